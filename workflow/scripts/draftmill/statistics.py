"""The throughput account of a run, computed from recorded facts.

Knows the generated rows, the servers' telemetry and published state, and the clients' events: files that the
run has left behind. Must never know a clock, a log's prose, HTTP or Snakemake: the same files give the same
figures on any day. Every definition stands in docs/statistics.md; names there and keys here are the same.

Times are unix seconds, durations seconds, rates tokens (or turns) per second.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import orjson
import polars as pl

from draftmill import verdicts
from draftmill.records import (
    GAUGES,
    TELEMETRY_SCHEMA,
    Server,
    Session,
    canonical_server,
    number,
    optional,
    read_servers,
    read_sessions,
    read_state,
    read_telemetry,
    read_turns,
    write_aside,
)

PAUSE_S = 30.0
"""A stretch without any work that is longer than this is a pause, and no part of the run."""
FULL = 0.9
"""The ramp ends when this share of the reachable running requests runs."""
AGREEMENT = 0.02
"""Server-side and client-side output tokens may differ by this share without a reason."""
SAMPLE_S = 5.0
"""A telemetry sample stands for the time up to the next one, but never for longer than this."""
BUCKET_WIDTHS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
MAX_BUCKETS = 1500


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

    def steady(self) -> list[tuple[float, float]]:
        """The stretches between ramp and drain, one per part at most."""
        windows = zip(self.full, self.drain, strict=True)
        return [(start, end) for start, end in windows if end > start]


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


def observed(telemetry: pl.DataFrame, parts: Sequence[Part]) -> pl.DataFrame:
    """Samples inside the parts, with `part` (index), `dt` (seconds that the sample stands for) and `restarted`
    (1 where `restarting` begins)."""
    if not parts:
        return telemetry.clear().with_columns(part=pl.lit(0), dt=pl.lit(0.0), restarted=pl.lit(0))
    borders = pl.DataFrame(
        {
            "t": [part.start for part in parts],
            "part": range(len(parts)),
            "part_end": [part.end for part in parts],
        },
        schema={"t": pl.Float64, "part": pl.Int64, "part_end": pl.Float64},
    )
    following = pl.col("t").shift(-1).over("server")
    restarting = pl.col("state") == "restarting"
    until = pl.min_horizontal(following.fill_null(pl.col("t") + 1.0), pl.col("part_end"))
    return (
        telemetry.sort("t")
        .join_asof(borders, on="t")
        .sort("server", "t")
        .filter(pl.col("t") <= pl.col("part_end"))
        .with_columns(
            pl.col(*GAUGES).forward_fill().over("server", "epoch"),
            dt=(until - pl.col("t")).clip(0.0, SAMPLE_S),
            restarted=(restarting & ~restarting.shift(1, fill_value=False).over("server")).cast(pl.Int32),
        )
    )


def telemetry_from_turns(answered: pl.DataFrame, parts: Sequence[Part], server: str) -> pl.DataFrame:
    """Samples for a server that recorded none (attached by URL, telemetry lost): one a second, with what ran
    of our own turns, and the most that ever ran as its capacity."""
    own = answered.filter(pl.col("server") == server)
    start, end = pl.col("started_at") + pl.col("queue_s"), pl.col("started_at") + pl.col("latency_s")
    running = (
        pl.concat([own.select(t=start, step=pl.lit(1)), own.select(t=end, step=pl.lit(-1))])
        .sort("t", "step")
        .select("t", running=pl.col("step").cum_sum().cast(pl.Float64))
    )
    seconds = [part.start + i for part in parts for i in range(int(part.seconds) + 1)]
    samples = pl.DataFrame({"t": seconds}, schema={"t": pl.Float64}).join_asof(running, on="t")
    samples = samples.filter(pl.col("running").is_not_null()).with_columns(
        server=pl.lit(server),
        state=pl.lit("ready"),
        epoch=pl.lit(1),
        capacity=pl.lit(running.get_column("running").max()),
    )
    return pl.concat([pl.DataFrame(schema=TELEMETRY_SCHEMA), samples], how="diagonal_relaxed").select(
        pl.col(name).cast(kind) for name, kind in TELEMETRY_SCHEMA.items()
    )


def server_output_tokens(telemetry: pl.DataFrame, parts: Sequence[Part]) -> dict[str, int]:
    """Output tokens by the servers' own counters, per server, inside the parts (and 10 s after each, since a
    counter moves after the answer).

    What a counter showed when it was first seen (an engine's warm-up, a server's earlier life) is not ours;
    a counter that falls, another epoch or a gap in the samples starts a new count.
    """
    wider = [Part(part.start, part.end + 10.0) for part in parts]
    counter = pl.coalesce("generation_tokens", "decode_tokens")
    new = (pl.col("epoch").diff() != 0) | (pl.col("t").diff() > PAUSE_S) | (pl.col("made").diff() < 0)
    counts = (
        observed(telemetry, wider)
        .with_columns(made=counter)
        .filter(pl.col("made").is_not_null())
        .with_columns(
            delta=pl.when(new.over("server"))
            .then(0.0)
            .otherwise(pl.col("made").diff().over("server"))
            .fill_null(0.0)
        )
        .group_by("server")
        .agg(pl.col("delta").sum())
    )
    return {server: int(delta) for server, delta in counts.select("server", "delta").iter_rows()}


def spread(values: pl.Series) -> dict[str, float | None]:
    """p5, p50, p95, p99, mean and max of a series; None for each where it is empty."""
    quantiles = {f"p{q}": values.quantile(q / 100, interpolation="linear") for q in (5, 50, 95, 99)}
    mean, largest = values.mean(), values.max()
    return {
        **quantiles,
        "mean": float(mean) if isinstance(mean, int | float) else None,
        "max": float(largest) if isinstance(largest, int | float) else None,
    }


def ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def iso(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def bucket_width_s(wall_s: float) -> float:
    return next((width for width in BUCKET_WIDTHS_S if wall_s / width <= MAX_BUCKETS), BUCKET_WIDTHS_S[-1])


def over_time(
    answered: pl.DataFrame, samples: pl.DataFrame, parts: Sequence[Part], phases: Phases, names: Sequence[str]
) -> pl.DataFrame:
    """One row per time bucket and server: the table results/throughput.parquet.

    `elapsed_s` counts from the run's start with the pauses cut out; rates are means over the bucket.
    """
    width = bucket_width_s(sum(part.seconds for part in parts))
    edges, elapsed = [], 0.0
    for index, part in enumerate(parts):
        steps = max(1, int(-(-part.seconds // width)))
        for step in range(steps):
            start = part.start + step * width
            end = min(start + width, part.end)
            edges.append((index, start, end, elapsed + step * width, phases.at(index, (start + end) / 2)))
        elapsed += part.seconds
    schema = {
        "part": pl.Int32,
        "t": pl.Float64,
        "end": pl.Float64,
        "elapsed_s": pl.Float64,
        "phase": pl.String,
    }
    buckets = pl.DataFrame(edges, schema=schema, orient="row")
    keys = buckets.select("t", bucket="t", until="end")
    began = (
        answered.with_columns(t=pl.col("started_at") + pl.col("queue_s")).sort("t").join_asof(keys, on="t")
    )
    reads = began.group_by("server", "bucket").agg(pl.col("prompt_tokens").sum())
    finished = (
        answered.with_columns(t=pl.col("started_at") + pl.col("latency_s")).sort("t").join_asof(keys, on="t")
    )
    ends = finished.group_by("server", "bucket").agg(turns=pl.len())
    ready = pl.col("state") == "ready"
    seen = (
        samples.sort("t")
        .join_asof(keys, on="t")
        .group_by("server", "bucket")
        .agg(
            pl.col("running", "queued", "kv_usage", "state_usage").filter(ready).mean(),
            pl.col("capacity").max(),
            ready=pl.col("dt").filter(ready).sum(),
            retracted=(pl.col("retracted").max() - pl.col("retracted").min()).clip(0.0),
            restarts=pl.col("restarted").sum(),
        )
    )
    starts, stops = buckets.get_column("t").to_list(), buckets.get_column("end").to_list()
    frames = []
    for name in names:
        own = answered.filter(pl.col("server") == name)
        made = zip(tokens_until(own, starts), tokens_until(own, stops), strict=True)
        tokens = pl.Series([after - before for before, after in made], dtype=pl.Float64)
        frames.append(buckets.with_columns(server=pl.lit(name), output_tokens=tokens))
    seconds = pl.max_horizontal(pl.col("end") - pl.col("t"), 1e-3)
    table = pl.concat(frames) if frames else buckets.with_columns(server=pl.lit(""), output_tokens=0.0)
    return (
        table.join(reads, left_on=["server", "t"], right_on=["server", "bucket"], how="left")
        .join(ends, left_on=["server", "t"], right_on=["server", "bucket"], how="left")
        .join(seen, left_on=["server", "t"], right_on=["server", "bucket"], how="left")
        .select(
            "server",
            "part",
            "t",
            "elapsed_s",
            (pl.col("end") - pl.col("t")).alias("seconds"),
            "phase",
            "output_tokens",
            pl.col("prompt_tokens").fill_null(0).cast(pl.Float64),
            (pl.col("output_tokens") / seconds).alias("output_tokens_per_s"),
            pl.col("turns").fill_null(0).cast(pl.Int32),
            "running",
            "queued",
            "capacity",
            "kv_usage",
            "state_usage",
            (pl.col("ready").fill_null(0.0) / seconds).clip(0.0, 1.0).alias("ready_share"),
            pl.col("retracted").fill_null(0.0),
            pl.col("restarts").fill_null(0).cast(pl.Int32),
        )
        .sort("t", "server")
    )


def time_shares(
    samples: pl.DataFrame, parts: Sequence[Part], phases: Phases, members: Sequence[Sequence[str]]
) -> dict[str, float]:
    """How the servers' time was spent; the shares add up to 1. `members`: the servers of each part.

    startup: until a server is first ready in a part; idle: ready, nothing runs; ramp, steady, drain: ready
    and running in the fleet's phase of that name; down: the rest (restarting, stalled, given up, unseen).
    """
    total = sum(part.seconds * len(names) for part, names in zip(parts, members, strict=True))
    ready = samples.filter(pl.col("state") == "ready")
    first = {
        (part, name): t
        for part, name, t in ready.group_by("part", "server").agg(pl.col("t").min()).iter_rows()
    }
    startup = sum(
        first.get((index, name), part.end) - part.start
        for index, (part, names) in enumerate(zip(parts, members, strict=True))
        for name in names
    )
    ready = ready.join(phases.table(), on="part")
    phase = (
        pl.when(pl.col("running").fill_null(0.0) <= 0)
        .then(pl.lit("idle"))
        .when(pl.col("t") >= pl.col("drain"))
        .then(pl.lit("drain"))
        .when(pl.col("t") < pl.col("full"))
        .then(pl.lit("ramp"))
        .otherwise(pl.lit("steady"))
    )
    spent = dict(ready.group_by(phase.alias("phase")).agg(pl.col("dt").sum()).iter_rows())
    shares = {"startup": ratio(startup, total)}
    shares |= {name: ratio(spent.get(name, 0.0), total) for name in ("ramp", "steady", "drain", "idle")}
    return shares | {"down": max(0.0, 1.0 - sum(shares.values())) if total else 0.0}


def utilisation(samples: pl.DataFrame) -> float | None:
    """Busy slot-seconds over available ones, while ready; None where no sample knows both."""
    known = samples.filter(
        (pl.col("state") == "ready") & (pl.col("capacity") > 0) & pl.col("running").is_not_null()
    )
    used, offered = known.select(
        (pl.col("running") * pl.col("dt")).sum().alias("used"),
        (pl.col("capacity") * pl.col("dt")).sum().alias("offered"),
    ).row(0)
    return used / offered if offered else None


def agreement(
    client: int,
    by_server: Mapping[str, int],
    expected: Iterable[str],
    sessions: Sequence[Session],
    resent: int,
    restarts: int,
) -> dict[str, object]:
    """Do the servers' counters and the dataset's ids tell the same number of output tokens?"""
    server = sum(by_server.values())
    missing = sorted(set(expected) - set(by_server))
    account: dict[str, object] = {
        "client_output_tokens": client,
        "server_output_tokens": server if by_server else None,
    }
    if not by_server:
        reason = "no server counters were recorded (an engine without metrics, or its telemetry was removed)"
        return account | {"difference": None, "agrees": None, "reason": reason}
    difference = ratio(server - client, client)
    account |= {"difference": difference, "agrees": abs(difference) <= AGREEMENT}
    if abs(difference) <= AGREEMENT:
        return account | {"reason": None}
    reasons = []
    told = sum(session.output_tokens for session in sessions)
    if missing:
        reasons.append(f"no counters of {', '.join(missing)}")
    if server > client:
        if told > client * (1 + AGREEMENT):
            reasons.append(
                f"clients received {told - client:,} tokens for turns that are not in this dataset"
            )
        if resent:
            reasons.append(
                f"{resent:,} turns were sent again, and their first attempts count at the server only"
            )
        if not reasons:
            reasons.append("answers that were still being made at an interruption count at the server only")
    elif restarts:
        reasons.append(f"{restarts} engine restarts lost what their counters gained after the last sample")
    elif not reasons:
        reasons.append("turns were answered while no telemetry was recorded")
    return account | {"reason": "; ".join(reasons)}


def server_accounts(
    names: Sequence[str],
    published: Mapping[str, Server],
    answered: pl.DataFrame,
    samples: pl.DataFrame,
    restarts: Mapping[str, int],
    counters: Mapping[str, int],
    shares: Mapping[str, Mapping[str, float]],
    wall: Mapping[str, float],
) -> list[dict[str, object]]:
    accounts: list[dict[str, object]] = []
    for name in names:
        state = published.get(name)
        turns = answered.filter(pl.col("server") == name)
        seen = samples.filter((pl.col("server") == name) & (pl.col("state") == "ready"))
        capacity = seen.get_column("capacity").drop_nulls()
        engine, _, version = (turns.item(0, "engine") if turns.height else "").partition(" ")
        tokens = int(turns.get_column("output_tokens").sum())
        accounts.append(
            {
                "server": name,
                "host": state.host if state else None,
                "slot": state.slot if state else None,
                "engine": state.engine if state else engine,
                "version": state.version if state else version,
                "flags": list(state.flags) if state else [],
                "gpus": list(state.gpus) if state else [],
                "gpu_name": state.gpu_name if state else None,
                "effective_capacity": int(capacity[-1])
                if len(capacity)
                else (state.capacity if state else None),
                "restarts": restarts.get(name, 0),
                "turns": turns.height,
                "prompt_tokens": int(turns.get_column("prompt_tokens").sum()),
                "output_tokens": tokens,
                "output_tokens_by_its_counter": counters.get(name),
                "wall_s": wall[name],
                "output_tokens_per_s": ratio(tokens, wall[name]),
                "utilisation": utilisation(seen),
                "shares": dict(shares[name]),
                "kv_usage": spread(seen.get_column("kv_usage").drop_nulls()),
                "state_usage": spread(seen.get_column("state_usage").drop_nulls()),
                "retracted": int(seen.select((pl.col("retracted").diff().clip(0.0)).sum()).item()),
            }
        )
    return accounts


def shard_accounts(answered: pl.DataFrame) -> list[dict[str, object]]:
    """Per shard: turns, tokens, and the time from the first turn's start to the last one's end in each part."""
    end = pl.col("started_at") + pl.col("latency_s")
    by_part = answered.group_by("shard", "part").agg(
        turns=pl.len(),
        output_tokens=pl.col("output_tokens").sum(),
        started_at=pl.col("started_at").min(),
        ended_at=end.max(),
        wall_s=end.max() - pl.col("started_at").min(),
    )
    shards = by_part.group_by("shard").agg(
        pl.col("turns", "output_tokens", "wall_s").sum(), pl.col("started_at").min(), pl.col("ended_at").max()
    )
    rate = pl.when(pl.col("wall_s") > 0).then(pl.col("output_tokens") / pl.col("wall_s")).otherwise(0.0)
    order = pl.col("shard").str.extract(r"^(\d+)").cast(pl.Int64)
    return shards.with_columns(output_tokens_per_s=rate).sort(order, "shard").to_dicts()


def with_part(answered: pl.DataFrame, parts: Sequence[Part]) -> pl.DataFrame:
    borders = pl.DataFrame(
        {"started_at": [part.start for part in parts], "part": range(len(parts))},
        schema={"started_at": pl.Float64, "part": pl.Int64},
    )
    return answered.sort("started_at").join_asof(borders, on="started_at")


def account(
    turns: pl.DataFrame,
    telemetry: pl.DataFrame,
    servers: Sequence[Server],
    sessions: Sequence[Session],
    operation: Mapping[str, object],
) -> tuple[dict[str, object], pl.DataFrame]:
    """(the content of throughput.json, the table of throughput.parquet).

    `turns` as of `read_turns`, `telemetry` as of `read_telemetry`; `operation`: that block of the config.
    """
    published = {server.server: server for server in servers}
    names = {name: canonical_server(name, servers) for name in turns.get_column("server").unique()}
    turns = turns.with_columns(pl.col("server").replace(names))
    answered = turns.filter(pl.col("outcome") == "answered")
    parts, left_out = find_parts(answered, telemetry, servers, sessions)
    answered = with_part(answered, parts)
    mute = set(answered.get_column("server").unique()) - set(telemetry.get_column("server").unique())
    recorded = [telemetry, *(telemetry_from_turns(answered, parts, name) for name in sorted(mute))]
    samples = observed(pl.concat(recorded).sort("server", "t"), parts)
    live = samples.filter(~pl.col("state").is_in(["stopped", "given_up"]))
    pairs = {
        *live.select("part", "server").unique().iter_rows(),
        *answered.select("part", "server").unique().iter_rows(),
    }
    members = [sorted(name for part, name in pairs if part == index) for index in range(len(parts))]
    everyone = sorted({name for part_names in members for name in part_names})
    devices = {name: published[name].devices if name in published else 1 for name in everyone}
    gpus = sum(len(published[name].gpus) for name in everyone if name in published)

    by_server = samples.filter(pl.col("state") == "ready").group_by("server").agg(pl.col("capacity").max())
    capacity = int(by_server.get_column("capacity").sum())
    phases = find_phases(answered, parts, capacity, sessions)
    steady = phases.steady()
    steady_s = sum(end - start for start, end in steady)
    edges = [t for window in steady for t in window]
    made = tokens_until(answered, edges)
    steady_tokens = sum(made[1::2]) - sum(made[::2])
    table = over_time(answered, samples, parts, phases, everyone)
    width = bucket_width_s(sum(part.seconds for part in parts))
    inside = table.filter((pl.col("phase") == "steady") & (pl.col("seconds") >= 0.99 * width))
    steady_rates = (
        inside.group_by("t").agg(pl.col("output_tokens_per_s").sum()).get_column("output_tokens_per_s")
    )

    wall_s = sum(part.seconds for part in parts)
    device_s = sum(
        part.seconds * devices[name] for part, who in zip(parts, members, strict=True) for name in who
    )
    wall = {
        name: sum(part.seconds for part, who in zip(parts, members, strict=True) if name in who)
        for name in everyone
    }
    shares = {
        name: time_shares(
            samples.filter(pl.col("server") == name),
            parts,
            phases,
            [[name] if name in who else [] for who in members],
        )
        for name in everyone
    }
    output_tokens = int(answered.get_column("output_tokens").sum())
    prompt_tokens = int(answered.get_column("prompt_tokens").sum())
    resent = int((turns.get_column("attempts") - 1).clip(0).sum())
    seen = dict(samples.group_by("server").agg(pl.col("restarted").sum()).iter_rows())
    restarts = {
        name: max(seen.get(name, 0), published[name].restarts if name in published else 0)
        for name in everyone
    }
    counters = server_output_tokens(
        telemetry.filter(pl.col("generation_tokens").is_not_null() | pl.col("decode_tokens").is_not_null()),
        parts,
    )
    ours = [s for s in sessions if any(s.start <= part.end and s.end >= part.start for part in parts)]
    gpu_hours = device_s / 3600
    price = optional(operation, "price_per_gpu_hour")
    millions = output_tokens / 1e6
    result: dict[str, object] = {
        "turns": answered.height,
        "outcomes": dict(turns.group_by("outcome").len().sort("outcome").iter_rows()),
        "finish_reasons": dict(answered.group_by("finish_reason").len().sort("finish_reason").iter_rows()),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "output_tokens_per_s": ratio(output_tokens, wall_s),
        "output_tokens_per_s_per_gpu": ratio(output_tokens, device_s),
        "prompt_tokens_per_s": ratio(prompt_tokens, wall_s),
        "turns_per_s": ratio(answered.height, wall_s),
        "steady_state": {
            "seconds": steady_s,
            "output_tokens_per_s": steady_tokens / steady_s if steady_s > 0 else None,
            "output_tokens_per_s_per_gpu": ratio(steady_tokens, steady_s) / sum(devices.values())
            if steady_s > 0
            else None,
            "over_time": spread(steady_rates),
            "reason": None
            if steady_s > 0
            else "the run was too short: it never held more turns than the fleet has slots",
        },
        "gpus": gpus,
        "devices": sum(devices.values()),
        "device": "gpu" if gpus else "cpu server",
        "gpu_hours": gpu_hours,
        "gpu_hours_per_million_output_tokens": gpu_hours / millions if millions else None,
        "price_per_gpu_hour": price,
        "cost": price * gpu_hours if price is not None else None,
        "cost_per_million_output_tokens": price * gpu_hours / millions
        if price is not None and millions
        else None,
        "latency_s": spread(answered.get_column("latency_s")),
        "queue_s": spread(answered.get_column("queue_s")),
        "tokens_per_answer": spread(answered.get_column("output_tokens")),
        "tokens_per_prompt": spread(answered.get_column("prompt_tokens")),
        "cache_hit_rate": ratio(int(answered.get_column("cached_tokens").sum()), prompt_tokens),
        "capacity": capacity,
        "utilisation": utilisation(samples),
        "utilisation_before_drain": utilisation(
            samples.join(phases.table(), on="part").filter(pl.col("t") < pl.col("drain"))
        ),
        "shares": time_shares(samples, parts, phases, members),
        "restarts": sum(restarts.values()),
        "retries": resent,
        "requeues": sum(session.requeued for session in ours),
        "token_agreement": agreement(
            output_tokens,
            counters,
            everyone,
            ours,
            resent,
            sum(restarts.values()),
        ),
        "started_at": iso(parts[0].start) if parts else None,
        "ended_at": iso(parts[-1].end) if parts else None,
        "parts": [
            {"from": iso(part.start), "to": iso(part.end), "wall_s": part.seconds, "servers": who}
            for part, who in zip(parts, members, strict=True)
        ],
        "pauses": [
            {"from": iso(before.end), "to": iso(after.start), "seconds": after.start - before.end}
            for before, after in pairwise(parts)
        ],
        "left_out": [
            {
                "from": iso(part.start),
                "to": iso(part.end),
                "seconds": part.seconds,
                "why": "no answer of this dataset was made in it",
            }
            for part in left_out
        ],
        "servers": server_accounts(everyone, published, answered, samples, restarts, counters, shares, wall),
        "shards": shard_accounts(answered),
    }
    return result, table


def bounds(
    fleet: Path, servers: Sequence[Server], table: pl.DataFrame, reference: object
) -> dict[str, object]:
    """`bound_by`, what bound the run, and `bound_by_server`; both empty where no server recorded telemetry."""
    parts = (
        table.group_by("part").agg(pl.col("t").min(), end=(pl.col("t") + pl.col("seconds")).max()).sort("t")
    )
    stretches = [(start, end) for start, end in parts.select("t", "end").iter_rows()]
    found = verdicts.verdicts(fleet, servers, stretches, reference)
    chosen = verdicts.of_the_run(found)
    return {
        "bound_by": verdicts.as_record(*chosen) if chosen else None,
        "bound_by_server": {name: verdicts.as_record(name, diagnosis) for name, diagnosis in found.items()},
    }


def throughput(
    generated: Sequence[Path], fleet: Path, config: Mapping[str, object], json_out: Path, parquet_out: Path
) -> None:
    """Writes throughput.json and throughput.parquet, each aside and renamed.

    `generated`: the shards' generated/*.parquet; `fleet`: results/fleet; `config`: the resolved config.
    """
    block = config.get("operation")
    operation: Mapping[str, object] = block if isinstance(block, Mapping) else {}
    servers = read_servers(fleet)
    telemetry = read_telemetry(fleet)
    result, table = account(read_turns(generated), telemetry, servers, read_sessions(fleet), operation)
    result |= bounds(fleet, servers, table, operation.get("reference"))
    write_aside(
        json_out, orjson.dumps(rounded(result), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    aside = parquet_out.with_name(parquet_out.name + ".part")
    table.write_parquet(aside)
    aside.replace(parquet_out)


def rounded(value: object) -> object:
    """The same with floats at seven digits (unix times to the millisecond), for people who read the file."""
    if isinstance(value, float):
        return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def summary_lines(results: Path) -> list[str]:
    """The three closing lines of a run: where dataset, throughput and report are, and how fast it was."""
    rates = read_state(results / "throughput.json")
    rows = read_state(results / "validation.json")
    steady = rates.get("steady_state")
    held = optional(steady, "output_tokens_per_s") if isinstance(steady, dict) else None
    accepted, rejected = int(number(rows, "accepted")), int(number(rows, "rejected"))
    device = "GPU" if rates.get("device") == "gpu" else "CPU server"
    speed = f"{number(rates, 'output_tokens_per_s'):,.0f} tok/s over {duration(number(rates, 'wall_s'))}"
    if held is not None:
        speed += f", {held:,.0f} in steady state"
    tokens = f"{int(number(rates, 'output_tokens')):,} output tokens"
    each = f"{number(rates, 'output_tokens_per_s_per_gpu'):,.0f} per {device}"
    dataset = results / "drafter" / "train.parquet"
    return [
        f"dataset     {dataset} and train.jsonl: {accepted:,} rows accepted, {rejected:,} rejected",
        f"throughput  {results / 'throughput.json'}: {tokens}, {speed}, {each}",
        "report      report.html",
    ]


def duration(seconds: float) -> str:
    """As a person says it: 42 s, 3 min 20 s, 5 h 12 min, 2 d 14 h."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    for name, size, below, smaller in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name} {rest} {below}" if rest else f"{whole // size} {name}"
    return f"{whole} s"
