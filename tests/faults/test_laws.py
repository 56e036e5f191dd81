"""The laws, one by one, on the real workflow with stand-in servers; and a few seeds of chaos.

Each test runs in a folder of its own; those that start from a finished run copy the same one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import chaos
import harness
import pyarrow.parquet as pq
import pytest
import tiny_model
from harness import REFUSING, Run

pytestmark = pytest.mark.slow

SHARDS = 2
PATIENCE_S = 150.0  # a hung test ends here; nothing is judged by it
ROWS = [*harness.conversations(16), harness.poison()]
POISONED = "poison0_gen0"
Make = Callable[..., Run]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("m") / "model")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes a run in a folder of its own, and ends all its processes with the test."""
    made: list[Run] = []

    def new(
        *faults: dict[str, Any], name: str = "run", standin: dict[str, Any] | None = None, **changes: Any
    ) -> Run:
        settings = {"shards": SHARDS, "operation": {"cpu_servers": 2}}
        run = Run(
            tmp_path / name,
            model,
            settings=harness.over(settings, changes),
            standin={"faults": [REFUSING, *faults], **(standin or {})},
        )
        run.prompts(ROWS)
        made.append(run)
        return run

    yield new
    for run in made:
        run.stop_all()


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that nobody disturbed, to the end of the workflow."""
    settings = {"shards": SHARDS, "operation": {"cpu_servers": 2}}
    run = Run(tmp_path_factory.mktemp("f") / "run", model, settings=settings, standin={"faults": [REFUSING]})
    run.prompts(ROWS)
    assert run.finish(timeout_s=PATIENCE_S) == 0, run.log().read_text()[-3000:]
    yield run
    run.stop_all()


@pytest.fixture
def copied(finished: Run, tmp_path: Path) -> Iterator[Run]:
    """A copy of the finished run, its servers' log included."""
    shutil.copytree(finished.folder, tmp_path / "run", symlinks=True)
    run = Run(tmp_path / "run", finished.model, settings=finished.settings, standin=finished.standin)
    yield run
    run.stop_all()


def ends_well(run: Run, *targets: str) -> None:
    code = run.finish(*targets, timeout_s=PATIENCE_S)
    assert code == 0, run.log().read_text()[-4000:]


def agrees(run: Run, finished: Run, but: AbstractSet[str] = frozenset()) -> None:
    """The dataset is that of an undisturbed run, and the accounts add up."""
    expected = finished.merged()
    assert harness.unsound_accounts(run, expected.keys() | finished.rejected().keys()) == []
    assert harness.differing(run, expected, but) == []


def until(what: Callable[[], Any], run: Run, process: subprocess.Popen[bytes] | None = None) -> Any:
    """Waits for something to become true."""
    deadline = time.monotonic() + PATIENCE_S / 2
    while not (found := what()):
        ended = process is not None and process.poll() is not None
        assert time.monotonic() < deadline and not ended, run.log().read_text()[-3000:]
        time.sleep(0.05)
    return found


# ---- law 1 and 2: exactly once, and resume shows the truth


def test_a_lost_table_comes_back_from_the_journal_byte_for_byte(copied: Run) -> None:
    table = copied.results / "generated" / f"1-of-{SHARDS}.parquet"
    before, asked, starts = table.read_bytes(), copied.asked(), copied.starts()
    table.unlink()
    planned = copied.dry_run(f"results/generated/{table.name}")
    assert planned["generate"] == planned["launch_server"] == [f"1-of-{SHARDS}"]
    ends_well(copied, f"results/generated/{table.name}")
    assert table.read_bytes() == before
    assert (copied.asked(), copied.starts()) == (asked, starts)


@pytest.mark.parametrize("kind", chaos.JOURNAL_DAMAGES)
def test_a_damaged_journal_costs_only_what_is_damaged(copied: Run, finished: Run, kind: str) -> None:
    import random

    before, asked = copied.journal(), copied.asked()
    chaos.damage(copied.segments()[0], kind, random.Random(3))
    left = copied.journal()
    shutil.rmtree(copied.results / "generated")
    (copied.results / "merged.parquet").unlink()
    ends_well(copied, "results/merged.parquet")
    assert copied.asked() - asked == len(before - left)
    agrees(copied, finished)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_resume_after_the_group_was_hit(make: Make, finished: Run, number: int) -> None:
    run = make()
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 8, run, process)
    os.killpg(process.pid, number)
    process.wait(PATIENCE_S)
    assert run.census() == []
    kept = run.journal()
    ended = run.moment
    assert harness.untrue_plan(run, SHARDS) == []
    if number == signal.SIGINT:  # law 8: what there is can be used before it goes on
        done = run.command("partial", "--out", "part")
        assert done.returncode == 0, done.stdout + done.stderr
        assert pq.read_table(run.folder / "part" / "train.parquet").num_rows > 0
    resumed = run.start_resume("results/merged.parquet")
    assert resumed.wait(PATIENCE_S) == 0, run.log().read_text()[-3000:]
    assert kept <= run.journal()
    assert harness.asked_again(run, [(ended, kept)]) == []
    agrees(run, finished)


# ---- law 3: a server is judged by work


def test_a_hung_server_is_restarted_and_a_busy_one_is_not(make: Make, finished: Run) -> None:
    run = make({"fault": "hangs", "answers": 2, "slots": ["cpu0"], "starts": [1, 2]}, {"fault": "busy_503"})
    ends_well(run, "results/merged.parquet")
    assert run.starts() == 3
    assert "stall_s" in json.dumps(run.state("cpu0")["startups"])
    agrees(run, finished)


def test_a_pause_of_the_supervisor_is_no_stall_of_its_server(make: Make) -> None:
    """SIGSTOP, as Slurm's suspension or `docker pause` do it, for longer than stall_s; the answers take longer still."""
    slow = {"scale": 0.1, "start_s": 0.02, "lengths": {"median": 60, "mean": 61, "cap": 70, "min": 55}}
    run = make(standin=slow, shards=1, operation={"cpu_servers": 1, "client": {"request_timeout_s": 60}})
    run.prompts(ROWS[:3])
    process = run.start("results/merged.parquet")
    until(run.requests, run, process)
    (supervisor,) = run.having("supervisor")
    supervisor.send(signal.SIGSTOP)
    time.sleep(7)
    supervisor.send(signal.SIGCONT)
    assert process.wait(PATIENCE_S) == 0, run.log().read_text()[-3000:]
    assert run.starts() == 1


def test_health_probes_do_not_pile_up_at_a_deaf_server(make: Make) -> None:
    run = make({"fault": "deaf", "answers": 2, "slots": ["cpu0"]}, operation={"server": {"stall_s": 6}})
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 6, run, process)
    most = 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        most = max(most, run.connections_of("supervisor"))
        time.sleep(0.1)
    assert most <= 6
    run.stop_all()


def test_one_slot_is_given_up_and_the_other_finishes_everything(make: Make, finished: Run) -> None:
    run = make({"fault": "crash_at_start", "slots": ["cpu1"], "cause": "oom"})
    ends_well(run, "results/merged.parquet")
    state = run.state("cpu1")
    assert state["state"] in ("given_up", "restarting")
    assert "out of memory" in json.dumps(state).lower()
    assert run.starts() <= 8
    agrees(run, finished)


def test_with_no_server_left_the_run_fails_with_the_cause(make: Make) -> None:
    run = make({"fault": "crash_at_start", "cause": "oom"})
    assert run.finish("results/merged.parquet", timeout_s=PATIENCE_S) == 1
    said = run.log().read_text()
    assert "out of memory" in said
    assert run.census() == []


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ([{"fault": "http", "status": 500}], "stall_s"),
        (
            [{"fault": "dies", "answers": 3, "starts": [1]}, {"fault": "crash_at_start", "starts": [2]}],
            "starting",
        ),
        ([{"fault": "poison", "s": 0}], "exit code"),
    ],
    ids=["answers 500 to everything", "works once and never starts again", "dies of every turn"],
)
def test_a_server_is_judged_by_its_answers_and_given_up_with_the_end_of_its_log(
    make: Make, faults: list[dict[str, Any]], cause: str
) -> None:
    """Restarts are bounded whatever comes back from a server that answers nothing, and no row pays for it (law 4)."""
    restarts = 4 if cause == "exit code" else 1  # enough for a turn to be suspected twice alone
    run = make(*faults, operation={"cpu_servers": 1, "server": {"restarts": restarts}})
    assert run.finish("results/merged.parquet", timeout_s=PATIENCE_S) == 1
    said = run.log().read_text()
    assert "No server is left" in said and cause in said
    assert "The end of" in said.partition("No server is left")[2]
    assert run.starts() == restarts + 1
    kept = run.records().values() if run.segments() else ()
    assert {record["outcome"] for record in kept} <= {"answered", "refused"}
    assert run.census() == []


class Strangers:
    """Servers that somebody else runs, at addresses that the run is given."""

    def __init__(self, run: Run, ports: list[int]) -> None:
        self.run, self.ports = run, ports
        self.servers: list[subprocess.Popen[bytes]] = []

    def start(self, port: int) -> None:
        flags = ["--host", "127.0.0.1", "--port", str(port), "--model-path", str(self.run.model)]
        theirs = {name: value for name, value in self.run.env().items() if name != harness.MARK}
        command = [sys.executable, str(harness.STANDIN), *flags]
        self.servers.append(subprocess.Popen(command, env=theirs, stdout=subprocess.DEVNULL))


@pytest.fixture
def strangers(make: Make) -> Iterator[Callable[..., Strangers]]:
    made: list[Strangers] = []

    def start(count: int, **server: Any) -> Strangers:
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            ports = [one.getsockname()[1] for one in sockets]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        run = make(standin={"scale": 0.4}, operation={"engine": "attach", "attach": urls, "server": server})
        made.append(Strangers(run, ports))
        for port in ports:
            made[-1].start(port)
        return made[-1]

    yield start
    for one in made:
        for server in one.servers:
            server.kill()
            server.wait()


def test_of_two_attached_servers_one_dies_and_the_other_finishes_and_lives_on(
    strangers: Callable[..., Strangers], finished: Run
) -> None:
    given = strangers(2)
    run = given.run
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 3, run, process)
    given.servers[0].kill()
    assert process.wait(PATIENCE_S) == 0, run.log().read_text()[-3000:]
    assert run.census() == []
    assert given.servers[1].poll() is None, "a server that is not ours was ended"
    agrees(run, finished)
    assert run.rejected() == finished.rejected()


def test_an_attached_server_that_is_gone_ends_the_run_with_its_address_and_may_come_back(
    strangers: Callable[..., Strangers], finished: Run
) -> None:
    given = strangers(1, restarts=0)
    run = given.run
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 3, run, process)
    given.servers[0].kill()
    assert process.wait(PATIENCE_S) == 1
    said = run.log().read_text()
    assert "No server is left" in said and f"127.0.0.1:{given.ports[0]} has not answered" in said
    kept = run.journal()
    given.start(given.ports[0])
    assert run.start_resume("results/merged.parquet").wait(PATIENCE_S) == 0, run.log().read_text()[-3000:]
    assert harness.asked_again(run, [(run.moment, kept)]) == []
    agrees(run, finished)


@pytest.mark.parametrize("kind", ["never_starts", "starts_late"])
def test_a_start_is_given_its_time_and_no_more(make: Make, finished: Run, kind: str) -> None:
    in_time = {"operation": {"server": {"start_timeout_s": 60}}}  # however slow this machine is
    run = make({"fault": kind, "starts": [1], "s": 4}, **(in_time if kind == "starts_late" else {}))
    ends_well(run, "results/merged.parquet")
    assert run.starts() == 2 or kind == "never_starts"
    assert run.starts() <= 3
    agrees(run, finished)


# ---- law 4: a dead server burns no rows


def test_the_turns_of_a_dead_server_run_elsewhere_at_once(make: Make, finished: Run) -> None:
    """Before its own server is back; the others have room for all of them."""
    patient = {"server": {"stall_s": 60}, "client": {"request_timeout_s": 60}}
    run = make(shards=3, standin={"scale": 0.3, "slots": 12}, operation={"cpu_servers": 3, **patient})
    process = run.start("results/merged.parquet")
    until(lambda: run.starts() == 3 and run.answered() > 0, run, process)
    victim = max(
        run.having("server"),
        key=lambda server: len(harness.failover(run, start_of(run, server), time.monotonic())),
    )
    start, at = start_of(run, victim), time.monotonic()
    victim.send(signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 0, run.log().read_text()[-3000:]
    moved = harness.failover(run, start, at)
    assert moved and {elsewhere for _, elsewhere in moved.values()} <= {1, 2, 3} - {start}
    slowest = max(delay for delay, _ in moved.values())
    print(f"{len(moved)} turns of a dead server ran elsewhere after at most {slowest:.2f} s")
    agrees(run, finished)


def start_of(run: Run, server: harness.Process) -> int:
    """Which start of a server this process is, from 1."""
    for path in (run.folder / "standin").glob("start-*.json"):
        if json.loads(path.read_bytes())["pid"] == server.pid:
            return int(path.stem.partition("-")[2])
    raise AssertionError("no server has this pid")


def test_a_dying_server_burns_no_rows(make: Make, finished: Run) -> None:
    run = make({"fault": "dies", "answers": 4})
    ends_well(run, "results/merged.parquet")
    assert run.starts() > 2
    agrees(run, finished)


def test_only_the_poison_is_rejected_and_named(make: Make, finished: Run) -> None:
    run = make({"fault": "poison", "token": tiny_model.MARKERS["poison"], "s": 0.3})
    ends_well(run, "results/merged.parquet")
    assert run.rejected() == {**finished.rejected(), POISONED: "poison"}
    agrees(run, finished, but={POISONED})
    assert run.starts() <= 8


@pytest.mark.parametrize(
    "faults",
    [
        [{"fault": "http", "status": 500}, {"fault": "html"}, {"fault": "truncated"}, {"fault": "abort"}],
        [{"fault": "http", "status": 429}, {"fault": "no_ids"}, {"fault": "close"}, {"fault": "empty"}],
        [
            {"fault": "http", "status": 503},
            {"fault": "late", "s": 3600},
            {"fault": "metrics_vanish", "answers": 3},
        ],
    ],
)
def test_a_bad_answer_is_asked_again_and_never_becomes_a_row(
    make: Make, finished: Run, faults: list[dict[str, Any]]
) -> None:
    run = make(*({**fault, "probability": 0.15, "once": True} for fault in faults))
    ends_well(run, "results/merged.parquet")
    agrees(run, finished)
    assert run.rejected() == finished.rejected()


# ---- law 5: nothing survives


@pytest.mark.parametrize(
    "end", ["success", "SIGINT group", "SIGTERM group", "SIGKILL snakemake", "SIGKILL group"]
)
def test_nothing_survives(make: Make, end: str) -> None:
    run = make({"fault": "ignores_term"}, {"fault": "leaves_children", "count": 2})
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 3, run, process)
    ports = run.ports()
    assert run.having("child")
    what, _, target = end.partition(" ")
    if target == "group":
        os.killpg(process.pid, chaos.SIGNALS[what])
    elif target:
        process.send_signal(chaos.SIGNALS[what])
    process.wait(PATIENCE_S)
    assert run.census() == []
    logs = list((run.results / "logs" / "supervisors").iterdir())
    assert logs and not any("Traceback" in log.read_text() for log in logs)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    "roles", [("supervisor",), ("keeper",), ("lease",), ("supervisor", "keeper"), ("supervisor", "lease")]
)
def test_nothing_survives_the_death_of_its_keepers(make: Make, finished: Run, roles: tuple[str, ...]) -> None:
    run = make({"fault": "leaves_children"})
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 3, run, process)
    victims = [run.having(role)[0] for role in roles]
    for victim in victims:
        victim.send(signal.SIGKILL)
    process.wait(PATIENCE_S)
    assert run.census() == []
    if process.returncode != 0:
        assert run.start_resume("results/merged.parquet").wait(PATIENCE_S) == 0
    agrees(run, finished)


def test_sigterm_to_snakemake_alone_lets_running_shards_finish(make: Make) -> None:
    run = make()
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 3, run, process)
    process.terminate()
    process.wait(PATIENCE_S)
    assert "Will exit after finishing currently running jobs" in run.log().read_text()
    assert run.finished_shards() == {f"{i}-of-{SHARDS}" for i in range(1, SHARDS + 1)}
    assert run.census() == []


# ---- law 6 and 7: no mixing, and growing is cheap


def test_operation_comments_and_logs_leave_nothing_to_do(copied: Run) -> None:
    operation = {
        "server": {"stall_s": 77, "port": 23456},
        "client": {"concurrency": 3},
        "progress_interval_s": 9,
    }
    copied.configure(harness.over(copied.settings, {"operation": operation}))
    with (copied.folder / "config.yaml").open("a") as config:
        config.write("# a comment\n")
    assert copied.dry_run() == {}


def test_changed_code_runs_shards_again_without_one_request(copied: Run) -> None:
    asked, starts = copied.asked(), copied.starts()
    ends_well(copied, "results/merged.parquet", "--forcerun", "generate")
    assert "Generating shard" in copied.log().read_text()
    assert (copied.asked(), copied.starts()) == (asked, starts)


def test_another_temperature_asks_for_everything_anew_and_mixes_nothing(copied: Run) -> None:
    asked, before = copied.asked(), copied.journal()
    copied.configure(harness.over(copied.settings, {"sampling": {"temperature": 0.25}}))
    ends_well(copied)
    turns = copied.validation()["turns"]
    assert copied.asked() - asked >= turns - len(copied.rejected())
    temperatures = {json.loads(row["sampling"])["temperature"] for row in copied.generated()}
    assert temperatures == {0.25}
    assert before < copied.journal()


def test_growing_reordering_and_other_shards_ask_for_new_turns_only(copied: Run, finished: Run) -> None:
    asked = copied.asked()
    copied.configure(harness.over(copied.settings, {"shards": 3}))
    new = [{"id": "new", "prompt": "something quite new"}]
    copied.prompts([*new, *reversed(ROWS)])
    ends_well(copied)
    assert copied.asked() - asked == 1
    assert copied.merged().keys() - finished.merged().keys() <= {
        "new_gen0",
        "twin_gen0",
    }  # of two twins the first in the file stays
    merged = pq.read_table(copied.results / "merged.parquet", columns=["id"]).to_pydict()["id"]
    assert len(merged) == len(set(merged))


# ---- law 8 and 9: partial results, and coming back


def test_partial_results_beside_a_running_workflow(make: Make) -> None:
    run = make(standin={"scale": 0.3})
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 5, run, process)
    out = run.folder / "part"
    done = run.command("partial", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert pq.read_table(next(out.rglob("train.parquet"))).num_rows > 0
    assert "partial" in next(out.rglob("README.md")).read_text().lower()
    assert process.poll() is None
    refused = run.start_resume()
    assert refused.wait(PATIENCE_S) == 1
    assert re.search("going on|running", run.log().read_text())
    assert process.poll() is None
    run.stop_all()


def test_two_runs_in_one_directory(make: Make, finished: Run) -> None:
    run = make()
    process = run.start("results/merged.parquet")
    until(lambda: run.answered() > 3, run, process)
    assert run.finish("results/merged.parquet", timeout_s=PATIENCE_S) != 0
    assert process.wait(PATIENCE_S) == 0
    agrees(run, finished)


# ---- the machine


def test_a_full_disk_loses_nothing_and_is_named(make: Make, finished: Run, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        run = make(name="small/run")
        process = run.start("results/merged.parquet")
        until(lambda: run.answered() > 8, run, process)
        chaos.fill(run.folder / "filler")
        assert process.wait(PATIENCE_S) == 1
        assert run.census() == []
        assert re.search("[Nn]o space left", run.log().read_text())
        (run.folder / "filler").unlink()
        kept = run.journal()
        assert run.start_resume("results/merged.parquet").wait(PATIENCE_S) == 0, run.log().read_text()[-3000:]
        assert harness.asked_again(run, [(run.moment, kept)]) == []
        agrees(run, finished)
    finally:
        run.stop_all()
        subprocess.run(["umount", "-l", str(disk)], check=False)


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_a_clock_that_jumps(make: Make, finished: Run, jump_s: int) -> None:
    run = make(standin={"scale": 0.5})
    run.environment["CLOCK_JUMP"] = f"{time.monotonic() + 12}:{jump_s}"
    ends_well(run, "results/merged.parquet")
    agrees(run, finished)


def test_eight_shards_at_once_on_eight_cores(make: Make, finished: Run) -> None:
    """As the README has it: Snakemake's pool of cores + 5 threads must hold eight leases and their shards."""
    run = make(shards=8)
    ends_well(run, "results/merged.parquet")
    agrees(run, finished)


# ---- security


def test_the_key_is_nowhere_and_the_loopback_is_all(make: Make) -> None:
    run = make()
    process = run.start()
    until(lambda: run.answered() > 3, run, process)
    assert not {address for address in run.listening() if not address.startswith(("127.", "::1"))}
    keys = [path.read_text().strip() for path in run.runtime.rglob("api-key")]
    assert keys and len(keys[0]) > 20
    for path in run.runtime.rglob("*"):
        if path.is_file() and keys[0].encode() in path.read_bytes():
            assert path.stat().st_mode & 0o077 == 0, path
    assert not [p.command for p in run.processes() if keys[0] in " ".join(p.command)]
    assert process.wait(PATIENCE_S) == 0
    kept = [
        p
        for p in run.folder.rglob("*")
        if p.is_file() and not p.is_symlink() and keys[0].encode() in p.read_bytes()
    ]
    assert kept == []


def test_names_and_ids_from_prompts_are_never_paths_nor_shell_words(make: Make, tmp_path: Path) -> None:
    ids = [
        "../../../escaped",
        "/escaped",
        "$(touch escaped)",
        "; touch escaped #",
        "`touch escaped`",
        "a\nb",
        "x" * 5000,
    ]
    name = "a; touch escaped; $(touch escaped) '`touch escaped`.jsonl"
    run = make(prompts={"files": [name]})
    with (run.folder / name).open("w", encoding="utf-8") as file:
        for number, words in enumerate(ids):
            file.write(json.dumps({"id": words, "prompt": f"prompt {number}", "source": words}) + "\n")
    before = {path.name for path in tmp_path.parent.iterdir()}
    ends_well(run)
    found = {row.removesuffix("_gen0") for row in run.merged() | run.rejected()}
    assert (
        len(found) == len(ids) and set(ids[:-2]) <= found
    )  # what no id can be is replaced by its row's hash
    assert not [
        path for path in tmp_path.rglob("*escaped*") if path.name != name and ".snakemake" not in path.parts
    ]
    assert {path.name for path in tmp_path.parent.iterdir()} == before and not Path("/escaped").exists()


# ---- chaos


@pytest.mark.parametrize("seed", [2, 5, 13])
def test_a_seed_of_chaos(model: Path, finished: Run, tmp_path: Path, seed: int) -> None:
    rows, rejected = finished.merged(), set(finished.rejected())
    played = chaos.Seed(seed, tmp_path, model, rows, rejected, prompts=ROWS)
    try:
        outcome = played.play()
        assert outcome.broken == [], str(outcome)
    finally:
        with contextlib.suppress(OSError):
            played.close(None)


def test_a_disk_that_is_not_filled_is_no_hit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no small disk may be mounted; the session is no more than a second's sleep here."""
    monkeypatch.setattr(chaos, "_small_disk", lambda _folder: None)
    seed = chaos.Seed(1, tmp_path, model, {}, set(), prompts=[])
    seed.hits = [chaos.Hit("disk full", "", after_s=0.0, from_first_request=False)]
    monkeypatch.setattr(seed.run, "start", lambda *_: subprocess.Popen(["sleep", "1"]))
    assert seed._session() == 0
    assert seed.outcome.hits == []
