"""Which jobs a Ctrl-C takes back; tests/slurm presses it on real ones."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_executor_plugins.executors.remote import (  # type: ignore[import-untyped]
    RemoteExecutor,
)

from draftmill import snakemake_cancel

PLUGIN = "snakemake_executor_plugin_slurm"


class Executor(RemoteExecutor):  # type: ignore[misc]
    """Snakemake's own loop over jobs that are plain texts; a look lasts until it is told to end."""

    def __init__(self, *jobs: str) -> None:
        settings = SimpleNamespace(init_seconds_before_status_checks=0, seconds_between_status_checks=0)
        self.workflow = SimpleNamespace(
            executor_plugin=SimpleNamespace(common_settings=settings), remote_execution_settings=settings
        )
        self._next_seconds_between_status_checks = None
        self.active_jobs, self.lock, self.wait = list(jobs), threading.Lock(), True
        self.looking, self.look_ends = threading.Event(), threading.Event()
        self.ended: set[str] = set()
        self.cancelled: list[str] = []

    async def check_active_jobs(self, active_jobs: list[str]) -> AsyncIterator[str]:
        self.looking.set()
        await asyncio.to_thread(self.look_ends.wait)
        for job in active_jobs:
            if job not in self.ended:
                yield job

    def cancel_jobs(self, active_jobs: list[str]) -> None:
        self.cancelled = sorted(active_jobs)

    def run_job(self, job: Any) -> None: ...

    def shutdown(self) -> None:
        self.wait = False


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    plugin = ModuleType(PLUGIN)
    plugin.Executor = type("Executor", (Executor,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PLUGIN, plugin)
    snakemake_cancel.find_all()
    snakemake_cancel.find_all()
    made: Executor = plugin.Executor("1", "2", "3")
    return made


def test_a_ctrl_c_in_the_middle_of_a_look_takes_all_jobs_back(executor: Executor) -> None:
    loop = threading.Thread(target=lambda: asyncio.run(executor._wait_for_jobs()), daemon=True)
    loop.start()
    assert executor.looking.wait(10)
    with executor.lock:
        executor.active_jobs.append("4")  # submitted meanwhile
    executor.cancel()
    assert executor.cancelled == ["1", "2", "3", "4"]
    executor.ended.add("2")
    executor.look_ends.set()
    loop.join(10)
    assert not loop.is_alive()
    assert sorted(executor.active_jobs) == ["1", "3", "4"], "each once, and what has ended is gone"


def test_without_the_plugin_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    snakemake_cancel.find_all()
