"""The generate job: asks the fleet for what the journal lacks of one shard, then writes the shard's table.

The only place where walks, journal, client and engine meet.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from draftmill import config as settings
from draftmill import engines, science, serving, tuning
from draftmill.engines import Broken, Unreached
from draftmill.errors import UserError
from draftmill.fleet import allocation, processes
from draftmill.fleet.client import Client, Figures, Server, Task
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import Fleet
from draftmill.fleet.slots import slots
from draftmill.generation import Row, Shard, Turn, Walk
from draftmill.journal import Journal, Writer
from draftmill.model import Model
from draftmill.validation import too_many_rejected

log = logging.getLogger("generate")

LEASE = Path(__file__).resolve().parents[1] / "lease.py"
CONNECT_S = 10.0
CONNECTIONS = 4096  # kept open to one server; more is never granted
EXAMPLES = 3
SHARD_CAPACITIES = 5  # turns of a shard over a server's capacity that keep a fleet busy (simulated)
JUDGE_EVERY = 8  # of the conversations after the first validation.reject_limit_after, one in eight is judged
ALL_REFUSED = 20  # refusals in a row from the start: the request is wrong, not the prompts


def generate(
    config: settings.Config, results: Path, shard_file: Path, service_file: Path, output: Path
) -> None:
    """Writes ``output``, the table of all turns of ``shard_file``.

    Raises UserError when no server is left, the disk is full, or too many answers are rejected.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # the other pools keep what reading a shard took
    shard = Shard(config, results / "model")
    journal = Journal(results / "journal")
    rows = shard.rows(shard_file)
    turns = sum(row.turn_count for row in rows)
    pending, begun, settled = _unfinished(shard, rows, journal)
    changes = science.record(config, results)
    if changes and pending:
        new, total = shard.new_conversations(sorted(shard_file.parent.glob("*.parquet")), journal)
        log.warning(
            "changed since the last run: %s; %d of %d conversations are new", "; ".join(changes), new, total
        )
    log.info("%s: %d turns, %d of them in the journal", shard_file.stem, turns, settled)
    if pending:
        serving.check(config, shard.model)
        if _tune_first(config, results, shard.model.identity):
            journal.refresh()  # with the answers to what the tuner asked
            pending, begun, settled = _unfinished(shard, rows, journal)
        _say_what_to_expect(config, results, shard.model)
        verdicts = _Verdicts(config["validation"])
        for row in filter(verdicts.wants, begun):  # what was rejected before counts, too
            walk = shard.walk(row, journal.get)
            verdicts.count(row, walk)
        del rows, begun  # each is given back when it is answered, and read again for the table
        _Asking(config, results, shard, journal, shard_file.stem, service_file, turns, settled, verdicts).run(
            pending
        )
        journal.refresh()
        rows = shard.rows(shard_file)
    shard.write(rows, journal, output)
    if journal.damaged_lines:
        log.warning("%d damaged lines of the journal were passed over", journal.damaged_lines)
    journal.close()


def _unfinished(shard: Shard, rows: list[Row], journal: Journal) -> tuple[list[Row], list[Row], int]:
    """The conversations that lack an answer, those with one or more, and how many turns are settled in all."""
    pending: list[Row] = []
    begun: list[Row] = []
    settled = 0
    for row in rows:
        walk = shard.walk(row, journal.get, judge_last=False)
        settled += len(walk.facts)
        if walk.facts:
            begun.append(row)
        if walk.next is not None:
            pending.append(row)
    return pending, begun, settled


def _tune_first(config: settings.Config, results: Path, model_identity: str) -> bool:
    """With ``auto`` among the server's flags: one job of the run measures, the others wait for what it finds.
    Returns whether answers may have come of it.

    Never in a Slurm allocation: others would measure too, each with the turns that the first has asked or will ask.
    """
    if not serving.tunes(config):
        return False
    hardware = slots(config["operation"])[0].hardware
    found = functools.partial(tuning.adopted_flags, config, results, hardware, model_identity)
    if allocation.job() is not None:
        if found() is None:
            log.warning("nothing was measured on %s, so its servers start with the flags as asked", hardware)
        return False
    lock = Lock(Fleet(results, processes.owner()).runtime / "tuning.lock")
    while not lock.take():
        time.sleep(1)
    if found() is None:
        from draftmill.tuner import tune

        tune(config, results)
    lock.release()
    return True


def _say_what_to_expect(config: settings.Config, results: Path, model: Model) -> None:
    """Once a run, before its first server starts: the capacity model's table, and what SGLang will cut or refuse."""
    slot = slots(config["operation"])[0]
    if serving.engine_name(config["operation"], model) != "sglang" or not slot.gpus:
        return
    try:
        (Fleet(results, processes.owner()).runtime / "expected").touch(exist_ok=False)
    except FileExistsError:
        return
    from draftmill.candidates import table
    from draftmill.expectations import expect

    try:
        expected = expect(config, results, slot, serving.server_spec(config, results, slot).flags)
    except UserError as unknown:
        # A shape that the capacity model does not know; what ails the server itself, it will say.
        log.info("nothing is foretold of the servers: %s", unknown)
        return
    if expected is None:
        log.info("nothing is foretold of the servers: %s is not in the table of GPUs", slot.gpu_name)
        return
    log.info("expected of each server, and of other flags:\n%s", table(expected.found))
    asked = expected.found[0].capacity
    for sentence in (*asked.refusals, *asked.warnings):
        log.warning("%s", sentence)


class _Verdicts:
    """How many answers the policy rejects, to stop a run that produces rejects."""

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self._policy = policy
        self._chosen: dict[tuple[str, int], bool] = {}
        self._judged = self._rejected = self._refused = 0
        self.reasons: Counter[str] = Counter()
        self._examples: list[str] = []

    def wants(self, row: Row) -> bool:
        """Whether this conversation's last answer is judged here; the merge judges all."""
        name = (row.primary_id, row.sample)
        if name not in self._chosen:
            early = len(self._chosen) < self._policy["reject_limit_after"]
            self._chosen[name] = early or int(row.content_hash[:8], 16) % JUDGE_EVERY == 0
        return self._chosen[name]

    def count(self, row: Row, walk: Walk) -> None:
        """Takes in the turns of a walk; raises UserError when too many are rejected."""
        if not self.wants(row):
            return
        asked = [facts for facts in walk.facts if facts["outcome"] != "unasked"]
        self._judged += len(asked)
        if walk.rejected is not None and asked:
            self._rejected += 1
            self.reasons[walk.rejected] += 1
            if len(self._examples) < EXAMPLES:
                self._examples.append(f"{asked[-1]['id']}: {walk.rejected}")
        refusals = [facts for facts in asked if facts["outcome"] == "refused"]
        self._refused += len(refusals)
        if refusals and self._refused == self._judged == ALL_REFUSED:
            raise UserError(
                f"The first {ALL_REFUSED} turns were all refused ({refusals[0]['detail']}); "
                "the server does not take what it is asked: look at the sampling block and the server's log."
            )
        if too_many_rejected(self._rejected, self._judged, self._policy):
            raise UserError(
                f"{self._rejected} of {self._judged} answers were rejected, more than validation.reject_limit "
                f"({self._policy['reject_limit']}) allows; for instance {'; '.join(self._examples)}. "
                "Look at the prompts, the template and the sampling, or raise the limit."
            )


class Asker:
    """Asks a server for one turn, keeps the answer, and says what to ask next. Safe to call from many threads."""

    def __init__(
        self, config: settings.Config, fleet: Fleet, shard: Shard, journal: Journal, writer: Writer
    ) -> None:
        self._shard, self._journal, self._writer = shard, journal, writer
        attached = config["operation"]["engine"] == "attach"
        key = os.environ.get("DRAFTMILL_ATTACH_KEY", "") if attached else fleet.key_file().read_text()
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        self._headers = {"Content-Type": "application/json", **authorization}
        self._timeout = urllib3.Timeout(
            connect=CONNECT_S, read=config["operation"]["client"]["request_timeout_s"]
        )
        self._server = functools.cache(self._connect)
        self._connecting = threading.Lock()
        self._engine = functools.cache(engines.load)

    def answer(self, turn: Turn, server: Server, attempt: int, judge_last: bool = True) -> Walk:
        """Asks one server for one turn; gives its conversation from it on. Raises Refused or Transient, UserError when
        the journal cannot be written."""
        engine = self._engine(server.engine)
        route, body = _request(engine, turn)
        started_at = time.time()
        began = time.monotonic()
        try:
            with self._connecting:  # a thousand threads that begin together make one pool
                pool, prefix = self._server(server.address)
            reply = pool.urlopen("POST", prefix + route, body, redirect=False)
        except (NewConnectionError, ConnectTimeoutError) as fault:
            raise Unreached(f"{server.name} could not be reached: {type(fault).__name__}") from fault
        except HTTPError as fault:
            raise Broken(f"{server.name} did not answer: {type(fault).__name__}") from fault
        completion = engine.completion(reply.status, reply.data)
        record = {
            "outcome": "answered",
            "id": str(turn),
            "output_ids": completion.output_ids,
            "finish_reason": completion.finish_reason,
            "started_at": started_at,
            "queue_s": completion.queue_s,
            "latency_s": time.monotonic() - began,
            "server": server.name,
            "engine": f"{server.engine} {server.version}",
            "cached_tokens": completion.cached_tokens,
            "attempts": attempt,
        }
        return self._keep(turn, record, judge_last)

    def give_up(self, turn: Turn, outcome: str, detail: str) -> Walk:
        """Keeps that a turn will never be answered (``refused`` or ``poison``)."""
        return self._keep(
            turn, {"outcome": outcome, "id": str(turn), "detail": detail, "started_at": time.time()}
        )

    def next(self, row: Row) -> Turn:
        """The turn of a conversation that is to be asked now."""
        turn = self._shard.walk(row, self._journal.get).next
        assert turn is not None
        return turn

    def _keep(self, turn: Turn, record: dict[str, Any], judge_last: bool = True) -> Walk:
        try:
            self._writer.append(turn.key, record)
        except OSError as fault:
            raise UserError(
                f"The journal {self._writer.path} cannot be written ({fault.strerror}); make room on the disk "
                "and run again: everything written so far is kept."
            ) from fault

        def lookup(key: str) -> dict[str, Any] | None:
            return record if key == turn.key else self._journal.get(key)

        return self._shard.walk(turn.row, lookup, judge_last, since=turn)

    def _connect(self, address: str) -> tuple[urllib3.HTTPConnectionPool, str]:
        """The connections to one server, for all threads, and the path before its routes.

        urllib3 is what requests stands on; with requests around it a turn takes 1.8 times the CPU (measured).
        """
        pool = urllib3.connection_from_url(
            address, maxsize=CONNECTIONS, headers=self._headers, timeout=self._timeout, retries=False
        )
        return pool, urllib3.util.parse_url(address).path or ""


def _request(engine: engines.Engine, turn: Turn) -> tuple[str, bytes]:
    """Route and body; by itself, so that the list of ids is not kept while the answer is awaited."""
    route, body = engine.request(turn.prompt_ids, turn.sampling)
    return route, orjson.dumps(body)


class _Asking:
    """Asks for the missing turns of one shard, and tells how it goes."""

    def __init__(
        self,
        config: settings.Config,
        results: Path,
        shard: Shard,
        journal: Journal,
        name: str,
        service_file: Path,
        turns: int,
        settled: int,
        verdicts: _Verdicts,
    ) -> None:
        lease = json.loads(service_file.read_text())
        if lease["error"]:
            raise UserError(lease["error"])
        self._name = name
        self._service_file = service_file
        self._lease: subprocess.Popen[bytes] | None = None
        self._fleet = Fleet(results, processes.owner())
        self._order = float(lease["started_at"])
        self._writer = Writer(results / "journal")
        self._asker = Asker(config, self._fleet, shard, journal, self._writer)
        self._turns, self._settled, self._reused = turns, settled, settled
        self._verdicts = verdicts
        self._lock = threading.Lock()
        self._output_tokens = 0
        self._interval = float(config["operation"]["progress_interval_s"])
        self._began = self._last_note = time.monotonic()
        self._operation = config["operation"]
        self._over = threading.Event()
        self._shards: int = config["shards"]
        self._capacity_seen = False

    def run(self, pending: list[Row]) -> None:
        raise_file_limit()
        events = self._fleet.clients / f"{self._name}-{os.getpid()}.jsonl"
        events.parent.mkdir(parents=True, exist_ok=True)
        with events.open("a", encoding="utf-8") as self._events:
            client = Client(
                self._fleet,
                self._name,
                self._order,
                self._answer,
                self._give_up,
                self._note,
                self._tick,
                self._renew_lease,
                proven=self._settled > 0,
                deadline=allocation.deadline(),
            )
            self._note("started", {"turns": self._turns, "reused": self._settled})
            threading.Thread(target=self._announce, name="progress", daemon=True).start()
            gc.freeze()  # the rows stay: not to be looked through at every collection
            try:
                client.run(Task(row, row.work) for row in _taken_from(pending))
            finally:
                self._over.set()
                if self._lease is not None:
                    self._lease.terminate()
                    self._lease.wait()
                with contextlib.suppress(OSError):  # a full disk has been named already
                    self._writer.close()
                    self._note("finished", self._standing(client.figures))

    def _renew_lease(self) -> None:
        """Takes the place of a lease that was killed, of which Snakemake learns nothing."""
        log.warning("this shard's lease is gone; taking another")
        self._lease = subprocess.Popen([sys.executable, str(LEASE), str(self._service_file)])

    # A waiting conversation is its row, a tenth of the size of its turn.

    def _answer(self, asked: Row | Turn, server: Server, attempt: int) -> Task[Row | Turn] | None:
        turn = self._asker.next(asked) if isinstance(asked, Row) else asked
        return self._settle(turn, self._asker.answer(turn, server, attempt, self._verdicts.wants(turn.row)))

    def _give_up(self, asked: Row | Turn, outcome: str, detail: str) -> None:
        turn = self._asker.next(asked) if isinstance(asked, Row) else asked
        self._settle(turn, self._asker.give_up(turn, outcome, detail))

    def _settle(self, turn: Turn, walk: Walk) -> Task[Row | Turn] | None:
        with self._lock:
            self._settled += len(walk.facts)
            self._output_tokens += sum(len(facts["output_ids"]) for facts in walk.facts)
            self._verdicts.count(turn.row, walk)
        return None if walk.next is None else Task(walk.next, walk.next.work)

    # --- what it tells

    def _standing(self, figures: Figures) -> dict[str, Any]:
        return {
            "turns": self._turns,
            "done": self._settled,
            "failed": figures.retried,
            "requeued": figures.requeued,
            "in_flight": figures.in_flight,
            "output_tokens": self._output_tokens,
            "rejects": dict(self._verdicts.reasons),
        }

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        line = {"t": time.time(), "shard": self._name, "event": event, **facts}
        self._events.write(json.dumps(line) + "\n")
        self._events.flush()

    def _announce(self) -> None:
        """Says how the whole run stands, on the terminal, whenever it is this client's turn to say it."""
        from draftmill import status  # its tables are slow to import, and a shard from the journal needs none

        while not self._over.wait(1):
            line = status.announce(self._fleet.results, self._operation)
            if line is not None:
                print(line, file=sys.stderr, flush=True)

    def _warn_of_small_shards(self, capacity: int) -> None:
        """Says once a run when shards are too small to keep servers of that capacity busy to their end."""
        stamp = self._fleet.runtime / "shard-size-checked"
        with contextlib.suppress(FileExistsError):
            stamp.touch(exist_ok=False)
            turns = json.loads((self._fleet.results / "prompts.json").read_text())["turns"]
            most = max(1, turns // (SHARD_CAPACITIES * capacity))
            tiny = turns < self._shards * capacity
            if most < self._shards and (most > 1 or tiny):  # else the run is so small that it drains anyway
                log.warning(
                    "a shard holds about %d turns, less than %d times what a server runs at once (%d): servers may "
                    "stand idle at the end of shards; set shards: %d",
                    turns // self._shards, SHARD_CAPACITIES, capacity, most,
                )  # fmt: skip

    def _tick(self, figures: Figures) -> None:
        if figures.capacity and not self._capacity_seen:
            self._capacity_seen = True
            self._warn_of_small_shards(figures.capacity)
        if time.monotonic() - self._last_note >= self._interval:
            self._last_note = time.monotonic()
            standing = self._standing(figures)
            self._note("progress", standing)
            elapsed_s = time.monotonic() - self._began
            answered = self._settled - self._reused
            log.info(
                "%d of %d turns, %d running, %d failed tries; %.0f tok/s; %s",
                self._settled, self._turns, figures.in_flight, figures.retried, self._output_tokens / elapsed_s,
                f"{elapsed_s / answered * (self._turns - self._settled):.0f} s left at this rate"
                if answered else "no answer yet",
            )  # fmt: skip


def _taken_from(rows: list[Row]) -> Iterator[Row]:
    while rows:
        yield rows.pop()


def raise_file_limit() -> None:
    """A turn in flight needs a descriptor; says so when the system allows too few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < 4096:
        log.warning("only %d open files are allowed here (ulimit -Hn): that bounds the turns in flight", hard)
