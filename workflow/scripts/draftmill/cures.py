"""What should change a limit: the flag, its predicted effect, and the gain, for each kind of limit.

Knows the figures of a window and what is known of the engine; names only flags that this engine takes.
Must never decide which limit binds (bottleneck.py does) nor try anything out (the tuner does).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftmill.architecture import Architecture
from draftmill.candidates import candidates
from draftmill.capacity import Workload, capacity, default_mem_fraction, reserved_ratio
from draftmill.gpus import Gpu
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
from draftmill.throughput import estimate
from draftmill.windows import Facts

KV_FULL = 0.9
# A cure that brings less than this is no cure: the next limit is as near.
WORTHWHILE = 1.1
# Prefills that take less of the time than this are no bottleneck.
PREFILL_HEAVY = 1 / 3
# From this share of prompt tokens found in the prefix cache on, the cache is worth its slots.
CACHE_EARNS = 0.3
# Prompts of this length fill a prefill pass by themselves.
LONG_PROMPT = 2048


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

    kind: advice names flags of SGLang alone. slots_per_request: state slots that one running request needs.
    hybrid: the model has state layers (None: not known). gpu, architecture: together they turn guesses into
    the capacity model's figures.
    """

    kind: Literal["sglang", "llamacpp"] = "sglang"
    dialect: Dialect = UNKNOWN
    flags: ServerFlags | None = None
    slots_per_request: int | None = None
    architecture: Architecture | None = None
    gpu: Gpu | None = None
    gpu_memory_bytes: int | None = None
    hybrid: bool | None = None


def slots_per_request(facts: Facts, engine: Engine) -> int | None:
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


def modelled_slots(engine: Engine) -> tuple[int, int] | None:
    """State slots // slots per request, and slots, by the capacity model."""
    if engine.architecture is None or engine.flags is None or engine.gpu is None:
        return None
    memory = engine.gpu_memory_bytes or engine.gpu.memory_bytes
    have = capacity(engine.architecture, memory, engine.flags, Workload(), engine.dialect)
    if have.state_slots is None or have.slots_per_request is None:
        return None
    return have.state_slots // have.slots_per_request, have.state_slots


def kv_room(facts: Facts) -> float | None:
    """Requests of the present kind that the KV pool would hold."""
    held = facts.held_tokens
    if not held or not facts.kv_tokens:
        return None
    return facts.kv_tokens / (held * (1 + reserved_ratio()))


def more_running_gain(now: float, then: float) -> float:
    """What more running requests bring when the model is not known: the middle of nothing and proportion.

    Weights are read once a step for all, states and caches for each: the truth lies between 1 and the
    ratio. On the recordings' H200 1.68, 3.0 and 5.1 times as many brought 1.29, 1.79 and 2.31 times.
    """
    return math.sqrt(then / now) if now > 0 and then > now else 1.0


def _accepted(engine: Engine, words: Sequence[str]) -> bool:
    """Whether the engine would start with these flags added to its own."""
    flags = with_flags(engine.flags or ServerFlags(), *words)
    name = engine.architecture.name if engine.architecture else ""
    return not refusals(flags, engine.dialect, name, engine.hybrid is not False)


def _strategy_words(engine: Engine) -> tuple[str, ...]:
    """The asked flags of a strategy: they go with the radix cache, and the overlap schedule runs again."""
    asked = engine.flags.asked if engine.flags else ()
    kept = without_settings(asked, ["strategy", "overlap"])
    return tuple(word for word in asked if word not in kept)


def _estimated_gain(
    engine: Engine, facts: Facts, words: Sequence[str], drop: Sequence[str] = ()
) -> float | None:
    """The gain by the time model, where model, GPU and flags are known."""
    if engine.architecture is None or engine.gpu is None or engine.flags is None:
        return None
    memory = engine.gpu_memory_bytes or engine.gpu.memory_bytes
    work = workload_of(facts)
    rates = []
    for flags in (engine.flags, _changed(engine.flags, words, drop)):
        have = capacity(engine.architecture, memory, flags, work, engine.dialect)
        rates.append(estimate(engine.architecture, engine.gpu, flags, work, have, engine.dialect).tok_s)
    return rates[1] / rates[0] if rates[0] > 0 else None


def _changed(flags: ServerFlags, words: Sequence[str], drop: Sequence[str]) -> ServerFlags:
    return with_flags(read_flags(without_settings(flags.asked, drop)), *words)


def workload_of(facts: Facts) -> Workload:
    usual = Workload()
    return Workload(
        prompt_tokens=facts.prompt_tokens or usual.prompt_tokens,
        output_tokens=facts.output_tokens or usual.output_tokens,
        cached_share=facts.cached_share or 0.0,
        clients=max(1, round(facts.demand)),
    )


def state_cure(facts: Facts, engine: Engine) -> Advice | None:
    """Fewer slots per request if it needs several, else a larger part of memory for states."""
    per, slots = slots_per_request(facts, engine), facts.state_slots
    modelled = modelled_slots(engine)
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


def _strategies(facts: Facts, engine: Engine, per: int) -> list[tuple[tuple[str, ...], int]]:
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
    facts: Facts, engine: Engine, slots: int, now: float, words: Sequence[str], need: int
) -> Advice | None:
    then = min(float(slots // need), kv_room(facts) or math.inf, max(facts.demand, now))
    if then <= now:
        return None
    gain = _estimated_gain(engine, facts, words, ("strategy", "radix_cache", "overlap")) or more_running_gain(
        now, then
    )
    off = words[0] == "--disable-radix-cache"
    what = "radix cache off" if off else words[1]
    limit = "" if then >= slots // need else f" ({then:.0f} of them at this load)"
    return Advice(
        " ".join(words),
        f"{slots} slots at {slots_per_request(facts, engine) or round(slots / now)} per request run {now:.0f}; "
        f"{what} runs {slots // need}{limit}: expect about {gain:.1f}x, at most {then / now:.1f}x",
        gain,
        _strategy_words(engine) if off else (),
    )


def _larger_share(facts: Facts, engine: Engine, slots: int, now: float) -> Advice | None:
    """With one slot per request only memory makes more of them: what the KV cache does not use."""
    held = facts.held_tokens
    if not held or not facts.kv_tokens or (facts.kv or 1.0) > KV_FULL:
        return None
    ratio = engine.flags.mamba_ratio if engine.flags else 0.9
    slot_as_tokens = ratio * facts.kv_tokens / slots
    kept = held * (1 + reserved_ratio())
    most = (slots * slot_as_tokens + facts.kv_tokens) / (slot_as_tokens + kept)
    then = min(most, max(facts.demand, now))
    if then <= now:
        return None
    gain = more_running_gain(now, then)
    return Advice(
        f"--max-running-requests {int(most)}",
        f"with the radix cache off the pool holds exactly as many states: {slots} slots run {now:.0f} and the KV "
        f"cache stands at {facts.kv:.2f}; {int(most)} slots leave it just enough: expect about {gain:.2f}x",
        gain,
    )


def kv_cure(facts: Facts, engine: Engine) -> Advice | None:
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
            f"{more_running_gain(1, room):.2f}x",
            more_running_gain(1, room),
        )
    fraction = _fraction(engine)
    more = min((fraction or 0.89) + 0.03, 0.95)
    if fraction is not None and more <= fraction:
        said = f"{used} at {facts.running:.0f} running and memory is given away whole: only shorter answers, "
        return Advice(None, said + "more GPUs or a smaller KV dtype would help", 1.0)
    words = ("--mem-fraction-static", f"{more:.2f}")
    room = 1.0 + 0.03 * 3  # 3 % of the card are about 9 % of a pool that is a third of it
    gain = _estimated_gain(engine, facts, words) or more_running_gain(1, room)
    now = "the present fraction, unless it is higher already" if fraction is None else f"{fraction:.2f}"
    return Advice(
        " ".join(words),
        f"{used} at {facts.running:.0f} running: memory beyond {now} goes to the caches whole: "
        f"expect about {gain:.2f}x",
        gain,
    )


def _fraction(engine: Engine) -> float | None:
    """The memory fraction in force: asked, else SGLang's own for this model and card, else unknown."""
    if engine.flags is not None and engine.flags.mem_fraction is not None:
        return engine.flags.mem_fraction
    if engine.flags is None or engine.architecture is None or engine.gpu is None:
        return None
    memory = engine.gpu_memory_bytes or engine.gpu.memory_bytes
    return default_mem_fraction(engine.architecture, memory, engine.flags)


def without_prefill(share: float) -> float:
    """The gain if prefill took no time at all: the most that any gathering of prefills can bring."""
    return 1 / (1 - min(share, 0.95))


def prefill_cure(facts: Facts, engine: Engine) -> Advice | None:
    share = facts.prefill_share or 0.0
    most = without_prefill(share)
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


def cap_cure(facts: Facts) -> Advice | None:
    room = kv_room(facts)
    if room is None:
        return None
    then = int(min(room, max(facts.demand, facts.running)))
    if then <= facts.running:
        return None
    gain = more_running_gain(facts.running, then)
    return Advice(
        f"--max-running-requests {int(room)}",
        f"{facts.running:.0f} run at KV use {facts.kv or 0:.2f}; the KV cache holds {int(room)}: expect about {gain:.1f}x, "
        f"at most {then / facts.running:.1f}x",
        gain,
    )


def compute_cure(facts: Facts, engine: Engine) -> Advice | None:
    """The best other setting by the capacity model, where model, GPU and flags are known."""
    if engine.architecture is None or engine.gpu is None or engine.flags is None:
        if (facts.prefill_share or 0) > PREFILL_HEAVY:
            return prefill_cure(facts, engine)
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
        workload_of(facts),
        engine.dialect,
        gpu_memory_bytes=engine.gpu_memory_bytes,
    )
    best = found[1] if len(found) > 1 else None
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
