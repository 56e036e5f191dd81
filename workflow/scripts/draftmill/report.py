"""The report's items: what a reader who was not there is told about a run, and in which words.

Knows the files under results/ that are finished when the dataset is, and turns them into pages that stand alone.
Must never know a server, a clock or Snakemake. All text of users and models is escaped by plots.py and pages.py;
secrets in the config are blacked out before they are written.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from platform import python_version

import polars as pl
import pyarrow.compute as pc
import pyarrow.dataset as ds
import yaml

from draftmill import __version__, pages, plots
from draftmill.plots import Band, Mark, Series
from draftmill.records import json_lines, number, optional, read_state, text, write_aside
from draftmill.statistics import duration

Table = Mapping[str, object]

STEPS = 360
"""Points of a plot over time; more buckets are averaged."""
LONGEST_TEXT = 6000
"""Characters of one message that a page shows."""
SAMPLES = 24
"""Conversations on the page of samples."""
PACKAGES = ("snakemake", "polars", "pyarrow", "tokenizers", "jinja2", "requests")


@dataclass(frozen=True)
class Item:
    """One entry of the report: its file, its place in the menu, and its caption (also workflow/report/<name>.rst).

    Snakemake sorts the menu by the categories' names, hence their numbers.
    """

    name: str
    title: str
    category: str
    labels: Mapping[str, str]
    caption: str


ITEMS = (
    Item(
        "overview",
        "What came of the run",
        "1. Summary",
        {"item": "Overview", "kind": "figures"},
        "What was asked, what came out, how fast, what bound it, and what to change. Counts are those of the merge's "
        "accounts, rates those of results/throughput.json, whose definitions are in docs/statistics.md. Read the five "
        "figures from left to right, then the two sentences.",
    ),
    Item(
        "throughput",
        "Throughput over time",
        "2. Throughput",
        {"item": "Output tokens per second", "kind": "plot"},
        "Output tokens per second of every server, stacked. Each answer's tokens are spread evenly over the time in "
        "which it was generated; the time axis counts time at work, with pauses cut out. Read the upper edge for the "
        "whole fleet and a band's height for one server; shaded are start-up, ramp and drain, red flags are restarts, "
        "ticks on the axis are ends of shards.",
    ),
    Item(
        "occupancy",
        "Running requests and memory",
        "2. Throughput",
        {"item": "Running, KV and state use", "kind": "plot"},
        "Running requests against what the servers can run, and the share of KV cache and state slots in use. Sampled "
        "by the supervisors once a second from the servers' own metrics. Running at capacity with free KV cache and "
        "full state slots means state-bound; below capacity with an empty queue, that the clients were too slow.",
    ),
    Item(
        "server-time",
        "How the servers spent their time",
        "2. Throughput",
        {"item": "Shares of server time", "kind": "plot"},
        "The share of each server's time in start-up, ramp, steady state, drain, idle and down. From the telemetry's "
        "states and running requests, second by second; the shares of one server add up to 100 %. Everything that is "
        "not steady state is time that a longer run or a fix could win back.",
    ),
    Item(
        "shard-times",
        "Shards over time",
        "2. Throughput",
        {"item": "Shard times", "kind": "plot"},
        "When each shard was worked on, from the start of its first turn to the end of its last, in order of start. "
        "Taken from the generated rows. Shards should overlap without a gap: the permits go to the oldest first.",
    ),
    Item(
        "tuning",
        "Tuning candidates",
        "2. Throughput",
        {"item": "Tuning", "kind": "plot"},
        "Output tokens per second of each candidate for the server's flags, measured in steady state on the run's own "
        "first turns, with the standard error. Expected is what the capacity model had promised against the asked "
        "flags. The longest bar whose answers stayed the same and sound was adopted.",
    ),
    Item(
        "token-lengths",
        "Token lengths",
        "3. Dataset",
        {"item": "Token lengths", "kind": "plot"},
        "How long prompts and answers of the accepted rows are, in tokens of the target model. Counted on the ids "
        "that were sent and sampled, never on text. A peak at the limit means truncated answers; the table says what "
        "a trainer with a shorter maximum would lose.",
    ),
    Item(
        "finish-reasons",
        "Finish reasons",
        "3. Dataset",
        {"item": "Finish reasons", "kind": "plot"},
        "Why the generations ended, as the engine said, for accepted and rejected rows. A high share of length means "
        "that max_tokens is too small for this model and these prompts.",
    ),
    Item(
        "rejects",
        "Rejected and flagged rows",
        "3. Dataset",
        {"item": "Rejects by reason", "kind": "plot"},
        "How many turns were rejected or flagged, by reason and by shard. From results/validation.json; every rejected "
        "row stands with its text in results/rejected.parquet. A shard that stands out points to a source of prompts "
        "or to a server.",
    ),
    Item(
        "conversations",
        "Conversations",
        "3. Dataset",
        {"item": "Sample rows", "kind": "text"},
        "One row from each finish reason and each reject reason, rendered as a conversation. Chosen for a length that "
        "is usual in its group. The green bar marks what was sampled and is trained on; all the rest is given.",
    ),
    Item(
        "provenance",
        "Provenance",
        "4. Provenance",
        {"item": "Provenance", "kind": "table"},
        "Which model, template, tokenizer, sampling, servers and versions made this dataset, and in which parts the "
        "run went. Recorded while it ran. Two datasets whose hashes here agree were asked for in the same way.",
    ),
    Item(
        "config",
        "Resolved configuration",
        "4. Provenance",
        {"item": "Config", "kind": "text"},
        "The configuration of the run with every default filled in. Secrets and environment values are blacked out. "
        "As a config file it asks for the same run again.",
    ),
)


def write_report(results: Path, config: Table, folder: Path) -> None:
    """Writes <folder>/<item>.html for every item of `ITEMS`. `results`: the run's folder; `config`: resolved."""
    run = Run(results, config)
    for item in ITEMS:
        lead, body = CONTENT[item.name](run)
        write_aside(folder / f"{item.name}.html", pages.page(item.title, lead, body, item.caption).encode())


@dataclass(frozen=True)
class Run:
    """What the pages are made from; each table is read when a page first asks for it."""

    results: Path
    config: Table

    @cached_property
    def rates(self) -> Table:
        return read_state(self.results / "throughput.json")

    @cached_property
    def accounts(self) -> Table:
        return read_state(self.results / "validation.json")

    @cached_property
    def prompts(self) -> Table:
        return read_state(self.results / "prompts.json")

    @cached_property
    def model(self) -> Table:
        return read_state(self.results / "model" / "model.json")

    @cached_property
    def buckets(self) -> pl.DataFrame:
        """results/throughput.parquet."""
        return pl.read_parquet(self.results / "throughput.parquet")

    @cached_property
    def accepted(self) -> pl.DataFrame:
        """id, source, finish_reason, prompt_len, completion_len, seq_len, truncated, flags of accepted rows."""
        columns = "id", "source", "finish_reason", "prompt_len", "completion_len", "seq_len", "truncated"
        return pl.scan_parquet(self.results / "merged.parquet").select(columns).collect()

    @cached_property
    def rejected(self) -> pl.DataFrame:
        """id, reason, finish_reason, detail and length (characters) of rejected rows."""
        columns = ("id", "reason", "finish_reason", "detail", pl.col("text").str.len_chars().alias("length"))
        return pl.scan_parquet(self.results / "rejected.parquet").select(columns).collect()

    @cached_property
    def sampling(self) -> Table:
        """Every sampling parameter of the first generated row."""
        for path in sorted((self.results / "generated").glob("*.parquet")):
            rows = pl.scan_parquet(path).select("sampling").head(1).collect()
            if rows.height:
                return _mapping(json.loads(rows.item()))
        return {}

    @property
    def servers(self) -> list[Table]:
        return _tables(self.rates.get("servers"))


def _mapping(value: object) -> Table:
    return value if isinstance(value, Mapping) else {}


def _tables(value: object) -> list[Table]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _counts(value: object) -> dict[str, int]:
    return {str(name): int(count) for name, count in _mapping(value).items() if isinstance(count, int)}


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def _said(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{plots.number(value)}{unit}"


Page = tuple[str, list[str]]


def _hardware(run: Run) -> str:
    """8 × NVIDIA H200, or 2 CPU servers."""
    count = int(number(run.rates, "devices"))
    names = sorted({text(server, "gpu_name") for server in run.servers} - {""})
    if text(run.rates, "device") == "gpu":
        return f"{count} × {' and '.join(names) or 'GPU'}"
    return f"{count} CPU server{'s' if count != 1 else ''}"


def _asked(run: Run) -> str:
    """One sentence: who was asked what, how."""
    engines = sorted(
        {f"{text(server, 'engine')} {text(server, 'version')}".strip() for server in run.servers}
    )
    temperature, limit = run.sampling.get("temperature"), run.sampling.get("max_tokens")
    name = text(run.model, "name") or text(run.model, "path") or "The target model"
    return (
        f"{name} answered on {_hardware(run)} with {' and '.join(engines) or 'an unknown engine'}, "
        f"at temperature {temperature} and up to {limit} tokens an answer."
    )


def overview(run: Run) -> Page:
    """The first page."""
    accounts, rates, prompts = run.accounts, run.rates, run.prompts
    turns, accepted, rejected = (int(number(accounts, name)) for name in ("turns", "accepted", "rejected"))
    usable, rows_in = int(number(accounts, "usable")), int(number(accounts, "rows_in"))
    dropped = [
        f"{int(number(accounts, name)):,} {name}"
        for name in ("duplicates", "contaminated", "skipped")
        if accounts.get(name)
    ]
    tokens = number(rates, "output_tokens")
    steady = optional(_mapping(rates.get("steady_state")), "output_tokens_per_s")
    overall = number(rates, "output_tokens_per_s")
    each = "GPU" if text(rates, "device") == "gpu" else "CPU server"
    cost = optional(rates, "cost_per_million_output_tokens")
    lengths = _mapping(rates.get("tokens_per_answer"))
    flags = _counts(accounts.get("flags"))
    reasons = _counts(accounts.get("reasons"))
    worst = next(iter(reasons.items()), None)
    sources = len(_mapping(prompts.get("sources"))) or 1
    figures = [
        (
            "asked",
            f"{plots.number(turns)} turns",
            f"from {usable:,} of {rows_in:,} rows in {sources} source{'s' if sources != 1 else ''}"
            + (f" ({', '.join(dropped)})" if dropped else ""),
        ),
        (
            "came out",
            f"{plots.number(accepted)} rows",
            f"{_share(accepted, turns)} accepted, {rejected:,} rejected"
            + (f", most for {_words(worst[0])}" if worst else "")
            + (f"; {flags['truncated']:,} truncated" if flags.get("truncated") else ""),
        ),
        (
            "tokens to train on",
            plots.number(int(run.accepted.get_column("completion_len").sum())),
            (
                f"of {plots.number(tokens)} generated; median {_said(optional(lengths, 'p50'))} an answer, "
                f"95 % under {_said(optional(lengths, 'p95'))}"
            ),
        ),
        (
            "speed",
            f"{plots.number(steady if steady is not None else overall)} tok/s",
            (
                f"{'in steady state; ' if steady is not None else ''}{plots.number(overall)} over all of "
                f"{duration(number(rates, 'wall_s'))}, {plots.number(number(rates, 'output_tokens_per_s_per_gpu'))} per {each}"
            ),
        ),
        (
            "per million tokens",
            f"{_said(optional(rates, 'gpu_hours_per_million_output_tokens'))} {each.split(maxsplit=1)[0]}\u2011h",
            f"{duration(3600 * number(rates, 'gpu_hours'))} of {each} time in all"
            + (
                f"; {cost:,.2f} per million at {number(rates, 'price_per_gpu_hour'):g} an hour"
                if cost is not None
                else ""
            ),
        ),
    ]
    bound, change = verdict(run)
    body = [pages.figures(figures), pages.paragraph(bound, "verdict"), pages.paragraph(change, "verdict")]
    body += [pages.paragraph(note, "warn") for note in remarks(run)]
    return _asked(run), body


def verdict(run: Run) -> tuple[str, str]:
    """The two sentences: what bound the run, and what to change."""
    found = _mapping(run.rates.get("bound_by"))
    if not found:
        return (
            "What bound the run is not known: no server recorded telemetry.",
            "Run with an engine that publishes metrics to learn what to change.",
        )
    advice = _mapping(found.get("advice"))
    bound = f"The run was {text(found, 'verdict')}: {_sentence(text(found, 'evidence'))}"
    if found.get("expected"):
        bound += f" {_sentence(text(found, 'expected'))}"
    if not advice.get("flag"):
        return bound, _sentence(
            text(advice, "predicted_effect") or "no setting is known that would make it faster"
        )
    drop = advice.get("drop")
    instead = f" instead of {' '.join(map(str, drop))}" if isinstance(drop, list) and drop else ""
    return (
        bound,
        f"What to change: {text(advice, 'flag')}{instead}; {_sentence(text(advice, 'predicted_effect'))}",
    )


def _sentence(words: str) -> str:
    """The words with a full stop, each sentence once."""
    return words.strip().rstrip(".") + "."


def remarks(run: Run) -> list[str]:
    """What a reader has to know before believing the figures."""
    notes = []
    pauses = _tables(run.rates.get("pauses"))
    if pauses:
        total = duration(sum(number(pause, "seconds") for pause in pauses))
        notes.append(
            f"The run went in {len(pauses) + 1} parts; {total} of pauses between them are left out of every rate."
        )
    restarts, retries = int(number(run.rates, "restarts")), int(number(run.rates, "retries"))
    if restarts or retries:
        notes.append(
            f"Servers were restarted {restarts:,} times and turns sent again {retries:,} times; no row was lost."
        )
    agreement = _mapping(run.rates.get("token_agreement"))
    if agreement.get("agrees") is False:
        share = f"{100 * abs(number(agreement, 'difference')):.3g} %"
        more = "more" if number(agreement, "difference") > 0 else "fewer"
        notes.append(
            f"The servers count {share} {more} output tokens than the dataset holds: {text(agreement, 'reason')}."
        )
    return notes


def _words(kind: str) -> str:
    return kind.replace("_", " ")


@dataclass(frozen=True)
class Timeline:
    """The buckets of results/throughput.parquet, averaged to at most `STEPS` points per server."""

    xs: list[float]
    by_server: Mapping[str, pl.DataFrame]
    bands: list[Band]
    marks: list[Mark]
    """Part borders and restarts."""


def timeline(run: Run) -> Timeline:
    """What every plot over time shares."""
    buckets = run.buckets.sort("elapsed_s", "server")
    steps = buckets.select("part", "t", "elapsed_s", "seconds", "phase").unique("t", maintain_order=True)
    width = -(-steps.height // STEPS) or 1
    grouped = steps.with_row_index("row").with_columns(step=pl.col("row") // width).select("t", "step")
    weight = pl.col("seconds")
    rows = (
        buckets.join(grouped, on="t")
        .group_by("server", "step")
        .agg(
            (pl.col("elapsed_s").min() + (pl.col("elapsed_s") + weight).max()).alias("twice"),
            (pl.col("output_tokens").sum() / weight.sum()).alias("rate"),
            pl.col("running", "capacity", "queued", "kv_usage", "state_usage", "ready_share").mean(),
        )
        .with_columns(x=pl.col("twice") / 2)
        .sort("step")
    )
    names = rows.get_column("server").unique().sort().to_list()
    by_server = {name: rows.filter(pl.col("server") == name) for name in names}
    xs = next(iter(by_server.values())).get_column("x").to_list() if names else []
    stretches: list[Band] = []
    for elapsed, seconds, phase in steps.select("elapsed_s", "seconds", "phase").iter_rows():
        if stretches and stretches[-1].name == phase and abs(stretches[-1].end - elapsed) < 1e-6:
            stretches[-1] = Band(stretches[-1].start, elapsed + seconds, phase)
        else:
            stretches.append(Band(elapsed, elapsed + seconds, phase))
    starts = (
        steps.group_by("part")
        .agg(pl.col("elapsed_s").min())
        .sort("part")
        .get_column("elapsed_s")
        .to_list()[1:]
    )
    pauses = _tables(run.rates.get("pauses"))
    marks = [
        Mark(x, "part", f"paused {duration(number(pause, 'seconds'))}")
        for x, pause in zip(starts, pauses, strict=False)
    ]
    restarted = buckets.filter(pl.col("restarts") > 0).select("elapsed_s", "server")
    marks += [Mark(x, "restart", f"{server} restarted") for x, server in restarted.iter_rows()]
    return Timeline(xs, by_server, [band for band in stretches if band.name != "steady"], marks)


def elapsed(run: Run, t: float) -> float:
    """Time at work (s, pauses cut out) at a unix time."""
    before = run.buckets.filter(pl.col("t") <= t).sort("t").tail(1)
    if not before.height:
        return 0.0
    start, worked, seconds = before.select("t", "elapsed_s", "seconds").row(0)
    return float(worked) + min(t - float(start), float(seconds))


def shard_spans(run: Run) -> list[tuple[str, float, float]]:
    """(name and figures, start, end) of each shard in time at work."""
    return [
        (
            (
                f"{text(shard, 'shard')}: {int(number(shard, 'turns')):,} turns in {duration(number(shard, 'wall_s'))}, "
                f"{plots.number(number(shard, 'output_tokens_per_s'))} tok/s"
            ),
            elapsed(run, number(shard, "started_at")),
            elapsed(run, number(shard, "ended_at")),
        )
        for shard in _tables(run.rates.get("shards"))
    ]


def throughput(run: Run) -> Page:
    """Stacked output tokens per second."""
    line = timeline(run)
    names = list(line.by_server)
    shown = names if len(names) <= plots.COLOURS else names[: plots.COLOURS - 1]
    series = [
        Series(name, line.by_server[name].get_column("rate").to_list(), index)
        for index, name in enumerate(shown)
    ]
    if len(shown) < len(names):
        others = [line.by_server[name].get_column("rate").fill_null(0.0) for name in names[len(shown) :]]
        total = sum(others[1:], others[0])
        series.append(Series(f"{len(others)} other servers", total.to_list(), plots.COLOURS - 1))
    ends = [Mark(end, "shard", f"end of {name}") for name, _, end in shard_spans(run)]
    chart = plots.stacked_chart(
        "Output tokens per second, all servers stacked",
        line.xs,
        series,
        plots.counts("tok/s"),
        stretches=line.bands,
        points=[*line.marks, *(ends if len(ends) <= 200 else [])],
    )
    rows = [
        (
            text(server, "server"),
            f"{int(number(server, 'turns')):,}",
            f"{int(number(server, 'output_tokens')):,}",
            plots.number(number(server, "output_tokens_per_s")),
            _said(optional(server, "effective_capacity")),
            "unknown"
            if optional(server, "utilisation") is None
            else plots.percent(number(server, "utilisation")),
            f"{int(number(server, 'restarts'))}",
        )
        for server in run.servers
    ]
    head = ("server", "turns", "output tokens", "tok/s", "capacity", "slots in use", "restarts")
    steady = _mapping(run.rates.get("steady_state"))
    held = optional(steady, "output_tokens_per_s")
    lead = f"{plots.number(number(run.rates, 'output_tokens_per_s'))} tok/s over the whole run; " + (
        f"{plots.number(held)} tok/s in steady state, which held for {duration(number(steady, 'seconds'))}."
        if held is not None
        else f"no steady state: {text(steady, 'reason')}."
    )
    return lead, [chart, pages.heading("By server"), pages.table(head, rows)]


def _server_lines(line: Timeline, column: str) -> list[Series]:
    """One series per server, or the lowest, median and highest of many; none where nothing is known."""
    known = {
        name: rows.get_column(column).to_list()
        for name, rows in line.by_server.items()
        if rows.get_column(column).null_count() < rows.height
    }
    if len(known) <= plots.COLOURS:
        return [Series(name, values, index) for index, (name, values) in enumerate(known.items())]
    columns: list[list[float]] = [
        sorted(value for value in values if value is not None) for values in zip(*known.values(), strict=True)
    ]
    picks = (("lowest", 0.0), ("median", 0.5), ("highest", 1.0))
    return [
        Series(
            name, [values[int(share * (len(values) - 1))] if values else None for values in columns], index
        )
        for index, (name, share) in enumerate(picks)
    ]


def occupancy(run: Run) -> Page:
    """Running against capacity, KV and state use."""
    line = timeline(run)
    body = []
    fleet = pl.concat(line.by_server.values()) if line.by_server else pl.DataFrame(schema={"step": pl.UInt32})
    if fleet.height and fleet.get_column("running").null_count() < fleet.height:
        offered = (pl.col("capacity") * (pl.col("ready_share") > 0)).sum()
        sums = (
            fleet.group_by("step")
            .agg(pl.col("running", "queued").sum(), offered.alias("capacity"))
            .sort("step")
        )
        series = [
            Series("running", sums.get_column("running").to_list(), 0),
            Series("capacity of the ready servers", sums.get_column("capacity").to_list(), 1, dashed=True),
            Series("queued at the servers", sums.get_column("queued").to_list(), 7),
        ]
        title = "Requests, all servers together"
        body.append(
            plots.line_chart(
                title, line.xs, series, plots.counts("requests"), stretches=line.bands, points=line.marks
            )
        )
    for column, title, what in (
        ("kv_usage", "KV cache in use", "KV cache use"),
        ("state_usage", "State slots in use", "state slots (a model without linear attention has none)"),
    ):
        series = _server_lines(line, column)
        if series:
            body.append(
                plots.line_chart(
                    title,
                    line.xs,
                    series,
                    plots.shares("share"),
                    stretches=line.bands,
                    points=line.marks,
                    y_max=1.0,
                )
            )
        else:
            body.append(pages.paragraph(f"No server published its {what}."))
    used = optional(run.rates, "utilisation_before_drain")
    lead = (
        "How full the servers were."
        if used is None
        else f"Before the drain {plots.percent(used)} of the slots were in use."
    )
    return lead, body


def server_time(run: Run) -> Page:
    """Shares of server time."""
    names = ("steady", "ramp", "drain", "startup", "idle", "down")

    def row(label: str, shares: Table) -> tuple[str, list[float]]:
        return label, [number(shares, name) for name in names]

    whole = _mapping(run.rates.get("shares"))
    rows = [
        row("all servers", whole),
        *(row(text(s, "server"), _mapping(s.get("shares"))) for s in run.servers),
    ]
    chart = plots.stacks(
        "Shares of server time", ("steady", "ramp", "drain", "start-up", "idle", "down"), rows[:65]
    )
    percents = [(label, *(plots.percent(round(value, 4)) for value in values)) for label, values in rows]
    lead = f"{plots.percent(round(number(whole, 'steady'), 4))} of the servers' time went into steady generation."
    head = ("server", "steady", "ramp", "drain", "start-up", "idle", "down")
    return lead, [chart, pages.folded("The same as a table", pages.table(head, percents))]


def shard_times(run: Run) -> Page:
    """A stroke per shard."""
    spans = shard_spans(run)
    marks = [mark for mark in timeline(run).marks if mark.kind == "part"]
    chart = plots.spans_chart("Time at work per shard", spans, number(run.rates, "wall_s"), marks)
    took = sorted(number(shard, "wall_s") for shard in _tables(run.rates.get("shards")))
    middle = duration(took[len(took) // 2]) if took else "none"
    ends = f", between {duration(took[0])} and {duration(took[-1])}" if took else ""
    return f"{len(spans):,} shards; the median shard took {middle}{ends}.", [chart]


def tuning(run: Run) -> Page:
    """Candidates and what they measured."""
    measured = list(json_lines(run.results / "tuning" / "measurements.jsonl"))
    winner = read_state(run.results / "tuning" / "winner.json")
    if not measured:
        return "No tuning was done: the servers ran with the flags of the config.", [
            pages.paragraph(
                "Run `snakemake tune`, or set operation.server.flags to auto, to measure candidates."
            )
        ]
    # Measurements of another card, version or model do not compare with these.
    shown = text(winner, "circumstances") or text(measured[-1], "circumstances")
    rows = sorted(
        (one for one in measured if text(one, "circumstances") == shown),
        key=lambda one: -number(one, "tok_s"),
    )
    bars, lines = [], []
    for one in rows:
        name = text(one, "name") + (
            " (adopted)" if _flags(one) == _flags(winner) and not one.get("model") else ""
        )
        rate = f"{plots.number(number(one, 'tok_s'))} ± {plots.number(number(one, 'error'))} tok/s"
        outcome = text(one, "outcome")
        note = rate if outcome == "measured" else f"{outcome}: {text(one, 'detail') or rate}"
        bars.append((name, number(one, "tok_s"), note))
        running = f"{number(one, 'running'):.0f} of {number(one, 'capacity'):.0f}"
        expected = f"{number(one, 'expected_gain', 1.0):.2f}×"
        rejected = _share(number(one, "rejected"), number(one, "answers"))
        lines.append((name, _flags(one) or "(none)", expected, rate, running, text(one, "verdict"), rejected))
    head = ("setting", "flags", "expected", "measured", "running", "bound by", "answers rejected")
    proposals = winner.get("proposals")
    body = [
        plots.bars("Output tokens per second of one server", bars),
        *(
            pages.paragraph(str(proposal), "warn")
            for proposal in (proposals if isinstance(proposals, list) else [])
        ),
        pages.heading("All measurements"),
        pages.table(head, lines, numbers=False),
    ]
    adopted = text(winner, "reason") or "nothing was adopted"
    return f"{len(rows)} settings were measured. {adopted[:1].upper()}{adopted[1:].rstrip('.')}.", body


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
    lost = _counts(run.accounts.get("loss_beyond"))
    trained = int(rows.get_column("completion_len").sum())
    if lost:
        lines = [(f"{int(length):,}", f"{count:,}", _share(count, trained)) for length, count in lost.items()]
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
        note = f"{good + bad:,} ({_share(good + bad, total)})" + (
            f", {bad:,} of them rejected" if bad else ""
        )
        rows.append((reason or "never asked or no answer", float(good + bad), note))
    stopped = accepted.get("stop", 0) + rejected.get("stop", 0)
    return f"{_share(stopped, total)} of {total:,} turns ended by themselves.", [
        plots.bars("Turns by finish reason", rows)
    ]


def rejects(run: Run) -> Page:
    """Reasons, flags and shards."""
    accounts = run.accounts
    turns, rejected = int(number(accounts, "turns")), int(number(accounts, "rejected"))

    def listing(title: str, found: Mapping[str, int], colour: int) -> str:
        rows = [
            (_words(name), float(count), f"{count:,} ({_share(count, turns)})")
            for name, count in found.items()
        ]
        return plots.bars(title, rows, colour) if rows else pages.paragraph(f"{title}: none.")

    reasons, flags = _counts(accounts.get("reasons")), _counts(accounts.get("flags"))
    body = [listing("Rejected turns by reason", reasons, 1), listing("Flags on accepted rows", flags, 5)]
    shards = {str(name): _mapping(shard) for name, shard in _mapping(accounts.get("by_shard")).items()}
    worst = sorted(shards.items(), key=lambda pair: -number(pair[1], "rejected"))[:20]
    rows = [
        (
            name,
            number(shard, "rejected"),
            (
                f"{int(number(shard, 'rejected')):,} of {int(number(shard, 'turns')):,} "
                f"({_share(number(shard, 'rejected'), number(shard, 'turns'))})"
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
    return f"{rejected:,} of {turns:,} turns were rejected ({_share(rejected, turns)}).", body


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
        messages = _tables(row.get("conversations"))
        last = len(messages) - 1
        flags = row.get("flags")
        flagged = (
            f", flagged {', '.join(_words(str(flag)) for flag in flags)}"
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
        turns = [_turn(text(message, "role"), text(message, "content")) for message in _tables(given)]
        turns.append(_turn("rejected answer", text(row, "text") or "(nothing)"))
        body.append(
            _talk(
                f"Rejected: {_words(reason)}",
                f"{name} from {text(row, 'source')}. {text(row, 'detail')}",
                turns,
            )
        )
    return f"{len(good)} accepted and {len(bad)} rejected rows.", body


def provenance(run: Run) -> Page:
    """Hashes, versions, servers, parts."""
    model = run.model
    names = (
        "name",
        "path",
        "identity",
        "kind",
        "revision",
        "context_length",
        "template_hash",
        "tokenizer_hash",
    )
    body = [
        pages.heading("Model"),
        pages.facts(
            (_words(name), redact_text(text(model, name))) for name in names if model.get(name) is not None
        ),
        pages.heading("Sampling"),
        pages.facts(
            (name, json.dumps(value, ensure_ascii=False)) for name, value in sorted(run.sampling.items())
        ),
        pages.heading("Servers"),
    ]
    rows = [
        (
            text(server, "server"),
            f"{text(server, 'engine')} {text(server, 'version')}",
            text(server, "gpu_name") or "CPU",
            _said(optional(server, "effective_capacity")),
            redact_text(_flags(server)),
        )
        for server in run.servers
    ]
    body.append(pages.table(("server", "engine", "device", "capacity", "flags"), rows, numbers=False))
    parts = [
        (text(part, "from"), text(part, "to"), duration(number(part, "wall_s")))
        for part in _tables(run.rates.get("parts"))
    ]
    body += [
        pages.heading("Parts of the run"),
        pages.table(("from", "to", "time at work"), parts, numbers=False),
    ]
    left_out = [
        (text(part, "from"), text(part, "to"), text(part, "why"))
        for part in _tables(run.rates.get("left_out"))
    ]
    if left_out:
        body += [pages.heading("Left out"), pages.table(("from", "to", "why"), left_out, numbers=False)]
    versions = [("draftmill", __version__), ("python", python_version())]
    versions += [(name, _version(name)) for name in PACKAGES]
    body += [pages.heading("Versions"), pages.facts(versions)]
    return (
        f"Seed {run.config.get('seed')}; {text(run.rates, 'started_at')} to {text(run.rates, 'ended_at')}.",
        body,
    )


def _flags(server: Table) -> str:
    flags = server.get("flags")
    return " ".join(str(flag) for flag in flags) if isinstance(flags, list) else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


SECRET = re.compile(r"api_?key|secret|password|passwd|credential|(^|_)(auth_?)?token$", re.IGNORECASE)
SECRET_FLAG = re.compile(r"(--[\w-]*(?:api-key|auth-token|hf-token|secret|password)[\w-]*[= ]+)\S+")
USERINFO = re.compile(r"(\w://)[^/@\s]+@")
BLACK = "█████"


def redact_text(value: str) -> str:
    """The same without passwords in URLs and without values of secret flags."""
    return USERINFO.sub(rf"\1{BLACK}@", SECRET_FLAG.sub(rf"\1{BLACK}", value))


def redact(value: object, name: str = "") -> object:
    """A config without its secrets: values under secret names and all environment values are blacked out."""
    if isinstance(value, Mapping):
        inside = "secret" if name == "env" else ""
        return {str(key): redact(item, inside or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return BLACK if SECRET.search(name) and value else redact_text(value)
    return value


def config(run: Run) -> Page:
    """The resolved config as YAML."""
    dumped = yaml.safe_dump(redact(run.config), sort_keys=False, allow_unicode=True, width=96)
    return "Every key with the value that was used.", [pages.code(dumped)]


CONTENT: Mapping[str, Callable[[Run], Page]] = {
    "overview": overview,
    "throughput": throughput,
    "occupancy": occupancy,
    "server-time": server_time,
    "shard-times": shard_times,
    "tuning": tuning,
    "token-lengths": token_lengths,
    "finish-reasons": finish_reasons,
    "rejects": rejects,
    "conversations": conversations,
    "provenance": provenance,
    "config": config,
}
