"""Telemetry cut into windows, and the figures of each: what ran, waited and was held, and how fast.

Knows samples alone and makes nothing of them: no verdict (bottleneck.py), no engine, no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean, median

from draftmill.telemetry import Sample

# Running requests flicker by one or two under the cap while one is replaced by the next.
AT_CAP = 0.93


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of one stretch of samples of one engine start, and of the run it stands in."""

    seconds: float
    running: float
    highest: float
    queued: float
    wanted: float | None
    cap: float | None
    cap_seen: bool
    kv: float | None
    state: float | None
    state_slots: int | None
    kv_tokens: int | None
    retracted: int
    rate: float | None
    pure_rate: float | None
    prefill_share: float | None
    output_tokens: float | None
    prompt_tokens: float | None
    cached_share: float | None
    idle_share: float | None

    @property
    def demand(self) -> float:
        """Requests that would run if they could."""
        return max(self.running + self.queued, self.wanted or 0.0)

    @property
    def held_tokens(self) -> float | None:
        """KV tokens of a running request."""
        if self.kv is None or not self.kv_tokens or self.running < 1:
            return None
        return self.kv * self.kv_tokens / self.running


@dataclass(frozen=True, slots=True)
class Run:
    """What only the whole run shows: the cap, the most that ran, decode undisturbed by prefills.

    full_at: by epoch, when requests first ran in their usual number (unix s), where they came in slowly.
    """

    cap: float | None
    cap_seen: bool
    highest: float
    pure_rate: float | None
    full_at: dict[int, float]


def run_figures(samples: Sequence[Sample], asked_cap: int | None) -> Run:
    """Figures of a whole run; asked_cap: the request limit that was asked for, which may not be reached."""
    running = [s.running for s in samples if s.running is not None]
    highest = float(max(running, default=0))
    published = [s.capacity for s in samples if s.capacity is not None]
    queued = any((s.queued or 0) > 0 for s in samples)
    cap: float | None = float(median(published)) if published else None
    if cap is None and asked_cap is not None and queued:
        cap = min(float(asked_cap), highest)
    if cap is None and queued and highest:
        cap = highest  # while requests wait, what ran at most is the best guess of what can run
    rates = sorted(
        {
            s.gen_throughput
            for s in samples
            if s.gen_throughput and s.running and s.running >= AT_CAP * highest
        },
        reverse=True,
    )
    # The third best interval: the best of hundreds is an accident of timing, all are disturbed by prefills.
    pure = rates[min(2, len(rates) - 1)] if rates else None
    full_at: dict[int, float] = {}
    for (epoch, state), group in groupby(samples, key=lambda s: (s.epoch, s.state)):
        ramp, _ = _ramp(list(group))
        if ramp and state == "ready":
            full_at.setdefault(epoch, ramp[-1].t)
    return Run(cap, bool(published), highest, pure, full_at)


def stretches(samples: Sequence[Sample], window_s: float) -> list[list[Sample]]:
    """Windows that never span two starts of the engine, two states or a ramp; a short tail joins the last."""
    found: list[list[Sample]] = []
    for _, group in groupby(samples, key=lambda s: (s.epoch, s.state)):
        ramp, whole = _ramp(list(group))
        if ramp:
            found.append(ramp)
        parts: list[list[Sample]] = [[]]
        for sample in whole:
            if parts[-1] and sample.state == "ready" and sample.t - parts[-1][0].t >= window_s:
                parts.append([])
            parts[-1].append(sample)
        if len(parts) > 1 and parts[-1][-1].t - parts[-1][0].t < window_s / 2:
            parts[-2].extend(parts.pop())
        found.extend(parts)
    return found


def _ramp(ready: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples before requests first ran in their usual number, and the rest, which starts there.

    No ramp where it would be more than a quarter of the time: then the usual number says little.
    """
    running = [s.running for s in ready if s.running]
    if ready[0].state != "ready" or not running:
        return [], ready
    usual = median(running)
    full = next((at for at, s in enumerate(ready) if (s.running or 0) >= AT_CAP * usual), 0)
    span = ready[-1].t - ready[0].t
    if full == 0 or ready[full].t - ready[0].t > span / 4:
        return [], ready
    return ready[: full + 1], ready[full:]


def facts_of(part: Sequence[Sample], run: Run) -> Facts:
    first, last = part[0], part[-1]
    seconds = max(last.t - first.t, 0.0)

    def middle(name: str) -> float | None:
        values = [float(value) for sample in part if (value := getattr(sample, name)) is not None]
        return median(values) if values else None

    def last_known(name: str) -> int | None:
        return next((value for s in reversed(part) if (value := getattr(s, name)) is not None), None)

    def grown(name: str) -> float | None:
        """Growth of a counter between the first and the last sample that have it."""
        known = [float(value) for sample in part if (value := getattr(sample, name)) is not None]
        return known[-1] - known[0] if known else None

    running = middle("running") or 0.0
    prompt, generation, finished = grown("prompt_tokens"), grown("generation_tokens"), grown("finished")
    cached, prefill_s, decode_s, idle = (
        grown("cached_tokens"),
        grown("prefill_s"),
        grown("decode_s"),
        grown("idle_s"),
    )
    rate = _rate(part)
    share: float | None = None
    if prefill_s is not None and decode_s is not None and prefill_s + decode_s > 0:
        share = prefill_s / (prefill_s + decode_s)
    elif rate is not None and run.pure_rate and running >= AT_CAP * run.highest:
        share = max(0.0, 1 - rate / run.pure_rate)
    return Facts(
        seconds=seconds,
        running=running,
        highest=float(max((s.running or 0 for s in part), default=0)),
        queued=middle("queued") or 0.0,
        wanted=middle("wanted"),
        cap=run.cap,
        cap_seen=run.cap_seen,
        kv=middle("kv_usage"),
        state=middle("state_usage"),
        state_slots=last_known("state_slots"),
        kv_tokens=last_known("kv_tokens"),
        retracted=round(max(grown("retracted") or 0.0, 0.0)),
        rate=rate,
        pure_rate=run.pure_rate,
        prefill_share=share,
        output_tokens=generation / finished if generation and finished else None,
        prompt_tokens=prompt / finished if prompt and finished else None,
        cached_share=(cached or 0.0) / prompt if prompt else None,
        idle_share=min(max(idle / seconds, 0.0), 1.0) if idle is not None and seconds else None,
    )


def _rate(part: Sequence[Sample]) -> float | None:
    """Output tok/s: of the steps' counter, else of the engine's own figure, else of finished requests."""
    by_steps = _slope([(s.t, s.decode_tokens) for s in part])
    if by_steps is not None:
        return by_steps
    # The gauge keeps its value between log lines; 0 says that no line was written yet.
    shown = [s.gen_throughput for s in part if s.gen_throughput]
    return fmean(shown) if shown else _slope([(s.t, s.generation_tokens) for s in part])


def _slope(points: Sequence[tuple[float, int | None]]) -> float | None:
    known = [(t, value) for t, value in points if value is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return max(known[-1][1] - known[0][1], 0) / (known[-1][0] - known[0][0])


def weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    total = sum(weight for value, weight in values if value is not None)
    if total <= 0:
        known = [value for value, _ in values if value is not None]
        return fmean(known) if known else None
    return sum(value * weight for value, weight in values if value is not None) / total


def together(parts: Sequence[Facts]) -> Facts:
    """Several stretches as one, weighted by their time."""

    def mean(name: str) -> float | None:
        return weighted([(getattr(part, name), max(part.seconds, 1e-9)) for part in parts])

    last = parts[-1]
    return replace(
        last,
        seconds=sum(part.seconds for part in parts),
        running=mean("running") or 0.0,
        highest=max(part.highest for part in parts),
        queued=mean("queued") or 0.0,
        wanted=mean("wanted"),
        kv=mean("kv"),
        state=mean("state"),
        retracted=sum(part.retracted for part in parts),
        rate=mean("rate"),
        prefill_share=mean("prefill_share"),
        output_tokens=mean("output_tokens"),
        prompt_tokens=mean("prompt_tokens"),
        cached_share=mean("cached_share"),
        idle_share=mean("idle_share"),
    )


def drain_start(samples: Sequence[Sample], run: Run) -> float:
    """When the last work began to run out: from there on nothing waits and running only falls. inf: never."""
    start = math.inf
    lowest = -1
    for sample in reversed(samples):
        if sample.running is None or sample.state != "ready":
            break
        waiting = (sample.queued or 0) > 0 or (sample.wanted is not None and sample.wanted > sample.running)
        if waiting or sample.running < lowest:
            break
        lowest = max(lowest, sample.running)
        start = sample.t
    fell = [s.running for s in samples if s.t >= start and s.running is not None]
    return start if fell and fell[0] >= 2 and fell[-1] <= 0.5 * fell[0] and run.highest else math.inf
