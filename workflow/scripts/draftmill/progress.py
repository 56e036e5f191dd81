"""How a run stands: servers, shards, rate, time left; as one calm line, and as Prometheus text.

Knows client events, telemetry samples and published states, already read, and the time it is told. Must never read
a file, a clock or a server (status.py does).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev

from draftmill.bottleneck import diagnose
from draftmill.errors import UserError
from draftmill.plots import number as said
from draftmill.records import PAUSE_S, Server, number, optional, text
from draftmill.telemetry import Sample
from draftmill.verdicts import engine_of

RECENT_S = 60.0
"""`now` in a rate is the mean over so many seconds."""
WINDOWS = 20
"""Windows of `RECENT_S` that the time left is estimated from."""
SILENT_S = 15.0
"""A server that should write telemetry and has not for so long shows no sign of life."""
ENDED = ("stopped", "given_up")

Event = Mapping[str, object]


@dataclass(frozen=True)
class ServerNow:
    """One server. tok_s: output tokens per second over the last minute; None where nothing is known."""

    server: str
    state: str
    since: float | None
    restarts: int
    running: int | None
    queued: int | None
    capacity: int | None
    kv_usage: float | None
    state_usage: float | None
    tok_s: float | None
    devices: int
    gpus: int
    error: str | None
    log: str | None
    binds: str | None


@dataclass(frozen=True)
class ShardNow:
    """One shard. state: waiting (no client yet), running, stopped (its client ended early) or done."""

    shard: str
    state: str
    turns: int | None
    done: int
    in_flight: int
    failed: int
    tok_s: float | None
    left_s: float | None


@dataclass(frozen=True)
class Left:
    """Seconds to the end: as it looks, and the range it may lie in."""

    seconds: float
    soonest: float
    latest: float


@dataclass(frozen=True)
class Progress:
    """A run at one moment `t` (unix s). Rates are output tokens per second of all servers.

    output_tokens: of all parts so far, as the clients counted them.
    """

    t: float
    turns: int
    done: int
    output_tokens: int
    tok_s: float | None
    mean_tok_s: float | None
    running: int
    queued: int
    failed: int
    requeued: int
    left: Left | None
    binds: str | None
    rejects: Mapping[str, int]
    servers: tuple[ServerNow, ...]
    shards: tuple[ShardNow, ...]

    @property
    def devices(self) -> int:
        """GPUs (or CPU servers) of the servers that are up."""
        return sum(server.devices for server in self.servers if server.state not in (*ENDED, "silent"))


def server_now(server: Server, state: Mapping[str, object], samples: Sequence[Sample], t: float) -> ServerNow:
    """`state`: the published state file; `samples`: the latest, in order of time."""
    last = samples[-1] if samples else None
    standing = text(state, "state")
    if standing not in ENDED and last is not None and t - last.t > SILENT_S:
        standing = "silent"
    live = last if last is not None and standing not in (*ENDED, "silent") else None
    recent = [sample for sample in samples if sample.t >= t - RECENT_S]
    return ServerNow(
        server=server.server,
        state=standing,
        since=optional(state, "since") if standing != "silent" else (last.t if last else None),
        restarts=server.restarts,
        running=live.running if live else None,
        queued=live.queued if live else None,
        capacity=(live.capacity if live else None) or server.capacity or None,
        kv_usage=live.kv_usage if live else None,
        state_usage=live.state_usage if live else None,
        tok_s=token_rate(recent) if live else None,
        devices=server.devices,
        gpus=len(server.gpus),
        error=text(state, "error") or None,
        log=text(state, "log") or None,
        binds=binding(recent, server) if live and standing == "ready" else None,
    )


def token_rate(samples: Sequence[Sample]) -> float | None:
    """Output tokens per second of one server by its own counters, in its latest epoch; None where they do not tell.

    `generation_tokens` moves when an answer ends, so while it stands still under running requests it tells nothing.
    """
    latest = [sample for sample in samples if sample.epoch == samples[-1].epoch]
    for name in ("decode_tokens", "generation_tokens"):
        points = [(sample.t, getattr(sample, name)) for sample in latest if getattr(sample, name) is not None]
        if len(points) > 1 and points[-1][0] > points[0][0]:
            made = points[-1][1] - points[0][1]
            if made > 0 or (made == 0 and not latest[-1].running):
                return float(made) / (points[-1][0] - points[0][0])
    return None


def binding(samples: Sequence[Sample], server: Server) -> str | None:
    """What binds a server at present, in a word."""
    try:
        return str(diagnose(samples, engine_of(server, None)).verdict)
    except UserError:
        return None


def shard_now(
    shard: str, sessions: Sequence[Sequence[Event]], *, finished: bool, t: float, patience_s: float
) -> ShardNow:
    """`sessions`: the events of each client that worked on the shard, each in order of time; `finished`: its file is
    there; a client that is silent for `patience_s` has ended.
    """
    if not sessions:
        return ShardNow(shard, "done" if finished else "waiting", None, 0, 0, 0, None, None)
    events = max(sessions, key=lambda session: number(session[-1], "t"))
    first, last = events[0], events[-1]
    turns, reused = int(number(first, "turns")), int(number(first, "reused"))
    done = max(int(max(number(event, "done") for event in events)), reused)
    took = number(last, "t") - number(first, "t")
    made = done - reused
    ended = any(event.get("event") == "finished" for event in events) or t - number(last, "t") > patience_s
    state = "done" if finished or done >= turns else "stopped" if ended else "running"
    return ShardNow(
        shard=shard,
        state=state,
        turns=turns,
        done=turns if finished else done,
        in_flight=int(number(last, "in_flight")) if state == "running" else 0,
        failed=int(number(last, "failed")),
        tok_s=number(last, "output_tokens") / took if took > 0 and made else None,
        left_s=(turns - done) * took / made if state == "running" and made and took > 0 else None,
    )


def latest_part(sessions: Iterable[Sequence[Event]]) -> list[Sequence[Event]]:
    """The sessions of the run's present part: all since the last pause."""
    ordered = sorted(sessions, key=lambda events: -number(events[-1], "t"))
    part: list[Sequence[Event]] = []
    start = float("inf")
    for events in ordered:
        if part and start - number(events[-1], "t") > PAUSE_S:
            break
        part.append(events)
        start = min(start, number(events[0], "t"))
    return part


def value_at(events: Sequence[Event], name: str, t: float) -> float:
    """What a counter of a client's events showed at `t`; 0 before its first event."""
    value = 0.0
    for event in events:
        if number(event, "t") > t:
            break
        value = max(value, number(event, name))
    return value


def finished_turns(events: Sequence[Event], t: float) -> float:
    """Turns that a client had settled itself at `t`, without those it found in the journal."""
    return max(0.0, value_at(events, "done", t) - number(events[0], "reused"))


def time_left(part: Sequence[Sequence[Event]], left: int, t: float) -> Left | None:
    """When `left` turns will be done, from the last windows of the present part; None while too little is known."""
    if left <= 0:
        return Left(0.0, 0.0, 0.0)
    start = min((number(events[0], "t") for events in part), default=t)
    edges = [t - step * RECENT_S for step in range(WINDOWS + 1) if t - step * RECENT_S >= start]
    totals = [sum(finished_turns(events, edge) for events in part) for edge in edges]
    rates = [(later - earlier) / RECENT_S for later, earlier in pairwise(totals)]
    finished = totals[0] - totals[-1] if totals else 0.0
    if len(rates) < 3 or finished < 5:
        return None
    rate = fmean(rates)
    by_window = stdev(rates) / (rate * len(rates) ** 0.5)
    doubt = min(0.9, 2 * max(by_window, finished**-0.5))
    return Left(left / rate, left / rate / (1 + doubt), left / rate / (1 - doubt))


def summary(
    t: float,
    turns: int | None,
    sessions: Sequence[Sequence[Event]],
    servers: Sequence[ServerNow],
    shards: Sequence[ShardNow],
    rejects: Mapping[str, int],
) -> Progress:
    """Everything together. `turns`: of the whole run (results/prompts.json); None before the prompts are read."""
    planned = turns if turns is not None else sum(shard.turns or 0 for shard in shards)
    done = min(planned, sum(shard.done for shard in shards)) if planned else 0
    part = latest_part(sessions)
    start = min((number(events[0], "t") for events in part), default=t)
    end = (
        t
        if any(shard.state == "running" for shard in shards)
        else max((number(e[-1], "t") for e in part), default=t)
    )
    tokens = sum(value_at(events, "output_tokens", t) for events in part)
    if not any(finished_turns(events, t) for events in part):  # too early to say
        servers = [replace(server, binds=None) for server in servers]
    rates = [server.tok_s for server in servers if server.tok_s is not None]
    verdicts = [server.binds for server in servers if server.binds]
    return Progress(
        t=t,
        turns=planned,
        done=done,
        output_tokens=int(sum(number(events[-1], "output_tokens") for events in sessions)),
        tok_s=sum(rates) if rates else None,
        mean_tok_s=tokens / (end - start) if tokens and end > start else None,
        running=sum(server.running or 0 for server in servers),
        queued=sum(server.queued or 0 for server in servers),
        failed=sum(int(value_at(events, "failed", t)) for events in part),
        requeued=sum(int(value_at(events, "requeued", t)) for events in part),
        left=time_left(part, planned - done, t) if planned else None,
        binds=max(verdicts, key=verdicts.count) if verdicts else None,
        rejects=rejects,
        servers=tuple(servers),
        shards=tuple(shards),
    )


def line(progress: Progress) -> str:
    """The one line that Snakemake's own output gets every half minute."""
    share = f" ({100 * progress.done / progress.turns:.3g} %)" if progress.turns else ""
    parts = [f"{progress.done:,} of {progress.turns:,} turns{share}"]
    rates = []
    if progress.tok_s is not None:
        rates.append(f"{said(progress.tok_s)} tok/s now")
        if progress.devices > 1:
            kind = "GPU" if any(server.gpus for server in progress.servers) else "server"
            rates.append(f"{said(progress.tok_s / progress.devices)} per {kind}")
    if progress.mean_tok_s is not None:
        rates.append(f"{said(progress.mean_tok_s)}{'' if rates else ' tok/s'} since the start")
    parts.append(", ".join(rates) or "no rate yet")
    if progress.running or progress.queued or progress.done < progress.turns:
        parts.append(f"{progress.running:,} running, {progress.queued:,} queued")
    trouble = [
        f"{progress.failed:,} failed tries" if progress.failed else "",
        fleet_trouble(progress.servers),
    ]
    parts += [word for word in trouble if word]
    states = {shard.state for shard in progress.shards}
    ended = "stopped" in states and "running" not in states
    parts.append("stopped; make resume goes on" if ended else left_said(progress.left))
    if progress.binds:
        passing = {"drain": "draining, with fewer turns left than slots", "start-up": "starting up"}
        parts.append(passing.get(progress.binds, progress.binds))
    return "; ".join(parts)


def fleet_trouble(servers: Sequence[ServerNow]) -> str:
    """Servers that are not ready, by state; empty where all are."""
    states = Counter(server.state for server in servers if server.state not in ("ready", "stopped"))
    names = {"given_up": "given up", "silent": "without a sign of life"}
    return ", ".join(
        f"{count} server{'s' if count > 1 else ''} {names.get(state, state)}"
        for state, count in sorted(states.items())
    )


def left_said(left: Left | None) -> str:
    """The time left with its range."""
    if left is None:
        return "time left not known yet"
    if left.seconds <= 0:
        return "all turns done"
    return f"{roughly(left.seconds)} left ({roughly(left.soonest)} to {roughly(left.latest)})"


def roughly(seconds: float) -> str:
    """A stretch of time in one unit: 42 s, 35 min, 5.9 h, 2.58 d."""
    for below, size, unit in ((100, 1, "s"), (6_000, 60, "min"), (172_800, 3_600, "h")):
        if seconds < below:
            return f"{seconds / size:.3g} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.3g} d"


def prometheus(progress: Progress) -> str:
    """The same as a text file for the node exporter's textfile collector."""
    out: list[str] = []

    def metric(name: str, help_text: str, values: Iterable[tuple[Mapping[str, str], float | None]]) -> None:
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            out.append(f"# HELP draftmill_{name} {help_text}")
            out.append(f"# TYPE draftmill_{name} gauge")
            out.extend(f"draftmill_{name}{labelled(labels)} {value:.10g}" for labels, value in known)

    left = progress.left
    metric("turns", "Turns of the run.", [({}, progress.turns)])
    metric("turns_done", "Turns that are settled.", [({}, progress.done)])
    metric(
        "output_tokens_per_second", "Output rate of all servers over the last minute.", [({}, progress.tok_s)]
    )
    metric(
        "mean_output_tokens_per_second",
        "Output rate since the start of this part.",
        [({}, progress.mean_tok_s)],
    )
    metric("failed_tries", "Tries that failed and were made again.", [({}, progress.failed)])
    metric("seconds_left", "Estimated time to the end.", [({}, left.seconds if left else None)])
    metric("timestamp_seconds", "When this was written.", [({}, progress.t)])
    rejects = [({"reason": reason}, float(count)) for reason, count in progress.rejects.items()]
    metric("rejected_turns", "Rejected turns by reason.", rejects)
    for name, help_text in (
        ("running", "Running requests."),
        ("queued", "Queued requests."),
        ("capacity", "Requests that can run at once."),
        ("kv_usage", "Share of the KV cache in use."),
        ("state_usage", "Share of the state slots in use."),
        ("tok_s", "Output tokens per second."),
        ("restarts", "Restarts of the engine."),
    ):
        values = [({"server": server.server}, getattr(server, name)) for server in progress.servers]
        metric(f"server_{name}", help_text, values)
    ready = [({"server": server.server}, float(server.state == "ready")) for server in progress.servers]
    metric("server_ready", "1 while the server is ready.", ready)
    return "\n".join(out) + "\n"


def labelled(labels: Mapping[str, str]) -> str:
    """Labels in braces, escaped as the text format wants it."""
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
