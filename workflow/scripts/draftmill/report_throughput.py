"""The report's pages on speed: over time, by server, by shard, and what the tuner measured.

Knows results/throughput.parquet and .json and the tuner's files, and which plots show them. Must never know how
a plot is drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from draftmill import pages, plots
from draftmill.plots import Band, Mark, Series
from draftmill.records import json_lines, number, optional, read_state, text
from draftmill.report_run import (
    Page,
    Run,
    Table,
    flags_of,
    known,
    mapping,
    share_of,
    tables,
)
from draftmill.statistics import duration

STEPS = 360
"""Points of a plot over time; more buckets are averaged."""


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
    pauses = tables(run.rates.get("pauses"))
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
        for shard in tables(run.rates.get("shards"))
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
            known(optional(server, "effective_capacity")),
            "unknown"
            if optional(server, "utilisation") is None
            else plots.percent(number(server, "utilisation")),
            f"{int(number(server, 'restarts'))}",
        )
        for server in run.servers
    ]
    head = ("server", "turns", "output tokens", "tok/s", "capacity", "slots in use", "restarts")
    steady = mapping(run.rates.get("steady_state"))
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

    whole = mapping(run.rates.get("shares"))
    rows = [
        row("all servers", whole),
        *(row(text(s, "server"), mapping(s.get("shares"))) for s in run.servers),
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
    took = sorted(number(shard, "wall_s") for shard in tables(run.rates.get("shards")))
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
    shown = winner.get("circumstances") or measured[-1].get("circumstances")
    rows = sorted(
        (one for one in measured if one.get("circumstances") == shown),
        key=lambda one: -number(one, "tok_s"),
    )
    bars, lines = [], []
    for one in rows:
        name = text(one, "name") + (
            " (adopted)" if flags_of(one) == flags_of(winner) and not one.get("model") else ""
        )
        rate = f"{plots.number(number(one, 'tok_s'))} ± {plots.number(number(one, 'error'))} tok/s"
        outcome = text(one, "outcome")
        if outcome == "failed":
            rate = "failed"
        note = rate if outcome == "measured" else f"{outcome}: {text(one, 'detail') or rate}"
        bars.append((name, number(one, "tok_s"), note))
        running = f"{number(one, 'running'):.0f} of {number(one, 'capacity'):.0f}"
        expected = f"{number(one, 'expected_gain', 1.0):.2f}×"
        rejected = share_of(number(one, "rejected"), number(one, "answers"))
        lines.append(
            (name, flags_of(one) or "(none)", expected, rate, running, text(one, "verdict"), rejected)
        )
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
