"""Rows as JSON lines, in the shapes that trainers ask for.

Knows what SpecForge, speculators and chat trainers read. No value is ever null and no list empty where a
later row could fill it, because readers take a column's type from the first rows they see; only the tool
calls in chats stand where a row has some. Must never know how a row came about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from draftmill.arrays import list_rows
from draftmill.rows import JSONL_COLUMNS

# Unicode's line ends beyond ASCII stand only inside strings, and some readers split lines at them.
LINE_BREAKS = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\u2028\u2029\u0085")

Shape = Callable[[pa.Table], Iterator[dict[str, Any]]]


class LinesFile:
    """A .jsonl file; ``shape`` makes one object of each row."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self._file = path.open("wb")
        self._shape = shape

    def write(self, table: pa.Table) -> None:
        """Appends one line for each row of ``table``."""
        self._file.writelines(map(_line, self._shape(table)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _line(row: dict[str, Any]) -> bytes:
    """One line of strict JSON, whatever a reader takes for the end of a line."""
    line = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    if line.isascii():
        return line
    for character, escape in LINE_BREAKS:
        line = line.replace(character, escape)
    return line


def pretokenised(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The training row: SpecForge and speculators find input_ids and loss_mask and use them as they are."""
    plain = [name for name in (*JSONL_COLUMNS, "carried") if name not in ("input_ids", "loss_mask")]
    columns = table.select(plain).to_pylist(), list_rows(table["input_ids"]), list_rows(table["loss_mask"])
    for row, input_ids, loss_mask in zip(*columns, strict=True):
        conversation = _filled(row["conversations"])
        row |= {"input_ids": input_ids, "loss_mask": loss_mask, "conversations": conversation}
        yield {name: row[name] for name in JSONL_COLUMNS} | _carried(row)


def conversations(table: pa.Table) -> Iterator[dict[str, Any]]:
    """SpecForge's text path. It hands every other column to the chat template, so there is none but the
    user's own."""
    for row in _texts(table):
        yield {
            "id": row["id"],
            "status": row["status"],
            "conversations": _messages(row),
            "tools": row["tools"] or "[]",
        } | _carried(row)


def messages(table: pa.Table) -> Iterator[dict[str, Any]]:
    """What chat trainers read: ``messages``, the last of them the answer to learn."""
    for row in _texts(table):
        yield {
            "id": row["id"],
            "primary_id": row["primary_id"],
            "messages": _messages(row),
            "tools": row["tools"] or "[]",
        } | _carried(row)


def text(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rendered text, special tokens and all (SpecForge: is_preformatted)."""
    yield from table.select(["id", "text"]).to_pylist()


def _texts(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.select(
        ["id", "primary_id", "status", "conversations", "messages", "tools", "carried"]
    ).to_pylist()
    return rows


def _carried(row: dict[str, Any]) -> dict[str, str]:
    """The user's columns, which all rows of a run have or none."""
    return {} if row["carried"] is None else {"carried": row["carried"]}


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row, from ``messages`` where ``conversations`` cannot say it all."""
    given = json.loads(row["messages"]) if row["messages"] else row["conversations"]
    return _filled(given)


def _filled(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"reasoning_content": message.get("reasoning_content") or ""} for message in conversation
    ]
