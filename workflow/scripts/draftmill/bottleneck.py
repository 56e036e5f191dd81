"""What holds a server's throughput, with the figures that show it and the flag that should change it.

Knows samples of telemetry and, where they are given, the engine's dialect, flags and model. Must never
know where samples come from or what time it is; it tries nothing out (the tuner does).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from statistics import fmean, median
from typing import Literal

from draftmill.architecture import Architecture
from draftmill.capacity import (
    INIT_NEW_TOKEN_RATIO,
    MIN_NEW_TOKEN_RATIO_FACTOR,
    Workload,
    candidates,
    capacity,
    default_mem_fraction,
    estimate,
    reference_tok_s,
    roofline,
)
from draftmill.errors import UserError
from draftmill.gpus import Gpu, Reference
from draftmill.server_flags import (
    FREE_SLOTS_FLAG,
    PREFILL_DELAYER_FLAG,
    UNKNOWN,
    Dialect,
    ServerFlags,
    changes,
    read_flags,
    refusals,
    with_flags,
    without_settings,
)
from draftmill.telemetry import Sample

WINDOW_S = 30.0
# Running requests flicker by one or two under the cap while one is replaced by the next.
AT_CAP = 0.93
KV_FULL = 0.9
# A cure that brings less than this is no cure: the next limit is as near.
WORTHWHILE = 1.1
# Prefills that take less of the time than this are no bottleneck.
PREFILL_HEAVY = 1 / 3
# From this share of prompt tokens found in the prefix cache on, the cache is worth its slots.
CACHE_EARNS = 0.3
# Prompts of this length fill a prefill pass by themselves.
LONG_PROMPT = 2048


class Verdict(StrEnum):
    """What binds. cap: a request limit below what memory allows; down: the engine does not serve."""

    STATE = "state-bound"
    KV = "KV-bound"
    COMPUTE = "compute- or bandwidth-bound"
    PREFILL = "prefill-bound"
    CAP = "cap-bound"
    CLIENT = "client-bound"
    STARTUP = "start-up"
    DRAIN = "drain"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Advice:
    """The flags to add (None: no flag helps), and what they should bring in words and as a factor on tok/s.

    drop: flags among the asked ones that must go, since the engine would refuse them beside the new.
    """

    flag: str | None
    predicted_effect: str
    gain: float
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known of the engine beside its telemetry; everything may be missing.

    kind: advice names flags of SGLang alone. slots_per_request: state slots that one running request needs. hybrid: the model has state layers
    (None: not known). gpu, architecture: together they turn guesses into the capacity model's figures.
    """

    kind: Literal["sglang", "llamacpp"] = "sglang"
    dialect: Dialect = UNKNOWN
    flags: ServerFlags | None = None
    slots_per_request: int | None = None
    architecture: Architecture | None = None
    gpu: Gpu | None = None
    gpu_memory_bytes: int | None = None
    hybrid: bool | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time with one verdict. start_s, end_s: unix s; tok_s: output tokens per second."""

    start_s: float
    end_s: float
    verdict: Verdict
    evidence: str
    tok_s: float | None
    advice: Advice | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole run: what held it for most of its steady time, and every window.

    blind: what these samples cannot show. steady_tok_s: output rate without start-up and drain.
    phases: seconds by verdict. expected: a sentence on the reference, None without one.
    """

    verdict: Verdict
    evidence: str
    advice: Advice | None
    windows: tuple[Window, ...]
    steady_tok_s: float | None
    phases: dict[str, float]
    blind: tuple[str, ...]
    expected: str | None = None
    reference_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
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


def diagnose(
    samples: Sequence[Sample],
    engine: Engine = Engine(),
    reference: Reference | None = None,
    window_s: float = WINDOW_S,
) -> Diagnosis:
    """What binds in each window of about window_s seconds, and over the run.

    Samples of one server in the order of time. Raises UserError without samples.
    """
    if not samples:
        raise UserError("there is no telemetry to diagnose: give a file with at least one sample")
    ordered = sorted(samples, key=lambda sample: sample.t)
    stretches = _stretches(ordered, window_s)
    whole = _run_figures(ordered, engine)
    drain_from = _drain_start(ordered, whole)
    ends = [part[0].t for part in stretches[1:]] + [ordered[-1].t]
    judged = [
        (part, *_judge_stretch(part, end, engine, whole, drain_from))
        for part, end in zip(stretches, ends, strict=True)
    ]
    windows = tuple(
        Window(part[0].t, end, verdict, evidence, facts.rate if facts else None, advice)
        for (part, verdict, evidence, advice, facts), end in zip(judged, ends, strict=True)
    )
    phases: dict[str, float] = {}
    for window in windows:
        phases[window.verdict] = phases.get(window.verdict, 0.0) + (window.end_s - window.start_s)
    passing = {Verdict.STARTUP, Verdict.DRAIN, Verdict.DOWN}
    steady = [entry for entry in judged if entry[1] not in passing] or judged
    weights: dict[Verdict, float] = {}
    for part, verdict, *_ in steady:
        weights[verdict] = weights.get(verdict, 0.0) + max(part[-1].t - part[0].t, 1e-9)
    verdict = max(weights, key=lambda v: weights[v])
    chosen = [entry for entry in steady if entry[1] == verdict]
    evidence, advice = chosen[-1][2], chosen[-1][3]
    parts = [entry[4] for entry in chosen if entry[4] is not None]
    if verdict not in passing and parts:
        evidence, advice = _say(verdict, _together(parts), engine)
    rates = [(entry[4].rate, entry[4].seconds) for entry in steady if entry[4] and entry[4].rate is not None]
    steady_rate = _weighted(rates)
    expected, share = _expectation(reference, steady_rate, engine, parts)
    return Diagnosis(
        verdict=verdict,
        evidence=evidence,
        advice=advice,
        windows=windows,
        steady_tok_s=steady_rate,
        phases=phases,
        blind=tuple(_blind(ordered, engine)),
        expected=expected,
        reference_share=share,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """What only the whole run shows: the highest of running, the cap, decode undisturbed by prefills, ends of ramps."""

    cap: float | None
    cap_seen: bool
    highest: float
    pure_rate: float | None
    full_at: dict[int, float]


def _run_figures(samples: Sequence[Sample], engine: Engine) -> _Run:
    running = [s.running for s in samples if s.running is not None]
    highest = float(max(running, default=0))
    published = [s.capacity for s in samples if s.capacity is not None]
    queued = any((s.queued or 0) > 0 for s in samples)
    cap: float | None = float(median(published)) if published else None
    if cap is None and engine.flags is not None and engine.flags.max_running is not None and queued:
        cap = min(float(engine.flags.max_running), highest)
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
    return _Run(cap, bool(published), highest, pure, full_at)


def _stretches(samples: Sequence[Sample], window_s: float) -> list[list[Sample]]:
    """Windows that never span two starts of the engine, two states or a ramp; a short tail joins its neighbour."""
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


def _facts(part: Sequence[Sample], run: _Run) -> _Facts:
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
    return _Facts(
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


def _weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    total = sum(weight for value, weight in values if value is not None)
    if total <= 0:
        known = [value for value, _ in values if value is not None]
        return fmean(known) if known else None
    return sum(value * weight for value, weight in values if value is not None) / total


def _together(parts: Sequence[_Facts]) -> _Facts:
    """Several stretches as one, weighted by their time."""

    def mean(name: str) -> float | None:
        return _weighted([(getattr(part, name), max(part.seconds, 1e-9)) for part in parts])

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


def _drain_start(samples: Sequence[Sample], run: _Run) -> float:
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


Judged = tuple[Verdict, str, Advice | None, _Facts | None]


def _judge_stretch(
    part: Sequence[Sample], end: float, engine: Engine, run: _Run, drain_from: float
) -> Judged:
    state = part[0].state
    seconds = end - part[0].t
    if state in ("waiting", "starting", "restarting"):
        return (
            Verdict.STARTUP,
            f"the engine was {state} for {seconds:.0f} s (start {part[0].epoch})",
            None,
            None,
        )
    if state != "ready":
        return Verdict.DOWN, f"the engine was {state.replace('_', ' ')} for {seconds:.0f} s", None, None
    facts = _facts(part, run)
    if all(not s.running and not s.gen_throughput and not s.generation_tokens and not s.queued for s in part):
        return Verdict.STARTUP, f"ready for {seconds:.0f} s, 0 requests so far", None, facts
    if part[-1].t <= run.full_at.get(part[0].epoch, -math.inf):
        told = f"requests came in: {part[-1].running} running after {seconds:.0f} s"
        return Verdict.STARTUP, told, None, facts
    draining = (part[0].t + part[-1].t) / 2 >= drain_from
    verdict = Verdict.DRAIN if draining else _binding(facts, engine)
    return (verdict, *_say(verdict, facts, engine), facts)


def _binding(facts: _Facts, engine: Engine) -> Verdict:
    cap = facts.cap
    waiting = facts.queued >= 1 or (facts.wanted is not None and facts.wanted > facts.running * 1.02 + 1)
    at_cap = cap is not None and facts.running >= AT_CAP * cap
    kv_full = facts.kv is not None and facts.kv > KV_FULL
    # Without waiting requests only a server that is full to its cap can be the limit.
    if not waiting and not (at_cap and facts.cap_seen) and not (kv_full and facts.retracted):
        return Verdict.CLIENT
    if facts.retracted and (kv_full or facts.kv is None):
        return Verdict.KV
    if kv_full and not (at_cap and facts.cap_seen):
        return Verdict.KV
    if not at_cap and not kv_full and facts.queued < 1:
        return Verdict.CLIENT  # clients want more than they send
    gains: dict[Verdict, float] = {}
    if _state_sets_cap(facts, engine):
        cure = _state_cure(facts, engine)
        gains[Verdict.STATE] = cure.gain if cure else 1.0
    elif at_cap and _asked_cap(facts, engine):
        gains[Verdict.CAP] = _more_running_gain(facts.running, _kv_room(facts) or facts.running)
    if facts.prefill_share is not None and facts.prefill_share > PREFILL_HEAVY:
        gains[Verdict.PREFILL] = 1 / (1 - min(facts.prefill_share, 0.95))
    best = max(gains, key=lambda v: gains[v], default=None)
    if best is not None and gains[best] >= WORTHWHILE:
        return best
    return Verdict.COMPUTE


def _per_request(facts: _Facts, engine: Engine) -> int | None:
    """State slots per request: as published, else the one value under which the slots give this cap."""
    if engine.slots_per_request is not None:
        return engine.slots_per_request
    if facts.state_slots and facts.cap:
        fits = [k for k in (1, 3, 4, 5) if facts.state_slots // k == round(facts.cap)]
        if not fits and not facts.cap_seen:  # a guessed cap may be one short
            fits = [
                k for k in (1, 3, 4, 5) if abs(facts.state_slots // k - facts.cap) <= max(1, 0.02 * facts.cap)
            ]
        return fits[0] if fits else None
    return None


def _state_sets_cap(facts: _Facts, engine: Engine) -> bool:
    slots, per = facts.state_slots, _per_request(facts, engine)
    if slots is None and facts.state is None and engine.hybrid and engine.architecture and engine.flags:
        have = _modelled(engine)
        return have is not None and have[0] <= (facts.cap or math.inf) * 1.05
    if facts.cap is None or facts.running < AT_CAP * facts.cap:
        return False
    if slots and per:
        return slots // per <= facts.cap * 1.02
    # Without the number of slots: the use at which each strategy stands when it is full.
    return facts.state is not None and (facts.state > 0.95 or 0.6 < facts.state < 0.82) and slots is None


def _modelled(engine: Engine) -> tuple[int, int] | None:
    """State slots // slots per request, and slots, by the capacity model."""
    if engine.architecture is None or engine.flags is None or engine.gpu is None:
        return None
    memory = engine.gpu_memory_bytes or engine.gpu.memory_bytes
    have = capacity(engine.architecture, memory, engine.flags, Workload(), engine.dialect)
    if have.state_slots is None or have.slots_per_request is None:
        return None
    return have.state_slots // have.slots_per_request, have.state_slots


def _asked_cap(facts: _Facts, engine: Engine) -> bool:
    asked = engine.flags.max_running if engine.flags else None
    return asked is not None and facts.cap is not None and abs(asked - facts.cap) <= 1


def _kv_room(facts: _Facts) -> float | None:
    """Requests of the present kind that the KV pool would hold."""
    held = facts.held_tokens
    if not held or not facts.kv_tokens:
        return None
    return facts.kv_tokens / (held * (1 + INIT_NEW_TOKEN_RATIO * MIN_NEW_TOKEN_RATIO_FACTOR))


def _more_running_gain(now: float, then: float) -> float:
    """What more running requests bring when the model is not known: the middle of nothing and proportion.

    Weights are read once a step for all, states and caches for each: the truth lies between 1 and the
    ratio. On the recordings' H200 1.68, 3.0 and 5.1 times as many brought 1.29, 1.79 and 2.31 times.
    """
    return math.sqrt(then / now) if now > 0 and then > now else 1.0


def _say(verdict: Verdict, facts: _Facts, engine: Engine) -> tuple[str, Advice | None]:
    """The evidence in one sentence with its figures, and the advice."""
    evidence, advice = _said(verdict, facts, engine)
    if advice is not None and engine.kind != "sglang":
        advice = Advice(
            None, f"{engine.kind} has no flag for it; {facts.running:.0f} ran at most at once", 1.0
        )
    return evidence, advice


def _said(verdict: Verdict, facts: _Facts, engine: Engine) -> tuple[str, Advice | None]:
    seen = _figures(facts)
    if verdict is Verdict.STATE:
        return _state_sentence(facts, engine, seen), _state_cure(facts, engine)
    if verdict is Verdict.KV:
        retractions = f", {facts.retracted} requests retracted" if facts.retracted else ""
        return f"the KV cache is full{retractions}: {seen}", _kv_cure(facts, engine)
    if verdict is Verdict.PREFILL:
        pure = f" (decode alone ran at {facts.pure_rate:.0f} tok/s)" if facts.pure_rate else ""
        return f"prefill takes {facts.prefill_share:.0%} of the time{pure}: {seen}", _prefill_cure(
            facts, engine
        )
    if verdict is Verdict.CAP:
        return f"the request limit holds the server below what its memory allows: {seen}", _cap_cure(
            facts, engine
        )
    if verdict is Verdict.COMPUTE:
        return (
            f"requests wait and no other limit is near{_roofline_clause(facts, engine)}: {seen}",
            _compute_cure(facts, engine),
        )
    if verdict is Verdict.DRAIN:
        return f"nothing waits any more and what runs ends: {seen}", None
    idle = f", scheduler idle {facts.idle_share:.0%} of the time" if facts.idle_share is not None else ""
    more = (
        f", though clients want {facts.wanted:.0f}"
        if facts.wanted is not None and facts.wanted > facts.demand - 1
        else ""
    )
    return f"no request waits and the server is not full{more}{idle}: {seen}", None


def _figures(facts: _Facts) -> str:
    cap = "" if facts.cap is None else f" of at most {facts.cap:.0f}" + ("" if facts.cap_seen else " seen")
    said = [f"{facts.running:.0f} running{cap}", f"{facts.queued:.0f} queued"]
    if facts.kv is not None:
        said.append(f"KV use {facts.kv:.2f}")
    if facts.state is not None:
        said.append(
            f"state use {facts.state:.2f}" + (f" of {facts.state_slots} slots" if facts.state_slots else "")
        )
    if facts.rate is not None:
        said.append(f"{facts.rate:.0f} output tok/s")
    return ", ".join(said)


def _state_sentence(facts: _Facts, engine: Engine, seen: str) -> str:
    per = _per_request(facts, engine)
    if facts.state_slots and per:
        return f"{facts.state_slots} state slots at {per} per request run {facts.state_slots // per}: {seen}"
    modelled = _modelled(engine) if facts.state is None else None
    if modelled is not None:
        return f"by the capacity model {modelled[1]} state slots run {modelled[0]} (the server publishes no state metrics): {seen}"
    return f"state slots are full: {seen}"


def _accepted(engine: Engine, words: Sequence[str]) -> bool:
    """Whether the engine would start with these flags added to its own."""
    flags = with_flags(engine.flags or ServerFlags(), *words)
    name = engine.architecture.name if engine.architecture else ""
    return not refusals(flags, engine.dialect, name, engine.hybrid is not False)


def _strategy_words(engine: Engine) -> tuple[str, ...]:
    """The asked flags of a strategy, which go when the radix cache does: the overlap schedule may run again."""
    asked = engine.flags.asked if engine.flags else ()
    kept = without_settings(asked, ["strategy", "overlap"])
    return tuple(word for word in asked if word not in kept)


def _estimated_gain(
    engine: Engine, facts: _Facts, words: Sequence[str], drop: Sequence[str] = ()
) -> float | None:
    """The gain by the time model, where model, GPU and flags are known."""
    if engine.architecture is None or engine.gpu is None or engine.flags is None:
        return None
    memory = engine.gpu_memory_bytes or engine.gpu.memory_bytes
    work = _workload(facts)
    rates = []
    for flags in (engine.flags, _changed(engine.flags, words, drop)):
        have = capacity(engine.architecture, memory, flags, work, engine.dialect)
        rates.append(estimate(engine.architecture, engine.gpu, flags, work, have, engine.dialect).tok_s)
    return rates[1] / rates[0] if rates[0] > 0 else None


def _changed(flags: ServerFlags, words: Sequence[str], drop: Sequence[str]) -> ServerFlags:
    return with_flags(read_flags(without_settings(flags.asked, drop)), *words)


def _workload(facts: _Facts) -> Workload:
    usual = Workload()
    return Workload(
        prompt_tokens=facts.prompt_tokens or usual.prompt_tokens,
        output_tokens=facts.output_tokens or usual.output_tokens,
        cached_share=facts.cached_share or 0.0,
        clients=max(1, round(facts.demand)),
    )


def _state_cure(facts: _Facts, engine: Engine) -> Advice | None:
    """Fewer slots per request if it needs several, else a larger part of memory for states."""
    per, slots = _per_request(facts, engine), facts.state_slots
    modelled = _modelled(engine)
    if slots is None and modelled is not None:
        slots, per = modelled[1], per or max(1, modelled[1] // max(modelled[0], 1))
    if slots is None or per is None:
        if facts.state is not None and facts.state > 0.95:
            return None
        return Advice(
            "--disable-radix-cache",
            f"one state slot per request instead of several: expect more than {facts.running:.0f} running; "
            "how many cannot be said without the number of slots",
            1.5,
        )
    now = min(facts.running, slots / per)
    if now <= 0:
        return None
    if per > 1:
        options = [
            _fewer_slots(facts, engine, slots, now, name, new)
            for name, new in _strategies(facts, engine, per)
        ]
        return max((option for option in options if option), key=lambda option: option.gain, default=None)
    return _larger_share(facts, engine, slots, now)


def _strategies(facts: _Facts, engine: Engine, per: int) -> list[tuple[tuple[str, ...], int]]:
    """Flags that need fewer slots per request, with how many; a cache that earns its slots stays on."""
    named = [(engine.dialect.strategy("no_buffer"), 3), (engine.dialect.strategy("extra_buffer_lazy"), 4)]
    found = [
        (words, need)
        for words, need in named
        if words is not None and need < per and _accepted(engine, words)
    ]
    if (facts.cached_share or 0.0) < CACHE_EARNS or not found:
        found.insert(0, (("--disable-radix-cache",), 1))
    return found


def _fewer_slots(
    facts: _Facts, engine: Engine, slots: int, now: float, words: Sequence[str], need: int
) -> Advice | None:
    then = min(float(slots // need), _kv_room(facts) or math.inf, max(facts.demand, now))
    if then <= now:
        return None
    gain = _estimated_gain(
        engine, facts, words, ("strategy", "radix_cache", "overlap")
    ) or _more_running_gain(now, then)
    off = words[0] == "--disable-radix-cache"
    what = "radix cache off" if off else words[1]
    limit = "" if then >= slots // need else f" ({then:.0f} of them at this load)"
    return Advice(
        " ".join(words),
        f"{slots} slots at {_per_request(facts, engine) or round(slots / now)} per request run {now:.0f}; "
        f"{what} runs {slots // need}{limit}: expect about {gain:.1f}x, at most {then / now:.1f}x",
        gain,
        _strategy_words(engine) if off else (),
    )


def _larger_share(facts: _Facts, engine: Engine, slots: int, now: float) -> Advice | None:
    """With one slot per request only memory makes more of them: what the KV cache does not use."""
    held = facts.held_tokens
    if not held or not facts.kv_tokens or (facts.kv or 1.0) > KV_FULL:
        return None
    ratio = engine.flags.mamba_ratio if engine.flags else 0.9
    slot_as_tokens = ratio * facts.kv_tokens / slots
    kept = held * (1 + INIT_NEW_TOKEN_RATIO * MIN_NEW_TOKEN_RATIO_FACTOR)
    most = (slots * slot_as_tokens + facts.kv_tokens) / (slot_as_tokens + kept)
    then = min(most, max(facts.demand, now))
    if then <= now:
        return None
    gain = _more_running_gain(now, then)
    return Advice(
        f"--max-running-requests {int(most)}",
        f"with the radix cache off the pool holds exactly as many states: {slots} slots run {now:.0f} and the KV "
        f"cache stands at {facts.kv:.2f}; {int(most)} slots leave it just enough: expect about {gain:.2f}x",
        gain,
    )


def _kv_cure(facts: _Facts, engine: Engine) -> Advice | None:
    flags = engine.flags or ServerFlags()
    used = f"KV use {facts.kv:.2f}" if facts.kv is not None else "the KV cache full"
    if facts.retracted:
        value = round(min(flags.conservativeness * 1.5, 3.0), 2)
        lost = facts.retracted
        return Advice(
            f"--schedule-conservativeness {value:g}",
            f"{lost} requests were retracted in {facts.seconds:.0f} s and computed twice at {used}: expect none, "
            f"at about {facts.running:.0f} running",
            1.05,
        )
    if facts.state is not None and facts.state < 0.9 and engine.dialect.knows("--mamba-full-memory-ratio"):
        value = flags.mamba_ratio * max(facts.state, 0.05)
        room = (1 + flags.mamba_ratio) / (1 + value)
        return Advice(
            f"--mamba-full-memory-ratio {value:.2f}",
            f"states use {facts.state:.2f} of their part: {room:.2f} times the KV tokens, so about "
            f"{facts.running * room:.0f} running instead of {facts.running:.0f}: expect about "
            f"{_more_running_gain(1, room):.2f}x",
            _more_running_gain(1, room),
        )
    fraction = _fraction(engine)
    more = min((fraction or 0.89) + 0.03, 0.95)
    if fraction is not None and more <= fraction:
        return Advice(None, f"{used} at {facts.running:.0f} running and memory is given away whole: shorter answers, "
                      "more GPUs or a smaller KV dtype would help", 1.0)  # fmt: skip
    room = 1.0 + 0.03 * 3  # 3 % of the card are about 9 % of a pool that is a third of it
    now = "the present fraction, unless it is higher already" if fraction is None else f"{fraction:.2f}"
    return Advice(
        f"--mem-fraction-static {more:.2f}",
        f"{used} at {facts.running:.0f} running: memory beyond {now} goes to the caches whole, so about "
        f"{facts.running * room:.0f} run: expect about {_more_running_gain(1, room):.2f}x",
        _more_running_gain(1, room),
    )


def _fraction(engine: Engine) -> float | None:
    """The memory fraction in force: asked, else SGLang's own for this model and card, else unknown."""
    if engine.flags is not None and engine.flags.mem_fraction is not None:
        return engine.flags.mem_fraction
    if engine.flags is None or engine.architecture is None or engine.gpu is None:
        return None
    memory = engine.gpu_memory_bytes or engine.gpu.memory_bytes
    return default_mem_fraction(engine.architecture, memory, engine.flags)


def _prefill_cure(facts: _Facts, engine: Engine) -> Advice | None:
    share = facts.prefill_share or 0.0
    most = 1 / (1 - min(share, 0.95))
    options = []
    if engine.dialect.knows(FREE_SLOTS_FLAG) and _accepted(engine, (FREE_SLOTS_FLAG, "4")):
        slots = 4 if engine.dialect.free_slots_limit is not None else 16
        options.append(
            (f"{FREE_SLOTS_FLAG} {slots}", f"one prefill pass for {slots} prompts instead of one for each")
        )
    if engine.dialect.knows(PREFILL_DELAYER_FLAG) and _accepted(engine, (PREFILL_DELAYER_FLAG,)):
        options.append(
            (PREFILL_DELAYER_FLAG, "prompts gathered for up to 30 decode steps into one prefill pass")
        )
    if options:
        flag, how = options[0]
        gain = _estimated_gain(engine, facts, flag.split()) or (1 + most) / 2
        return Advice(
            flag, f"{how}: expect about {gain:.1f}x, at most {most:.1f}x (prefill takes {share:.0%})", gain
        )
    if engine.dialect.sure or (facts.prompt_tokens or 0) >= LONG_PROMPT:
        return Advice(
            "--chunked-prefill-size 16384",
            f"fewer, larger prefill passes: expect up to {most:.1f}x where prompts are long (prefill takes {share:.0%})",
            (1 + most) / 2,
        )
    return Advice(
        f"{FREE_SLOTS_FLAG} 4",
        f"if this version has the flag (0.5.15 has, `--help` says): one prefill pass for 4 prompts instead of one for "
        f"each: expect about {(1 + most) / 2:.1f}x, at most {most:.1f}x (prefill takes {share:.0%})",
        (1 + most) / 2,
    )


def _cap_cure(facts: _Facts, engine: Engine) -> Advice | None:
    room = _kv_room(facts)
    if room is None:
        return None
    then = int(min(room, max(facts.demand, facts.running)))
    if then <= facts.running:
        return None
    gain = _more_running_gain(facts.running, then)
    return Advice(
        f"--max-running-requests {int(room)}",
        f"{facts.running:.0f} run at KV use {facts.kv or 0:.2f}; the KV cache holds {int(room)}: expect about {gain:.1f}x, "
        f"at most {then / facts.running:.1f}x",
        gain,
    )


def _roofline_clause(facts: _Facts, engine: Engine) -> str:
    if engine.architecture is None or engine.gpu is None or facts.rate is None or facts.running < 1:
        return ""
    flags = engine.flags or ServerFlags()
    line = roofline(engine.architecture, engine.gpu, flags, _workload(facts), round(facts.running))
    return f", at {facts.rate / line.tok_s:.0%} of the {line.bound} roofline of {line.tok_s:.0f} tok/s ({engine.gpu.name})"


def _compute_cure(facts: _Facts, engine: Engine) -> Advice | None:
    """The best other setting by the capacity model, where model, GPU and flags are known."""
    if engine.architecture is None or engine.gpu is None or engine.flags is None:
        if (facts.prefill_share or 0) > PREFILL_HEAVY:
            return _prefill_cure(facts, engine)
        return Advice(
            None,
            f"{facts.running:.0f} running requests use the GPU as it is: more of them bring little; a faster card, more "
            "GPUs or a smaller weight format would",
            1.0,
        )
    found = candidates(
        engine.architecture,
        engine.gpu,
        engine.flags,
        _workload(facts),
        engine.dialect,
        gpu_memory_bytes=engine.gpu_memory_bytes,
    )
    best = next((c for c in found[1:] if not c.changes_answers), None)
    if best is None or best.gain < WORTHWHILE:
        said = f"no other setting is estimated above {best.gain if best else 1:.2f}x"
        return Advice(None, said, 1.0)
    add, drop = changes(engine.flags, best.flags)
    return Advice(
        " ".join(add) or None,
        f"{best.name}: expect about {best.gain:.1f}x by the capacity model",
        best.gain,
        drop,
    )


def _blind(samples: Sequence[Sample], engine: Engine) -> list[str]:
    """What these samples cannot show, one sentence each."""
    ready = [s for s in samples if s.state == "ready"]
    if not ready:
        return ["the engine was never ready: nothing of its load can be seen"]
    found = []
    if all(s.state_usage is None for s in ready) and engine.hybrid is not False:
        if engine.hybrid:
            found.append(
                "this version publishes no state metrics: whether state slots bind is computed, not seen"
            )
        else:
            found.append(
                "no state metrics: if the model is hybrid, its state memory cannot be seen (a dense model has none)"
            )
    if all(s.capacity is None for s in ready):
        found.append("the effective request limit is not in the samples: the most that ran stands for it")
    if all(s.kv_usage is None for s in ready):
        found.append("no KV use in the samples: a full KV cache cannot be seen")
    if all(s.decode_tokens is None for s in ready) and all(s.gen_throughput is None for s in ready):
        found.append("no decode counter: the rate follows finished requests and lags behind")
    if all(s.prefill_s is None for s in ready) and all(not s.gen_throughput for s in ready):
        found.append("no prefill times: whether prefill binds cannot be seen")
    return found


def _expectation(
    reference: Reference | None, rate: float | None, engine: Engine, parts: Sequence[_Facts]
) -> tuple[str | None, float | None]:
    if reference is None:
        return None, None
    work = _workload(_together(parts)) if parts else Workload()
    due = reference_tok_s(reference, engine.architecture, replace(work, clients=None), engine.dialect)
    if due is None:
        return f"{reference} says nothing in tok/s without the model's config.json", None
    if rate is None:
        return f"{reference} stands for {due:.0f} tok/s; no rate was measured", None
    stands = "" if reference.gpu is None else f" (about {due:.0f} tok/s by the capacity model)"
    return f"{rate:.0f} tok/s are {rate / due:.0%} of the reference {reference}{stands}", rate / due
