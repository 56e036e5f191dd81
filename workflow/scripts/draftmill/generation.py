"""One shard: which of its turns are answered, which are still to be asked, and the table of all of them.

A conversation is walked turn by turn. Each turn's key follows from what was answered before, so the same
walk serves to find what is missing, to go on after an answer, and to write the table when all is there.
"""

from __future__ import annotations

import json
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill import config as settings
from draftmill.answers import Answer, AnswerReader
from draftmill.aside import remove_leftovers, replacing
from draftmill.chat import ChatTemplate, TemplateRefused
from draftmill.errors import UserError
from draftmill.journal import Journal
from draftmill.model import Model
from draftmill.rows import GENERATED
from draftmill.tokens import Tokenizer
from draftmill.turns import numerics, turn_id, turn_key, turn_seed
from draftmill.validation import findings, rejection, wants_longer

log = logging.getLogger("generation")

Lookup = Callable[[str], dict[str, Any] | None]  # the journal's record under a key
ROW_GROUP = 512
GROUP_TEXT = 16_000_000  # characters of messages at which a group is written all the same


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation of a shard, to be answered once (``sample``). All rows of a shard are in memory."""

    primary_id: str
    source: str
    content_hash: str
    turns: str  # JSON of Conversation.turns
    tools: str | None
    carried: str | None
    thinking: bool
    max_tokens: int
    prompt_ids: array[int]  # of the first turn, 4 bytes each
    turn_count: int
    sample: int

    def __str__(self) -> str:
        return turn_id(self.primary_id, self.sample, 0) if self.turn_count == 1 else self.primary_id

    @property
    def work(self) -> tuple[float, ...]:
        """More is longer: turns to come, then the length of the first prompt."""
        return (self.turn_count, len(self.prompt_ids))

    @property
    def ids(self) -> list[str]:
        return [turn_id(self.primary_id, self.sample, turn) for turn in range(self.turn_count)]


@dataclass
class Turn:
    """A turn that can be asked now."""

    row: Row
    index: int
    key: str
    prompt_ids: array[int]
    sampling: dict[str, Any]
    messages: list[dict[str, Any]]
    pieces: dict[bytes, array[int]]  # of its conversation so far, see Tokenizer.encode_again
    longer: bool = False  # the second try, where the first was cut off

    def __str__(self) -> str:
        return turn_id(self.row.primary_id, self.row.sample, self.index)

    @property
    def work(self) -> tuple[float, ...]:
        """More is longer: turns still to come, then the length of the prompt."""
        return (self.row.turn_count - self.index, len(self.prompt_ids))


@dataclass
class Walk:
    """A conversation as far as it is answered, from its beginning or from some turn on."""

    facts: list[dict[str, Any]] = field(default_factory=list)  # one of each turn that is settled
    next: Turn | None = None
    rejected: str | None = None


class Shard:
    """The turns of one shard under one configuration."""

    def __init__(self, config: settings.Config, model_folder: Path) -> None:
        self._config = config
        self._policy: Mapping[str, Any] = config["validation"]
        self.model = Model.load(model_folder)
        self._tokenizer = Tokenizer.load(model_folder)
        self._template = ChatTemplate.load(model_folder)
        self._reader = AnswerReader(self._tokenizer, self.model.eos_token_ids, self._template.source)
        self._sampling = settings.sampling(config, self.model.generation_config)
        self._sampling["adapter"] = bool(config["model"]["adapters"])
        self._numerics = numerics(config["model"])

    def rows(self, shard: Path) -> list[Row]:
        """The conversations of a shard file, once for each sample."""
        columns = [field.name for field in fields(Row) if field.name not in ("turn_count", "sample")]
        samples = range(self._config["prompts"]["samples"])
        rows = []
        # piece by piece and without threads: a third of the memory of reading it whole
        with pq.ParquetFile(shard, pre_buffer=False) as file:
            for batch in file.iter_batches(ROW_GROUP, columns=columns, use_threads=False):
                for plain in batch.to_pylist():
                    plain["source"] = sys.intern(plain["source"])
                    plain["prompt_ids"] = array("i", plain["prompt_ids"])
                    count = len(json.loads(plain["turns"]))
                    rows += [Row(**plain, turn_count=count, sample=sample) for sample in samples]
        return rows

    def new_conversations(self, shards: Iterable[Path], journal: Journal) -> tuple[int, int]:
        """(conversations whose first turn is not in the journal, all conversations), samples counted each."""
        new = total = 0
        for shard in shards:
            for row in self.rows(shard):
                turn = self._with_key(row, 0, row.prompt_ids, [], row.max_tokens)
                new += turn.key not in journal
                total += 1
        return new, total

    def walk(self, row: Row, lookup: Lookup, judge_last: bool = True, since: Turn | None = None) -> Walk:
        """The conversation's settled turns and the next to ask if any is missing: from its beginning, or from
        ``since`` on, a turn that an earlier walk gave as ``next``.

        Whether its last answer is rejected decides nothing here, so that verdict (a decoding of the answer
        and a search for loops) may be left to the merge.
        """
        walk = Walk()
        messages: list[dict[str, Any]] = []
        pieces = since.pieces if since else {}
        for index, given in enumerate(json.loads(row.turns)):
            if since and index < since.index:
                continue
            if since and index == since.index:
                messages = since.messages
                turn, refusal = since, None
            else:
                messages = [*messages, *given]
                if walk.rejected is not None:
                    walk.facts.append(self._unasked(row, index, messages))
                    continue
                turn, refusal = self._turn(row, index, messages, pieces)
            if refusal is not None:
                walk.facts.append(_facts(turn, {"outcome": "refused", "detail": refusal}))
                walk.rejected = "refused"
                continue
            turn, record = self._answered(turn, lookup)
            if record is None:
                walk.next = turn
                return walk
            walk.facts.append(_facts(turn, record))
            if record["outcome"] != "answered":
                walk.rejected = record["outcome"]
                continue
            if index == row.turn_count - 1 and not judge_last:
                continue
            answer = self.read(turn, record)
            walk.rejected = rejection(findings(answer, self._policy))
            messages = [*messages, {"role": "assistant", "content": answer.content}]
        return walk

    def read(self, turn: Turn, record: Mapping[str, Any]) -> Answer:
        """The answer in a journal record."""
        return self._reader.read(
            turn.prompt_ids,
            record["output_ids"],
            record["finish_reason"],
            thinking=turn.row.thinking,
            sampling=turn.sampling,
            tools=turn.row.tools is not None,
        )

    def _answered(self, turn: Turn, lookup: Lookup) -> tuple[Turn, dict[str, Any] | None]:
        """The turn with its record; where the policy asks for it, the longer second try with its own."""
        record = lookup(turn.key)
        if (
            record is None
            or record["outcome"] != "answered"
            or record["finish_reason"] != "length"
            or turn.longer
        ):
            return turn, record
        if not wants_longer(findings(self.read(turn, record), self._policy)):
            return turn, record
        room = self.model.room(len(turn.prompt_ids))
        longer = min(int(turn.sampling["max_tokens"] * self._policy["retry_longer_factor"]), room)
        if longer <= turn.sampling["max_tokens"]:
            return turn, record
        again = self._with_key(turn.row, turn.index, turn.prompt_ids, turn.messages, longer, turn.pieces)
        again.longer = True
        return again, lookup(again.key)

    def _turn(
        self, row: Row, index: int, messages: list[dict[str, Any]], pieces: dict[bytes, array[int]]
    ) -> tuple[Turn, str | None]:
        """The turn to ask for ``messages``, and why it cannot be asked, if so."""
        if index == 0:
            return self._with_key(row, 0, row.prompt_ids, messages, row.max_tokens, pieces), None
        # as the first turn was rendered
        thinking = row.thinking if self.model.template_has_thinking else None
        tools = json.loads(row.tools) if row.tools else None
        try:
            prompt_ids = self._tokenizer.encode_again(
                self._template.render(messages, tools, thinking), pieces
            )
        except TemplateRefused as refusal:
            return self._with_key(row, index, array("i"), messages, row.max_tokens), str(refusal)
        room = self.model.room(len(prompt_ids))
        prompts = self._config["prompts"]
        shorten = prompts["context_policy"] == "shorten" and room >= prompts["min_max_tokens"]
        max_tokens = min(row.max_tokens, room) if shorten else row.max_tokens
        turn = self._with_key(row, index, prompt_ids, messages, max_tokens, pieces)
        if max_tokens > room:
            return turn, (
                f"the prompt has {len(prompt_ids)} tokens with the answers before it, which with max_tokens "
                f"{max_tokens} is more than the context of {self.model.context_length}"
            )
        return turn, None

    def _with_key(
        self,
        row: Row,
        index: int,
        prompt_ids: array[int],
        messages: list[dict[str, Any]],
        max_tokens: int,
        pieces: dict[bytes, array[int]] | None = None,
    ) -> Turn:
        seed = turn_seed(self._config["seed"], row.content_hash, index, row.sample)
        sampling = {**self._sampling, "max_tokens": max_tokens, "seed": seed}
        key = turn_key(self.model.identity, self._numerics, prompt_ids, sampling)
        return Turn(row, index, key, prompt_ids, sampling, messages, {} if pieces is None else pieces)

    def _unasked(self, row: Row, index: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        turn = self._with_key(row, index, array("i"), messages, row.max_tokens)
        return _facts(
            turn, {"outcome": "unasked", "detail": "an earlier turn of the conversation was rejected"}
        )

    def write(self, rows: list[Row], journal: Journal, path: Path, partial: bool = False) -> int:
        """Writes the shard's table from the journal, the same bytes each time; gives the number of its turns.

        Every turn must be in the journal, unless ``partial``: then the settled ones are written.
        """
        count = text = 0
        remove_leftovers(path.parent, f".{path.name}.")
        with replacing(path) as aside, pq.ParquetWriter(aside, GENERATED, compression="zstd") as writer:
            group: list[dict[str, Any]] = []
            for facts in self._sorted_facts(rows, journal, partial):
                messages = json.dumps(facts["messages"], ensure_ascii=False)
                sampling = json.dumps(facts["sampling"], sort_keys=True)
                group.append({**facts, "messages": messages, "sampling": sampling})
                count += 1
                text += len(messages)
                if len(group) == ROW_GROUP or text > GROUP_TEXT:
                    writer.write_table(pa.Table.from_pylist(group, GENERATED))
                    group, text = [], 0
            if group:
                writer.write_table(pa.Table.from_pylist(group, GENERATED))
        return count

    def _sorted_facts(self, rows: list[Row], journal: Journal, partial: bool) -> Iterator[dict[str, Any]]:
        """Every settled turn's facts by id; one conversation is in memory at a time, save where ids interleave."""
        places = sorted((turn, at, row.turn_count) for at, row in enumerate(rows) for turn in row.ids)
        walked: dict[int, dict[str, dict[str, Any]]] = {}
        left: dict[int, int] = {}
        for turn, at, count in places:
            if at not in walked:
                walk = self.walk(rows[at], journal.get, judge_last=False)
                if walk.next is not None and not partial:
                    raise UserError(
                        f"Turn {walk.next} is not in the journal: a turn before it was answered twice at the same time, "
                        "here and by another job. Run again to go on from here."
                    )
                walked[at] = {facts["id"]: facts for facts in walk.facts}
                left[at] = count
            facts = walked[at].pop(turn, None)
            if facts is not None:
                yield facts
            left[at] -= 1
            if left[at] == 0:
                del walked[at]


def _facts(turn: Turn, record: Mapping[str, Any]) -> dict[str, Any]:
    """The generated row of a settled turn, its messages and sampling still to be written as JSON."""
    row = turn.row
    return {
        "id": str(turn),
        "primary_id": row.primary_id,
        "turn_index": turn.index,
        "sample": row.sample,
        "source": row.source,
        "content_hash": row.content_hash,
        "key": turn.key,
        "outcome": record["outcome"],
        "thinking": row.thinking,
        "messages": turn.messages,
        "tools": row.tools,
        "prompt_ids": turn.prompt_ids,
        "output_ids": record.get("output_ids", []),
        "finish_reason": record.get("finish_reason", ""),
        "detail": record.get("detail"),
        "seed": turn.sampling["seed"],
        "sampling": turn.sampling,
        "max_tokens": turn.sampling["max_tokens"],
        "started_at": record.get("started_at"),
        "queue_s": record.get("queue_s"),
        "latency_s": record.get("latency_s"),
        "server": record.get("server"),
        "engine": record.get("engine"),
        "cached_tokens": record.get("cached_tokens"),
        "attempts": record.get("attempts", 0),
        "carried": row.carried,
    }
