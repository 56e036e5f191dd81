"""One job step for all shards of a Slurm allocation, so that one warm server answers them all.

Snakemake 9.27 knows inside an allocation nothing of the group that was submitted, nor how many GPUs it may use: it
runs every lease with its shard in a step of its own, one after the other, each under a Snakemake that starts and
a server that loads anew (measured: three shards, three servers). Steps cannot share a server, since Slurm ends
all processes of a step with it.
"""

from __future__ import annotations

import os
import sys

from snakemake.dag import DAG
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake.workflow import Workflow


def unite(workflow: Workflow) -> None:
    """In the Snakemake that hands an allocation's jobs to srun: makes one group of them, before it plans them."""
    plan = DAG._update_group_components
    if "slurm-jobstep" not in sys.argv or getattr(plan, "united", False):
        return
    if held := os.environ.get("SLURM_GPUS_ON_NODE"):
        workflow.global_resources["gpu"] = int(held)

    def united(dag: DAG) -> None:
        groups = list(set(dag._group.values()))
        for other in groups[1:]:
            other.groupid = groups[0].groupid
            groups[0].merge(other)
        for job in dag._group:
            dag._group[job] = groups[0]
        plan(dag)

    united.united = True  # type: ignore[attr-defined]
    DAG._update_group_components = united
    # After the one job it would look a second later for more, and not end before (measured).
    JobScheduler._schedule_reevalutation = lambda *_: None
