"""Frequent looks for the files that a job waits for, and for the end of a shard.

Snakemake 9.27 looks for files at once and then after a tenth of --latency-wait, a second at least. A lease is there 0.2 s
after its shard's job begins to wait for it, so that a warm server stood idle for the rest (measured: 1.9 s from the lease
to the shard's first request with a wait of 15 s, of which 1.5 s are this). For the end of a shard it looks every second,
and once more after it, before it ends the lease and can begin the next shard (measured: 1.9 s).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from snakemake import jobs
from snakemake.executors import local

SOON_S = 3.0  # what is not there after so long is left to Snakemake's own waiting
LOOK_S = 0.05
END_LOOK_S = 0.2


def look_often() -> None:
    """Makes every job look for its files every 0.05 s at first, and the executor for a shard's end every 0.2 s."""
    local.time = SimpleNamespace(sleep=lambda _: time.sleep(END_LOOK_S))  # all that it knows of time
    wait = jobs.wait_for_files
    if getattr(wait, "often", False):
        return

    async def often(files: Iterable[Any], *args: Any, **options: Any) -> None:
        files = list(files)
        # A service's file may go before anybody looks for it, and a storage's need not be here.
        awaited = [] if options.get("ignore_pipe_or_service") else [f for f in files if not _elsewhere(f)]
        began = time.monotonic()
        while time.monotonic() - began < SOON_S and not all(map(os.path.exists, awaited)):
            time.sleep(LOOK_S)  # as Snakemake does here: the thread has nothing else to do
        await wait(files, *args, **options)

    often.often = True  # type: ignore[attr-defined]
    jobs.wait_for_files = often


def _elsewhere(file: Any) -> bool:
    return bool(getattr(file, "is_storage", False))
