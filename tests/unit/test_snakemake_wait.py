"""What a shard's job does until its lease is there."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from snakemake import jobs
from snakemake.executors import local

from draftmill import snakemake_wait


def test_a_file_that_comes_soon_is_there_before_snakemake_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    async def wait(files: list[str], **options: Any) -> None:
        seen.extend(Path(file).exists() for file in files)

    monkeypatch.setattr(jobs, "wait_for_files", wait)
    snakemake_wait.look_often()
    lease = tmp_path / "lease.json"
    threading.Timer(0.2, lease.touch).start()
    asyncio.run(jobs.wait_for_files([str(lease)]))
    assert seen == [True]


def test_a_service_that_is_over_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(files: list[str], **options: Any) -> None: ...

    monkeypatch.setattr(jobs, "wait_for_files", wait)
    monkeypatch.setattr(snakemake_wait, "SOON_S", 1e9)
    snakemake_wait.look_often()
    asyncio.run(jobs.wait_for_files([str(tmp_path / "lease.json")], ignore_pipe_or_service=True))


def test_the_end_of_a_shard_is_seen_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor waits so between two looks at a group's jobs."""
    waits: list[float] = []
    monkeypatch.setattr(local, "time", local.time)
    monkeypatch.setattr(jobs, "wait_for_files", jobs.wait_for_files)
    snakemake_wait.look_often()
    monkeypatch.setattr("time.sleep", waits.append)
    local.time.sleep(1)
    assert waits == [snakemake_wait.END_LOOK_S]
