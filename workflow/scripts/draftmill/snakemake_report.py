"""The report after every run that made its pages, as `snakemake --report` would write it.

Snakemake 9.27 has --report-after-run, but in a profile it makes a dry-run fail (the pages are not there yet) and
`snakemake --report` run the workflow; so the Snakefile's onsuccess, which sees a run's end only, calls this.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snakemake.workflow import Workflow


def write(workflow: Workflow, path: Path) -> None:
    """Writes the report to `path`, where the run's targets needed its pages. A run does not fail for it."""
    if not any(job.rule.name == "report_items" for job in workflow.dag.jobs):
        return
    # here, since the Snakefile is read once for every job
    from snakemake.logging import logger
    from snakemake.report import auto_report
    from snakemake.report.html_reporter import ReportSettings
    from snakemake.settings.types import GlobalReportSettings
    from snakemake_interface_report_plugins.registry import (  # type: ignore[import-untyped]
        ReportPluginRegistry,
    )

    html = ReportPluginRegistry().get_plugin("html")
    level = logger.level
    logger.setLevel(logging.WARNING)  # else it names each page and each rule
    try:
        workflow.async_run(auto_report(workflow.dag, html, ReportSettings(path=path), GlobalReportSettings()))
        said = f"The report is in {path}."
    except Exception as fault:  # noqa: BLE001  whatever it is, the run has ended well
        said = f"The report could not be written ({fault}); write it with: snakemake --report {path}"
    logger.setLevel(level)
    logger.warning(said)
