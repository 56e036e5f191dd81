"""An end for allocations that Slurm preempts for good.

The slurm plugin 2.8 leaves every PREEMPTED job to Slurm, as if all of them started again: where the cluster's
PreemptMode is CANCEL, Snakemake waits for ever. A job that does start again is pending at the next look, so one that
stays PREEMPTED has ended, and its shards are to be submitted again.
"""

from __future__ import annotations

import sys
import time
from typing import Any

FOR_GOOD_S = 30.0  # an accounting database may be so late to know that a job waits again


def let_end() -> None:
    """Makes the plugin, where Snakemake has loaded it, take a lasting preemption for a cancelled job."""
    plugin: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None or getattr(plugin.query_job_status, "ends", False):
        return
    ask = plugin.query_job_status
    since: dict[str, float] = {}

    async def asked(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        states, took_s = await ask(command, logger)
        if states is None:
            return states, took_s
        preempted = [job for job, state in states.items() if state == "PREEMPTED"]
        for job in since.keys() - set(preempted):
            del since[job]
        for job in preempted:
            if time.monotonic() - since.setdefault(job, time.monotonic()) > FOR_GOOD_S:
                states[job] = "CANCELLED"
        return states, took_s

    asked.ends = True  # type: ignore[attr-defined]
    plugin.query_job_status = asked
