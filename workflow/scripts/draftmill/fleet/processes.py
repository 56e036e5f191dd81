"""Processes by identity: who is alive, who belongs to whom, and how a whole tree is ended.

A pid alone can be reused, so a process is named by (pid, start time in clock ticks since boot), which
no change of the wall clock touches. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

OWNER_VARIABLE = "DRAFTMILL_OWNER"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One process that is, or was."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that now has ``pid``; None when there is none."""
        stat = _stat(pid)
        return None if stat is None else cls(pid, int(stat[19]))

    @classmethod
    def me(cls) -> Process:
        own = cls.of(os.getpid())
        assert own is not None
        return own

    @classmethod
    def parse(cls, text: str) -> Process:
        """The inverse of ``str``; the host in front is dropped."""
        _host, pid, started = text.rsplit(":", 2)
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{socket.gethostname()}:{self.pid}:{self.started}"

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and int(stat[19]) == self.started and stat[0] not in ("Z", "X")

    def handle(self) -> int | None:
        """A file descriptor that becomes readable when the process ends; None when it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.alive:
            return descriptor
        os.close(descriptor)
        return None

    @property
    def command(self) -> list[str]:
        """The words of its command line; none when it has ended."""
        return [os.fsdecode(word) for word in _read(self.pid, "cmdline").split(b"\0")[:-1]]

    def carries(self, start: str) -> bool:
        """Whether its environment, as it was at its start, holds an entry ``NAME=VALUE`` that begins so."""
        return any(entry.startswith(start.encode()) for entry in _read(self.pid, "environ").split(b"\0"))

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>; empty when the process has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on (after the name, which may hold anything)."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split() or None


def claim_owner() -> None:
    """Makes this process the owner of the run's fleet, for itself and its children."""
    os.environ[OWNER_VARIABLE] = str(Process.me())


def owner() -> Process:
    """The Snakemake process that this one works for."""
    return Process.parse(os.environ[OWNER_VARIABLE])


def end_with_owner() -> None:
    """Ends this process at once when the Snakemake process that it works for ends, even by SIGKILL."""
    handle = owner().handle()
    if handle is None:
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()


def die_with_parent(number: int, parent: int) -> None:
    """Asks the kernel to send this process ``number`` when its parent ends; exits if it already has."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes every descendant whose parent ends a child of this process, instead of init's."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[Process]:
    """All running processes below ``root``, whatever group or session they moved to."""
    parents: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None and stat[0] not in ("Z", "X"):
            parents.setdefault(int(stat[1]), []).append(pid)
    found: list[Process] = []
    todo = [root]
    while todo:
        for child in parents.get(todo.pop(), []):
            todo.append(child)
            process = Process.of(child)
            if process is not None:
                found.append(process)
    return found


def carrying(entry: str) -> list[Process]:
    """All running processes of this user, but this one, whose environment at their start held ``NAME=VALUE``."""
    needle = entry.encode()
    return _running(pid for pid in _pids() if needle in _read(pid, "environ").split(b"\0"))


def working_in(folder: Path) -> list[Process]:
    """All running processes of this user, but this one, whose working folder is ``folder``."""
    place = str(folder.resolve())

    def there(pid: int) -> bool:
        try:
            return str(Path(f"/proc/{pid}/cwd").readlink()) == place
        except OSError:
            return False

    return _running(pid for pid in _pids() if there(pid))


def _running(pids: Iterable[int]) -> list[Process]:
    """The processes that have these pids now, without this one and without the ended."""
    found = (Process.of(pid) for pid in pids if pid != os.getpid())
    return [process for process in found if process is not None and process.alive]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def sweep(variable: str, mark: str) -> None:
    """Ends every process that was started with ``variable=mark`` in its environment."""
    end(lambda: carrying(f"{variable}={mark}"), grace_s=0)


def end(find: Callable[[], list[Process]], grace_s: float) -> None:
    """Ends all that ``find`` finds: SIGTERM, and SIGKILL for what is still there after ``grace_s``.

    ``find`` is asked again and again, since a dying process can leave new orphans.
    """
    if grace_s > 0:
        for process in find():
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and find():
            reap()
            time.sleep(0.05)
    deadline = time.monotonic() + 5
    while (left := find()) and time.monotonic() < deadline:
        for process in left:
            process.send(signal.SIGKILL)
        reap()
        time.sleep(0.02)
    reap()


def reap() -> None:
    """Collects children that have ended (orphans that this process adopted among them)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
