"""A shard's side of the fleet: asks every supervisor of its host for permits and sends each turn straight
to the server that granted one.

One thread (the caller's) talks to the supervisors and decides; one thread a running turn waits for its
answer. What to ask and what to do with an answer is the caller's: it hands in ``Task``s and two functions.
Nothing here knows what a prompt is.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import logging
import os
import queue
import random
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from draftmill.aside import write_aside
from draftmill.engines import Broken, Refused, Transient, Unreached
from draftmill.errors import UserError
from draftmill.fleet.places import Fleet
from draftmill.threads import Threads

log = logging.getLogger("client")

T = TypeVar("T")

TOLD = ("want", "seen", "returned", "answered", "failed", "alone")  # to a supervisor, of one link
WANT_AT_MOST = 4096  # more is never granted at once, and a steady figure saves messages
TRIES = 12  # of one turn with a server that lives; a server's death does not count
SUSPECT_AFTER, POISON_AFTER = 2, 2  # crashes in company, then alone
DOUBT_S = 0.5  # a supervisor sees its server's end after 0.1 s
PROOF_S = 5.0  # after connections broke: by then their supervisor has said "down", or the server lives
LEAST_ROUND_S = 0.004  # between two rounds, so that answers that come together are handled together
BREAKER_AFTER = 6  # failures in a row of one server
NO_SERVER_S = 120.0
REVIVE_S = 5.0  # without any supervisor: the lease that would have started one again is gone too
HOPELESS_S = 30.0  # all slots given up for so long: a lease moves to another slot in 5 to 10 s
CLOSING_S = 10.0  # before an allocation's time limit: for all processes to end by themselves
SWITCH_INTERVAL_S = 0.05  # with 1,024 threads: 4 times the turns a second of Python's default (measured)


@dataclass
class Task(Generic[T]):
    """One turn to be answered. ``work``: how much it is expected to take; more goes first. ``prefers``: the
    server that holds the beginning of its prompt."""

    what: T
    work: tuple[float, ...] = ()
    prefers: str | None = None
    tries: int = 0
    attempts: int = 0
    crashes: int = 0
    crashes_alone: int = 0
    alone: bool = False  # as it last ran
    last_fault: str = ""


@dataclass(frozen=True)
class Server:
    """A server as a turn sees it."""

    name: str
    address: str
    engine: str
    version: str

    @classmethod
    def published(cls, fleet: Fleet, slot: str, state: Mapping[str, Any]) -> Server:
        """The server of a slot whose supervisor says this of it."""
        return cls(f"{fleet.host.name}/{slot}", state["address"], state["engine"], str(state["version"]))


@dataclass
class _Link:
    """The connection to one supervisor."""

    connection: socket.socket
    buffer: bytes = b""
    public: dict[str, Any] = field(default_factory=dict)
    seen: int = 0
    returned: int = 0
    answered: int = 0  # turns; a refused one is neither: it takes no work to refuse
    failed: int = 0  # turns that came to nothing though it lives
    permits: int = 0  # in hand, of the current epoch
    alone: bool = False
    sent: tuple[int, ...] = (0,) * len(TOLD)
    running: dict[int, Task[Any]] = field(default_factory=dict)
    broken: list[tuple[float, Task[Any]]] = field(default_factory=list)  # when, and which, since an answer
    suspected: int = 0  # the epoch whose turns are suspected already
    failures: int = 0
    closed_until: float = 0.0  # the circuit breaker
    doubtful_until: float = 0.0  # something broke: its supervisor will say shortly whether the server is down

    @property
    def ready(self) -> bool:
        return self.public.get("state") == "ready"

    @property
    def given_up(self) -> bool:
        return self.public.get("state") == "given_up"


@dataclass(frozen=True)
class _Done:
    link: str
    epoch: int
    number: int
    task: Task[Any]
    took_s: float
    follow_up: Task[Any] | None = None
    answered: bool = False  # and not refused
    fault: Exception | None = None


@dataclass(frozen=True)
class Figures:
    """How a client stands."""

    in_flight: int
    requeued: int
    retried: int
    capacity: int  # turns that the largest server runs at once, 0 before one is ready


class Client(Generic[T]):
    """Answers tasks through the fleet.

    ``answer(what, server, attempt)`` asks the server, keeps the answer, and gives the next task of the same
    conversation or None; it runs in many threads and raises Refused or Transient. ``give_up(what,
    outcome, detail)`` keeps that a turn will never be answered (``refused`` or ``poison``), with which its
    conversation ends. ``revive()`` is called when no supervisor has been there for REVIVE_S. ``proven``: such
    servers have answered before; where none ever has, no turn is blamed for a server's end. ``deadline``
    (monotonic s): no turn is asked that would, by the longest answer so far, end after it.
    """

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        order: float,
        answer: Callable[[T, Server, int], Task[T] | None],
        give_up: Callable[[T, str, str], None],
        note: Callable[[str, dict[str, Any]], None],
        tick: Callable[[Figures], None],
        revive: Callable[[], None],
        proven: bool,
        deadline: float,
    ) -> None:
        self.fleet, self.name, self.order = fleet, name, order
        self.answer, self.give_up, self.note, self.tick, self.revive = answer, give_up, note, tick, revive
        self._links: dict[str, _Link] = {}
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count()
        self._ready: list[tuple[tuple[float, ...], int, Task[T]]] = []
        self._preferring: dict[str, deque[Task[T]]] = {}
        self._delayed: list[tuple[float, int, Task[T]]] = []
        self._suspects: deque[Task[T]] = deque()
        self._finished: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._in_flight = self._requeued = self._retried = 0
        self._given_up: list[Task[T]] = []
        self._last_look = 0.0
        self._last_link = self._last_hope = time.monotonic()
        self._revived = False
        self._settled: dict[str, int] = {}
        self._proven = proven
        self._deadline = deadline
        self._longest_file = fleet.runtime / "longest-answer-s"  # the fleet's next shard starts with it
        self._longest_s = 0.0
        with contextlib.suppress(FileNotFoundError):
            self._longest_s = float(self._longest_file.read_text())

    def run(self, tasks: Iterable[Task[T]]) -> None:
        """Returns when every task and all that followed from them are answered or given up.

        Raises UserError when no server is left, when turns failed again and again on living servers, or when the
        time is up, and whatever ``answer`` raises beside Refused and Transient.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for task in tasks:
            self._put(task)
        threads = Threads("turn")
        try:
            while self._in_flight or self._waiting:
                self._check_time()
                self._look_for_supervisors()
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    else:
                        self._hear(key.data)
                time.sleep(LEAST_ROUND_S)
                self._collect()
                self._release_delayed()
                self._dispatch(threads)
                self._say()
                self._check_hope()
                self.tick(self.figures)
        finally:
            threads.close()
            for name in list(self._links):
                self._drop(name)
            with contextlib.suppress(OSError):  # a full disk has been named already
                write_aside(self._longest_file, str(self._longest_s))
        if self._given_up:
            first = self._given_up[0]
            raise UserError(
                f"{len(self._given_up)} turns failed {TRIES} times each on servers that live "
                f"(the last fault: {first.last_fault}); everything else is in the journal. Run again to try them anew."
            )

    @property
    def figures(self) -> Figures:
        capacity = max((link.public["capacity"] for link in self._links.values() if link.ready), default=0)
        return Figures(self._in_flight, self._requeued, self._retried, capacity)

    @property
    def _waiting(self) -> int:
        preferring = sum(len(tasks) for tasks in self._preferring.values())
        return len(self._ready) + preferring + len(self._delayed) + len(self._suspects)

    # --- the queue

    def _put(self, task: Task[T]) -> None:
        if task.crashes_alone >= POISON_AFTER and self._proven:
            self._reject_poison(task)
        elif task.crashes >= SUSPECT_AFTER:
            self._suspects.append(task)
        elif task.prefers is not None and task.prefers in self._links:
            self._preferring.setdefault(task.prefers, deque()).append(task)
        else:
            heapq.heappush(self._ready, (tuple(-w for w in task.work), next(self._numbers), task))

    def _reject_poison(self, task: Task[T]) -> None:
        detail = f"took a server down {task.crashes_alone} times with nothing else running"
        log.error("poison: %s %s", task.what, detail)
        self.note("poison", {"turn": str(task.what)})
        self.give_up(task.what, "poison", detail)

    def _take(self, link: str) -> Task[T] | None:
        """The next turn for this server: one whose beginning it holds, else the longest, else one that
        prefers another server (an idle place costs more than a prefix)."""
        own = self._preferring.get(link)
        if own:
            return own.popleft()
        if self._ready:
            return heapq.heappop(self._ready)[2]
        longest = max(self._preferring.values(), key=len, default=None)
        return longest.popleft() if longest else None

    def _later(self, task: Task[T], delay_s: float) -> None:
        heapq.heappush(self._delayed, (time.monotonic() + delay_s, next(self._numbers), task))

    def _release_delayed(self) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._put(heapq.heappop(self._delayed)[2])

    def _patience(self) -> float:
        if self._delayed:
            return min(1.0, max(0.0, self._delayed[0][0] - time.monotonic()))
        return 1.0 if self._links else 0.1

    # --- the supervisors

    def _look_for_supervisors(self) -> None:
        if time.monotonic() - self._last_look < (1.0 if self._links else 0.1):
            return
        self._last_look = time.monotonic()
        for path in self.fleet.runtime.glob("*.sock"):
            if path.stem in self._links:
                continue
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
                hello = {"role": "client", "name": self.name, "order": [self.order, self.name]}
                connection.sendall(json.dumps({"hello": hello}).encode() + b"\n")
            except OSError:
                connection.close()
                continue
            self._links[path.stem] = _Link(connection)
            self._selector.register(connection, selectors.EVENT_READ, path.stem)

    def _hear(self, name: str) -> None:
        link = self._links[name]
        try:
            data = link.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(name)
            return
        *lines, link.buffer = (link.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "granted" in message:
                link.seen += message["granted"]
                if message["epoch"] == link.public.get("epoch") and message["alone"] == link.alone:
                    link.permits += message["granted"]
                else:
                    link.returned += message["granted"]
            elif "server" in message:
                self._changed(name, link, message["server"])
            elif "down" in message:
                self._server_down(name, link, message["down"], message["reason"])

    def _changed(self, name: str, link: _Link, public: dict[str, Any]) -> None:
        if public.get("epoch") != link.public.get("epoch"):
            link.returned += link.permits
            link.permits, link.failures, link.closed_until, link.doubtful_until = 0, 0, 0.0, 0.0
        link.public = public
        if public["state"] == "ready" and self._settled.get(name) != public["epoch"]:
            self._settled[name] = public["epoch"]
            log.info("%s is ready and runs %s turns at once", name, public["capacity"])
        if public["state"] == "stalled":  # before its end breaks the connections
            self._suspect(link, public["epoch"])

    def _server_down(self, name: str, link: _Link, epoch: int, reason: str) -> None:
        log.warning("the server of %s is down (%s)", name, reason.partition("\n")[0])
        self._suspect(link, epoch)
        link.returned += link.permits
        link.permits = 0

    def _suspect(self, link: _Link, epoch: int) -> None:
        """Everything that was in flight when a server went down is suspected a little. Its failures come in by
        themselves, some before its supervisor has cleared up and says so: those waited for that."""
        if link.suspected == epoch:
            return
        link.suspected = epoch
        for _, task in link.broken:
            task.tries -= 1  # it was the server's end, not an answer of a living one
        broken = {id(task): task for _, task in link.broken}
        for task in {**broken, **{id(task): task for task in link.running.values()}}.values():
            task.crashes += 1
            task.crashes_alone += task.alone
        waiting, self._delayed = self._delayed, []
        for entry in waiting:
            if id(entry[2]) in broken:
                self._put(entry[2])
            else:
                heapq.heappush(self._delayed, entry)
        link.broken.clear()

    def _drop(self, name: str) -> None:
        """Forgets a supervisor that is gone; what runs on its server fails or finishes by itself."""
        link = self._links.pop(name)
        self._selector.unregister(link.connection)
        link.connection.close()
        for task in self._preferring.pop(name, ()):
            task.prefers = None
            self._put(task)

    def _say(self) -> None:
        """Tells each supervisor what is wanted and given back, if that has changed."""
        ready = self._waiting - len(self._delayed) - len(self._suspects)
        now = time.monotonic()
        for link in self._links.values():
            if link.alone and not link.running and (not self._suspects or link.given_up):
                link.alone = False
        alone_somewhere = any(link.alone for link in self._links.values())
        for name, link in list(self._links.items()):
            if self._suspects and link.ready and not alone_somewhere:
                link.alone = alone_somewhere = True
            if self._closing:
                want = 0
            elif link.alone:
                free = not link.running and link.permits == 0 and link.doubtful_until <= now
                want = 1 if self._suspects and free else 0
            elif max(link.closed_until, link.doubtful_until) > now:
                want = 0
            elif link.failures >= BREAKER_AFTER:
                want = min(1, ready)  # half open: one turn tries
            else:
                want = min(ready, WANT_AT_MOST)
            message = (want, link.seen, link.returned, link.answered, link.failed, link.alone)
            if message != link.sent:
                link.sent = message
                line = json.dumps(dict(zip(TOLD, message, strict=True)))
                try:
                    link.connection.sendall(line.encode() + b"\n")
                except OSError:
                    self._drop(name)

    def _check_hope(self) -> None:
        if self._links:
            self._last_link, self._revived = time.monotonic(), False
            if not all(link.given_up for link in self._links.values()):
                self._last_hope = time.monotonic()
            elif time.monotonic() - self._last_hope > HOPELESS_S:
                raise UserError(
                    "No server is left.\n" + "\n".join(str(x.public["error"]) for x in self._links.values())
                )
        elif not self._revived and time.monotonic() - self._last_link > REVIVE_S:
            self._revived = True
            self.revive()
        elif time.monotonic() - self._last_link > NO_SERVER_S:
            raise UserError(
                f"No server's supervisor could be reached for {NO_SERVER_S:.0f} s; "
                f"see {self.fleet.results / 'logs' / 'supervisors'}. Run again to go on from here."
            )

    @property
    def _closing(self) -> bool:
        """Whether another answer might take longer than there is time."""
        return time.monotonic() + self._longest_s + CLOSING_S > self._deadline

    def _check_time(self) -> None:
        left_s = self._deadline - time.monotonic()
        if self._closing and (not self._in_flight or left_s < CLOSING_S):
            raise UserError(
                f"The allocation ends in {max(0, left_s):.0f} s and an answer has taken up to {self._longest_s:.0f} s, "
                "so nothing more is asked in it. All answers are in the journal; the next allocation goes on from them."
            )

    # --- the turns

    def _dispatch(self, threads: Threads) -> None:
        for name, link in self._links.items():
            while (
                link.permits and link.ready and link.doubtful_until <= time.monotonic() and not self._closing
            ):
                task = self._suspects.popleft() if link.alone and self._suspects else None
                if task is None and not link.alone:
                    task = self._take(name)
                if task is None:
                    break
                link.permits -= 1
                number = next(self._numbers)
                link.running[number] = task
                self._in_flight += 1
                server = Server.published(self.fleet, name, link.public)
                task.attempts += 1
                task.alone = link.alone
                threads.run(self._one, name, link.public["epoch"], number, task, server)
            if link.permits:
                link.returned += link.permits
                link.permits = 0

    def _one(self, name: str, epoch: int, number: int, task: Task[T], server: Server) -> None:
        """Asks for one answer; runs in a thread of its own."""
        began = time.monotonic()
        try:
            try:
                follow_up, answered = self.answer(task.what, server, task.attempts), True
            except Refused as refusal:
                self.give_up(task.what, "refused", str(refusal))
                follow_up, answered = None, False
            self._finish(
                _Done(
                    name,
                    epoch,
                    number,
                    task,
                    time.monotonic() - began,
                    follow_up=follow_up,
                    answered=answered,
                )
            )
        except Exception as fault:  # noqa: BLE001  raised again in the caller's thread
            self._finish(_Done(name, epoch, number, task, time.monotonic() - began, fault=fault))

    def _finish(self, done: _Done) -> None:
        self._finished.put(done)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _collect(self) -> None:
        while True:
            try:
                done = self._finished.get_nowait()
            except queue.Empty:
                return
            self._in_flight -= 1
            link = self._links.get(done.link)
            if link is not None and link.running.pop(done.number, None) is not None:
                link.returned += 1
            if done.fault is None:
                self._proven |= done.answered
                self._longest_s = max(self._longest_s, done.took_s)
                if link is not None:
                    link.failures = 0
                    link.answered += done.answered
                    link.broken = [one for one in link.broken if time.monotonic() - one[0] < PROOF_S]
                if done.follow_up is not None:
                    done.follow_up.prefers = done.link
                    self._put(done.follow_up)
            elif isinstance(done.fault, Transient):
                self._failed(done, link)
            else:
                raise done.fault

    def _failed(self, done: _Done, link: _Link | None) -> None:
        task = done.task
        task.last_fault = str(done.fault)
        same_life = link is not None and link.ready and link.public.get("epoch") == done.epoch
        if not same_life:
            self._requeued += 1
            self._put(task)
            return
        assert link is not None
        now = time.monotonic()
        if isinstance(done.fault, Broken):
            link.doubtful_until = now + DOUBT_S
            if isinstance(done.fault, Unreached):
                self._requeued += 1
                self._put(task)
                return
            link.broken.append((now, task))
        link.failures += 1
        link.failed += 1
        task.tries += 1
        self._retried += 1
        if link.failures >= BREAKER_AFTER and link.closed_until <= time.monotonic():
            pause = 2.0 ** min(6, link.failures - BREAKER_AFTER)  # 1 to 64 s
            link.failures = min(link.failures, BREAKER_AFTER + 6)
            link.closed_until = time.monotonic() + pause
            log.warning(
                "%s failed %d times in a row (%s): pausing it %.0f s",
                done.link,
                link.failures,
                task.last_fault,
                pause,
            )
        if task.tries >= TRIES:
            self._given_up.append(task)
            log.error("turn %s failed %d times: %s", task.what, task.tries, task.last_fault)
        elif isinstance(done.fault, Broken):
            self._later(task, PROOF_S)
        else:
            self._later(task, min(30.0, 0.5 * 2**task.tries) * random.uniform(0.75, 1.25))
