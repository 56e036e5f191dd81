"""check-prompts: what would come of prompt files, told before a run.

Knows how rows are read and normalised, and lengths in tokens where a tokenizer is given. Must never write a
file that stays, nor need a config, a model's weights or an engine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from draftmill.chat import ChatTemplate, TemplateRefused
from draftmill.conversations import Conversation
from draftmill.errors import UserError
from draftmill.prompts import find_sources
from draftmill.sharding import (
    CONTROL_TOKENS,
    Candidate,
    Skip,
    read_conversations,
    spells_control_tokens,
    summarise,
)
from draftmill.tokens import Tokenizer

SHOWN = 20
BATCH = 256
PIECE = 1 << 20  # characters tokenised at once: a text of 30 MB would take gigabytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-command's own arguments."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="as in prompts.files: a path, a glob, package:…"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with every skipped row")
    parser.add_argument("--turns", choices=("all", "last", "first"), default="all", help="as prompts.turns")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="a folder with tokenizer.json: adds lengths in tokens, of the whole prompt for results/model, else of its text, "
        "and the prompts that spell control tokens",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the account of the files. UserError where a run would find nothing to ask, and as a run's."""
    measured = _Measured(args.tokenizer) if args.tokenizer else None
    prompts = {"carry": [], "system_prompt": None, "turns": args.turns}
    account = _Account()
    with tempfile.TemporaryFile("w+", encoding="ascii") as skipped:
        for row in read_conversations(prompts, 0, find_sources(args.files)):
            account.counts["rows_in"] += 1
            if isinstance(row, Candidate):
                account.counts["usable"] += 1
                account.counts["turns"] += len(row.conversation.turns)
                account.notes.update(row.notes)
                if measured:
                    measured.add(row.conversation)
            elif row.reason == "duplicate":
                account.counts["duplicates"] += 1
            else:
                account.reasons[row.reason] += 1
                skipped.write(json.dumps(_as_json(row)) + "\n")
        if measured:
            account.tokens = summarise(measured.lengths())
            account.notes[CONTROL_TOKENS] = measured.control_tokens
        account.notes = +account.notes  # without zeros
        skipped.seek(0)
        if args.json:
            _print_json(account, skipped)
        else:
            _print_account(account, skipped)
    if account.counts["usable"]:
        return 0
    raise UserError("No prompt is usable: a run with these files would have nothing to ask.")


@dataclass
class _Account:
    """What is told of the files; the skipped rows themselves lie in a file."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, int] | None = None


def _as_json(skip: Skip) -> dict[str, str | int | None]:
    return {"file": skip.source, "row": skip.row, "id": skip.id, "reason": skip.reason, "detail": skip.detail}


def _print_json(account: _Account, skipped: IO[str]) -> None:
    """One object, its list written row by row: there may be millions of broken ones."""
    head = {name: account.counts[name] for name in ("rows_in", "usable", "duplicates", "turns")} | {
        "reasons": dict(account.reasons),
        "notes": dict(account.notes),
        "prompt_tokens": account.tokens,
    }
    print(json.dumps(head)[:-1], end=', "skipped": [')
    for number, line in enumerate(skipped):
        print("," * bool(number), line.strip("\n"), sep="", end="")
    print("]}")


def _print_account(account: _Account, skipped: IO[str]) -> None:
    total = sum(account.reasons.values())
    for line in _some(skipped, total):
        print(line)
    counts = account.counts
    rows, turns = _counted(counts["rows_in"], "row"), _counted(counts["turns"], "turn")
    print(f"{rows}: {counts['usable']:,} usable ({turns}), ", end="")
    print(f"{_counted(counts['duplicates'], 'duplicate')}, {total:,} skipped (rows count from 0)", end="")
    print(f": {_listed(account.reasons)}" if total else "")
    if account.notes:
        print(f"notes on usable rows: {_listed(account.notes)}")
    if account.tokens and counts["usable"]:
        print("prompt tokens: " + ", ".join(f"{name} {n:,}" for name, n in account.tokens.items()))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.most_common())


def _some(skipped: IO[str], total: int) -> Iterator[str]:
    for number, line in enumerate(skipped):
        if number == SHOWN:
            yield f"… and {total - SHOWN:,} more; --json lists them all"
            return
        row = json.loads(line)
        yield f"{row['file']}, row {row['row']}: {row['detail']} ({row['reason']})"


class _Measured:
    """Lengths in tokens of first turns: rendered where the folder is a frozen model, else of their text."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder) if (folder / "model.json").exists() else None
        self._waiting: list[str] = []
        self._characters = 0
        self._lengths: list[int] = []
        self.control_tokens = 0

    def add(self, conversation: Conversation) -> None:
        """Measures the first turn, sooner or later."""
        self.control_tokens += spells_control_tokens(conversation, self._tokenizer)
        self._waiting.append(self._text(conversation))
        self._characters += len(self._waiting[-1])
        if len(self._waiting) == BATCH or self._characters > PIECE:
            self._tokenise()

    def lengths(self) -> list[int]:
        """Of everything added, in order."""
        self._tokenise()
        return self._lengths

    def _text(self, conversation: Conversation) -> str:
        messages = conversation.turns[0]
        if self._template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return self._template.render(messages, conversation.tools or None)
        except TemplateRefused:
            return ""  # its length is 0; a run skips it with the template's reason

    def _tokenise(self) -> None:
        found = [len(ids) for ids in self._tokenizer.encode_batch([t[:PIECE] for t in self._waiting])]
        for i, whole in enumerate(self._waiting):
            rest = (whole[at : at + PIECE] for at in range(PIECE, len(whole), PIECE))
            found[i] += sum(len(self._tokenizer.encode(piece)) for piece in rest)
        self._lengths += found
        self._waiting, self._characters = [], 0
