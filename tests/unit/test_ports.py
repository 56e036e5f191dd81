"""Ports and locks: two servers never meet, and nothing is held longer than its holder lives."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill.errors import UserError
from draftmill.fleet import ports
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import Fleet, forget_dead_fleets, user_folder
from draftmill.fleet.processes import Process
from draftmill.fleet.slots import Slot

FIRST, SECOND = Slot("cpu0"), Slot("cpu1")


def environment() -> dict[str, str]:
    """For a process that finds the package, and the test's own folder of locks."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTMILL_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@contextlib.contextmanager
def listening(port: int) -> Iterator[int]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        yield server.getsockname()[1]


def test_derived_ports_are_blocks_of_their_own(tmp_path: Path, held: contextlib.ExitStack) -> None:
    found = [ports.choose(None, slot, held, tmp_path) for slot in (FIRST, SECOND, FIRST)]
    assert len(set(found)) == 3
    assert all((port - ports.FIRST) % ports.BLOCK == 0 and ports.FIRST <= port < ports.LAST for port in found)


def test_a_block_is_free_again_when_its_holder_lets_go(tmp_path: Path) -> None:
    with contextlib.ExitStack() as first:
        port = ports.choose(None, FIRST, first, tmp_path)
    with contextlib.ExitStack() as second:
        assert ports.choose(None, SECOND, second, tmp_path) == port


def test_a_derived_port_moves_on_past_a_listener(tmp_path: Path, held: contextlib.ExitStack) -> None:
    with contextlib.ExitStack() as probe:
        port = ports.choose(None, FIRST, probe, tmp_path)
    with listening(port):
        assert ports.choose(None, FIRST, held, tmp_path) != port


def test_fleets_that_cannot_see_each_others_locks_look_in_different_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two users of one host: a port is free to see until its server listens."""
    found = set()
    for user in range(8):
        monkeypatch.setenv("DRAFTMILL_RUNTIME_DIR", str(tmp_path / f"user{user}"))
        with contextlib.ExitStack() as stack:
            found.add(ports.choose(None, FIRST, stack, user_folder() / "fleet"))
    assert len(found) > 4


def test_old_connections_are_no_listener(tmp_path: Path, held: contextlib.ExitStack) -> None:
    """The port of a server that was just ended: its connections are still in TIME_WAIT."""
    with contextlib.ExitStack() as probe:
        port = ports.choose(None, FIRST, probe, tmp_path)
    with listening(port), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"x")
    assert ports.choose(port, FIRST, held, tmp_path) == port


def test_a_fixed_port_is_the_first_servers_and_the_next_is_a_block_higher(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    with contextlib.ExitStack() as probe:
        base = ports.choose(None, FIRST, probe, tmp_path)
    asked = [ports.choose(base, slot, held, tmp_path) for slot in (SECOND, FIRST, SECOND, FIRST)]
    assert asked == [base, base + ports.BLOCK, base, base + ports.BLOCK]


def test_a_fixed_port_that_is_taken_is_a_sentence(tmp_path: Path, held: contextlib.ExitStack) -> None:
    with (
        listening(0) as port,
        pytest.raises(UserError, match=rf"Port {port} \(operation\.server\.port\) is taken"),
    ):
        ports.choose(port, FIRST, held, tmp_path)


def test_a_fixed_port_beyond_the_last_is_a_sentence(tmp_path: Path, held: contextlib.ExitStack) -> None:
    """65,000 is allowed; the eighth server's would be 65,700."""
    for rank in range(7):
        (tmp_path / f"rank-{rank}").symlink_to(f"cpu{rank}")
    with pytest.raises(UserError, match=r"Port 65700 \(operation\.server\.port\)"):
        ports.choose(65_000, Slot("cpu7"), held, tmp_path)


# --- locks


def test_a_lock_is_held_once() -> None:
    path = user_folder() / "lock"
    first, second = Lock(path), Lock(path)
    assert first.take() and first.take() and not second.take()
    first.release()
    assert second.take()


def test_a_lock_is_not_inherited_and_ends_with_its_holder() -> None:
    """The holder starts a child that outlives it; the child must not keep the lock."""
    path = user_folder() / "lock"
    script = (
        "import subprocess, sys, time; from pathlib import Path; from draftmill.fleet.locks import Lock\n"
        "assert Lock.take(lock := Lock(Path(sys.argv[1])))\n"
        "child = subprocess.Popen(['sleep', '600'], close_fds=False)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, path], env=environment(), stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            assert not Lock(path).take()
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert Lock(path).take()
        finally:
            os.kill(child, signal.SIGKILL)


# --- places


def test_the_users_folder_is_the_users_alone() -> None:
    folder = user_folder()
    folder.chmod(0o777)
    assert user_folder().stat().st_mode & 0o777 == 0o700


def test_fleets_of_other_folders_and_owners_never_meet(tmp_path: Path) -> None:
    owner = Process.me()
    mine = Fleet(tmp_path / "results", owner)
    assert mine.runtime == Fleet(tmp_path / "." / "results", owner).runtime
    others = [
        Fleet(tmp_path / "other", owner),
        Fleet(tmp_path / "results", Process(owner.pid, owner.started + 1)),
    ]
    assert len({mine.runtime, *(fleet.runtime for fleet in others)}) == 3
    assert len({mine.mark("cpu0"), mine.mark("cpu1"), *(fleet.mark("cpu0") for fleet in others)}) == 4


def test_a_sockets_path_fits_however_deep_the_run_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = Fleet(tmp_path.joinpath(*["a" * 50] * 10) / "results", Process.me())
    name = "-".join(["gpu12345678"] * 4)
    with tempfile.TemporaryDirectory(prefix="dm-") as short:
        monkeypatch.setenv("DRAFTMILL_RUNTIME_DIR", short)
        below_user_folder = deep.socket(name).relative_to(user_folder())
    assert len(f"/tmp/draftmill-{2**32 - 2}/{below_user_folder}") <= 107


def test_the_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, Process.me())
    script = (
        "import sys; from pathlib import Path\n"
        "from draftmill.fleet.places import Fleet; from draftmill.fleet.processes import Process\n"
        "print(Fleet(Path(sys.argv[1]), Process.parse(sys.argv[2])).key_file().read_text())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path, str(fleet.owner)],
            env=environment(),
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    keys = {process.communicate()[0].strip() for process in started}
    assert keys == {fleet.key_file().read_bytes()}
    assert len(*keys) == 64
    assert fleet.key_file().stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in fleet.runtime.iterdir()) == ["api-key", "owner"]


def test_fleets_of_dead_owners_are_forgotten_and_living_ones_are_not(tmp_path: Path) -> None:
    me = Process.me()
    living = Fleet(tmp_path, me).runtime
    dead = Fleet(tmp_path, Process(me.pid, me.started - 1)).runtime
    broken = user_folder() / "fleet-broken"
    broken.mkdir()
    (broken / "owner").write_text("no process")
    forget_dead_fleets()
    assert living.exists() and broken.exists() and not dead.exists()
