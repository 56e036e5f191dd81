"""When a run worked: its parts and pauses, and start-up, ramp, steady state and drain in each part.

Knows the times of answers, samples and clients. Must never know a file or a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from draftmill.records import PAUSE_S, Server, Session

FULL = 0.9
"""The ramp ends when this share of the reachable running requests runs."""


@dataclass(frozen=True)
class Part:
    """A stretch of the run with work in it; a resumed run has several, with pauses between."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Phases:
    """Borders of start-up, ramp, steady state and drain: fleet-wide, in unix seconds."""

    first_work: tuple[float, ...]
    """Per part: when the first answer began."""
    full: tuple[float, ...]
    """Per part: when the fleet first ran at `FULL` of what it could; the ramp's end."""
    drain: tuple[float, ...]
    """Per part: when fewer turns were left than the fleet has slots; the end of an interrupted part."""

    def table(self) -> pl.DataFrame:
        """part, full and drain, to join samples with."""
        columns = {"part": range(len(self.full)), "full": self.full, "drain": self.drain}
        return pl.DataFrame(columns, schema={"part": pl.Int64, "full": pl.Float64, "drain": pl.Float64})

    def at(self, part: int, t: float) -> str:
        if t < self.first_work[part]:
            return "startup"
        if t >= self.drain[part]:
            return "drain"
        return "ramp" if t < self.full[part] else "steady"

    def steady(self) -> list[tuple[int, float, float]]:
        """(part, start, end) of the stretches between ramp and drain, one per part at most."""
        windows = enumerate(zip(self.full, self.drain, strict=True))
        return [(part, start, end) for part, (start, end) in windows if end > start]


def find_parts(
    answered: pl.DataFrame, telemetry: pl.DataFrame, servers: Sequence[Server], sessions: Sequence[Session]
) -> tuple[list[Part], list[Part]]:
    """(parts that made answers of this dataset, parts that made none), both in order of time.

    Work is: an answer being made, a client at its shard (unless everything was journalled already), an
    engine starting or running requests. A warm server that waits is no work.
    """
    spans: list[tuple[float, float]] = [(s.start, s.end) for s in sessions if s.turns > s.reused]
    spans += [(start, start if ready is None else ready) for s in servers for start, ready in s.startups]
    working = telemetry.filter(
        (pl.col("running") > 0) | pl.col("state").is_in(["starting", "restarting", "stalled"])
    )
    columns = ["start", "end"]
    every = pl.concat(
        [
            answered.select(start="started_at", end=pl.col("started_at") + pl.col("latency_s")),
            working.select(start="t", end="t"),
            pl.DataFrame(spans, schema=dict.fromkeys(columns, pl.Float64), orient="row"),
        ]
    ).sort("start")
    merged = (
        every.with_columns(reach=pl.col("end").cum_max().shift(1))
        .with_columns(part=(pl.col("start") - pl.col("reach") > PAUSE_S).fill_null(False).cum_sum())
        .group_by("part")
        .agg(pl.col("start").min(), pl.col("end").max())
        .sort("start")
    )
    parts = [Part(start, end) for start, end in merged.select(columns).iter_rows()]
    starts = answered.get_column("started_at").sort()
    with_answers = [
        part
        for part in parts
        if starts.search_sorted(part.end, side="right") > starts.search_sorted(part.start, side="left")
    ]
    return with_answers, [part for part in parts if part not in with_answers]


def find_phases(
    answered: pl.DataFrame, parts: Sequence[Part], capacity: int, sessions: Sequence[Session]
) -> Phases:
    """Borders of ramp and drain. `capacity`: running requests of the whole fleet; 0 where it is unknown."""
    begin = (pl.col("started_at") + pl.col("queue_s")).alias("t")
    end = (pl.col("started_at") + pl.col("latency_s")).alias("t")
    running = (
        pl.concat([answered.select(begin, step=pl.lit(1)), answered.select(end, step=pl.lit(-1))])
        .sort("t", "step")
        .with_columns(running=pl.col("step").cum_sum())
    )
    ends = answered.select(end).get_column("t").sort()
    first_work, full, drain = [], [], []
    for part in parts:
        here = running.filter(pl.col("t").is_between(part.start, part.end))
        peak = here.get_column("running").max()
        most = int(peak) if isinstance(peak, int) else 0
        reached = here.filter(pl.col("running") >= FULL * (min(capacity, most) if capacity else most))
        first_work.append(here.item(0, "t") if here.height else part.end)
        full.append(reached.item(0, "t") if reached.height else part.end)
        clients = [s for s in sessions if s.turns > s.reused and s.start <= part.end and s.end >= part.start]
        if part is not parts[-1] and not all(client.finished for client in clients):
            drain.append(part.end)
            continue
        done = ends.filter(ends.is_between(part.start, part.end))
        slots = capacity or most
        drain.append(float(done[len(done) - slots]) if len(done) > slots else part.start)
    return Phases(tuple(first_work), tuple(full), tuple(drain))


def tokens_until(answered: pl.DataFrame, times: Sequence[float]) -> list[float]:
    """How many output tokens had been made at each of `times` (ascending); an answer's tokens are spread
    evenly over the time between its leaving the queue and its end."""
    start = pl.col("started_at") + pl.col("queue_s")
    end = pl.max_horizontal(pl.col("started_at") + pl.col("latency_s"), start + 1e-3)
    spread = answered.select(start=start, end=end, rate=pl.col("output_tokens") / (end - start))
    steps = (
        pl.concat([spread.select(t="start", step="rate"), spread.select(t="end", step=-pl.col("rate"))])
        .sort("t")
        .with_columns(rate=pl.col("step").cum_sum(), dt=pl.col("t").diff().fill_null(0.0))
        .with_columns(made=(pl.col("rate").shift(1).fill_null(0.0) * pl.col("dt")).cum_sum())
    )
    asked = pl.DataFrame({"at": times}, schema={"at": pl.Float64}).join_asof(
        steps.select("t", "rate", "made"), left_on="at", right_on="t"
    )
    made = (pl.col("made") + pl.col("rate") * (pl.col("at") - pl.col("t"))).fill_null(0.0).clip(0.0)
    return asked.select(made.alias("made")).get_column("made").to_list()


def with_part(answered: pl.DataFrame, parts: Sequence[Part]) -> pl.DataFrame:
    borders = pl.DataFrame(
        {"started_at": [part.start for part in parts], "part": range(len(parts))},
        schema={"started_at": pl.Float64, "part": pl.Int64},
    )
    return answered.sort("started_at").join_asof(borders, on="started_at")
