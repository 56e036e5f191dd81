"""A Slurm allocation's time limit: how it is read, and that nothing is asked that cannot end before it."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.fleet import allocation
from draftmill.fleet.client import CLOSING_S, Client, Server, Task
from draftmill.fleet.places import Fleet
from draftmill.fleet.processes import Process


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_the_time_left_as_slurm_writes_it(days: int, hours: int, minutes: int, seconds: int) -> None:
    clock = f"{hours}:{minutes:02}:{seconds:02}"
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert allocation.parse_duration(f"{days}-{clock}") == whole
    assert allocation.parse_duration(clock) == whole - days * 86400
    assert allocation.parse_duration(f"{minutes}:{seconds:02}") == minutes * 60 + seconds


@pytest.mark.parametrize("word", ["UNLIMITED", "NOT_SET", "INVALID", "", "5", "1-2"])
def test_no_limit_is_no_time(word: str) -> None:
    assert allocation.parse_duration(word) is None


def test_outside_slurm_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert allocation.deadline() == float("inf")


def test_where_squeue_is_missing_there_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert allocation.deadline() == float("inf")


@pytest.mark.parametrize(("left_s", "longest_s"), [(CLOSING_S - 1, 0.0), (CLOSING_S + 50, 60.0)])
def test_nothing_is_asked_that_cannot_end_in_time(
    left_s: float, longest_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest answer of the allocation's shards before counts, too."""
    monkeypatch.setenv("DRAFTMILL_RUNTIME_DIR", str(tmp_path / "run"))
    fleet = Fleet(tmp_path / "results", Process.me())
    (fleet.runtime / "longest-answer-s").write_text(str(longest_s))

    def never(*_: object) -> None:
        raise AssertionError("asked")

    def answer(what: str, server: Server, attempt: int) -> Task[str] | None:
        raise AssertionError("asked")

    client: Client[str] = Client(
        fleet, "1-of-1", 0.0, answer, never, never, lambda _: None, never,
        proven=True, deadline=time.monotonic() + left_s,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"so nothing more is asked in it.*are in the journal"):
        client.run([Task("a turn")])
