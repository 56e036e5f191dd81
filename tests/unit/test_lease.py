"""A lease's service file, for which Snakemake and the shard's job wait."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.errors import UserError
from draftmill.fleet import lease, processes
from draftmill.fleet.slots import Slot

CONFIG: dict[str, Any] = {"operation": {}}


@pytest.fixture
def service_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv(processes.OWNER_VARIABLE, str(processes.Process.me()))
    return tmp_path / "lease.json"


def test_the_file_is_there_before_a_slow_driver_answers(
    service_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def slow(_operation: object) -> tuple[Slot, ...]:
        seen.append(json.loads(service_file.read_text()))
        return (Slot("cpu0"),)

    monkeypatch.setattr(lease, "slots", slow)
    made = lease.Lease(service_file, service_file.parent, CONFIG)
    assert seen == [{"started_at": made.started_at, "error": None}]
    assert made.slot == Slot("cpu0")


def test_an_error_is_written_into_it(service_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_operation: object) -> tuple[Slot, ...]:
        raise UserError("The GPUs cannot be listed.")

    monkeypatch.setattr(lease, "slots", broken)
    with pytest.raises(UserError):
        lease.Lease(service_file, service_file.parent, CONFIG)
    assert json.loads(service_file.read_text())["error"] == "The GPUs cannot be listed."
