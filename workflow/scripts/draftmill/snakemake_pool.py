"""Room in Snakemake's local executor for every shard's lease and generate job at once.

Snakemake 9.27 runs its local jobs on a pool of cores + 5 threads, and a service with its consumer takes
three of them: one for the group and one for each job. So from the fifth pair on eight cores (3 × 5 > 13)
groups can hold all threads while their own jobs wait for one: measured, a run of eight shards stood still.
"""

from __future__ import annotations

import concurrent.futures

from snakemake.executors import local

THREADS_PER_PAIR = 3


def widen(shards: int) -> None:
    """Makes the pool large enough for the pairs of all shards, before Snakemake builds it; a thread is only started
    when it is needed, and in an allocation no count of cores bounds the pairs."""
    build = local.Executor.__post_init__
    if getattr(build, "widened", False):
        return

    def widened(executor: local.Executor) -> None:
        build(executor)
        executor.workers += THREADS_PER_PAIR * shards
        executor.pool = concurrent.futures.ThreadPoolExecutor(max_workers=executor.workers)

    widened.widened = True  # type: ignore[attr-defined]
    local.Executor.__post_init__ = widened
