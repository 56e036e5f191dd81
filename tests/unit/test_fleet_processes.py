"""Processes by identity, and the end of whole trees: nothing of ours outlives what it belongs to."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftmill.fleet import keeper, processes
from draftmill.fleet.processes import Process

KEEPER = Path(keeper.__file__)
PATIENCE_S = 60  # a loaded machine is no fault; nothing here waits so long unless something is broken
MARK = "DRAFTMILL_TEST"


def until(happens: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


class Nursery:
    """Starts processes marked in their environment, so that all that came of them can be found and ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{folder.name}-{os.getpid()}"
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }

    def start(self, script: str, *arguments: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)], env=self.environment, cwd=self.folder
        )

    def alive(self) -> list[Process]:
        return processes.carrying(f"{MARK}={self.mark}")

    def pids(self, name: str) -> list[int]:
        """The pids that processes have written into files called so."""
        with contextlib.suppress(OSError, ValueError):
            return [int(word) for word in (self.folder / name).read_text().split()]
        return []


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    for process in made.alive():
        process.send(signal.SIGKILL)


# --- identity


def test_a_process_is_its_pid_and_its_start() -> None:
    me = Process.me()
    assert me.alive and Process.of(os.getpid()) == me
    assert Process.parse(str(me)) == me
    assert not Process(me.pid, me.started + 1).alive
    assert Process(me.pid, me.started - 1).handle() is None


def test_a_host_with_colons_in_its_name_is_no_trouble() -> None:
    assert Process.parse("a:b:12:34") == Process(12, 34)


def test_no_signal_reaches_another_process_under_the_same_pid(nursery: Nursery) -> None:
    child = nursery.start("import time; time.sleep(600)")
    now = Process.of(child.pid)
    assert now is not None
    Process(now.pid, now.started - 1).send(signal.SIGKILL)
    assert child.poll() is None and now.alive
    now.send(signal.SIGKILL)
    child.wait()
    assert not now.alive
    now.send(signal.SIGKILL)  # to nobody, and no error


def test_an_ended_process_is_dead_before_it_is_collected(nursery: Nursery) -> None:
    child = nursery.start("pass")
    process = Process.of(child.pid)
    assert process is not None
    until(lambda: not process.alive, "a zombie counts as ended")
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()
    assert Process.of(child.pid) is None and process.handle() is None


def test_a_handle_tells_of_the_end(nursery: Nursery) -> None:
    child = nursery.start("import time; time.sleep(600)")
    process = Process.of(child.pid)
    assert process is not None
    handle = process.handle()
    assert handle is not None
    assert select.select([handle], [], [], 0)[0] == []
    child.kill()
    assert select.select([handle], [], [], PATIENCE_S)[0] == [handle]
    child.wait()
    os.close(handle)


def test_a_name_that_looks_like_a_state_changes_nothing(nursery: Nursery) -> None:
    """/proc/<pid>/stat holds the name in parentheses, and a name may hold anything."""
    script = (
        "import ctypes, time; from pathlib import Path\n"
        "ctypes.CDLL(None).prctl(15, b') Z 1 (x', 0, 0, 0)\n"
        "Path('ready').touch(); time.sleep(600)"
    )
    child = nursery.start(script)
    until((nursery.folder / "ready").exists, "the child has its name")
    process = Process.of(child.pid)
    assert process is not None and process.alive
    assert process in processes.descendants(os.getpid())
    child.kill()
    child.wait()


def test_the_owner_is_known_to_children(nursery: Nursery) -> None:
    script = (
        "import os, subprocess, sys; from draftmill.fleet import processes\n"
        "processes.claim_owner()\n"
        "seen = subprocess.check_output([sys.executable, '-c', 'from draftmill.fleet import processes; print(processes.owner())'])\n"
        "assert seen.decode().strip() == str(processes.Process.me()), seen"
    )
    assert nursery.start(script).wait() == 0


# --- ending trees

# A tree of a child, its child, and one that left both session and parent; every one ignores SIGTERM.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note(name):
    with open(name, 'a') as file: file.write(f'{os.getpid()}\\n')
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0: os._exit(0)
        note('members'); time.sleep(600)
    note('members'); time.sleep(600)
note('members'); time.sleep(600)
"""


def test_descendants_are_found_in_other_sessions_and_not_beyond(nursery: Nursery) -> None:
    tree, stranger = nursery.start(STUBBORN), nursery.start("import time; time.sleep(600)")
    until(lambda: len(nursery.pids("members")) == 3, "three members")
    # the one whose parents ended is nobody's here: only a subreaper keeps it (the next test)
    found = {process.pid for process in processes.descendants(tree.pid)}
    assert found <= set(nursery.pids("members")) and len(found) == 1
    assert {tree.pid, stranger.pid} <= {process.pid for process in processes.descendants(os.getpid())}
    for process in nursery.alive():
        process.send(signal.SIGKILL)
    tree.wait(), stranger.wait()


@pytest.mark.parametrize("grace_s", [0, 0.3])
def test_end_kills_what_ignores_sigterm_and_what_was_reparented(nursery: Nursery, grace_s: float) -> None:
    script = (
        "import json, os, subprocess, sys, time; from pathlib import Path; from draftmill.fleet import processes\n"
        "processes.adopt_orphans()\n"
        "tree = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "while not Path('members').exists() or len(Path('members').read_text().split()) < 3: time.sleep(0.02)\n"
        "tree.kill(); tree.wait()\n"  # now two orphans of the tree are left
        "me = os.getpid(); find = lambda: processes.descendants(me)\n"
        "before = len(find()); processes.end(find, grace_s=float(sys.argv[2])); after = len(find())\n"
        "Path('result').write_text(json.dumps([before, after]))"
    )
    assert nursery.start(script, STUBBORN, grace_s).wait() == 0
    assert json.loads((nursery.folder / "result").read_text()) == [2, 0]
    assert nursery.alive() == []


def test_end_lets_the_willing_finish_in_their_own_way(nursery: Nursery) -> None:
    script = (
        "import os, signal, subprocess, sys, time; from pathlib import Path; from draftmill.fleet import processes\n"
        "child = 'import signal, sys, time; from pathlib import Path\\n"
        'signal.signal(signal.SIGTERM, lambda *_: (Path("finished").touch(), sys.exit()))\\n'
        'Path("ready").touch(); time.sleep(600)\'\n'
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "while not Path('ready').exists(): time.sleep(0.02)\n"
        "me = os.getpid(); processes.end(lambda: processes.descendants(me), grace_s=60)"
    )
    assert nursery.start(script).wait() == 0
    assert (nursery.folder / "finished").exists() and nursery.alive() == []


def test_a_sweep_ends_marked_processes_and_no_others(nursery: Nursery) -> None:
    """As after the death of a supervisor and its keeper: only the mark in the environment tells."""
    script = "import sys, time; time.sleep(600)"
    environment = dict(nursery.environment)
    started = []
    for mark in ("ours/cpu0", "ours/cpu01", "others/cpu0"):
        environment["DRAFTMILL_SLOT"] = mark
        started.append(subprocess.Popen([sys.executable, "-c", script], env=environment))
    until(lambda: len(nursery.alive()) == 3, "three processes")
    sweeper = nursery.start(
        "from draftmill.fleet import processes; processes.sweep('DRAFTMILL_SLOT', 'ours/cpu0')"
    )
    assert sweeper.wait() == 0
    assert started[0].wait() == -signal.SIGKILL
    assert [process.poll() for process in started[1:]] == [None, None]
    for process in started[1:]:
        process.kill()
        process.wait()


def test_what_a_process_is_called_and_where_it_works(nursery: Nursery) -> None:
    child = nursery.start("import time; time.sleep(600)", "a word", "")
    process = Process.of(child.pid)
    assert process is not None
    until(lambda: process.command[1:2] == ["-c"], "the child's own command line")
    assert process.command[3:] == ["a word", ""]
    assert process.carries(f"{MARK}=") and process.carries(f"{MARK}={nursery.mark}")
    assert not process.carries(f"{MARK}=another") and not process.carries(nursery.mark)
    assert process in processes.working_in(nursery.folder)
    assert process not in processes.working_in(nursery.folder.parent)
    child.kill()
    child.wait()
    assert process.command == [] and not process.carries(MARK)


def test_a_rules_script_ends_with_snakemake(nursery: Nursery) -> None:
    """Whatever it does at that moment: a merge that went on would write beside the next run."""
    script = (
        "import subprocess, sys, time; from draftmill.fleet import processes\n"
        "processes.claim_owner()\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)"
    )
    work = (
        "import time; from pathlib import Path; from draftmill import job\n"
        "with job.logged('log'):\n"
        "    Path('at-work').touch(); time.sleep(600)"
    )
    owner = nursery.start(script, work)
    until((nursery.folder / "at-work").exists, "the script's start")
    assert len(nursery.alive()) == 2
    owner.kill()
    owner.wait()
    until(lambda: not nursery.alive(), "the script's end")


# --- the keeper


class Kept:
    """A keeper under a parent of its own, as under a supervisor."""

    def __init__(
        self, nursery: Nursery, engine: str, *, grace_s: float = 0.2, key: str = "s3cret-key"
    ) -> None:
        self.nursery, self.folder = nursery, nursery.folder
        (self.folder / "key").write_text(f"{key}\n")
        self.log = self.folder / "log"
        parent = (
            "import subprocess, sys; from pathlib import Path; import os\n"
            "k = subprocess.Popen([sys.executable, '-P', sys.argv[1], '--parent', str(os.getpid()), *sys.argv[2:]])\n"
            "Path('keeper.new').write_text(str(k.pid)); Path('keeper.new').rename('keeper')\n"
            "code = k.wait(); Path('code.new').write_text(str(code)); Path('code.new').rename('code')"
        )
        command = ("--log", self.log, "--redact", self.folder / "key", "--grace", grace_s)
        self.parent = nursery.start(parent, KEEPER, *command, "--", sys.executable, "-u", "-c", engine)

    @property
    def pid(self) -> int:
        until(lambda: self.nursery.pids("keeper"), "the keeper's start")
        return self.nursery.pids("keeper")[0]

    def code(self) -> int:
        assert self.parent.wait(PATIENCE_S) == 0
        return self.nursery.pids("code")[0]


@pytest.mark.parametrize(
    ("engine", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", 134)]
)
def test_the_keepers_exit_code_is_the_engines(nursery: Nursery, engine: str, code: int) -> None:
    assert Kept(nursery, engine).code() == code


def test_what_the_engine_leaves_behind_ends_with_it(nursery: Nursery) -> None:
    leave = (
        STUBBORN.rpartition("note(")[0]
        + "\nwhile len(open('members').read().split()) < 2: time.sleep(0.02)\n"
    )
    kept = Kept(nursery, f"open('members', 'w').close()\n{leave}")
    assert kept.code() == 0
    assert len(nursery.pids("members")) == 2
    assert nursery.alive() == []


def test_the_keeper_ends_everything_when_its_parent_is_killed(nursery: Nursery) -> None:
    kept = Kept(nursery, STUBBORN)
    until(lambda: len(nursery.pids("members")) == 3, "the engine's start")
    kept.parent.kill()
    kept.parent.wait()
    until(lambda: not nursery.alive(), "the end of engine, grandchildren and keeper")


def test_the_engine_ends_when_the_keeper_is_killed(nursery: Nursery) -> None:
    kept = Kept(nursery, "import time; open('ready', 'w').close(); time.sleep(600)")
    until((nursery.folder / "ready").exists, "the engine's start")
    os.kill(kept.pid, signal.SIGKILL)
    assert kept.code() == -signal.SIGKILL
    until(lambda: not nursery.alive(), "the end of the engine")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_is_a_polite_end_of_the_engine(nursery: Nursery, number: int) -> None:
    engine = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('goodbye'), sys.exit(5)))\n"
        "open('ready', 'w').close(); time.sleep(600)"
    )
    kept = Kept(nursery, engine, grace_s=PATIENCE_S)
    until((nursery.folder / "ready").exists, "the engine's start")
    os.kill(kept.pid, number)
    assert kept.code() == 5
    assert kept.log.read_text() == "goodbye\n"


def test_a_command_that_does_not_exist_is_said_in_the_log(nursery: Nursery) -> None:
    (nursery.folder / "key").write_text("k")
    done = nursery.start(
        "import os, subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, '-P', sys.argv[1], '--parent', str(os.getpid()), '--log', 'log',\n"
        "    '--redact', 'key', '--grace', '1', '--', '/no/such/engine']))",
        KEEPER,
    )
    assert done.wait() == 127
    assert (nursery.folder / "log").read_text() == "cannot start /no/such/engine: No such file or directory\n"


def test_the_log_holds_what_the_engine_says_without_the_key(nursery: Nursery) -> None:
    engine = (
        "import sys\n"
        "print('api_key=s3cret-key, again s3cret-key'); print('to stderr s3cret-key', file=sys.stderr)\n"
        "sys.stdout.buffer.write(b'\\xff\\x00 no text\\n'); sys.stdout.write('no newline at the end')"
    )
    kept = Kept(nursery, engine)
    assert kept.code() == 0
    data = kept.log.read_bytes()
    assert b"s3cret" not in data and data.count(b"[redacted]") == 3
    assert b"\xff\x00 no text\n" in data and data.endswith(b"no newline at the end")


def test_a_key_across_the_end_of_a_very_long_line_is_redacted_too(nursery: Nursery) -> None:
    """Lines are taken 64 KiB at a time."""
    kept = Kept(nursery, "print('x' * 65531 + 's3cret-key' + 'y' * 100)")
    assert kept.code() == 0
    assert kept.log.read_bytes() == b"x" * 65531 + b"[redacted]" + b"y" * 100 + b"\n"


def test_the_log_is_rotated_by_size_and_only_one_old_one_is_kept(nursery: Nursery) -> None:
    lines = 3 * keeper.LOG_BYTES // 10_000
    kept = Kept(nursery, f"for n in range({lines}): print(n, 'x' * 9_990)")
    assert kept.code() == 0
    old = kept.log.with_name("log.1")
    assert sorted(path.name for path in kept.folder.glob("log*")) == ["log", "log.1"]
    assert keeper.LOG_BYTES < old.stat().st_size < keeper.LOG_BYTES + 20_000
    numbers = [int(line.split()[0]) for file in (old, kept.log) for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], lines))


def test_a_full_disk_under_the_log_does_not_stop_the_engine(nursery: Nursery) -> None:
    """More output than a pipe holds, into a log that takes nothing."""
    (nursery.folder / "log").symlink_to("/dev/full")
    kept = Kept(nursery, "print(('x' * 999 + '\\n') * 1000); open('finished', 'w').close()")
    assert kept.code() == 0
    assert (nursery.folder / "finished").exists()
