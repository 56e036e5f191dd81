"""The report's pages on the dataset: lengths, finish reasons, rejects, and sample conversations.

Knows the merge's tables and accounts. Must never know how a plot is drawn; all text of users and models is escaped
on its way into a page.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import polars as pl
import pyarrow.compute as pc
import pyarrow.dataset as ds

from draftmill import pages, plots
from draftmill.plots import Mark
from draftmill.records import number, text
from draftmill.report_run import (
    Page,
    Run,
    Table,
    counts,
    in_words,
    mapping,
    share_of,
    tables,
)

LONGEST_TEXT = 6000
"""Characters of one message that a page shows."""
SAMPLES = 24
"""Conversations on the page of samples."""


def _histogram(title: str, lengths: pl.Series, marks: Sequence[Mark], colour: int) -> str:
    largest = int(number({"max": lengths.max()}, "max"))
    width = math.ceil(plots.nice_step(max(largest, *(mark.x for mark in marks), 1), 48))
    index = (lengths / width).floor().cast(pl.Int64)
    counted = dict(pl.DataFrame({"bin": index}).group_by("bin").len().iter_rows())
    heights = [int(counted.get(place, 0)) for place in range(max(counted, default=0) + 1)]
    return plots.histogram(
        title, width, heights, plots.counts("tokens"), plots.counts("rows"), points=marks, colour=colour
    )


def token_lengths(run: Run) -> Page:
    """Histograms of prompts and answers."""
    rows = run.accepted
    if not rows.height:
        return "No row was accepted.", []
    limit = number(run.sampling, "max_tokens")
    marks = [Mark(limit, "limit", f"max_tokens {limit:,.0f}")] if limit else []
    body = [
        _histogram("Tokens per answer", rows.get_column("completion_len"), marks, 0),
        _histogram("Tokens per prompt", rows.get_column("prompt_len"), [], 2),
    ]
    quantiles = [
        (name, *(f"{value:,.0f}" for value in _quantiles(rows.get_column(column))))
        for name, column in (("answer", "completion_len"), ("prompt", "prompt_len"), ("whole row", "seq_len"))
    ]
    body += [pages.heading("In tokens"), pages.table(("", "p5", "p50", "p95", "p99", "max"), quantiles)]
    lost = counts(run.accounts.get("loss_beyond"))
    trained = int(rows.get_column("completion_len").sum())
    if lost:
        lines = [
            (f"{int(length):,}", f"{count:,}", share_of(count, trained)) for length, count in lost.items()
        ]
        body += [
            pages.heading("What a shorter maximum would lose"),
            pages.table(("a trainer's max_length", "tokens lost to training", "share"), lines),
        ]
    truncated = int(rows.get_column("truncated").sum())
    return (
        f"{trained:,} tokens to train on in {rows.height:,} rows; {truncated:,} answers are truncated.",
        body,
    )


def _quantiles(lengths: pl.Series) -> list[float]:
    return [
        float(lengths.quantile(share, interpolation="nearest") or 0.0)
        for share in (0.05, 0.5, 0.95, 0.99, 1.0)
    ]


def finish_reasons(run: Run) -> Page:
    """Bars of finish reasons."""
    accepted = dict(run.accepted.group_by("finish_reason").len().iter_rows())
    rejected = dict(run.rejected.group_by("finish_reason").len().iter_rows())
    total = sum(accepted.values()) + sum(rejected.values())
    rows = []
    for reason in sorted(
        {*accepted, *rejected}, key=lambda name: -accepted.get(name, 0) - rejected.get(name, 0)
    ):
        good, bad = accepted.get(reason, 0), rejected.get(reason, 0)
        note = f"{good + bad:,} ({share_of(good + bad, total)})" + (
            f", {bad:,} of them rejected" if bad else ""
        )
        rows.append((reason or "never asked or no answer", float(good + bad), note))
    stopped = accepted.get("stop", 0) + rejected.get("stop", 0)
    return f"{share_of(stopped, total)} of {total:,} turns ended by themselves.", [
        plots.bars("Turns by finish reason", rows)
    ]


def rejects(run: Run) -> Page:
    """Reasons, flags and shards."""
    accounts = run.accounts
    turns, rejected = int(number(accounts, "turns")), int(number(accounts, "rejected"))

    def listing(title: str, found: Mapping[str, int], colour: int) -> str:
        rows = [
            (in_words(name), float(count), f"{count:,} ({share_of(count, turns)})")
            for name, count in found.items()
        ]
        return plots.bars(title, rows, colour) if rows else pages.paragraph(f"{title}: none.")

    reasons, flags = counts(accounts.get("reasons")), counts(accounts.get("flags"))
    body = [listing("Rejected turns by reason", reasons, 1), listing("Flags on accepted rows", flags, 5)]
    shards = {str(name): mapping(shard) for name, shard in mapping(accounts.get("by_shard")).items()}
    worst = sorted(shards.items(), key=lambda pair: -number(pair[1], "rejected"))[:20]
    rows = [
        (
            name,
            number(shard, "rejected"),
            (
                f"{int(number(shard, 'rejected')):,} of {int(number(shard, 'turns')):,} "
                f"({share_of(number(shard, 'rejected'), number(shard, 'turns'))})"
            ),
        )
        for name, shard in worst
        if shard.get("rejected")
    ]
    if rows:
        body.append(
            plots.bars("Rejected turns by shard" + (", the 20 highest" if len(shards) > 20 else ""), rows, 3)
        )
    dropped = [(name, int(number(accounts, name))) for name in ("duplicates", "contaminated", "skipped")]
    body += [
        pages.heading("Prompts that were never asked"),
        pages.facts((name, f"{count:,}") for name, count in dropped),
        pages.paragraph("Each with file, row and reason in results/skipped.parquet."),
    ]
    return f"{rejected:,} of {turns:,} turns were rejected ({share_of(rejected, turns)}).", body


def _pick(rows: pl.DataFrame, group: str, length: str) -> dict[str, str]:
    """Group → id of a row whose length is at the lower quartile of its group; the largest groups first."""
    sizes = rows.group_by(group).len().sort("len", group, descending=[True, False]).head(SAMPLES)
    picked = {}
    for name in sizes.get_column(group).to_list():
        own = rows.filter(pl.col(group) == name).sort(length, "id")
        picked[str(name)] = str(own.item(own.height // 4, "id"))
    return picked


def _rows(paths: Sequence[Path], ids: Iterable[str], columns: Sequence[str]) -> dict[str, Table]:
    """The rows of these ids, by id; only row groups that can hold them are read."""
    wanted = list(ids)
    if not wanted or not paths:
        return {}
    found = ds.dataset([str(path) for path in paths]).to_table(
        columns=["id", *columns], filter=pc.field("id").isin(wanted)
    )
    return {str(row["id"]): row for row in found.to_pylist()}


INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of the text around."""


def _cut(content: str) -> str:
    """At most `LONGEST_TEXT` characters, with invisible ones written as escapes."""
    shown = INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", content[:LONGEST_TEXT])
    rest = len(content) - LONGEST_TEXT
    return shown if rest <= 0 else f"{shown}\n… {rest:,} more characters"


def _turn(role: str, content: str, reasoning: str = "", *, sampled: bool = False) -> str:
    said = f"<pre>{plots.escape(_cut(content))}</pre>" if content else ""
    if reasoning:
        said = pages.folded("reasoning", f"<pre>{plots.escape(_cut(reasoning))}</pre>") + said
    kind = "turn sampled" if sampled else "turn"
    return f'<div class="{kind}"><b>{plots.escape(role)}</b>{said}</div>'


def _talk(title: str, fine: str, turns: Iterable[str]) -> str:
    return f'<section class="talk"><h2>{plots.escape(title)}</h2><p class="fine">{plots.escape(fine)}</p>{"".join(turns)}</section>'


def conversations(run: Run) -> Page:
    """A row from each finish reason and each reject reason."""
    body = []
    good = _pick(run.accepted, "finish_reason", "seq_len")
    columns = ("conversations", "source", "prompt_len", "completion_len", "flags")
    rows = _rows([run.results / "merged.parquet"], good.values(), columns)
    for reason, name in good.items():
        row = rows[name]
        messages = tables(row.get("conversations"))
        last = len(messages) - 1
        flags = row.get("flags")
        flagged = (
            f", flagged {', '.join(in_words(str(flag)) for flag in flags)}"
            if isinstance(flags, list) and flags
            else ""
        )
        fine = (
            f"{name} from {text(row, 'source')}: {int(number(row, 'prompt_len')):,} tokens given, "
            f"{int(number(row, 'completion_len')):,} sampled{flagged}"
        )
        turns = [
            _turn(
                text(message, "role"),
                text(message, "content"),
                text(message, "reasoning_content"),
                sampled=index == last,
            )
            for index, message in enumerate(messages)
        ]
        body.append(_talk(f"Accepted, finish reason {reason}", fine, turns))
    bad = _pick(run.rejected, "reason", "length")
    rows = _rows(
        [run.results / "rejected.parquet"], bad.values(), ("detail", "text", "source", "finish_reason")
    )
    asked = _rows(sorted((run.results / "generated").glob("*.parquet")), bad.values(), ("messages",))
    for reason, name in bad.items():
        row = rows[name]
        given = json.loads(text(asked.get(name, {}), "messages") or "[]")
        turns = [_turn(text(message, "role"), text(message, "content")) for message in tables(given)]
        turns.append(_turn("rejected answer", text(row, "text") or "(nothing)"))
        body.append(
            _talk(
                f"Rejected: {in_words(reason)}",
                f"{name} from {text(row, 'source')}. {text(row, 'detail')}",
                turns,
            )
        )
    return f"{len(good)} accepted and {len(bad)} rejected rows.", body
