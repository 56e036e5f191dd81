"""All generated shards into one dataset, or a refusal that names the rows.

A k-way merge by id: every shard file is sorted, one short batch of each is in memory, so memory depends
neither on the number of rows nor on their distribution. Two worker processes judge the rows; here they
are put into order, set against each other (duplicates, earlier turns), counted and written. Must never
know engines, servers or the journal: it reads facts and nothing else.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import resource
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.aside import remove_leftovers, replacing
from draftmill.errors import UserError
from draftmill.exports.tables import ParquetFile
from draftmill.judging import Judge, read_table, write_table
from draftmill.rows import GENERATED, MERGED, REJECTED
from draftmill.validation import (
    DUPLICATE,
    EARLIER,
    FLAG,
    LENGTHS,
    READ,
    REJECT,
    RETRY_LONGER,
    accounts_fault,
    loss_beyond,
)

log = logging.getLogger("merging")

WORKERS = 2
BATCH_ROWS = 256
ROWS_IN_MEMORY = 8192  # over all open shards
RETOKENISED_ROWS = 10_000  # of a large run: retokenising is half the work, and these are enough for a share
SMALL_RUN = 1_000  # turns that are judged sooner here than two workers start
LOG_EVERY = 20_000  # turns
NAMED_ROWS = 10  # so many rows a refusal names


def merge(
    generated: list[Path],
    prompts_summary: Path,
    model_folder: Path,
    config: dict[str, Any],
    merged: Path,
    rejected: Path,
    summary: Path,
) -> None:
    """Writes merged.parquet (accepted, sorted by id), rejected.parquet and validation.json.

    ``generated``: the shard files; ``prompts_summary``: results/prompts.json. All three outputs appear at
    once at the end, or none. Raises UserError naming rows when a row breaks a law or the accounts do not
    add up.
    """
    prompts = json.loads(prompts_summary.read_text(encoding="utf-8"))
    policy = config["validation"]
    accounts = Accounts([path.stem for path in generated], str(policy[DUPLICATE]))
    for path in (merged, rejected, summary):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, f".{path.name}.")
    with (
        replacing(summary) as summary_aside,
        replacing(rejected) as rejected_aside,
        replacing(merged) as merged_aside,
    ):
        with ExitStack() as stack:
            accepted_file = stack.enter_context(closing(ParquetFile(merged_aside, MERGED)))
            rejected_file = stack.enter_context(closing(ParquetFile(rejected_aside, REJECTED)))
            share = min(1.0, RETOKENISED_ROWS / max(1, prompts["turns"]))
            if prompts["turns"] > SMALL_RUN:
                judges: Judges | Judge = stack.enter_context(Judges(model_folder, config, share))
            else:
                judges = Judge(model_folder, config, share)
            for batch in settle(_judged(judges, _batches(generated)), str(policy[DUPLICATE])):
                accounts.add(batch)
                accepted_file.write(_accepted(batch, str(policy[DUPLICATE])))
                rejected_file.write(_rejected(batch))
        accounts.refuse_unless_sound(prompts)
        report = json.dumps(accounts.report(prompts), ensure_ascii=False, indent=1)
        summary_aside.write_text(report + "\n", encoding="utf-8")
    log.info("%s", accounts)
    if not accounts.accepted:
        log.warning("no answer was accepted; why stands in %s under reasons", summary)


@dataclass
class Batch:
    """Consecutive rows of the merged order on their way through the merge."""

    judged: pa.Table  # judging.JUDGED
    shards: list[int]  # of each row, its place in the list of shard files
    ids: list[str]
    turns: list[int]
    reasons: list[str | None]
    details: list[str | None]
    faults: list[str | None]
    duplicates: list[bool]

    @classmethod
    def of(cls, judged: pa.Table, shards: list[int]) -> Batch:
        """A judged table, its verdicts unpacked."""
        columns = {n: judged[n].to_pylist() for n in ("id", "turn_index", "reason", "detail", "fault")}
        return cls(
            judged,
            shards,
            columns["id"],
            columns["turn_index"],
            columns["reason"],
            columns["detail"],
            columns["fault"],
            [False] * judged.num_rows,
        )


# --- reading: one order over all shards


def _batches(generated: list[Path]) -> Iterator[tuple[pa.Table, list[int]]]:
    """All rows of all shards in the order of their ids, BATCH_ROWS at a time, with each row's shard."""
    _allow_open_files(len(generated))
    at_once = max(8, min(BATCH_ROWS * 2, ROWS_IN_MEMORY // max(1, len(generated))))
    readers = [_shard_rows(path, at_once) for path in generated]
    heap: list[tuple[str, int, int, pa.Table, list[str]]] = []  # id, shard, row in its table, table, its ids

    def advance(shard: int) -> None:
        table = next(readers[shard], None)
        if table is not None:
            ids = table["id"].to_pylist()
            heapq.heappush(heap, (ids[0], shard, 0, table, ids))

    for shard in range(len(readers)):
        advance(shard)
    order: list[int] = []  # of each row its shard
    pieces: list[tuple[int, pa.Table]] = []  # shard and its next rows
    first: dict[int, int] = {}  # per shard, the first row that is not in a piece yet
    while heap:
        _, shard, row, table, ids = heap[0]
        first.setdefault(shard, row)
        order.append(shard)
        if row + 1 < len(ids):
            heapq.heapreplace(heap, (ids[row + 1], shard, row + 1, table, ids))
        else:
            heapq.heappop(heap)
            start = first.pop(shard)
            pieces.append((shard, table.slice(start, row + 1 - start)))
            advance(shard)
        if len(order) == BATCH_ROWS or not heap:
            for _, shard_, row_, table_, _ in heap:
                if shard_ in first:
                    start = first.pop(shard_)
                    pieces.append((shard_, table_.slice(start, row_ - start)))
            yield _interleave(pieces, order), order
            order, pieces = [], []


def _interleave(pieces: list[tuple[int, pa.Table]], order: list[int]) -> pa.Table:
    """The rows of ``pieces`` so that row i comes from shard ``order[i]``, each shard's rows in their order."""
    rows: dict[int, deque[int]] = {}
    at = 0
    for shard, piece in pieces:
        rows.setdefault(shard, deque()).extend(range(at, at + piece.num_rows))
        at += piece.num_rows
    joined = pa.concat_tables([piece for _, piece in pieces]).combine_chunks()
    return joined.take(pa.array([rows[shard].popleft() for shard in order], type=pa.int64()))


def _shard_rows(path: Path, at_once: int) -> Iterator[pa.Table]:
    """The rows of one shard, ``at_once`` at a time; a UserError if they are not sorted or not readable."""
    last = ""
    try:
        with pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
            for batch in file.iter_batches(at_once, columns=GENERATED.names, use_threads=False):
                if batch.num_rows == 0:
                    continue
                table = pa.Table.from_batches([batch])
                ids = table["id"].to_pylist()
                if any(before > after for before, after in zip([last, *ids], ids, strict=False)):
                    raise UserError(f"The rows of {path} are not sorted by id; delete it and run again.")
                last = ids[-1]
                yield table.select(GENERATED.names)
    except (OSError, pa.ArrowException, KeyError) as fault:
        raise UserError(f"The shard {path} cannot be read ({fault}); delete it and run again.") from fault


def _allow_open_files(files: int) -> None:
    """Raises the soft limit of open files if all shards would not fit into it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise UserError(
                f"{files} shards need {needed} open files at once, {hard} are allowed; see ulimit -n."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# --- judging: two worker processes


class Judges:
    """Worker processes that judge tables. A pipe each and not multiprocessing, which would run the main
    script again in every child, and the main script is Snakemake's."""

    def __init__(self, model_folder: Path, config: Mapping[str, Any], retokenised_share: float) -> None:
        package = Path(__file__).resolve().parent.parent
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(package)}
        needed = json.dumps({"validation": config["validation"]})
        command = [
            sys.executable,
            "-m",
            "draftmill.judging",
            str(model_folder),
            needed,
            str(retokenised_share),
        ]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(WORKERS)
        ]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(WORKERS)

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=True)
        for worker in self._workers:
            if kind is not None:
                worker.kill()
            with suppress(BrokenPipeError), worker:  # closes the pipes, which ends the worker, and waits
                pass

    def submit(self, table: pa.Table) -> Future[pa.Table]:
        """Has ``table`` judged by the next worker that is free."""
        return self._threads.submit(self._ask, table)

    def _ask(self, table: pa.Table) -> pa.Table:
        worker = self._idle.get()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            write_table(worker.stdin, table)
            judged = read_table(worker.stdout)
        except BrokenPipeError:
            judged = None
        finally:
            self._idle.put(worker)  # a dead one too: whoever takes it fails at once instead of waiting
        if judged is None:
            raise UserError(
                f"A worker of the merge ended with code {worker.wait()} on the rows {table['id'][0]} to "
                f"{table['id'][-1]}; its error stands above."
            )
        return judged


def _judged(judges: Judges | Judge, batches: Iterator[tuple[pa.Table, list[int]]]) -> Iterator[Batch]:
    """Every batch judged, in the order given; workers have a few in work at once."""
    if isinstance(judges, Judge):
        for table, shards in batches:
            yield Batch.of(judges.judge(table), shards)
        return
    ahead: deque[tuple[Future[pa.Table], list[int]]] = deque()
    for table, shards in batches:
        ahead.append((judges.submit(table), shards))
        if len(ahead) > WORKERS + 1:
            future, its_shards = ahead.popleft()
            yield Batch.of(future.result(), its_shards)
    for future, its_shards in ahead:
        yield Batch.of(future.result(), its_shards)


# --- settling: what one row means for another


Chains = dict[str, dict[int, bool]]  # stem of a conversation and sample → turn → rejected by itself


def settle(batches: Iterator[Batch], duplicate_policy: str) -> Iterator[Batch]:
    """Turns after a rejected one become ``earlier_turn_rejected``, repeated answers are found, ids that
    occur twice and missing turns become faults.

    In the order of ids, turn 10 comes before turn 2: a batch is held until all earlier turns of its rows
    have been seen, or until the order is past the place where they would have stood.
    """
    chains: Chains = {}
    answers: set[bytes] = set()
    held: deque[tuple[Batch, set[int]]] = deque()
    last = ""
    for batch in batches:
        _compare(batch, chains, answers, duplicate_policy, last)
        last = batch.ids[-1]
        held.append((batch, set(range(len(batch.ids)))))
        while held and _settled(*held[0], chains, last):
            yield held.popleft()[0]
        if not held:
            chains = {stem: chain for stem, chain in chains.items() if last <= stem + ":"}
    for batch, open_rows in held:
        _settled(batch, open_rows, chains, None)
        yield batch


def _stem(row_id: str, turn: int) -> str:
    """The id up to the number of its turn: what all turns of one conversation and sample share."""
    return row_id.removesuffix(str(turn))


def _compare(batch: Batch, chains: Chains, answers: set[bytes], duplicate_policy: str, last: str) -> None:
    digests = batch.judged["digest"].to_pylist()
    for at, (row_id, turn, digest) in enumerate(zip(batch.ids, batch.turns, digests, strict=True)):
        if row_id == last:
            batch.faults[at] = "it occurs twice"
        last = row_id
        stem = _stem(row_id, turn)
        if not stem.endswith("_gen") or stem == row_id:
            batch.faults[at] = f"its id does not end in _gen{turn}"
        chain = chains.setdefault(stem, {})
        if digest is not None and batch.reasons[at] is None:
            batch.duplicates[at] = digest in answers
            if not any(rejected for earlier, rejected in chain.items() if earlier < turn):
                answers.add(digest)  # else this row will be rejected too, and stands for no answer
            if batch.duplicates[at] and duplicate_policy in (REJECT, RETRY_LONGER):
                batch.reasons[at] = DUPLICATE
                batch.details[at] = "the same answer stands in an earlier row"
        chain[turn] = batch.reasons[at] is not None


def _settled(batch: Batch, open_rows: set[int], chains: Chains, last: str | None) -> bool:
    """Settles what can be settled; whether that was everything. ``last`` None: no row will follow."""
    for at in list(open_rows):
        turn = batch.turns[at]
        stem = _stem(batch.ids[at], turn)
        seen = chains[stem]
        missing = [earlier for earlier in range(turn) if earlier not in seen]
        if missing and last is not None and last <= stem + ":":
            continue
        open_rows.discard(at)
        if missing and batch.faults[at] is None:
            batch.faults[at] = f"turn {missing[0]} before it is missing"
        culprit = next((earlier for earlier in range(turn) if seen.get(earlier)), None)
        if culprit is not None:
            if batch.reasons[at] != EARLIER:
                batch.details[at] = f"turn {culprit} of the conversation was rejected"
            batch.reasons[at] = EARLIER
    return not open_rows


# --- writing


def _accepted(batch: Batch, duplicate_policy: str) -> pa.Table:
    flags = [
        [*own, DUPLICATE] if duplicate and duplicate_policy == FLAG else own
        for own, duplicate in zip(batch.judged["flags"].to_pylist(), batch.duplicates, strict=True)
    ]
    table = batch.judged.select(MERGED.names)
    place = MERGED.get_field_index("flags")
    table = table.set_column(place, MERGED.field("flags"), pa.array(flags, type=MERGED.field("flags").type))
    return table.filter(pa.array([reason is None for reason in batch.reasons]))


def _rejected(batch: Batch) -> pa.Table:
    columns = {name: batch.judged[name] for name in batch.judged.column_names} | {
        "reason": pa.array(batch.reasons, pa.string()),
        "detail": pa.array(batch.details, pa.string()),
        "text": batch.judged["completion"],
    }
    table = pa.Table.from_arrays([columns[name] for name in REJECTED.names], schema=REJECTED)
    return table.filter(pa.array([reason is not None for reason in batch.reasons]))


# --- counting


@dataclass
class _Shard:
    turns: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)


class Accounts:
    """Counts every row once, and refuses what does not add up."""

    def __init__(self, shards: list[str], duplicate_policy: str) -> None:
        self._names = shards
        self._duplicate_policy = duplicate_policy
        self._shards = [_Shard() for _ in shards]
        self._lost = dict.fromkeys(LENGTHS, 0)
        self._retokenised: Counter[bool | None] = Counter()  # the same ids, others, not measured
        self._faults: list[str] = []
        self._fault_count = 0

    def add(self, batch: Batch) -> None:
        """Counts the rows of ``batch``."""
        before = self.turns
        names = ("flags", "findings", "prompt_len", "completion_len", "retokenised_differs")
        columns = zip(*(batch.judged[name].to_pylist() for name in names), strict=True)
        for at, (flags, found, prompt, completion, retokenised) in enumerate(columns):
            shard = self._shards[batch.shards[at]]
            shard.turns += 1
            shard.findings.update(found)
            if batch.duplicates[at]:
                shard.findings[DUPLICATE] += 1
            fault = batch.faults[at]
            if fault is not None:
                self._fault_count += 1
                if len(self._faults) < NAMED_ROWS:
                    self._faults.append(f"{batch.ids[at]} (shard {self._names[batch.shards[at]]}): {fault}")
            reason = batch.reasons[at]
            if reason is not None:
                shard.reasons[reason] += 1
                continue
            shard.accepted += 1
            shard.flags.update(flags)
            if batch.duplicates[at] and self._duplicate_policy == FLAG:
                shard.flags[DUPLICATE] += 1
            self._retokenised[retokenised] += 1
            for length, lost in loss_beyond(prompt, completion).items():
                self._lost[length] += lost
        if before // LOG_EVERY < self.turns // LOG_EVERY:
            log.info("%s so far", self)

    @property
    def turns(self) -> int:
        """Turns counted."""
        return sum(shard.turns for shard in self._shards)

    @property
    def accepted(self) -> int:
        """Turns accepted."""
        return sum(shard.accepted for shard in self._shards)

    def __str__(self) -> str:
        reasons = _sum(shard.reasons for shard in self._shards)
        why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        rejected = self.turns - self.accepted
        return f"{self.turns:,} turns: {self.accepted:,} accepted, {rejected:,} rejected" + (
            f" ({why})" if why else ""
        )

    def refuse_unless_sound(self, prompts: Mapping[str, Any]) -> None:
        """Raises UserError if a row broke a law, or rows or turns are missing or too many."""
        if self._fault_count:
            more = self._fault_count - len(self._faults)
            raise UserError(
                f"The merge refuses {self._fault_count} rows: {'; '.join(self._faults)}"
                + (f"; and {more} more" if more else "")
                + ". Delete the shards named under results/generated and run again."
            )
        fault = accounts_fault(prompts, self.accepted, self.turns - self.accepted)
        if fault:
            held = ", ".join(
                f"{name} {shard.turns}" for name, shard in zip(self._names, self._shards, strict=True)
            )
            raise UserError(f"The accounts do not add up: {fault}. Turns by shard: {held}.")

    def report(self, prompts: Mapping[str, Any]) -> dict[str, Any]:
        """The content of validation.json."""
        retokenised = self._retokenised[True] + self._retokenised[False]
        return {
            **{name: prompts[name] for name in READ},
            "turns": self.turns,
            "accepted": self.accepted,
            "rejected": self.turns - self.accepted,
            "reasons": _sum(shard.reasons for shard in self._shards),
            "flags": _sum(shard.flags for shard in self._shards),
            "findings": _sum(shard.findings for shard in self._shards),
            "by_shard": {
                name: {
                    "turns": shard.turns,
                    "accepted": shard.accepted,
                    "rejected": shard.turns - shard.accepted,
                    "reasons": _sum([shard.reasons]),
                    "flags": _sum([shard.flags]),
                    "findings": _sum([shard.findings]),
                }
                for name, shard in zip(self._names, self._shards, strict=True)
            },
            "retokenisation_differs": self._retokenised[True] / retokenised if retokenised else 0.0,
            "retokenised_rows": retokenised,
            "loss_beyond": {str(length): lost for length, lost in self._lost.items()},
        }


def _sum(counters: Iterable[Counter[str]]) -> dict[str, int]:
    """All counters in one, the most frequent first."""
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
