"""Measures server settings on the run's own first turns, one setting a slot at a time, and adopts the best.

Every answer goes to the journal like any other, so that what was answered is never asked again. Rates are taken on
all servers at the same time, under full load, as in the run itself. Which settings to try and when a
measurement is good enough is tuning.py's judgement.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests

from draftmill import bottleneck, engines, tuning
from draftmill import config as settings
from draftmill.answering import LEASE, Asker, raise_file_limit
from draftmill.candidates import Candidate
from draftmill.candidates import table as table_of_expectations
from draftmill.cures import Engine
from draftmill.engines import Refused, Transient
from draftmill.errors import UserError
from draftmill.expectations import expect, given_flags
from draftmill.fleet import processes
from draftmill.fleet.client import SWITCH_INTERVAL_S, Server
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import Fleet
from draftmill.fleet.slots import Slot, slots
from draftmill.generation import Shard, Turn
from draftmill.journal import Journal, Writer
from draftmill.server_flags import ServerFlags, changes, read_flags, without
from draftmill.telemetry import Sample, parse_prometheus
from draftmill.tuning import Measurement, Setting

log = logging.getLogger("tune")

RAMP_S = 600.0  # at most this long until as many turns run as will, of all ages
DRAIN_S = 60.0  # turns in flight may take so long to end before the next setting starts; the rest comes again
BUSY_S = 30.0  # a GPU that another run holds for longer measures nothing
SILENT_S = 60.0  # a server that shows no metrics for so long has failed
MOST_CANDIDATES = 12  # of those that leave the answers as they are, and as many of the others


def tune(config: settings.Config, results: Path) -> tuning.Decision:
    """Measures what promises most, goes on where an earlier call stopped, and adopts the winner.

    Begins no setting after ``operation.tune.budget_s``. Raises UserError when there is nothing to measure with, or when
    it is being done already.
    """
    folder = results / tuning.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder / "lock")
    try:
        alone = lock.take()  # across hosts, too, where a shared file system keeps locks
    except OSError:
        alone = True  # it keeps none
    if not alone:
        raise UserError(
            f"Another call measures over {results} already, with the same turns; wait for it, or end it."
        )
    try:
        return _Tuner(config, results).run()
    finally:
        lock.release()


class _Feed:
    """The run's first turns that have no answer yet, in the order of the shards. Safe to call from threads."""

    def __init__(self, shard: Shard, journal: Journal, shards: list[Path]) -> None:
        self._follow_ups: deque[Turn] = deque()
        self._fresh = self._walk(shard, journal, shards)
        self._lock = threading.Lock()

    @staticmethod
    def _walk(shard: Shard, journal: Journal, shards: list[Path]) -> Iterator[Turn]:
        for path in shards:
            for row in shard.rows(path):
                turn = shard.walk(row, journal.get).next
                if turn is not None:
                    yield turn

    def take(self) -> Turn | None:
        with self._lock:
            return self._follow_ups.popleft() if self._follow_ups else next(self._fresh, None)

    def put(self, turn: Turn) -> None:
        with self._lock:
            self._follow_ups.append(turn)


@dataclass
class _Numerics:
    """The turns under one set of numerics, and what answers them."""

    feed: _Feed
    asker: Asker


class _Tuner:
    def __init__(self, config: settings.Config, results: Path) -> None:
        self._config, self._results = config, results
        self._fleet = Fleet(results, processes.owner())
        self._shards = sorted(
            (results / "shards").glob("*.parquet"), key=lambda path: int(path.stem.split("-")[0])
        )
        self._journal = Journal(results / "journal")
        self._writer = Writer(results / "journal")
        self._prompts = json.loads((results / "prompts.json").read_text())
        self._numerics: dict[str, _Numerics] = {}
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + config["operation"]["tune"]["budget_s"]
        self._asked = Setting("as asked", settings.server_flags(config).words, 1.0)
        self._candidates: list[Setting] = [self._asked]
        self._started: list[Setting] = []
        self._planning = threading.Lock()
        self._circumstances: tuning.Circumstances | None = None
        self._known = bottleneck.UNKNOWN_ENGINE
        self._beat = _Beat()
        self._dry = False  # no turns are left to measure with
        self._lost: list[_SlotLost] = []
        self._faults: list[Exception] = []  # that no other slot would do better

    def run(self) -> tuning.Decision:
        all_slots = slots(self._config["operation"])
        if any(slot.address for slot in all_slots):
            raise UserError("Tuning starts servers itself; it cannot tune the servers of operation.attach.")
        alike = [slot for slot in all_slots if slot.hardware == all_slots[0].hardware]
        if len(alike) < len(all_slots):
            log.warning(
                "measuring on %s alone: %d of %d servers; what is found there holds for no other GPU",
                alike[0].hardware, len(alike), len(all_slots),
            )  # fmt: skip
        raise_file_limit()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with self._leases(len(all_slots)):
            workers = [  # daemons: Ctrl-C waits for none
                threading.Thread(target=self._work, args=(slot,), name=slot.name, daemon=True)
                for slot in alike
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        self._writer.close()
        if self._faults:
            raise self._faults[0]
        if self._circumstances is None:  # no server has started, on any slot
            raise self._lost[0]
        done = self._done()
        if self._lost and not any(m.outcome == "measured" for m in done):
            raise self._lost[0]
        decision = tuning.decide(done, self._asked)
        tuning.adopt(self._results, decision, self._asked, self._circumstances)
        for line in table(done, decision.asked):
            log.info("%s", line)
        log.warning("tuning: %s", decision.reason)
        for proposal in decision.proposals:
            log.warning("tuning: %s", proposal)
        return decision

    @contextlib.contextmanager
    def _leases(self, number: int) -> Iterator[None]:
        """As many leases as there are slots, so that each has its supervisor."""
        folder = self._results / "leases"
        folder.mkdir(exist_ok=True)
        leases = [
            subprocess.Popen(
                [sys.executable, str(LEASE), str(folder / f"tune-{i}.json")], stdin=subprocess.DEVNULL
            )
            for i in range(number)
        ]
        try:
            yield
        finally:
            for lease in leases:
                lease.terminate()
            for lease in leases:
                lease.wait()
            for file in folder.glob("tune-*.json"):
                file.unlink()

    def _work(self, slot: Slot) -> None:
        """Measures one setting after the other on one slot."""
        try:
            with _Bench(self._fleet, slot, self._prompts["turns"]) as bench:
                while self._measure_next(bench):
                    pass
        except _SlotLost as lost:
            log.warning("%s measures nothing more: %s", slot.name, lost)
            self._lost.append(lost)
        except Exception as fault:  # noqa: BLE001  raised again by run
            self._faults.append(fault)

    def _done(self) -> list[Measurement]:
        return tuning.read_measurements(self._results, self._circumstances)

    def _next(self, bench: _Bench) -> Setting | None:
        """The setting to measure next; the first one, as asked, also tells the version and so the candidates."""
        with self._planning:
            if self._faults:
                return None
            if self._circumstances is None:
                try:
                    facts = bench.start(self._asked, self._config["operation"]["server"]["start_timeout_s"])
                except _StartFailed as fault:  # on no slot, then
                    self._faults.append(fault)
                    return None
                self._plan(bench.slot, facts)
                if not any(m.of(self._asked) for m in self._done()):
                    self._started.append(self._asked)
                    return self._asked
        with self._lock:
            done = self._done()
            for setting in tuning.remaining(self._candidates, done):
                if self._dry or time.monotonic() > self._deadline:
                    return None
                if setting not in self._started and tuning.worth_trying(setting, done, self._asked):
                    self._started.append(setting)
                    return setting
        return None

    def _plan(self, slot: Slot, facts: dict[str, Any]) -> None:
        """What to try, by the capacity model; logs its table of expectations."""
        identity = self._shard({}).model.identity
        self._circumstances = tuning.circumstances(
            self._config, facts["engine"], str(facts["version"]), slot.hardware, identity
        )
        if facts["engine"] == "sglang":
            expected = expect(self._config, self._results, slot, self._asked.flags, str(facts["version"]))
        else:
            expected, self._known = None, Engine(kind="llamacpp")
        if expected is None:
            log.warning(
                "no capacity model for %s on %s: only the asked flags are measured",
                facts["engine"],
                slot.gpu_name,
            )
            return
        self._known, found = expected.engine, expected.found
        log.info("expected, before measuring:\n%s", table_of_expectations(found))
        self._asked = self._candidates[0] = replace(
            self._asked, expected_capacity=found[0].capacity.max_running
        )
        given = read_flags(given_flags(self._config, slot, {}, self._asked.flags))
        sound = [candidate for candidate in found[1:] if not candidate.changes_answers]
        others = [candidate for candidate in found[1:] if candidate.changes_answers]
        chosen = [*sound[:MOST_CANDIDATES], *others[:MOST_CANDIDATES]]
        self._candidates += [as_setting(one, given) for one in sorted(chosen, key=lambda one: -one.gain)]

    def _all_flags(self, slot: Slot, setting: Setting) -> ServerFlags:
        given = given_flags(self._config, slot, setting.model, setting.flags)
        return read_flags([*given, *setting.flags])

    def _shard(self, model: dict[str, Any]) -> Shard:
        return Shard({**self._config, "model": {**self._config["model"], **model}}, self._results / "model")

    def _turns(self, setting: Setting) -> _Numerics:
        """The turns to ask under a setting: their keys hold what changes answers."""
        name = json.dumps(setting.model, sort_keys=True)
        with self._lock:
            if name not in self._numerics:
                shard = self._shard(setting.model)
                asker = Asker(self._config, self._fleet, shard, self._journal, self._writer)
                self._numerics[name] = _Numerics(_Feed(shard, self._journal, self._shards), asker)
            return self._numerics[name]

    def _measure_next(self, bench: _Bench) -> bool:
        """Measures one more setting; False when none is left, or no time."""
        with self._beat.part(bench.slot.name):
            setting = self._next(bench)
            if setting is None:
                return False
            assert self._circumstances is not None, "the first setting's server has told them"
            measurement = Measurement(
                setting.name, setting.flags, setting.model, "failed", self._circumstances,
                expected_gain=setting.expected_gain, expected_capacity=setting.expected_capacity,
            )  # fmt: skip
            try:
                facts = bench.start(setting, self._config["operation"]["server"]["start_timeout_s"])
                kept = self._measure(bench, setting, facts, measurement)
            except _StartFailed as fault:
                kept = replace(measurement, detail=str(fault), measured_at=time.time())
            except _SlotLost:  # another slot may measure it
                self._started.remove(setting)
                raise
            if kept is None:
                log.info("%s: too few turns are left to measure with", setting.name)
                return False
            log.info(
                "%s: %s %.0f tok/s (± %.0f) %s",
                setting.name, kept.outcome, kept.tok_s, kept.error, kept.detail,
            )  # fmt: skip
            tuning.keep(self._results, kept)
        return True

    def _measure(
        self, bench: _Bench, setting: Setting, facts: dict[str, Any], measurement: Measurement
    ) -> Measurement | None:
        best = tuning.best_rate(self._done(), self._asked)
        engine = self._known
        if engine.architecture is not None:
            engine = replace(engine, flags=self._all_flags(bench.slot, setting))
        at_once = (
            self._config["operation"]["client"]["concurrency"] or facts["capacity"] + facts["queue_depth"]
        )
        load = _Load(self._turns(setting), bench.server(facts), at_once, bench.turns, engine)
        measured = load.measure(measurement, facts["capacity"], best, bench, self._beat)
        self._dry = self._dry or load.dry
        return measured


class _Beat:
    """Makes the servers of a host take their rates at the same time: one that starts, fills or drains would change the
    prefills of those beside it (docs/benchmarks.md). Safe to call from threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._disturbing: set[str] = set()  # slots whose server starts, fills or drains
        self._measuring: set[str] = set()

    @contextlib.contextmanager
    def part(self, slot: str) -> Iterator[None]:
        """Around a setting on a slot, from the start of its server; begins when no rate is taken."""
        with self._changed:
            self._changed.wait_for(lambda: not self._measuring)
            self._disturbing.add(slot)
        try:
            yield
        finally:
            with self._changed:
                self._disturbing.discard(slot)
                self._measuring.discard(slot)
                self._changed.notify_all()

    def measure(self, slot: str) -> bool:
        """Whether a slot whose server runs as many turns as it will may take its rate; ask again if not."""
        with self._changed:
            self._disturbing.discard(slot)
            if self._disturbing:
                return False
            self._measuring.add(slot)
            return True

    def measured(self, slot: str) -> None:
        """The slot has its rate, or will have none; returns when it may drain, until when its load must go on."""
        with self._changed:
            self._disturbing.discard(slot)
            self._measuring.discard(slot)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._measuring)
            self._disturbing.add(slot)


class _StartFailed(UserError):
    """The server does not start with a setting; the text says why."""


class _SlotLost(UserError):
    """A slot can measure nothing, whatever the setting; the text says why."""


class _Bench:
    """One slot's server, held by the tuner alone."""

    def __init__(self, fleet: Fleet, slot: Slot, turns: int) -> None:
        self.fleet, self.slot, self.turns = fleet, slot, turns
        self.key = fleet.key_file().read_text()

    def __enter__(self) -> _Bench:
        deadline = time.monotonic() + 60
        self._connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._connection.connect(str(self.fleet.socket(self.slot.name)))
                break
            except OSError as fault:
                if time.monotonic() > deadline:
                    raise self._lost("did not start") from fault
                time.sleep(0.1)
        self._lines = self._connection.makefile("r", encoding="utf-8")
        self._send({"hello": {"role": "tuner", "name": "tune"}})
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._connection.close()

    def _lost(self, how: str) -> _SlotLost:
        log_file = self.fleet.supervisor_log(self.slot.name)
        return _SlotLost(f"The supervisor of {self.slot.name} {how}; see {log_file}.")

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as fault:
            raise self._lost("is gone") from fault

    def start(self, setting: Setting, timeout_s: float) -> dict[str, Any]:
        """The server's facts once it serves with ``setting``; raises _StartFailed, and _SlotLost where no setting
        would do better."""
        trial = {"flags": list(setting.flags), "model": setting.model}
        self._send({"trial": trial, "wanted": self.turns})
        waits_for = None  # a GPU, said once
        while True:
            self._connection.settimeout(BUSY_S if waits_for else timeout_s + 300)
            try:
                line = self._lines.readline()
            except OSError as fault:
                raise self._lost(f"is {waits_for}" if waits_for else "said nothing for too long") from fault
            if not line:
                raise self._lost("is gone")
            message = json.loads(line)
            if "trial_failed" in message and message["trial"] == trial:
                raise _StartFailed(message["trial_failed"])
            facts: dict[str, Any] = message.get("server", {})
            if facts.get("trial") == trial and facts["state"] == "ready":
                return facts
            if facts.get("state") == "given_up":
                raise _SlotLost(str(facts["error"]))
            waits_for = facts.get("error") if facts.get("state") == "waiting" else None

    def server(self, facts: dict[str, Any]) -> Server:
        return Server.published(self.fleet, self.slot.name, facts)


class _Load:
    """Keeps so many turns running on one server, and takes its rate."""

    def __init__(self, turns: _Numerics, server: Server, at_once: int, wanted: int, known: Engine) -> None:
        self._turns, self._server, self._at_once = turns, server, at_once
        self._wanted = wanted  # turns of the whole run: more would run if they could
        self._known = known
        self._stop = threading.Event()
        self._dry = threading.Event()  # no turn is left to ask: from here on fewer and fewer run
        self._lock = threading.Lock()
        self._answers = self._rejected = self._tokens = 0
        self._fault: Exception | None = None  # of the server, since its last answer
        self._silence: Exception | None = None  # why it shows no metrics; it may answer all the same
        self._raised: Exception | None = None  # what no other server would do better

    @property
    def dry(self) -> bool:
        """Whether the turns ran out."""
        return self._dry.is_set()

    def measure(
        self, measurement: Measurement, capacity_: int, best: float, bench: _Bench, beat: _Beat
    ) -> Measurement | None:
        """The measurement with what was found; None where too few turns were left."""
        engine = engines.load(self._server.engine)
        samples: list[Sample] = []
        began = shown = time.monotonic()
        threads = [
            threading.Thread(target=self._ask_until_stopped, daemon=True) for _ in range(self._at_once)
        ]
        for thread in threads:
            thread.start()
        full = False
        steady_from: float | None = None
        outcome = None
        while outcome is None and any(thread.is_alive() for thread in threads) and not self._dry.wait(1):
            try:
                page = engine.metrics(self._server.address, bench.key)
            except requests.RequestException as fault:
                if time.monotonic() - shown < SILENT_S:
                    continue
                self._silence = fault
                break
            shown = time.monotonic()
            sample = replace(parse_prometheus(page, time.time()), capacity=capacity_, wanted=self._wanted)
            samples.append(sample)
            full = full or self._full(samples, capacity_) or time.monotonic() - began > RAMP_S
            if full and steady_from is None and beat.measure(bench.slot.name):
                steady_from = sample.t
            if steady_from is not None:
                outcome = tuning.enough(_rates(samples, steady_from), best)
        beat.measured(bench.slot.name)
        self._stop.set()
        deadline = time.monotonic() + DRAIN_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.2)
        if self._raised is not None:
            raise self._raised
        return self._result(measurement, outcome, samples, steady_from, capacity_)

    def _full(self, samples: list[Sample], capacity_: int) -> bool:
        """Whether as many turns run as will (at the cap, or no more than some seconds ago), of all ages: they began
        together, and until as many have ended the server prefills too little, or compiles kernels for new shapes."""
        running = [s.running or 0 for s in samples]
        most = running[-1] >= 0.95 * min(capacity_, self._at_once)
        most = most or (len(running) > 15 and 0 < running[-1] <= running[-11])
        return most and self._answers >= running[-1]

    def _ask_until_stopped(self) -> None:
        try:
            self._ask_on()
        except Exception as fault:  # noqa: BLE001  raised again by measure
            self._raised = fault
            self._stop.set()

    def _ask_on(self) -> None:
        tries = 0
        while not self._stop.is_set() and tries < 5:
            turn = self._turns.feed.take()
            if turn is None:
                self._dry.set()
                return
            try:
                walk = self._turns.asker.answer(turn, self._server, 1)
            except Transient as fault:
                self._fault = fault
                tries += 1
                self._turns.feed.put(turn)
                time.sleep(1)
                continue
            except Refused as refusal:
                walk = self._turns.asker.give_up(turn, "refused", str(refusal))
            tries, self._fault = 0, None
            with self._lock:
                self._answers += 1
                self._rejected += walk.rejected is not None
                self._tokens += sum(len(facts["output_ids"]) for facts in walk.facts)
            if walk.next is not None:
                self._turns.feed.put(walk.next)

    def _result(
        self,
        measurement: Measurement,
        outcome: str | None,
        samples: list[Sample],
        steady_from: float | None,
        capacity_: int,
    ) -> Measurement | None:
        steady = [s for s in samples if steady_from is not None and s.t >= steady_from]
        rates = _rates(samples, steady_from) if steady_from is not None else []
        fault = self._silence or self._fault
        why = f"its server failed: {fault}" if outcome is None and fault is not None else ""
        why = "its server decoded no token" if outcome == "failed" else why
        if why:
            return replace(measurement, detail=why, capacity=capacity_, measured_at=time.time())
        if outcome is None and len(rates) < tuning.FEWEST_WINDOWS // 2:
            return None
        mean, error = tuning.mean_and_error(rates)
        diagnosis = bottleneck.diagnose(steady, self._known)
        return replace(
            measurement,
            outcome=outcome or "measured",
            tok_s=mean,
            error=error,
            seconds=steady[-1].t - steady[0].t,
            measured_at=steady[-1].t,
            running=sum(s.running or 0 for s in steady) / len(steady),
            capacity=capacity_,
            answers=self._answers,
            rejected=self._rejected,
            mean_tokens=self._tokens / max(1, self._answers),
            verdict=str(diagnosis.verdict),
            evidence=diagnosis.evidence,
            detail="" if outcome else "measured for a short time: too few turns were left",
        )


def _rates(samples: list[Sample], since: float) -> list[float]:
    """Output tok/s in windows of WINDOW_S from ``since`` on."""
    rates = []
    first: Sample | None = None
    for sample in samples:
        if sample.t < since:
            continue
        if first is None:
            first = sample
        elif sample.t - first.t >= tuning.WINDOW_S:
            before, now = _output_tokens(first), _output_tokens(sample)
            rates.append((now - before) / (sample.t - first.t))
            first = sample
    return rates


def _output_tokens(sample: Sample) -> int:
    """Tokens decoded so far; where the engine counts them only at the end of a request, those."""
    return sample.decode_tokens if sample.decode_tokens is not None else sample.generation_tokens or 0


def as_setting(candidate: Candidate, given: ServerFlags) -> Setting:
    """What to start a server with for a candidate: its flags but those ``given`` by the model block and the slot
    anyway. What changes answers belongs into the model block."""
    words: Sequence[str] = changes(given, candidate.flags)[0]
    model: dict[str, Any] = {}
    if candidate.changes_answers:
        model = {"state_dtype": candidate.flags.state_dtype}
        words = without(words, ["--mamba-ssm-dtype"])
    return Setting(candidate.name, tuple(words), candidate.gain, model, candidate.capacity.max_running)


def table(done: list[Measurement], asked: Measurement | None) -> list[str]:
    """The measurements as lines of text, best first; gains over ``asked``."""
    head = (
        f"{'setting':<60} {'outcome':<9} {'tok/s':>8} {'±':>6} {'running':>8} {'cap':>5} {'exp. cap':>8} "
        f"{'gain':>7} {'exp. gain':>9}  what binds"
    )
    base = asked.tok_s if asked else None
    rows = [
        f"{m.name[:60]:<60} {m.outcome:<9} {m.tok_s:>8.0f} {m.error:>6.0f} {m.running:>8.0f} {m.capacity:>5} "
        f"{m.expected_capacity:>8} {m.tok_s / base if base else 0:>6.2f}× {m.expected_gain:>8.2f}×  {m.verdict or m.detail.partition(chr(10))[0][:80]}"
        for m in sorted(done, key=lambda m: -m.tok_s)
    ]
    return [head, *rows]
