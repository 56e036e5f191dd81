import argparse
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from tests.synthetic_run import START, write_results, write_run

from draftmill import status
from draftmill.errors import UserError
from draftmill.progress import line


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A run that is half done: the first of two shards is written, the other's client is at work."""
    write_run(tmp_path, turns=60, shards=2, servers=2)
    write_results(tmp_path)
    (tmp_path / "validation.json").unlink()
    (tmp_path / "generated" / "1-of-2.parquet").unlink()
    (tmp_path / "shards").mkdir()
    for name in ("0-of-9", "0-of-2", "1-of-2"):
        (tmp_path / "shards" / f"{name}.parquet").touch()
    os.utime(tmp_path / "shards" / "0-of-9.parquet", (1, 1))
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "a.jsonl").write_bytes(b"x" * 3000)
    clients = tmp_path / "fleet" / "node1" / "clients" / "1-of-2-1000.jsonl"
    lines = clients.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["event"] != "finished"]
    last = json.loads(kept[-1]) | {"rejects": {"loop": 2}}
    clients.write_text("\n".join([*kept[:-1], json.dumps(last)]) + '\n{"t": 17900')
    for path in (tmp_path / "fleet" / "node1").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "ready"}))
    return tmp_path


def test_a_running_run_is_seen_as_it_stands(results: Path) -> None:
    found = status.look(results, START + 61)
    assert [(shard.shard, shard.state) for shard in found.shards] == [
        ("0-of-2", "done"),
        ("1-of-2", "running"),
    ]
    assert found.turns == 60 and 30 < found.done < 60
    assert [server.state for server in found.servers] == ["ready", "ready"]
    assert found.rejects == {"loop": 2}
    room = status.disk(results, found)
    assert room.free_bytes > 0 and room.needed_bytes is not None and room.needed_bytes > 0


def test_hours_later_nobody_works_any_more(results: Path) -> None:
    found = status.look(results, START + 10_000)
    assert [server.state for server in found.servers] == ["silent", "silent"]
    assert [shard.state for shard in found.shards] == ["done", "stopped"]


def test_a_run_whose_servers_have_ended_is_over_at_once(results: Path) -> None:
    for path in (results / "fleet" / "node1").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "stopped"}))
    clients = results / "fleet" / "node1" / "clients" / "1-of-2-1000.jsonl"
    last = json.loads(clients.read_text().splitlines()[-2])
    found = status.look(results, last["t"] + 5)
    assert [shard.state for shard in found.shards] == ["done", "stopped"]
    assert line(found).endswith("; stopped; make resume goes on")


def test_json_is_for_machines(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.run(arguments("--json", "--results", str(results))) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"turns", "done", "servers", "shards", "rejects", "left", "disk"} <= record.keys()


@pytest.mark.parametrize("width", [80, 140])
def test_tables_fit_a_terminal(results: Path, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(status.picture(results))
    shown = console.export_text()
    assert "…" not in shown
    for part in ("Servers on node1", "slot0", "1 stopped", "loop", "still to come"):
        assert part in shown


def test_names_are_no_markup(results: Path) -> None:
    path = results / "fleet" / "node1" / "slot0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"error": "[red]out of memory[/x]"}))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(status.picture(results))
    assert "[red]out of memory[/x] (log: results/fleet/node1/slot0.log)" in console.export_text()


def test_reading_changes_nothing(results: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    status.look(results, START + 60)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before


def test_no_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run in"):
        status.run(arguments("--results", str(tmp_path / "nothing")))


def test_an_empty_run_has_a_status(tmp_path: Path) -> None:
    assert status.look(tmp_path, START).turns == 0
    assert status.run(arguments("--results", str(tmp_path))) == 0


def test_one_of_all_clients_announces(results: Path) -> None:
    target = results / "draftmill.prom"
    operation = {"progress_interval_s": 30, "prometheus_file": str(target)}
    said = [status.announce(results, operation) for _ in range(5)]
    assert said[0] is not None and said[1:] == [None] * 4
    assert "draftmill_turns 60" in target.read_text()
    os.utime(results / "fleet" / "progress.stamp", (START, START))
    assert status.announce(results, operation) is not None
