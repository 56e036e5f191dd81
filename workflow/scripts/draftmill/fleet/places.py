"""Where a fleet's files lie: sockets and locks on this host, states and logs in the results.

Sockets and locks are in a folder that only this user can enter, named after the run's folder and the
Snakemake process that owns the fleet, so that neither two runs nor two allocations ever meet in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from draftmill.aside import write_aside
from draftmill.errors import UserError
from draftmill.fleet.processes import Process


def user_folder() -> Path:
    """The host-wide folder of this user's locks, mode 700 (DRAFTMILL_RUNTIME_DIR moves it).

    Not below TMPDIR: two runs must meet here whatever theirs are, lest they take the same GPU or port.
    """
    folder = Path(os.environ.get("DRAFTMILL_RUNTIME_DIR", f"/tmp/draftmill-{os.getuid()}"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(
            f"{folder} cannot be made ({fault.strerror}); set DRAFTMILL_RUNTIME_DIR to a folder of your own."
        ) from fault
    if folder.stat().st_uid != os.getuid():
        raise UserError(
            f"{folder} belongs to another user; set DRAFTMILL_RUNTIME_DIR to a folder of your own."
        )
    folder.chmod(0o700)
    return folder


LONGEST_SOCKET = 107  # bytes of a path, by the kernel
SLOT_VARIABLE = "DRAFTMILL_SLOT"  # in the environment of every process of an engine: Fleet.mark of its slot


@dataclass(frozen=True)
class Fleet:
    """The files of one owner's servers in one working directory."""

    results: Path
    owner: Process

    @property
    def runtime(self) -> Path:
        """Sockets, locks and the API key; short, because a socket's path holds 107 bytes at most."""
        digest = hashlib.blake2b(f"{self.results.resolve()} {self.owner}".encode(), digest_size=6).hexdigest()
        folder = user_folder() / f"fleet-{digest}"
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_aside(folder / "owner", str(self.owner))
        return folder

    @property
    def host(self) -> Path:
        """The folder of this host's states, telemetry and client events."""
        return self.results / "fleet" / socket.gethostname()

    @property
    def clients(self) -> Path:
        return self.host / "clients"

    def socket(self, slot: str) -> Path:
        path = self.runtime / f"{slot}.sock"
        if len(os.fsencode(path)) > LONGEST_SOCKET:
            raise UserError(
                f"{path} is too long for a socket's name; set DRAFTMILL_RUNTIME_DIR to a shorter folder, such as /tmp/dm."
            )
        return path

    def state(self, slot: str) -> Path:
        return self.host / f"{slot}.json"

    def telemetry(self, slot: str) -> Path:
        return self.host / f"{slot}.telemetry.jsonl"

    def server_log(self, slot: str) -> Path:
        return self.results / "logs" / "servers" / f"{socket.gethostname()}-{slot}.log"

    def supervisor_log(self, slot: str) -> Path:
        return self.results / "logs" / "supervisors" / f"{socket.gethostname()}-{slot}.log"

    def mark(self, slot: str) -> str:
        """Names the slot of this fleet among all that run on the host."""
        return f"{self.runtime.name}/{slot}"

    def key_file(self) -> Path:
        """The file with this fleet's random API key, made by whoever asks first; mode 600."""
        path = self.runtime / "api-key"
        fresh = path.with_name(f"api-key.{os.getpid()}.{secrets.token_hex(4)}")
        if not path.exists():
            fresh.touch(mode=0o600)
            fresh.write_text(secrets.token_hex(32))
            try:
                os.link(fresh, path)  # unlike a rename, this fails when another process was first
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        return path


def forget_dead_fleets() -> None:
    """Removes the sockets, locks and keys of fleets whose Snakemake has ended."""
    for note in user_folder().glob("fleet-*/owner"):
        with contextlib.suppress(OSError, ValueError):
            owner = note.read_text()
            here = owner.startswith(f"{socket.gethostname()}:")  # elsewhere its pid means nothing
            if here and not Process.parse(owner).alive:
                shutil.rmtree(note.parent, ignore_errors=True)
