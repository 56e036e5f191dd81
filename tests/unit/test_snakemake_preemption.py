"""What Snakemake is told of preempted jobs; tests/slurm preempts real ones."""

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from draftmill import snakemake_preemption

PLUGIN = "snakemake_executor_plugin_slurm"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The state of every job, as Slurm would tell it to the plugin."""
    states: dict[str, str] = {}

    async def query_job_status(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        return (dict(states), 0.1) if states else (None, None)

    plugin = ModuleType(PLUGIN)
    plugin.query_job_status = query_job_status  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PLUGIN, plugin)
    snakemake_preemption.let_end()
    snakemake_preemption.let_end()
    return states


def look() -> dict[str, str] | None:
    states: dict[str, str] | None = asyncio.run(sys.modules[PLUGIN].query_job_status("squeue", None))[0]
    return states


def test_a_job_that_stays_preempted_has_ended(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.update({"1": "PREEMPTED", "2": "RUNNING"})
    assert look() == slurm, "it may start again"
    monkeypatch.setattr(snakemake_preemption, "FOR_GOOD_S", -1)
    assert look() == {"1": "CANCELLED", "2": "RUNNING"}


def test_a_job_that_starts_again_goes_on(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for state in ("PREEMPTED", "PENDING", "RUNNING", "PREEMPTED"):
        slurm["1"] = state
        now[0] += snakemake_preemption.FOR_GOOD_S
        assert look() == {"1": state}
    now[0] += 1 + snakemake_preemption.FOR_GOOD_S
    assert look() == {"1": "CANCELLED"}


def test_a_queue_that_does_not_answer_says_nothing(slurm: dict[str, str]) -> None:
    assert look() is None


def test_without_the_plugin_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    snakemake_preemption.let_end()
