"""check-prompts: what would come of prompt files, told before a run.

Knows how rows are read and normalised, and lengths in tokens where a tokenizer is given. Must never write a
file that stays, nor need a config, a model's weights or an engine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from draftmill.chat import ChatTemplate, TemplateRefused
from draftmill.conversations import Conversation
from draftmill.prompts import find_sources
from draftmill.sharding import Candidate, Skip, read_conversations, summarise
from draftmill.tokens import Tokenizer

SHOWN = 20
BATCH = 256
PIECE = 1 << 20  # characters tokenised at once: a text of 30 MB would take gigabytes

Lengths = Callable[[Sequence[Conversation]], list[int]]


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
        help="a folder with tokenizer.json: adds lengths in tokens, of the whole prompt for results/model, else of its text",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the account of the files; 0, or 1 where a run would find nothing to ask. UserError as a run's."""
    lengths_of = _lengths_of(args.tokenizer) if args.tokenizer else None
    prompts = {"carry": [], "system_prompt": None, "turns": args.turns}
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    lengths: list[int] = []
    waiting: list[Conversation] = []
    size = 0
    with tempfile.TemporaryFile("w+", encoding="ascii") as skipped:
        for row in read_conversations(prompts, 0, find_sources(args.files), counts):
            counts["rows_in"] += 1
            if isinstance(row, Candidate):
                counts["usable"] += 1
                if lengths_of:
                    waiting.append(row.conversation)
                    size += len(row.conversation.canonical)
                    if len(waiting) == BATCH or size > PIECE:
                        lengths += lengths_of(waiting)
                        waiting, size = [], 0
            elif row.reason == "duplicate":
                counts["duplicates"] += 1
            else:
                reasons[row.reason] += 1
                skipped.write(json.dumps(_as_json(row)) + "\n")
        if lengths_of:
            lengths += lengths_of(waiting)
        tokens = summarise(lengths) if lengths_of else None
        skipped.seek(0)
        if args.json:
            _print_json(counts, reasons, tokens, skipped)
        else:
            _print_account(counts, reasons, tokens, skipped)
    return 0 if counts["usable"] else 1


def _as_json(skip: Skip) -> dict[str, str | int | None]:
    return {"file": skip.source, "row": skip.row, "id": skip.id, "reason": skip.reason, "detail": skip.detail}


def _print_json(
    counts: Counter[str], reasons: Counter[str], tokens: dict[str, int] | None, skipped: IO[str]
) -> None:
    """One object, its list written row by row: there may be millions of broken ones."""
    head = {name: counts[name] for name in ("rows_in", "usable", "duplicates")} | {"reasons": dict(reasons)}
    print(json.dumps(head)[:-1], end=', "prompt_tokens": ' + json.dumps(tokens) + ', "skipped": [')
    for number, line in enumerate(skipped):
        print("," * bool(number), line.strip("\n"), sep="", end="")
    print("]}")


def _print_account(
    counts: Counter[str], reasons: Counter[str], tokens: dict[str, int] | None, skipped: IO[str]
) -> None:
    for line in _some(skipped, sum(reasons.values())):
        print(line)
    total = sum(reasons.values())
    print(f"{counts['rows_in']:,} rows: {counts['usable']:,} usable, ", end="")
    print(f"{counts['duplicates']:,} duplicates, {total:,} skipped (rows count from 0)", end="")
    print(": " + ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common()) if total else "")
    if tokens and counts["usable"]:
        print("prompt tokens: " + ", ".join(f"{name} {n:,}" for name, n in tokens.items()))


def _some(skipped: IO[str], total: int) -> Iterator[str]:
    for number, line in enumerate(skipped):
        if number == SHOWN:
            yield f"… and {total - SHOWN:,} more; --json lists them all"
            return
        row = json.loads(line)
        yield f"{row['file']}, row {row['row']}: {row['detail']} ({row['reason']})"


def _lengths_of(folder: Path) -> Lengths:
    """The lengths in tokens of first turns: rendered where the folder is a frozen model, else their text."""
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder) if (folder / "model.json").exists() else None

    def text(conversation: Conversation) -> str:
        messages = conversation.turns[0]
        if template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return template.render(messages, conversation.tools or None)
        except TemplateRefused:
            return ""  # its length is 0; a run skips it with the template's reason

    def lengths(conversations: Sequence[Conversation]) -> list[int]:
        texts = [text(conversation) for conversation in conversations]
        found = [len(ids) for ids in tokenizer.encode_batch([t[:PIECE] for t in texts])]
        for i, whole in enumerate(texts):
            found[i] += sum(
                len(tokenizer.encode(whole[at : at + PIECE])) for at in range(PIECE, len(whole), PIECE)
            )
        return found

    return lengths
