"""One shard's lease: it keeps a slot's supervisor alive for as long as the shard runs.

It writes its service file first, before a driver that may be slow is asked for GPUs: Snakemake waits only so long for
it. An error is written into it then, since the reader of a missing file learns nothing. Then it waits: for SIGTERM from
Snakemake, or for Snakemake's end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.aside import write_aside
from draftmill.errors import UserError
from draftmill.fleet import processes
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import SLOT_VARIABLE, Fleet, forget_dead_fleets
from draftmill.fleet.slots import Slot, slots

SUPERVISOR = Path(__file__).resolve().parents[2] / "supervisor.py"
LOOK_S = 0.2


class Lease:
    """Holds one slot of the fleet, or none while all are held by other shards' leases."""

    def __init__(self, service_file: Path, results: Path, config: Mapping[str, Any]) -> None:
        self.service_file = service_file
        self.started_at = time.time()
        self.slot: Slot | None = None
        self._locks: list[Lock] = []  # of the slot, and of slots that were given up
        self._supervisor: subprocess.Popen[bytes] | None = None
        try:
            self.write(None)
            forget_dead_fleets()
            self.fleet = Fleet(results, processes.owner())
            self._slots = slots(config["operation"])
            self._take_free_slot()
        except UserError as fault:
            self.write(str(fault))
            raise

    def _take_free_slot(self) -> None:
        for slot in self._slots:
            lock = Lock(self.fleet.runtime / f"{slot.name}.lease")
            if lock.take():
                self.fleet.socket(slot.name)  # said now, if its name is too long
                self._locks.append(lock)
                self.slot = slot
                return

    def write(self, error: str | None) -> None:
        """Writes the service file that this shard's generate job reads."""
        write_aside(self.service_file, json.dumps({"started_at": self.started_at, "error": error}))

    def hold(self) -> None:
        """Returns when Snakemake asks this lease to end, or has ended itself."""
        asked, tell = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.write(tell, b"."))
        owner = self.fleet.owner.handle()
        while owner is not None:
            if self.slot is None:
                self._take_free_slot()
            connection = self._connect(self.slot) if self.slot is not None else None
            if connection is None:
                if select.select([asked, owner], [], [], LOOK_S)[0]:
                    break
            elif not self._keep(connection, asked, owner):
                break
        self._clear_up()

    def _keep(self, connection: socket.socket, asked: int, owner: int) -> bool:
        """Keeps the connection while the supervisor lives; True to go on with another one, False to end."""
        with connection:
            heard = b""
            while True:
                ready, _, _ = select.select([asked, owner, connection.fileno()], [], [])
                if asked in ready or owner in ready:
                    return False
                try:
                    data = connection.recv(1 << 16)
                except OSError:
                    data = b""
                if not data:
                    return True  # the supervisor is gone: the next round starts another
                *lines, heard = (heard + data).split(b"\n")
                if any(json.loads(line).get("server", {}).get("state") == "given_up" for line in lines):
                    given_up = self.slot
                    self._take_free_slot()
                    if self.slot is not given_up:
                        return True

    def _connect(self, slot: Slot) -> socket.socket | None:
        """A connection to the slot's supervisor, which is started if there is none; None while it starts."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.fleet.socket(slot.name)))
            hello = {"role": "lease", "name": self.service_file.stem}
            connection.sendall(json.dumps({"hello": hello}).encode() + b"\n")
        except OSError:
            connection.close()
            if self._supervisor is None or self._supervisor.poll() is not None:
                self._supervisor = self._start_supervisor(slot)
            return None
        return connection

    def _start_supervisor(self, slot: Slot) -> subprocess.Popen[bytes]:
        log = self.fleet.supervisor_log(slot.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, str(SUPERVISOR), str(self.fleet.results), slot.name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _clear_up(self) -> None:
        """If the supervisor was killed too, ends what it may have left."""
        if self.slot is not None and Lock(self.fleet.runtime / f"{self.slot.name}.lock").take():
            processes.sweep(SLOT_VARIABLE, self.fleet.mark(self.slot.name))
