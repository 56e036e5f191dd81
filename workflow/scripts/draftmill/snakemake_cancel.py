"""Ctrl-C that finds all jobs in Slurm's queue.

While Snakemake's remote executors (interface 9.4) look after their jobs, their list of jobs is empty: a Ctrl-C in that
moment takes none of them back, and allocations with GPUs stay in the queue or go on.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any


def find_all() -> None:
    """Makes the slurm plugin, where Snakemake has loaded it, keep its jobs in the list while it looks after them."""
    plugin: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None or getattr(plugin.Executor.check_active_jobs, "lists", False):
        return
    look = plugin.Executor.check_active_jobs

    async def listed(self: Any, jobs: list[Any]) -> AsyncIterator[Any]:
        with self.lock:
            self.active_jobs.extend(jobs)
        still_active = {id(job) async for job in look(self, jobs)}
        ended = {id(job) for job in jobs} - still_active
        with self.lock:
            self.active_jobs[:] = [job for job in self.active_jobs if id(job) not in ended]
        return
        yield  # none: those that go on are in the list already

    listed.lists = True  # type: ignore[attr-defined]
    plugin.Executor.check_active_jobs = listed
