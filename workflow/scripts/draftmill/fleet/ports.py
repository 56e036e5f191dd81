"""A block of ports for each server of this host, so that no server's derived ports meet another's."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import zlib
from pathlib import Path

from draftmill.errors import UserError
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import user_folder
from draftmill.fleet.slots import Slot

FIRST, LAST, BLOCK = 20_000, 32_000, 100  # below the range that Linux gives to outgoing connections


def choose(fixed: int | None, slot: Slot, held: contextlib.ExitStack, runtime: Path) -> int:
    """The first port of a free block, reserved until ``held`` ends.

    A port that the user fixed is for the fleet's first server, the next server's is one block higher;
    one that is taken is a UserError. Derived ports move on to the next block.
    """
    folder = user_folder() / "ports"
    folder.mkdir(exist_ok=True)
    if fixed is not None:
        port = fixed + BLOCK * _rank(slot, runtime)
        if not _free(port):
            raise UserError(
                f"Port {port} (operation.server.port) is taken or does not exist; "
                "free it, or set operation.server.port to null."
            )
        return port
    # Each fleet looks from a place of its own: other users' locks are not to be seen, and a port is taken only
    # when its server listens.
    blocks = range(FIRST, LAST, BLOCK)
    own = zlib.crc32(os.fsencode(runtime)) % len(blocks)
    for port in itertools.chain(blocks[own:], blocks[:own]):
        lock = Lock(folder / f"{port}.lock")
        if lock.take():
            if _free(port):
                held.callback(lock.release)
                return port
            lock.release()
    raise UserError(f"No port between {FIRST} and {LAST} is free for a server.")


def _rank(slot: Slot, runtime: Path) -> int:
    """How many supervisors of the fleet have asked before this one."""
    for rank in range(64):
        with contextlib.suppress(FileExistsError):
            (runtime / f"rank-{rank}").symlink_to(slot.name)
            return rank
        if (runtime / f"rank-{rank}").readlink().name == slot.name:
            return rank
    raise UserError("More than 64 servers on one host need operation.server.port: null.")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections are no listener
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):  # taken, or beyond the last port
            return False
    return True
