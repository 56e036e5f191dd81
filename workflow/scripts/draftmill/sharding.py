"""Sharding: from prompt files to the shards that generate works on.

Reads every row, normalises it, drops exact duplicates and contaminated prompts, renders and tokenises the
first turn, applies the context policy, and writes each conversation to the shard that the hash of its content
names. Knows the prompt files, the frozen model and the seed. Must never know keys, answers, servers or a
row's position as anything but a place to name: reordered files give the same shards.

rows_in = usable + duplicates + contaminated + skipped, in total and for each source. A row that a source's
``share`` leaves out is not asked for and not counted (a note says how many); unusable rows always are.

Memory holds an index entry for each usable conversation; texts and token ids wait in an unlinked file.
"""

from __future__ import annotations

import array
import concurrent.futures
import concurrent.futures.process
import ctypes
import errno
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.aside import remove_leftovers, replacing
from draftmill.chat import ChatTemplate, TemplateRefused
from draftmill.contamination import Benchmarks, incomplete, load_items
from draftmill.conversations import COLUMNS, Conversation, RowRefused, normalise, row_id
from draftmill.errors import UserError
from draftmill.model import Model
from draftmill.prompts import Source, Unreadable, find_sources, read_rows
from draftmill.tokens import Tokenizer
from draftmill.validation import READ

SHARD_SCHEMA = pa.schema(
    [
        pa.field("primary_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("turns", pa.string(), nullable=False),
        pa.field("tools", pa.string()),
        pa.field("carried", pa.string()),
        pa.field("thinking", pa.bool_(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    ]
)
SKIPPED_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64()),
        pa.field("id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
ROW_GROUP = 512
CHUNK_ROWS = 256
CHUNK_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 4 << 20
WORTH_A_POOL_BYTES = 4 << 20
MOST_WORKERS = 12  # reading and normalising feeds no more
CONTROL_TOKENS = "control_tokens_in_text"
LEFT_OUT = "left_out_by_share"
LONGEST_TOKEN = 32  # bytes; a prompt whose tokens are longer on average is no text


# --- what becomes of each row


@dataclass(frozen=True)
class Skip:
    """A row that is not asked: ``reason`` in snake_case, ``detail`` a sentence."""

    source: str
    row: int
    id: str | None
    reason: str
    detail: str


@dataclass(frozen=True)
class Candidate:
    """A row that was read as a conversation and is no duplicate of an earlier one."""

    source: str
    row: int
    id: str | None
    conversation: Conversation
    content_hash: str
    notes: tuple[str, ...]
    carried: str | None


@dataclass(frozen=True)
class Prepared:
    """What a candidate's first turn came to."""

    thinking: bool
    max_tokens: int
    prompt_ids: bytes  # int32, native order
    control_tokens: bool  # its text spells some


@dataclass
class Accounts:
    """The counts of prompts.json, kept row by row."""

    notes: Counter[str] = field(default_factory=Counter)
    sources: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, source: str, what: str) -> None:
        counts = self.sources.setdefault(source, Counter())
        counts["rows_in"] += 1
        counts[what] += 1

    def total(self, what: str) -> int:
        return sum(counts[what] for counts in self.sources.values())

    def as_json(self) -> dict[str, Any]:
        by_source = {name: {what: counts[what] for what in READ} for name, counts in self.sources.items()}
        return {what: self.total(what) for what in READ} | {"notes": dict(self.notes), "sources": by_source}


def fraction(seed: int, purpose: str, content_hash: str) -> float:
    """A number in [0, 1) that decides a share: the same for a conversation wherever it stands."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{content_hash}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def shard_of(content_hash: str, shards: int) -> int:
    return int(content_hash[:15], 16) % shards


def read_conversations(
    prompts: Mapping[str, Any], seed: int, sources: Iterable[Source]
) -> Iterator[Candidate | Skip]:
    """Every row of ``sources``, in order: a conversation, or why it is none.

    Exact duplicates come out as Skip with the reason ``duplicate``, rows that a share leaves out with LEFT_OUT.
    """
    carry: Sequence[str] = prompts["carry"]
    system = _system_prompts(prompts["system_prompt"])
    seen: dict[bytes, tuple[str, int]] = {}
    for source in sources:
        for found in read_rows(source.path, (*COLUMNS, *carry)):
            if isinstance(found, Unreadable):
                yield Skip(source.name, found.number, None, found.kind, found.sentence)
                continue
            identity = row_id(found.value)
            try:
                normal = normalise(found.value, prompts["turns"])
                conversation = normal.conversation
                content_hash = conversation.content_hash()
                if system:
                    text = _share_of(system, fraction(seed, "system", content_hash))
                    conversation = conversation.with_system(text)
                    content_hash = conversation.content_hash()
                carried = _carried(found.value, carry) if carry else None
            except RowRefused as refused:
                yield Skip(source.name, found.number, identity, refused.kind, refused.sentence)
                continue
            except RecursionError:
                yield Skip(
                    source.name, found.number, identity, "too_deep", "its values are nested too deeply"
                )
                continue
            if source.share < 1 and fraction(seed, "share", content_hash) >= source.share:
                yield Skip(source.name, found.number, identity, LEFT_OUT, "its source's share leaves it out")
                continue
            first = seen.setdefault(bytes.fromhex(content_hash), (source.name, found.number))
            if first != (source.name, found.number):
                detail = f"the same prompt stands in row {first[1]} of {first[0]}"
                yield Skip(source.name, found.number, identity, "duplicate", detail)
                continue
            yield Candidate(
                source.name, found.number, identity, conversation, content_hash, normal.notes, carried
            )


def spells_control_tokens(conversation: Conversation, tokenizer: Tokenizer) -> bool:
    """Whether a message spells a control token such as ``<|im_end|>``. It becomes that token, as it does in
    every trainer that renders the chat and tokenises the text; so it is counted, and changed nowhere."""
    return any(tokenizer.spells_special(m["content"]) for turn in conversation.turns for m in turn)


def _system_prompts(setting: Any) -> list[tuple[float, str]]:
    """(upper end of the share, text) of each system prompt of the config."""
    if not setting:
        return []
    if isinstance(setting, str):
        return [(1.0, setting)]
    ends = itertools.accumulate(float(entry["share"]) for entry in setting)
    return [(end, str(entry["text"])) for end, entry in zip(ends, setting, strict=True)]


def _share_of(texts: Sequence[tuple[float, str]], point: float) -> str:
    return next((text for end, text in texts if point < end), "")


def _carried(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The user's columns as strict JSON in strict UTF-8; what JSON cannot hold becomes text or null."""
    kept = {column: row[column] for column in columns if column in row}
    text = json.dumps(_strict(kept), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    if isinstance(value, float):
        return value if value - value == 0 else None
    if value is None or isinstance(value, str | int):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)


# --- the first turn: rendered, tokenised, fitted to the context


class Preparer:
    """Turns conversations into prompt ids; built once, shared with the worker processes by fork."""

    def __init__(self, config: Mapping[str, Any], folder: Path, benchmarks: Benchmarks) -> None:
        prompts = config["prompts"]
        self._benchmarks = benchmarks
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder)
        self._model = Model.load(folder)
        self._seed: int = config["seed"]
        self._max_tokens: int = config["sampling"]["max_tokens"]
        self._shorten = prompts["context_policy"] == "shorten"
        self._min_max_tokens: int = prompts["min_max_tokens"]
        self._longest = LONGEST_TOKEN * self._model.context_length
        self._thinking = self._thinking_share(prompts["thinking"])

    def _thinking_share(self, setting: bool | float | None) -> float:
        """The share of conversations that think; null is what the template does by itself."""
        if not self._model.template_has_thinking:
            if setting:
                raise UserError(
                    f"prompts.thinking is {setting}, but the chat template of {self._model.name} has no thinking mode; "
                    "set it to null."
                )
            return 0.0
        if setting is not None:
            return float(setting)
        probe = [{"role": "user", "content": "hi"}]
        return float(self._template.render(probe) == self._template.render(probe, thinking=True))

    def screen(self, row: Candidate | Skip) -> Candidate | Skip:
        """``row``, or why its first turn is too long even to be tokenised, which would cost much memory."""
        if isinstance(row, Skip) or len(row.conversation.canonical) <= self._longest:
            return row
        first = Conversation(row.conversation.turns[:1], row.conversation.tools)
        if len(first.canonical) <= self._longest:
            return row
        context = self._model.context_length
        detail = f"its {len(first.canonical):,} bytes cannot fit into the context of {context} tokens"
        return Skip(row.source, row.row, row.id, "too_long", detail)

    def prepare(self, candidates: Sequence[Candidate]) -> list[Prepared | Skip]:
        """One result for each candidate, in order."""
        results: list[Prepared | Skip | None] = [None] * len(candidates)
        rendered: list[tuple[int, str, bool]] = []
        for i, candidate in enumerate(candidates):
            text = self._render(candidate)
            if isinstance(text, Skip):
                results[i] = text
            else:
                rendered.append((i, *text))
        for batch in _batches(rendered, BATCH_CHARACTERS):
            for (i, _, thinking), ids in zip(
                batch, self._tokenizer.encode_batch([t for _, t, _ in batch]), strict=True
            ):
                results[i] = self._fitted(candidates[i], ids, thinking)
        return [result for result in results if result is not None]

    def _render(self, candidate: Candidate) -> tuple[str, bool] | Skip:
        skip = functools.partial(Skip, candidate.source, candidate.row, candidate.id)
        if finding := self._benchmarks.find(candidate.conversation):
            return skip("contaminated", finding.sentence())
        thinking = fraction(self._seed, "thinking", candidate.content_hash) < self._thinking
        try:
            text = self._template.render(
                candidate.conversation.turns[0],
                candidate.conversation.tools or None,
                thinking if self._model.template_has_thinking else None,
            )
        except TemplateRefused as refused:
            return skip("template_refused", " ".join(str(refused).split())[:300])
        return text, thinking

    def _fitted(self, candidate: Candidate, ids: Sequence[int], thinking: bool) -> Prepared | Skip:
        if not ids:
            return Skip(
                candidate.source,
                candidate.row,
                candidate.id,
                "empty",
                "the chat template makes nothing of it",
            )
        room = self._model.room(len(ids))
        max_tokens = min(self._max_tokens, room) if self._shorten else self._max_tokens
        if max_tokens > room or (max_tokens < self._max_tokens and max_tokens < self._min_max_tokens):
            wanted = (
                f"min_max_tokens {self._min_max_tokens}"
                if self._shorten
                else f"max_tokens {self._max_tokens}"
            )
            return Skip(
                candidate.source,
                candidate.row,
                candidate.id,
                "too_long",
                f"its {len(ids)} prompt tokens and {wanted} exceed the context of {self._model.context_length}",
            )
        control_tokens = spells_control_tokens(candidate.conversation, self._tokenizer)
        return Prepared(thinking, max_tokens, array.array("i", ids).tobytes(), control_tokens)


def _batches(rendered: Sequence[tuple[int, str, bool]], most: int) -> Iterator[list[tuple[int, str, bool]]]:
    batch: list[tuple[int, str, bool]] = []
    size = 0
    for entry in rendered:
        if batch and size + len(entry[1]) > most:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += len(entry[1])
    if batch:
        yield batch


# --- on all cores


Prepare = Callable[[Sequence[Candidate]], "concurrent.futures.Future[list[Prepared | Skip]]"]

_preparer: Preparer | None = None


@contextmanager
def _pool(preparer: Preparer) -> Iterator[Prepare]:
    """Workers by fork: they share the tokenizer's memory, and die with this process however it ends."""
    global _preparer  # noqa: PLW0603  fork hands it to the workers, no argument could
    _preparer = preparer
    with concurrent.futures.ProcessPoolExecutor(
        _workers(), multiprocessing.get_context("fork"), _start_worker, (os.getpid(),)
    ) as pool:
        try:
            yield lambda candidates: pool.submit(_prepare, candidates)
        except concurrent.futures.process.BrokenProcessPool as fault:
            raise UserError(
                "A process that tokenises prompts was killed, most likely for lack of memory; free some and run again."
            ) from fault
        finally:
            pool.shutdown(cancel_futures=True)
            _preparer = None


def _workers() -> int:
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def _start_worker(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _prepare(candidates: Sequence[Candidate]) -> list[Prepared | Skip]:
    assert _preparer is not None
    return _preparer.prepare(candidates)


@contextmanager
def _here(preparer: Preparer) -> Iterator[Prepare]:
    def prepare(candidates: Sequence[Candidate]) -> concurrent.futures.Future[list[Prepared | Skip]]:
        done: concurrent.futures.Future[list[Prepared | Skip]] = concurrent.futures.Future()
        done.set_result(preparer.prepare(candidates))
        return done

    yield prepare


def prepare_all(
    found: Iterable[Candidate | Skip], preparer: Preparer, parallel: bool
) -> Generator[tuple[Candidate, Prepared] | Skip, None, None]:
    """What becomes of each row, in order; candidates are prepared in chunks, a few ahead."""
    ahead = 2 * _workers() if parallel else 0
    waiting: deque[tuple[list[Candidate | Skip], concurrent.futures.Future[list[Prepared | Skip]]]] = deque()
    with _pool(preparer) if parallel else _here(preparer) as prepare:
        for chunk in _chunks(map(preparer.screen, found)):
            waiting.append((chunk, prepare([c for c in chunk if isinstance(c, Candidate)])))
            while len(waiting) > ahead:
                yield from _matched(*waiting.popleft())
        while waiting:
            yield from _matched(*waiting.popleft())


def _chunks(found: Iterable[Candidate | Skip]) -> Iterator[list[Candidate | Skip]]:
    chunk: list[Candidate | Skip] = []
    size = 0
    for row in found:
        chunk.append(row)
        size += len(row.conversation.canonical) if isinstance(row, Candidate) else 0
        if len(chunk) >= CHUNK_ROWS or size > CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _matched(
    chunk: Sequence[Candidate | Skip], done: concurrent.futures.Future[list[Prepared | Skip]]
) -> Iterator[tuple[Candidate, Prepared] | Skip]:
    results = iter(done.result())
    for row in chunk:
        result = row if isinstance(row, Skip) else next(results)
        yield result if isinstance(result, Skip) else (row, result)  # type: ignore[misc]


# --- the files


def shard_prompts(
    config: dict[str, Any], model_folder: Path, shards: list[Path], skipped: Path, summary: Path
) -> None:
    """Writes ``shards`` (shard k of N at shards[k]), ``skipped`` and ``summary`` from the prompts of ``config``.

    Files are written aside and renamed; shard files of another N in the same folder are removed. UserError for
    whatever is wrong with the files, the model or the disk, and where no prompt is usable.
    """
    try:
        _shard_prompts(config, model_folder, shards, skipped, summary)
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"There is no space left for {fault.filename or shards[0].parent} while sharding the prompts; "
                "free some and run again."
            ) from fault
        raise


def _shard_prompts(
    config: Mapping[str, Any], model_folder: Path, shards: Sequence[Path], skipped: Path, summary: Path
) -> None:
    prompts = config["prompts"]
    sources = find_sources(prompts["files"])
    benchmarks = load_benchmarks(prompts["decontaminate"])
    for sentence in incomplete(prompts["decontaminate"]):
        print(sentence, file=sys.stderr)
    preparer = Preparer(config, model_folder, benchmarks)
    parallel = sum(_size(source.path) for source in sources) > WORTH_A_POOL_BYTES
    for folder in {path.parent for path in (*shards, skipped, summary)}:
        folder.mkdir(parents=True, exist_ok=True)
    accounts = Accounts()
    for source in sources:
        accounts.sources[source.name] = Counter()
    found = read_conversations(prompts, config["seed"], sources)
    lengths: list[int] = []
    turns = 0
    with tempfile.TemporaryFile(dir=shards[0].parent) as file, replacing(skipped) as aside:
        spool = _Spool(file)
        with (
            _SkippedWriter(aside) as writer,
            closing(prepare_all(found, preparer, parallel)) as prepared_rows,
        ):
            for row in prepared_rows:
                if isinstance(row, Skip) and row.reason == LEFT_OUT:
                    accounts.notes[LEFT_OUT] += 1
                    continue
                if isinstance(row, Skip):
                    what = {"duplicate": "duplicates", "contaminated": "contaminated"}.get(
                        row.reason, "skipped"
                    )
                    accounts.count(row.source, what)
                    writer.add(row)
                    continue
                candidate, prepared = row
                accounts.count(candidate.source, "usable")
                accounts.notes.update(candidate.notes)
                accounts.notes["max_tokens_shortened"] += (
                    prepared.max_tokens < config["sampling"]["max_tokens"]
                )
                accounts.notes[CONTROL_TOKENS] += prepared.control_tokens
                lengths.append(len(prepared.prompt_ids) // 4)
                turns += len(candidate.conversation.turns)
                spool.add(candidate, prepared)
                if prompts["limit"] and len(lengths) >= prompts["limit"]:
                    break
        if not lengths:
            raise UserError(_nothing_usable(sources, accounts, aside))
        spool.write(shards)
    _remove_stale(shards)
    report = accounts.as_json()
    report["notes"] = {note: n for note, n in sorted(report["notes"].items()) if n}
    report["prompt_tokens"] = summarise(lengths)
    report["turns"] = turns * prompts["samples"]
    if len(benchmarks):
        report["decontaminated_against"] = benchmarks.sizes()
    with replacing(summary) as aside:
        aside.write_text(
            json.dumps(report, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )


def load_benchmarks(settings: Mapping[str, Any]) -> Benchmarks:
    """The index that ``prompts.decontaminate`` asks for."""
    return Benchmarks(load_items(settings), settings["ngram"], settings["threshold"])


def summarise(lengths: Iterable[int]) -> dict[str, int]:
    """Percentiles (nearest rank), largest and sum of token counts; all 0 where there are none."""
    ordered = sorted(lengths) or [0]
    ranks = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (5, 50, 95, 99)}
    return ranks | {"max": ordered[-1], "sum": sum(ordered)}


def _nothing_usable(sources: Sequence[Source], accounts: Accounts, skipped: Path) -> str:
    names = ", ".join(source.name for source in sources[:3]) + (", …" if len(sources) > 3 else "")
    names = names or "prompts.files"
    rows = accounts.total("rows_in")
    if not rows:
        return f"There is no row to use in {names}; correct prompts.files or the shares."
    first = pq.read_table(skipped).slice(0, 1).to_pylist()[0]
    return (
        f"None of the {rows} rows of {names} is usable; the first, row {first['row']} of {first['source']}, "
        f"is skipped because {first['detail']}."
    )


def _size(path: Path) -> int:
    return (
        sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        if path.is_dir()
        else path.stat().st_size
    )


def _remove_stale(shards: Sequence[Path]) -> None:
    """Removes shard files of another shard count, which nothing must ever read again, and half written ones."""
    for folder in {path.parent for path in shards}:
        remove_leftovers(folder, ".")
        for path in folder.glob("*-of-*.parquet"):
            if path not in shards and re.fullmatch(r"\d+-of-\d+", path.stem):
                path.unlink(missing_ok=True)


class _SkippedWriter(AbstractContextManager["_SkippedWriter"]):
    """Writes skipped rows as they come, so that a file of nothing but broken rows costs no memory."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SKIPPED_SCHEMA, compression="zstd")
        self._rows: list[Skip] = []

    def add(self, row: Skip) -> None:
        self._rows.append(row)
        if len(self._rows) >= 8192:
            self._flush()

    def _flush(self) -> None:
        rows = [{name: getattr(row, name) for name in SKIPPED_SCHEMA.names} for row in self._rows]
        for row in rows:
            row["detail"] = row["detail"].encode("utf-8", "replace").decode()
        self._writer.write_table(pa.Table.from_pylist(rows, SKIPPED_SCHEMA))
        self._rows = []

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str | None
    content_hash: str
    offset: int
    size: int


class _Spool:
    """Usable conversations on their way to the shards: an index in memory, the rest in a file."""

    def __init__(self, file: BinaryIO | Any) -> None:
        self._file = file
        self._entries: list[_Entry] = []
        self._offset = 0

    def add(self, candidate: Candidate, prepared: Prepared) -> None:
        conversation = candidate.conversation
        record = pickle.dumps(
            (
                candidate.source,
                candidate.row,
                candidate.content_hash,
                json.dumps(conversation.turns, ensure_ascii=False),
                json.dumps(conversation.tools, ensure_ascii=False) if conversation.tools else None,
                candidate.carried,
                prepared.thinking,
                prepared.max_tokens,
                prepared.prompt_ids,
            )
        )
        self._file.write(record)
        self._entries.append(_Entry(candidate.id, candidate.content_hash, self._offset, len(record)))
        self._offset += len(record)

    def write(self, shards: Sequence[Path]) -> None:
        """Writes every shard, sorted by primary_id; none is renamed before all are written."""
        ids = unique_ids([(entry.id, entry.content_hash) for entry in self._entries])
        members: list[list[tuple[str, _Entry]]] = [[] for _ in shards]
        for name, entry in zip(ids, self._entries, strict=True):
            members[shard_of(entry.content_hash, len(shards))].append((name, entry))
        for path, rows in zip(shards, members, strict=True):
            rows.sort(key=lambda row: row[0])
            with (
                replacing(path) as aside,
                pq.ParquetWriter(aside, SHARD_SCHEMA, compression="zstd") as writer,
            ):
                for start in range(0, max(1, len(rows)), ROW_GROUP):
                    writer.write_table(self._table(rows[start : start + ROW_GROUP]))

    def _table(self, rows: Sequence[tuple[str, _Entry]]) -> pa.Table:
        records = []
        for _, entry in rows:
            self._file.seek(entry.offset)
            records.append(pickle.loads(self._file.read(entry.size)))
        columns = [list(column) for column in zip(*records, strict=True)] or [[] for _ in range(9)]
        *flat, ids = columns
        offsets = [0, *itertools.accumulate(len(one) // 4 for one in ids)]
        lists = pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()),
            pa.Array.from_buffers(pa.int32(), offsets[-1], [None, pa.py_buffer(b"".join(ids))]),
        )
        arrays = [pa.array([name for name, _ in rows], pa.string())]
        arrays += [pa.array(values, SHARD_SCHEMA.field(i + 1).type) for i, values in enumerate(flat)]
        return pa.Table.from_arrays([*arrays, lists], schema=SHARD_SCHEMA)


def unique_ids(wanted: Sequence[tuple[str | None, str]]) -> list[str]:
    """A primary_id for each (user's id or None, content_hash), all different, none from a position.

    An id that several rows have, or that reads like a further sample of another (``x_s1`` beside ``x``), gets
    the start of the content hash behind it.
    """
    names = [name if name is not None else content_hash[:16] for name, content_hash in wanted]
    for length in itertools.chain((8,), itertools.repeat(32)):
        counts = Counter(names)
        clash = [counts[name] > 1 or _like_a_sample(name, counts) for name in names]
        if not any(clash):
            return names
        names = [
            f"{name}~{content_hash[:length]}" if clashes else name
            for name, clashes, (_, content_hash) in zip(names, clash, wanted, strict=True)
        ]
    raise AssertionError("unreachable: the loop ends only when all differ")


def _like_a_sample(name: str, names: Mapping[str, int]) -> bool:
    stem, mark, number = name.rpartition("_s")
    return bool(mark) and number.isdigit() and stem in names
