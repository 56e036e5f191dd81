"""What holds a server's throughput, with the figures that show it and the flag that should change it.

Knows windows of telemetry and, where they are given, the engine's flags and model. Must never know where
samples come from or what time it is; it tries nothing out (the tuner does).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from draftmill.candidates import reference_tok_s
from draftmill.capacity import Workload, roofline
from draftmill.cures import (
    KV_FULL,
    PREFILL_HEAVY,
    WORTHWHILE,
    Advice,
    Engine,
    cap_cure,
    compute_cure,
    kv_cure,
    kv_room,
    modelled_slots,
    more_running_gain,
    prefill_cure,
    slots_per_request,
    state_cure,
    without_prefill,
    workload_of,
)
from draftmill.errors import UserError
from draftmill.gpus import Reference
from draftmill.server_flags import ServerFlags
from draftmill.telemetry import Sample
from draftmill.windows import (
    AT_CAP,
    Facts,
    Run,
    drain_start,
    facts_of,
    run_figures,
    stretches,
    together,
    weighted,
)

__all__ = ["WINDOW_S", "Advice", "Diagnosis", "Engine", "Verdict", "Window", "diagnose"]


WINDOW_S = 30.0
UNKNOWN_ENGINE = Engine()


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


def diagnose(
    samples: Sequence[Sample],
    engine: Engine = UNKNOWN_ENGINE,
    reference: Reference | None = None,
    window_s: float = WINDOW_S,
) -> Diagnosis:
    """What binds in each window of about window_s seconds, and over the run.

    Samples of one server in the order of time. Raises UserError without samples.
    """
    if not samples:
        raise UserError("there is no telemetry to diagnose: give a file with at least one sample")
    ordered = sorted(samples, key=lambda sample: sample.t)
    parts_of_run = stretches(ordered, window_s)
    whole = run_figures(ordered, engine.flags.max_running if engine.flags else None)
    drain_from = drain_start(ordered, whole)
    ends = [part[0].t for part in parts_of_run[1:]] + [ordered[-1].t]
    judged = [
        (part, *_judge_stretch(part, end, engine, whole, drain_from))
        for part, end in zip(parts_of_run, ends, strict=True)
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
        evidence, advice = _say(verdict, together(parts), engine)
    rates = [(entry[4].rate, entry[4].seconds) for entry in steady if entry[4] and entry[4].rate is not None]
    steady_rate = weighted(rates)
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


Judged = tuple[Verdict, str, Advice | None, Facts | None]


def _judge_stretch(part: Sequence[Sample], end: float, engine: Engine, run: Run, drain_from: float) -> Judged:
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
    facts = facts_of(part, run)
    if all(not s.running and not s.gen_throughput and not s.generation_tokens and not s.queued for s in part):
        return Verdict.STARTUP, f"ready for {seconds:.0f} s, 0 requests so far", None, facts
    if part[-1].t <= run.full_at.get(part[0].epoch, -math.inf):
        told = f"requests came in: {part[-1].running} running after {seconds:.0f} s"
        return Verdict.STARTUP, told, None, facts
    draining = (part[0].t + part[-1].t) / 2 >= drain_from
    verdict = Verdict.DRAIN if draining else _binding(facts, engine)
    return (verdict, *_say(verdict, facts, engine), facts)


def _binding(facts: Facts, engine: Engine) -> Verdict:
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
        cure = state_cure(facts, engine)
        gains[Verdict.STATE] = cure.gain if cure else 1.0
    elif at_cap and _asked_cap(facts, engine):
        gains[Verdict.CAP] = more_running_gain(facts.running, kv_room(facts) or facts.running)
    if facts.prefill_share is not None and facts.prefill_share > PREFILL_HEAVY:
        # Half of the way: prefills can be gathered, not done away with.
        gains[Verdict.PREFILL] = (1 + without_prefill(facts.prefill_share)) / 2
    best = max(gains, key=lambda v: gains[v], default=None)
    if best is not None and gains[best] >= WORTHWHILE:
        return best
    return Verdict.COMPUTE


def _state_sets_cap(facts: Facts, engine: Engine) -> bool:
    slots, per = facts.state_slots, slots_per_request(facts, engine)
    if slots is None and facts.state is None and engine.hybrid and engine.architecture and engine.flags:
        have = modelled_slots(engine)
        return have is not None and have[0] <= (facts.cap or math.inf) * 1.05
    if facts.cap is None or facts.running < AT_CAP * facts.cap:
        return False
    if slots and per:
        return slots // per <= facts.cap * 1.02
    # Without the number of slots: the use at which each strategy stands when it is full.
    return facts.state is not None and (facts.state > 0.95 or 0.6 < facts.state < 0.82) and slots is None


def _asked_cap(facts: Facts, engine: Engine) -> bool:
    asked = engine.flags.max_running if engine.flags else None
    return asked is not None and facts.cap is not None and abs(asked - facts.cap) <= 1


def _say(verdict: Verdict, facts: Facts, engine: Engine) -> tuple[str, Advice | None]:
    """The evidence in one sentence with its figures, and the advice."""
    evidence, advice = _said(verdict, facts, engine)
    if advice is not None and engine.kind != "sglang":
        advice = Advice(
            None, f"{engine.kind} has no flag for it; {facts.running:.0f} ran at most at once", 1.0
        )
    return evidence, advice


def _said(verdict: Verdict, facts: Facts, engine: Engine) -> tuple[str, Advice | None]:
    seen = _figures(facts)
    if verdict is Verdict.STATE:
        return _state_sentence(facts, engine, seen), state_cure(facts, engine)
    if verdict is Verdict.KV:
        retractions = f", {facts.retracted} requests retracted" if facts.retracted else ""
        return f"the KV cache is full{retractions}: {seen}", kv_cure(facts, engine)
    if verdict is Verdict.PREFILL:
        pure = f" (decode alone ran at {facts.pure_rate:.0f} tok/s)" if facts.pure_rate else ""
        return f"prefill takes {facts.prefill_share:.0%} of the time{pure}: {seen}", prefill_cure(
            facts, engine
        )
    if verdict is Verdict.CAP:
        return f"the request limit holds the server below what its memory allows: {seen}", cap_cure(facts)
    if verdict is Verdict.COMPUTE:
        return (
            f"requests wait and no other limit is near{_roofline_clause(facts, engine)}: {seen}",
            compute_cure(facts, engine),
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


def _figures(facts: Facts) -> str:
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


def _state_sentence(facts: Facts, engine: Engine, seen: str) -> str:
    per = slots_per_request(facts, engine)
    if facts.state_slots and per:
        return f"{facts.state_slots} state slots at {per} per request run {facts.state_slots // per}: {seen}"
    modelled = modelled_slots(engine) if facts.state is None else None
    if modelled is not None:
        return f"by the capacity model {modelled[1]} state slots run {modelled[0]} (the server publishes no state metrics): {seen}"
    return f"state slots are full: {seen}"


def _roofline_clause(facts: Facts, engine: Engine) -> str:
    if engine.architecture is None or engine.gpu is None or facts.rate is None or facts.running < 1:
        return ""
    flags = engine.flags or ServerFlags()
    line = roofline(engine.architecture, engine.gpu, flags, workload_of(facts), round(facts.running))
    return f", at {facts.rate / line.tok_s:.0%} of the {line.bound} roofline of {line.tok_s:.0f} tok/s ({engine.gpu.name})"


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
    reference: Reference | None, rate: float | None, engine: Engine, parts: Sequence[Facts]
) -> tuple[str | None, float | None]:
    if reference is None:
        return None, None
    work = workload_of(together(parts)) if parts else Workload()
    due = reference_tok_s(reference, engine.architecture, replace(work, clients=None), engine.dialect)
    if due is None:
        return f"{reference} says nothing in tok/s without the model's config.json", None
    if rate is None:
        return f"{reference} stands for {due:.0f} tok/s; no rate was measured", None
    stands = "" if reference.gpu is None else f" (about {due:.0f} tok/s by the capacity model)"
    return f"{rate:.0f} tok/s are {rate / due:.0%} of the reference {reference}{stands}", rate / due
