"""One slot's supervisor: starts its server when the first turn is wanted, grants permits, watches it,
starts it again when it dies, and ends with the Snakemake process that owns the fleet.

A detached process, one a slot. It speaks lines of JSON over a Unix socket:

    from everybody           {"hello": {"role", "name"}}; a client adds "order", and goes on with
                             {"want", "seen", "returned", "answered", "failed", "alone"} (counts that only
                             grow, but want; a permit comes back answered, failed or unused)
    to everybody             {"server": {...}} when something changed, {"down": epoch, "reason": …}
    to a client              {"granted": n, "epoch": epoch, "alone": bool}
    from the tuner           {"trial": {"flags": […], "model": {…}}, "wanted": n}: serve with these instead, nobody
                             but the tuner, which has n turns, until it goes; {"trial_failed": reason, "trial"} back when
                             that cannot be

It never sees a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from draftmill import engines, logs, serving
from draftmill.aside import write_aside
from draftmill.errors import UserError
from draftmill.fleet import ports, processes
from draftmill.fleet.locks import Lock
from draftmill.fleet.permits import Client, Permits
from draftmill.fleet.places import SLOT_VARIABLE, Fleet, user_folder
from draftmill.fleet.slots import Slot
from draftmill.telemetry import Sample, parse_prometheus

KEEPER = Path(__file__).with_name("keeper.py")
GRACE_S = 3.0  # from SIGTERM to SIGKILL; with the rest it stays well inside the 10 s after a run's end
BACK_OFF_S = (1, 2, 4, 8, 16, 30, 60)
TAIL_LINES = 15
PORT_TAKEN = os.strerror(errno.EADDRINUSE).lower()  # in a server's log; the next start takes another block
ATTACH_S = 30  # a server that somebody else runs is there or not
PAUSED_S = 5.0  # between two looks at the server: this process stood still, not the server
USELESS_AFTER = 6  # turns in a row that came to nothing: such a server is not idle, though it holds none
OF_AN_ENGINE = (
    "engine", "version", "capacity", "model", "flags", "server_flags", "asked_capacity", "state_slots", "kv_tokens",
    "startups", "restarts",
)  # fmt: skip
# Snakemake sets these to the lease's threads, which are none; a server is told its own by operation.server.env.
THREAD_VARIABLES = frozenset(
    f"{library}_NUM_THREADS" for library in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR")
) | {"VECLIB_MAXIMUM_THREADS"}

log = logging.getLogger("supervisor")


class _Down(Exception):
    """The server is gone or useless; the text says why."""


class _Replaced(Exception):
    """The server is fine, but another setting is wanted."""


class _GivenUp(Exception):
    """No further start makes sense; the text says why."""


@dataclass
class _Connection:
    writer: asyncio.StreamWriter
    role: str = "client"
    answered: int = 0  # turns, as its client counts them
    failed: int = 0

    def send(self, message: dict[str, Any]) -> None:
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")


@dataclass
class _Progress:
    """The last moment at which the server was seen to work, and the turns that have failed since."""

    counters: tuple[Any, ...] = ()
    at: float = field(default_factory=time.monotonic)
    failed: int = 0

    def note(self, *counters: Any) -> None:
        if counters != self.counters:
            self.counters, self.at, self.failed = counters, time.monotonic(), 0


class Supervisor:
    """The server of one slot, from its first wanted turn to the end of the fleet."""

    def __init__(self, fleet: Fleet, slot: Slot, config: dict[str, Any]) -> None:
        self.fleet, self.slot, self.config = fleet, slot, config
        self.operation: Mapping[str, Any] = config["operation"]
        self.settings: Mapping[str, Any] = self.operation["server"]
        self.permits = Permits()
        self.connections: dict[int, _Connection] = {}
        self.demand = asyncio.Event()
        self.trial: dict[str, Any] | None = None  # the tuner's setting, while there is a tuner
        self.wanted_by_tuner = 0
        self.started_with: dict[str, Any] | None = None  # the one the present server was started with
        self.changed = asyncio.Event()
        self.ending = asyncio.Event()
        self.engine: engines.Engine | None = None
        self.spec: engines.ServerSpec | None = None
        self.keeper: subprocess.Popen[bytes] | None = None
        self.key = ""
        self.address: str | None = None
        self.epoch = 0
        self.failures = 0  # starts in a row that answered nothing
        self.answers = 0
        self.answers_at_start = 0
        self.last_cause = ""
        self.was_ready = False
        self.progress = _Progress()
        self.silent_since = 0.0  # since when the server does not answer at all; 0 while it does
        self.blind = False  # the server answers, but shows no counters: only its answers tell that it works
        self.idle_since = time.monotonic()
        self.facts: engines.Facts | None = None
        self.state = "waiting"
        self.since = time.time()
        self.error: str | None = None
        self.startups: list[dict[str, Any]] = []
        self.telemetry_file = fleet.telemetry(slot.name)
        self.before: dict[str, Any] = {}  # what the slot's supervisor before this one published
        with contextlib.suppress(OSError, ValueError):
            self.before = json.loads(fleet.state(slot.name).read_text(encoding="utf-8"))

    # --- its life

    async def run(self) -> None:
        """Serves until the owner has ended, or nobody has used the slot for ``warm_s``."""
        listening = self.fleet.socket(self.slot.name)
        listening.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, path=str(listening))
        watch = asyncio.create_task(self._watch())
        telemetry = asyncio.create_task(self._sample_every_second())
        life = asyncio.create_task(self._engine_life())
        self._publish()
        await self.ending.wait()
        log.info("ending")
        server.close()
        listening.unlink(missing_ok=True)
        for task in (life, watch, telemetry):
            task.cancel()
        await asyncio.gather(life, watch, telemetry, return_exceptions=True)
        self._end_engine()  # and an SGLang that is still being asked for its flags
        self._close_startup("stopped")
        if self.state != "given_up":
            self._become("stopped")

    async def _watch(self) -> None:
        """Ends the supervisor with its owner, at a signal, or when it has been of no use for a while."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ending.set)
        handle = self.fleet.owner.handle()
        if handle is None:
            self.ending.set()
            return
        loop.add_reader(handle, self.ending.set)
        while True:
            if self.connections:
                self.idle_since = time.monotonic()
            elif time.monotonic() - self.idle_since > self.settings["warm_s"]:
                log.info("nobody has used this slot for %s s", self.settings["warm_s"])
                self.ending.set()
            await asyncio.sleep(0.5)

    async def _engine_life(self) -> None:
        try:
            await self.demand.wait()
            async with contextlib.AsyncExitStack() as held:
                await self._take_gpus(held)
                while True:
                    if not self.demand.is_set():  # a tuner has gone
                        self._become("waiting")
                        await self.demand.wait()
                    self.changed.clear()
                    try:
                        await self._one_engine()
                    except _Replaced:
                        await self._put_away("replaced by another setting")
                    except (_Down, UserError) as reason:
                        if self.trial is None and isinstance(reason, UserError):
                            raise
                        if self.trial is None:
                            await self._recover(str(reason))
                            continue
                        await self._put_away(str(reason))
                        if PORT_TAKEN in str(reason).lower():  # that says nothing of the setting
                            continue
                        self._tell({"trial_failed": str(reason), "trial": self.started_with})
                        await self.changed.wait()
        except (_GivenUp, UserError) as reason:
            log.error("%s", reason)
            self._give_up(str(reason))
        except Exception as fault:  # a fault of ours: said to the clients, instead of a silent wait
            log.exception("the supervisor failed")
            self._give_up(f"The supervisor of {self.slot.name} failed: {fault!r}; see {self._log_path()}.")

    def _give_up(self, error: str) -> None:
        self.error = error
        self.permits.limit = 0
        self._end_engine()
        self._become("given_up")

    async def _take_gpus(self, held: contextlib.AsyncExitStack) -> None:
        """Waits until no other run of this user holds one of the slot's GPUs."""
        folder = user_folder() / "gpus"
        folder.mkdir(exist_ok=True)
        for gpu in sorted(self.slot.gpus, key=lambda gpu: gpu.uuid):
            lock = Lock(folder / f"{gpu.uuid}.lock")
            while not lock.take():
                if self.error is None:
                    self.error = f"waiting for {gpu.uuid}, which another run of this user holds"
                    self._publish()
                await asyncio.sleep(0.5)
            held.callback(lock.release)
        self.error = None

    async def _one_engine(self) -> None:
        """One start of the engine, until it is down."""
        self.epoch += 1
        self.facts = None  # those of the start before stay known until here
        self.answers_at_start = self.answers
        if self.slot.address is None:
            await self._start()
        else:
            self.address = self.slot.address
            self.key = os.environ.get("DRAFTMILL_ATTACH_KEY", "")
            self._open_startup()
            await self._until_ready(None)
        assert self.facts is not None
        self.was_ready = True
        self.startups[-1]["ready_at"] = time.time()
        fixed = self.operation["client"]["concurrency"]
        at_once = fixed or self.facts.capacity + self._queue_depth(self.facts.capacity)
        log.info(
            "ready at %s: it runs %d turns at once, so %d are sent to it%s",
            self.address,
            self.facts.capacity,
            at_once,
            " (operation.client.concurrency)" if fixed else "",
        )
        self.permits.limit = 0 if self.trial is not None else at_once
        self.progress, self.silent_since = _Progress(), 0.0
        self._become("ready")
        self._grant()
        await self._until_down()

    def _queue_depth(self, capacity: int) -> int:
        """Turns kept waiting at the server, so that a freed place is taken in the same step."""
        asked: int | None = self.operation["client"]["queue_depth"]
        return asked if asked is not None else max(2, capacity // 8)

    async def _start(self) -> None:
        self.started_with = self.trial
        self._become("starting")
        # In threads, since both may ask slow programs: the end of the run must not wait for them.
        self.spec = await asyncio.to_thread(
            serving.server_spec, self.config, self.fleet.results, self.slot, self.started_with
        )
        self.engine = engines.load(self.spec.engine)
        key_file = self.fleet.key_file()
        self.key = key_file.read_text()
        with contextlib.ExitStack() as held:
            if self.slot.gpus:
                await self._wait_for_kernels(held)
            port = ports.choose(self.settings["port"], self.slot, held, self.fleet.runtime)
            self._open_startup()
            folder = self.fleet.runtime / self.slot.name
            folder.mkdir(mode=0o700, exist_ok=True)
            launch = await asyncio.to_thread(self.engine.launch, self.spec, port, key_file, folder)
            self.address = f"http://127.0.0.1:{port}"
            self.keeper = self._spawn(launch, key_file)
            log.info("start %d: %s", self.epoch, " ".join(launch.argv))
            await self._until_ready(self.keeper)
            (self.fleet.runtime / "kernels-compiled").touch()

    async def _wait_for_kernels(self, held: contextlib.ExitStack) -> None:
        """Lets one server of the fleet compile its kernels before the others start: they share the cache."""
        lock = Lock(self.fleet.runtime / "compiling.lock")
        compiled = self.fleet.runtime / "kernels-compiled"
        while not compiled.exists():
            if lock.take():
                held.callback(lock.release)
                return
            await asyncio.sleep(0.2)

    def _spawn(self, launch: engines.Launch, key_file: Path) -> subprocess.Popen[bytes]:
        assert self.spec is not None
        server_log = self.fleet.server_log(self.slot.name)
        server_log.parent.mkdir(parents=True, exist_ok=True)
        with server_log.open("ab") as file:
            file.write(f"\n=== start {self.epoch} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        inherited = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
        environment = {**inherited, **launch.env, **self.spec.env}
        if self.slot.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.device for gpu in self.slot.gpus)
        head = [sys.executable, "-P", str(KEEPER), "--parent", str(os.getpid()), "--log", str(server_log)]
        head += ["--redact", str(key_file), "--grace", str(GRACE_S), "--"]
        return subprocess.Popen(
            [*head, *launch.argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=self.fleet.results.absolute().parent,  # not behind a link: paths count from here
        )

    async def _until_ready(self, keeper: subprocess.Popen[bytes] | None) -> None:
        assert self.address is not None
        patience = self.settings["start_timeout_s"] if keeper is not None else ATTACH_S
        deadline = time.monotonic() + patience
        while True:
            if keeper is not None and keeper.poll() is not None:
                raise _Down(self._with_log(f"ended with exit code {keeper.returncode} while starting"))
            if self.engine is None:
                self.engine = await asyncio.to_thread(serving.dialect, self.address, self.key)
            if self.engine is not None:
                self.facts = await asyncio.to_thread(
                    self.engine.facts, self.address, self.key, self._log_path()
                )
                if self.facts is not None:
                    return
                if keeper is not None and self.engine.start_failed(self._log_tail()):
                    raise _Down(self._with_log("cannot start"))
            if self.changed.is_set():
                raise _Replaced
            if time.monotonic() > deadline:
                raise _Down(
                    self._with_log(
                        f"was not ready after {patience} s (operation.server.start_timeout_s)"
                        if keeper is not None
                        else f"at {self.address} does not answer, or not to this key (DRAFTMILL_ATTACH_KEY)"
                    )
                )
            await asyncio.sleep(0.3)

    async def _until_down(self) -> None:
        """Returns never; raises _Down when the server has died or does no work that it should, _Replaced when other
        flags are wanted."""
        now = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            if self.changed.is_set():
                raise _Replaced
            last, now = now, time.monotonic()
            if now - last > PAUSED_S:  # nothing was sampled meanwhile, so nothing is known of the server
                self.progress.at = now
                self.silent_since = now if self.silent_since else 0.0
            client: Mapping[str, Any] = self.operation["client"]
            stall_s = client["request_timeout_s"] if self.blind else self.settings["stall_s"]
            silent_s = now - self.silent_since if self.silent_since else 0.0
            if self.keeper is None and silent_s > min(ATTACH_S, stall_s):
                raise _Down(self._with_log(f"at {self.address} has not answered for {silent_s:.0f} s"))
            if self.keeper is not None and self.keeper.poll() is not None:
                raise _Down(self._with_log(f"ended with exit code {self.keeper.returncode}"))
            if self.permits.held == 0 and self.progress.failed < USELESS_AFTER:
                self.progress.at = now
            elif now - self.progress.at > stall_s:
                self._become("stalled")
                raise _Down(
                    self._with_log(
                        f"moved no counter and gave no answer for {now - self.progress.at:.0f} s, with "
                        f"{self.permits.held} turns held and {self.progress.failed} failed "
                        "(operation.server.stall_s)"
                    )
                )

    async def _put_away(self, reason: str) -> None:
        """Clears up after a server that is down, or not wanted any more."""
        self.permits.limit = 0
        log.warning("the server is down: %s", reason.partition("\n")[0])
        await asyncio.to_thread(self._end_engine)
        self._close_startup(reason)
        self.permits.forget_held()
        self._tell({"down": self.epoch, "reason": reason})
        self._become("restarting")

    async def _recover(self, reason: str) -> None:
        """Clears up after a server that is down, and waits before the next start."""
        self.failures = 1 if self.answers > self.answers_at_start else self.failures + 1
        await self._put_away(reason)
        cause, newline, tail = reason.partition("\n")
        if self.failures > self.settings["restarts"]:
            raise _GivenUp(
                f"The server of {self.slot.name} {cause} That was its end number {self.failures} with no answer "
                f"in between (operation.server.restarts).{newline}{tail}"
            )
        if not self.was_ready and self.failures > 1 and cause == self.last_cause:
            raise _GivenUp(f"The server of {self.slot.name} {reason}")
        self.last_cause = cause
        self.error = reason
        self._publish()
        await asyncio.sleep(BACK_OFF_S[min(self.failures, len(BACK_OFF_S)) - 1])
        self.error = None

    def _with_log(self, what: str) -> str:
        """``what`` as a sentence, with the likely cause and, in the lines after it, the end of the server's log."""
        tail = self._log_tail()
        cause = self.engine.likely_cause(tail) if self.engine is not None and tail else ""
        likely = f" Likely cause: {cause}" if cause else ""
        end = "\n".join(["", f"The end of {self._log_path()}:", *tail.splitlines()[-TAIL_LINES:]])
        return f"{what}.{likely}{end if tail else ''}"

    def _log_tail(self) -> str:
        try:
            with self.fleet.server_log(self.slot.name).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 64_000))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        _, start, last = text.rpartition("\n=== start ")
        return last.partition("\n")[2] if start else text

    def _log_path(self) -> Path:
        return self.fleet.server_log(self.slot.name)

    def _end_engine(self) -> None:
        """Ends the engine and everything that came of it, the keeper's orphans included."""
        keeper, self.keeper = self.keeper, None
        if keeper is not None and keeper.poll() is None:
            keeper.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(GRACE_S + 2)
        me = os.getpid()
        processes.end(lambda: processes.descendants(me), grace_s=0)
        if keeper is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(1)
        self.address = None

    # --- its clients

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        name = id(connection)
        self.connections[name] = connection
        connection.send({"server": self._public()})
        try:
            while line := await reader.readline():
                self._heed(name, connection, json.loads(line))
        except (ConnectionError, ValueError) as fault:
            log.warning("a connection ended: %s", fault)
        except asyncio.CancelledError:
            pass  # the supervisor ends; asyncio would log a cancelled connection as a fault
        finally:
            self.connections.pop(name, None)
            self.permits.clients.pop(name, None)
            if connection.role == "tuner":
                self._try(None)
            self._grant()
            writer.close()

    def _heed(self, name: int, connection: _Connection, message: dict[str, Any]) -> None:
        if hello := message.get("hello"):
            connection.role = hello["role"]
            if hello["role"] == "client":
                order = hello["order"]
                self.permits.clients[name] = Client(order=(float(order[0]), str(order[1])))
            return
        if "trial" in message:
            self.wanted_by_tuner = int(message["wanted"])
            self._try(message["trial"])
            connection.send({"server": self._public()})
            return
        client = self.permits.clients.get(name)
        if client is not None:
            client.want, client.seen = int(message["want"]), int(message["seen"])
            client.returned = max(client.returned, int(message["returned"]))
            client.alone = bool(message["alone"])
            self.answers += int(message["answered"]) - connection.answered
            self.progress.failed += int(message["failed"]) - connection.failed
            connection.answered, connection.failed = int(message["answered"]), int(message["failed"])
            if client.open_want:
                self.demand.set()
            self._grant()

    def _try(self, trial: dict[str, Any] | None) -> None:
        """Serves with another setting from now on; None is the run's own."""
        if trial != self.trial:
            self.trial = trial
            self.changed.set()
            if trial is not None or any(client.open_want for client in self.permits.clients.values()):
                self.demand.set()
            else:
                self.demand.clear()  # what the tuner finds is not written yet: the next turn starts the server

    def _grant(self) -> None:
        for name, number in self.permits.grants():
            assert isinstance(name, int)
            alone = self.permits.clients[name].alone
            self.connections[name].send({"granted": number, "epoch": self.epoch, "alone": alone})

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self.connections.values():
            connection.send(message)

    # --- what it publishes

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, time.time()
        self._publish()

    def _publish(self) -> None:
        self._tell({"server": self._public()})
        gpus = self.slot.gpus
        facts = self.facts
        spec = self.spec
        published = {
            **self._public(),
            "host": socket.gethostname(),
            "gpus": [gpu.uuid for gpu in gpus],
            "gpu_name": gpus[0].name if gpus else None,
            "gpu_memory_bytes": gpus[0].memory_bytes if gpus else None,
            "model": spec.model_path if spec else None,
            "flags": [*spec.numerics, *spec.flags] if spec else [],
            "server_flags": facts.flags if facts else {},
            "since": self.since,
            "restarts": max(0, len(self.startups) - 1),
            "asked_capacity": facts.asked_capacity if facts else None,
            "state_slots": facts.state_slots if facts else None,
            "kv_tokens": facts.kv_tokens if facts else None,
            "owner": str(self.fleet.owner),
            "supervisor": str(processes.Process.me()),
            "log": str(self._log_path()),
            "startups": self.startups,
        }
        if not self.startups:  # a shard from the journal starts no engine: the facts of the last one stay
            published |= {name: self.before[name] for name in OF_AN_ENGINE if name in self.before}
        write_aside(self.fleet.state(self.slot.name), json.dumps(published, indent=1))

    def _public(self) -> dict[str, Any]:
        return {
            "slot": self.slot.name,
            "state": self.state,
            "address": self.address,
            "epoch": self.epoch,
            "engine": self.engine.name if self.engine else None,
            "version": self.facts.version if self.facts else None,
            "capacity": self.facts.capacity if self.facts else None,
            "queue_depth": self._queue_depth(self.facts.capacity) if self.facts else None,
            "trial": self.started_with,
            "error": self.error,
        }

    def _open_startup(self) -> None:
        entry = {
            "epoch": self.epoch,
            "started_at": time.time(),
            "ready_at": None,
            "ended_at": None,
            "reason": None,
        }
        self.startups.append(entry)

    def _close_startup(self, reason: str) -> None:
        if self.startups and self.startups[-1]["ended_at"] is None:
            self.startups[-1] |= {"ended_at": time.time(), "reason": reason.partition("\n")[0]}

    async def _sample_every_second(self) -> None:
        self.telemetry_file.parent.mkdir(parents=True, exist_ok=True)
        with self.telemetry_file.open("a", encoding="utf-8") as file:
            while True:
                try:
                    sample = await self._sample()
                    file.write(sample.to_json() + "\n")
                    file.flush()
                except Exception:  # a full disk or a strange page: a server is not judged by that
                    self.progress.at = time.monotonic()
                    log.exception("a sample was lost")
                await asyncio.sleep(1)

    async def _sample(self) -> Sample:
        sample = Sample(t=time.time(), state=self.state, epoch=self.epoch)
        address, engine = self.address, self.engine
        if self.state == "ready" and engine is not None and address is not None:
            try:
                text = await asyncio.to_thread(engine.metrics, address, self.key)
                sample = parse_prometheus(text, sample.t, state=self.state, epoch=self.epoch)
                self.blind = sample.running is None and sample.generation_tokens is None
                self.silent_since = 0.0
            except requests.HTTPError:
                self.blind = True
            except requests.RequestException:
                self.blind = False
                self.silent_since = self.silent_since or time.monotonic()
        counters = (sample.generation_tokens, sample.decode_tokens, sample.prefill_tokens, sample.kv_usage)
        self.progress.note(*counters, self.answers)
        return replace(
            sample,
            capacity=self.facts.capacity if self.facts else None,
            permits=self.permits.held,
            wanted=self.permits.wanted if self.started_with is None else self.wanted_by_tuner,
        )


def main(results: Path, slot: Slot, config: dict[str, Any]) -> int:
    """Runs the slot's supervisor; ends at once when the slot has one already."""
    fleet = Fleet(results, processes.owner())
    lock = Lock(fleet.runtime / f"{slot.name}.lock")
    if not lock.take():
        return 0
    processes.adopt_orphans()
    processes.sweep(SLOT_VARIABLE, fleet.mark(slot.name))
    os.environ[SLOT_VARIABLE] = fleet.mark(slot.name)  # of all that it starts from here on
    # The same file that its lease has given it as stderr, where only a crash before this line or in it is written.
    to_file = logs.rotated(fleet.supervisor_log(slot.name), "%(asctime)s %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[to_file])
    asyncio.run(Supervisor(fleet, slot, config).run())
    return 0
