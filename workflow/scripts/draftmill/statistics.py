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
from draftmill.aside import replacing, write_aside
from draftmill.errors import UserError
from draftmill.phases import Part, Phases, find_parts, find_phases, tokens_until, with_part
from draftmill.records import (
    GAUGES,
    PAUSE_S,
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
)

AGREEMENT = 0.02
"""Server-side and client-side output tokens may differ by this share without a reason."""
SAMPLE_S = 5.0
"""A telemetry sample stands for the time up to the next one, but never for longer than this."""
BUCKET_WIDTHS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
MAX_BUCKETS = 1500


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
    counted = telemetry.filter(counter.is_not_null())
    counts = (
        observed(counted, wider)
        .with_columns(made=counter)
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


@dataclass(frozen=True)
class Fleet:
    """Which servers lived in which part of the run, and how many devices each of them holds."""

    parts: Sequence[Part]
    members: Sequence[Sequence[str]]
    devices: Mapping[str, int]

    @property
    def servers(self) -> list[str]:
        return sorted(self.devices)

    @property
    def device_s(self) -> float:
        """GPU time: every part's length × the devices of its servers."""
        return sum(part.seconds * self.devices_in(index) for index, part in enumerate(self.parts))

    def devices_in(self, part: int) -> int:
        return sum(self.devices[name] for name in self.members[part])

    def wall_s(self, server: str) -> float:
        return sum(part.seconds for part, who in zip(self.parts, self.members, strict=True) if server in who)

    def of(self, server: str) -> list[list[str]]:
        """The members of each part, this server alone counted."""
        return [[server] if server in who else [] for who in self.members]


def find_fleet(
    answered: pl.DataFrame, samples: pl.DataFrame, parts: Sequence[Part], published: Mapping[str, Server]
) -> Fleet:
    """A server belongs to a part in which it answered or was seen alive."""
    live = samples.filter(~pl.col("state").is_in(["stopped", "given_up"]))
    pairs = {pair for rows in (live, answered) for pair in rows.select("part", "server").unique().iter_rows()}
    members = [sorted(name for part, name in pairs if part == index) for index in range(len(parts))]
    devices = {name: published[name].devices if name in published else 1 for _, name in pairs}
    return Fleet(parts, members, devices)


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


def server_account(
    name: str,
    state: Server | None,
    answered: pl.DataFrame,
    samples: pl.DataFrame,
    fleet: Fleet,
    phases: Phases,
) -> dict[str, object]:
    """One server's figures. `state`: what it published, if it did."""
    turns = answered.filter(pl.col("server") == name)
    own = samples.filter(pl.col("server") == name)
    ready = own.filter(pl.col("state") == "ready")
    capacity = ready.get_column("capacity").drop_nulls()
    engine, _, version = (turns.item(0, "engine") if turns.height else "").partition(" ")
    tokens, wall_s = int(turns.get_column("output_tokens").sum()), fleet.wall_s(name)
    return {
        "server": name,
        "host": state.host if state else None,
        "slot": state.slot if state else None,
        "engine": (state.engine if state else "") or engine,
        "version": (state.version if state else "") or version,
        "flags": list(state.flags) if state else [],
        "gpus": list(state.gpus) if state else [],
        "gpu_name": state.gpu_name if state else None,
        "effective_capacity": int(capacity[-1]) if len(capacity) else (state.capacity if state else None),
        "turns": turns.height,
        "prompt_tokens": int(turns.get_column("prompt_tokens").sum()),
        "output_tokens": tokens,
        "wall_s": wall_s,
        "output_tokens_per_s": ratio(tokens, wall_s),
        "utilisation": utilisation(ready),
        "shares": time_shares(own, fleet.parts, phases, fleet.of(name)),
        "kv_usage": spread(ready.get_column("kv_usage").drop_nulls()),
        "state_usage": spread(ready.get_column("state_usage").drop_nulls()),
        "retracted": int(ready.select((pl.col("retracted").diff().clip(0.0)).sum()).item()),
    }


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
    fleet = find_fleet(answered, samples, parts, published)
    by_server = samples.filter(pl.col("state") == "ready").group_by("server").agg(pl.col("capacity").max())
    capacity = int(by_server.get_column("capacity").sum())
    phases = find_phases(answered, parts, capacity, sessions)
    table = over_time(answered, samples, parts, phases, fleet.servers)

    gpus = len(
        {(published[n].host, gpu) for n in fleet.servers if n in published for gpu in published[n].gpus}
    )
    ours = [s for s in sessions if any(s.start <= part.end and s.end >= part.start for part in parts)]
    resent = int((turns.get_column("attempts") - 1).clip(0).sum())
    seen = dict(samples.group_by("server").agg(pl.col("restarted").sum()).iter_rows())
    restarts = {
        name: max(seen.get(name, 0), published[name].restarts if name in published else 0)
        for name in fleet.servers
    }
    counters = server_output_tokens(telemetry, parts)
    output_tokens = int(answered.get_column("output_tokens").sum())
    before_drain = samples.join(phases.table(), on="part").filter(pl.col("t") < pl.col("drain"))
    result: dict[str, object] = {
        "turns": answered.height,
        "outcomes": dict(turns.group_by("outcome").len().sort("outcome").iter_rows()),
        "finish_reasons": dict(answered.group_by("finish_reason").len().sort("finish_reason").iter_rows()),
        **rates(answered, fleet),
        "steady_state": steady_state(answered, fleet, phases, table),
        "gpus": gpus,
        "devices": gpus or len(fleet.servers),
        "device": "gpu" if gpus else "cpu server",
        **cost(fleet.device_s / 3600, output_tokens, optional(operation, "price_per_gpu_hour")),
        "latency_s": spread(answered.get_column("latency_s")),
        "queue_s": spread(answered.get_column("queue_s")),
        "tokens_per_answer": spread(answered.get_column("output_tokens")),
        "tokens_per_prompt": spread(answered.get_column("prompt_tokens")),
        "capacity": capacity,
        "utilisation": utilisation(samples),
        "utilisation_before_drain": utilisation(before_drain),
        "shares": time_shares(samples, parts, phases, fleet.members),
        "restarts": sum(restarts.values()),
        "retries": resent,
        "requeues": sum(session.requeued for session in ours),
        "token_agreement": agreement(
            output_tokens, counters, fleet.servers, ours, resent, sum(restarts.values())
        ),
        **calendar(fleet, left_out),
        "servers": [
            server_account(name, published.get(name), answered, samples, fleet, phases)
            | {"restarts": restarts[name], "output_tokens_by_its_counter": counters.get(name)}
            for name in fleet.servers
        ],
        "shards": shard_accounts(answered),
    }
    return result, table


def rates(answered: pl.DataFrame, fleet: Fleet) -> dict[str, object]:
    """Totals and what they are per second, over all parts."""
    output, prompt, cached = (
        int(answered.get_column(name).sum()) for name in ("output_tokens", "prompt_tokens", "cached_tokens")
    )
    wall_s = sum(part.seconds for part in fleet.parts)
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "wall_s": wall_s,
        "output_tokens_per_s": ratio(output, wall_s),
        "output_tokens_per_s_per_gpu": ratio(output, fleet.device_s),
        "prompt_tokens_per_s": ratio(prompt, wall_s),
        "turns_per_s": ratio(answered.height, wall_s),
        "cache_hit_rate": ratio(cached, prompt),
    }


def steady_state(
    answered: pl.DataFrame, fleet: Fleet, phases: Phases, table: pl.DataFrame
) -> dict[str, object]:
    """The rate between ramp and drain, and how it spreads over the whole buckets in there."""
    windows = phases.steady()
    seconds = sum(end - start for _, start, end in windows)
    made = tokens_until(answered, [t for _, start, end in windows for t in (start, end)])
    tokens = sum(made[1::2]) - sum(made[::2])
    device_s = sum((end - start) * fleet.devices_in(part) for part, start, end in windows)
    width = bucket_width_s(sum(part.seconds for part in fleet.parts))
    whole = table.filter((pl.col("phase") == "steady") & (pl.col("seconds") >= 0.99 * width))
    by_bucket = whole.group_by("t").agg(pl.col("output_tokens_per_s").sum())
    too_short = "the run was too short: it never held more turns than the fleet has slots"
    return {
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        "output_tokens_per_s_per_gpu": tokens / device_s if seconds else None,
        "over_time": spread(by_bucket.get_column("output_tokens_per_s")),
        "reason": None if seconds else too_short,
    }


def cost(gpu_hours: float, output_tokens: int, price: float | None) -> dict[str, object]:
    """GPU-hours, and money where a price of one is known."""
    per_million = gpu_hours / (output_tokens / 1e6) if output_tokens else None
    return {
        "gpu_hours": gpu_hours,
        "gpu_hours_per_million_output_tokens": per_million,
        "price_per_gpu_hour": price,
        "cost": None if price is None else price * gpu_hours,
        "cost_per_million_output_tokens": None
        if price is None or per_million is None
        else price * per_million,
    }


def calendar(fleet: Fleet, left_out: Sequence[Part]) -> dict[str, object]:
    """Parts, the pauses between them, and stretches of other work, with their times."""
    parts = fleet.parts
    return {
        "started_at": iso(parts[0].start) if parts else None,
        "ended_at": iso(parts[-1].end) if parts else None,
        "parts": [
            {"from": iso(part.start), "to": iso(part.end), "wall_s": part.seconds, "servers": list(who)}
            for part, who in zip(parts, fleet.members, strict=True)
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
    }


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
    with replacing(parquet_out) as aside:
        table.write_parquet(aside)


def rounded(value: object) -> object:
    """The same with floats at seven digits (unix times to the millisecond), for people who read the file."""
    if isinstance(value, float):
        return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def summary_lines(results: Path) -> list[str]:
    """The three closing lines of a run: where dataset, throughput and report are, and how fast it was."""
    if not (results / "throughput.json").exists():
        raise UserError(
            f"{results} holds no finished run; run snakemake first, or name its folder with --results."
        )
    rates = read_state(results / "throughput.json")
    rows = read_state(results / "validation.json")
    steady = rates.get("steady_state")
    held = optional(steady, "output_tokens_per_s") if isinstance(steady, dict) else None
    accepted, rejected = int(number(rows, "accepted")), int(number(rows, "rejected"))
    reasons = rows.get("reasons")
    most = max(reasons, key=lambda name: reasons[name]) if isinstance(reasons, dict) and reasons else ""
    why = f", most for {most}" if most else ""
    device = "GPU" if rates.get("device") == "gpu" else "CPU server"
    speed = f"{number(rates, 'output_tokens_per_s'):,.0f} tok/s over {duration(number(rates, 'wall_s'))}"
    if held is not None:
        speed += f", {held:,.0f} in steady state"
    tokens = f"{int(number(rates, 'output_tokens')):,} output tokens"
    each = f"{number(rates, 'output_tokens_per_s_per_gpu'):,.0f} per {device}"
    dataset = results / "drafter" / "train.parquet"
    report = results.parent / "report.html"
    return [
        f"dataset     {dataset} and train.jsonl: {accepted:,} rows accepted, {rejected:,} rejected{why}",
        f"throughput  {results / 'throughput.json'}: {tokens}, {speed}, {each}",
        f"report      {report if report.exists() else 'not written yet; run snakemake --report report.html'}",
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
