"""Snakemake, as `python -m snakemake`, but it looks for the end of its Slurm jobs every two seconds.

The slurm plugin adds ten seconds to the time between two looks with every look that finds nothing ended: tests would
wait most of their time. What runs in the jobs is started without this.
"""

from __future__ import annotations

import sys

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import (  # type: ignore[import-untyped]
    RemoteExecutor,
)

LOOK_S = 2


def always(_: RemoteExecutor) -> int:
    return LOOK_S


def kept(_: RemoteExecutor, longer: int) -> None:
    """What the plugin would wait is not taken."""


RemoteExecutor.next_seconds_between_status_checks = property(always, kept)

if __name__ == "__main__":
    sys.argv[0] = "snakemake"
    main()
