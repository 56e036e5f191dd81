"""The client beside supervisors that this test plays, line by line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.engines import Broken
from draftmill.fleet.client import Client, Figures, Server, Task
from draftmill.fleet.places import Fleet
from draftmill.fleet.processes import Process


class Supervisor:
    """One end of a supervisor's socket."""

    def __init__(self, fleet: Fleet, slot: str) -> None:
        self._slot, self._listener = slot, socket.socket(socket.AF_UNIX)
        self._listener.bind(str(fleet.socket(slot)))
        self._listener.listen()
        self._listener.settimeout(20)

    def accept(self) -> None:
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(20)
        self._lines = self._connection.makefile("r", encoding="utf-8")
        assert json.loads(self._lines.readline())["hello"]["role"] == "client"

    def say(self, **message: Any) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def stands(self, state: str, epoch: int) -> None:
        server = {"address": self._slot, "engine": "sglang", "version": "1", "capacity": 1}
        self.say(server={**server, "state": state, "epoch": epoch})

    def grant(self, epoch: int, alone: bool) -> None:
        """One permit, as soon as one is wanted in that way."""
        for line in self._lines:
            told = json.loads(line)
            if told["want"] and told["alone"] == alone:
                self.say(granted=1, epoch=epoch, alone=alone)
                return
        raise AssertionError("the client has gone")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setenv("DRAFTMILL_RUNTIME_DIR", str(tmp_path / "run"))
    return Fleet(tmp_path / "results", Process.me())


def nothing(*_: object) -> None: ...


def asking(
    fleet: Fleet,
    answer: Callable[[str, Server, int], Task[str] | None],
    give_up: Callable[[str, str, str], None] = nothing,
    tick: Callable[[Figures], None] = nothing,
) -> threading.Thread:
    """A client that asks for one turn."""
    client: Client[str] = Client(
        fleet, "1-of-1", 0.0, answer, give_up, nothing, tick, nothing, proven=True, deadline=float("inf")
    )
    running = threading.Thread(target=client.run, args=([Task("a turn")],), daemon=True)
    running.start()
    return running


@pytest.mark.parametrize("way", ["stalls", "crashes, and takes a while to clear up", "crashes"])
def test_a_turn_that_takes_servers_down_runs_alone_and_is_rejected(fleet: Fleet, way: str) -> None:
    """However its supervisor comes to know: a hung server is ended after it said so, a dead one's children hold on."""
    one = Supervisor(fleet, "one")
    asked: list[int] = []
    ends = threading.Semaphore(0)
    broke = threading.Semaphore(0)
    given_up: list[str] = []

    def answer(what: str, server: Server, attempt: int) -> Task[str] | None:
        asked.append(attempt)
        ends.acquire(timeout=20)
        broke.release()
        raise Broken("it has gone")

    def give_up(what: str, outcome: str, detail: str) -> None:
        given_up.append(outcome)

    running = asking(fleet, answer, give_up)
    one.accept()
    for epoch, alone in ((1, False), (2, False), (3, True), (4, True)):
        one.stands("ready", epoch)
        one.grant(epoch, alone=alone)
        while len(asked) < epoch:
            threading.Event().wait(0.01)
        if way == "stalls":
            one.stands("stalled", epoch)
            threading.Event().wait(0.1)
        ends.release()
        assert broke.acquire(timeout=20)
        threading.Event().wait(1.5 if "while" in way else 0.1)
        with contextlib.suppress(BrokenPipeError):  # it may know enough
            one.say(down=epoch, reason="gone")
            one.stands("restarting", epoch)
    running.join(20)
    assert not running.is_alive()
    assert given_up == ["poison"] and asked == [1, 2, 3, 4]


def test_a_suspect_finds_another_server_when_the_one_that_was_to_try_it_is_given_up(fleet: Fleet) -> None:
    one, other = Supervisor(fleet, "one"), Supervisor(fleet, "other")
    asked: list[tuple[str, int]] = []
    down = threading.Semaphore(0)

    def answer(what: str, server: Server, attempt: int) -> Task[str] | None:
        asked.append((server.address, attempt))
        if server.address == "one":
            down.acquire(timeout=20)
            raise Broken("it has gone")
        return None

    running = asking(fleet, answer)
    one.accept()
    other.accept()
    other.stands("starting", 1)
    for epoch in (1, 2):  # with others beside it, so that it is no more than suspected
        one.stands("ready", epoch)
        one.grant(epoch, alone=False)
        while len(asked) < epoch:
            threading.Event().wait(0.01)
        one.say(down=epoch, reason="killed")
        one.stands("starting", epoch)
        down.release()
    one.stands("ready", 3)
    for line in one._lines:
        if json.loads(line)["alone"]:
            break
    one.stands("given_up", 3)
    other.stands("ready", 2)
    other.grant(2, alone=True)
    running.join(20)
    assert not running.is_alive()
    assert asked == [("one", 1), ("one", 2), ("other", 3)]


def test_a_lease_has_time_to_move_to_another_slot_when_the_first_is_given_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python, the imports and nvidia-smi take seconds; here ten of them pass at once."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr("draftmill.fleet.client.time", clock)
    one = Supervisor(fleet, "one")
    asked: list[str] = []
    looks = threading.Semaphore(0)

    def answer(what: str, server: Server, attempt: int) -> None:
        asked.append(server.address)

    def tick(_figures: Figures) -> None:
        looks.release()

    def two_rounds() -> None:
        """Of the client, each begun by a message."""
        for _ in range(2):
            while looks.acquire(blocking=False):
                pass
            one.stands("given_up", 1)
            assert looks.acquire(timeout=20), "the client has gone"

    running = asking(fleet, answer, tick=tick)
    one.accept()
    two_rounds()
    passed[0] = 10.0
    two_rounds()
    other = Supervisor(fleet, "other")
    other.accept()
    other.stands("ready", 1)
    other.grant(1, alone=False)
    running.join(20)
    assert asked == ["other"]
