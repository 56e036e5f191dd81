"""The settings worth trying for a model on a card, ranked by what they should bring, and their table.

Knows which changes can help (what holds the state, what the caches get, how prefills are gathered) and
offers none that the engine would refuse. Must never start a server: trying out is the tuner's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from draftmill.architecture import Architecture
from draftmill.capacity import (
    Capacity,
    Workload,
    capacity,
    default_chunk,
    default_mem_fraction,
    kept_tokens,
    roofline,
    state_dtype_of,
)
from draftmill.gpus import Gpu, Reference
from draftmill.server_flags import (
    FREE_SLOTS_FLAG,
    PREFILL_DELAYER_FLAG,
    UNKNOWN,
    Dialect,
    ServerFlags,
    read_flags,
    resolved_overlap,
    resolved_strategy,
    with_flags,
    without_settings,
)
from draftmill.throughput import Estimate, estimate


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting worth trying: its whole flags, what it should hold and bring.

    changes_answers: it changes the sampled distribution, so it must not be adopted unasked.
    gain: estimated rate over that of the asked flags.
    """

    name: str
    flags: ServerFlags
    capacity: Capacity
    estimate: Estimate
    gain: float
    changes_answers: bool


def candidates(
    architecture: Architecture,
    gpu: Gpu,
    flags: ServerFlags,
    workload: Workload,
    dialect: Dialect = UNKNOWN,
    *,
    allow_state_dtype: bool = False,
    weight_bytes: int | None = None,
    gpu_memory_bytes: int | None = None,
) -> list[Candidate]:
    """The asked flags first, then every sensible alternative that the engine would take, best first.

    Alternatives that would change answers (the state's dtype) are left out unless allowed.
    """
    memory = gpu_memory_bytes or gpu.memory_bytes

    def weigh(name: str, tried: ServerFlags) -> Candidate:
        have = capacity(architecture, memory, tried, workload, dialect, weight_bytes)
        rate = estimate(architecture, gpu, tried, workload, have, dialect)
        other_dtype = state_dtype_of(architecture, tried) != state_dtype_of(architecture, flags)
        return Candidate(name, tried, have, rate, 1.0, other_dtype and architecture.state is not None)

    asked = weigh("as asked", flags)
    found: dict[ServerFlags, Candidate] = {_sameness(flags, architecture): asked}

    def offer(name: str, tried: ServerFlags | None) -> None:
        if tried is None:
            return
        graphs = _with_graphs(weigh(name, tried), dialect)
        key = _sameness(graphs, architecture)
        if key not in found:
            candidate = weigh(name, graphs)
            if not candidate.capacity.refusals:
                found[key] = candidate

    for name, base in _bases(architecture, flags, dialect, allow_state_dtype):
        for add, more in (("", base), *_memory_variants(architecture, memory, base)):
            larger = f"{name}, {add}" if add else name
            offer(larger, more)
            for batching, batched in _batching_variants(architecture, more, dialect):
                offer(f"{larger}, {batching}", batched)
        for balanced_name, balanced in _balanced(
            architecture, base, weigh(name, base).capacity, workload, dialect
        ):
            offer(f"{name}, {balanced_name}", balanced)
    ranked = sorted(found.values(), key=lambda c: -c.estimate.tok_s)
    for best in (ranked[0], next(c for c in ranked if not c.changes_answers)):
        for last_name, last in (
            *_balanced(architecture, best.flags, best.capacity, workload, dialect),
            *_scheduling_variants(best, memory),
        ):
            offer(f"{best.name}, {last_name}", last)

    def with_gain(candidate: Candidate) -> Candidate:
        gain = candidate.estimate.tok_s / asked.estimate.tok_s if asked.estimate.tok_s else 1.0
        return replace(candidate, gain=gain)

    others = [c for c in found.values() if c is not asked]
    return [asked, *sorted(map(with_gain, others), key=lambda c: (-c.gain, len(c.flags.asked), c.name))]


def _bases(
    architecture: Architecture, flags: ServerFlags, dialect: Dialect, allow_state_dtype: bool
) -> list[tuple[str, ServerFlags]]:
    named: list[tuple[str, ServerFlags]] = [("as asked", flags)]
    if flags.max_running is not None:
        named.append(("no request limit", read_flags(without_settings(flags.asked, ["max_running"]))))
    if architecture.state is not None:
        plain = read_flags(without_settings(flags.asked, ["strategy", "radix_cache", "overlap"]))
        named.append(("radix cache off", with_flags(plain, "--disable-radix-cache")))
        for strategy in ("no_buffer", "extra_buffer_lazy", "extra_buffer"):
            words = dialect.strategy(strategy)
            if words is not None:
                named.append((strategy, with_flags(plain, *words)))
        if (
            allow_state_dtype
            and state_dtype_of(architecture, flags) == "float32"
            and dialect.knows("--mamba-ssm-dtype")
        ):
            named += [
                (f"{name}, bf16 state", with_flags(base, "--mamba-ssm-dtype", "bfloat16"))
                for name, base in list(named)
            ]
    return named


def _memory_variants(
    architecture: Architecture, memory: int, base: ServerFlags
) -> Iterable[tuple[str, ServerFlags]]:
    """SGLang's own choice where less was asked, and a step beyond it: its reserve is a rule of thumb."""
    usual = default_mem_fraction(architecture, memory, base)
    now = usual if base.mem_fraction is None else base.mem_fraction
    for fraction in (usual, min(usual + 0.03, 0.95)):
        if fraction > now + 0.005:
            yield (
                f"memory fraction {fraction:.2f}",
                with_flags(base, "--mem-fraction-static", f"{fraction:.3f}"),
            )


def _batching_variants(
    architecture: Architecture, base: ServerFlags, dialect: Dialect
) -> Iterable[tuple[str, ServerFlags]]:
    if dialect.knows(FREE_SLOTS_FLAG) and base.min_free_slots is None and base.pp == 1:
        for slots in (4,) if dialect.free_slots_limit is not None else (4, 16):
            yield f"prefill after {slots} free slots", with_flags(base, FREE_SLOTS_FLAG, str(slots))
    overlap = resolved_overlap(base, architecture.name, architecture.state is not None)
    if dialect.knows(PREFILL_DELAYER_FLAG) and not base.prefill_delayer and overlap:
        yield "prefill delayed", with_flags(base, PREFILL_DELAYER_FLAG)


def _balanced(
    architecture: Architecture, base: ServerFlags, have: Capacity, workload: Workload, dialect: Dialect
) -> Iterable[tuple[str, ServerFlags]]:
    """Slots and KV tokens in the proportion in which requests use them, so that neither stands idle."""
    if architecture.state is None or not have.state_bytes_per_slot or have.pool_bytes <= 0:
        return
    kv = kept_tokens(workload, base.conservativeness) * have.kv_bytes_per_token
    state = have.state_bytes_per_slot * (have.slots_per_request or 1)
    running = int(have.pool_bytes / (kv + state))
    if running <= 0 or abs(running - have.running) <= 0.05 * have.running:
        return
    cleared = read_flags(without_settings(base.asked, ["mamba_ratio", "max_running", "max_mamba_cache"]))
    if not base.radix_cache:
        yield f"{running} slots", with_flags(cleared, "--max-running-requests", str(running))
    elif dialect.knows("--mamba-full-memory-ratio"):
        yield (
            f"state to KV {state / kv:.2f}",
            with_flags(cleared, "--mamba-full-memory-ratio", f"{state / kv:.2f}"),
        )


def _scheduling_variants(best: Candidate, memory: int) -> Iterable[tuple[str, ServerFlags]]:
    if best.capacity.limit == "KV tokens" and best.flags.conservativeness > 0.5:
        yield "less held back", with_flags(best.flags, "--schedule-conservativeness", "0.5")
    chunk = best.flags.chunked_prefill or default_chunk(memory)
    if chunk > 0:
        yield f"prefill chunk {2 * chunk}", with_flags(best.flags, "--chunked-prefill-size", str(2 * chunk))


def _sameness(flags: ServerFlags, architecture: Architecture) -> ServerFlags:
    """What two settings share when they start the same server, however they are written."""
    if architecture.state is None:
        return replace(flags, asked=())
    strategy, overlap = resolved_strategy(flags, architecture.name)
    return replace(flags, asked=(), strategy=strategy, overlap=overlap)


def _with_graphs(candidate: Candidate, dialect: Dialect) -> ServerFlags:
    """The flags with decode graphs up to what will run, in steps of 32, where they end below it."""
    have, flags = candidate.capacity, candidate.flags
    if not flags.cuda_graph or dialect.graph_flag is None or have.running <= have.graph_max_batch:
        return flags
    return with_flags(flags, dialect.graph_flag, str(math.ceil(have.running / 32) * 32))


def reference_tok_s(
    reference: Reference,
    architecture: Architecture | None,
    workload: Workload,
    dialect: Dialect = UNKNOWN,
) -> float | None:
    """tok/s that a reference stands for, or None where it names a GPU and the model is not known.

    A share of a GPU is that share of what the time model expects of it at its best setting here.
    """
    if reference.tok_s is not None:
        return reference.tok_s
    if reference.gpu is None or architecture is None:
        return None
    found = candidates(architecture, reference.gpu, ServerFlags(), workload, dialect)
    return reference.share * max(c.estimate.tok_s for c in found)


def _shown(found: Sequence[Candidate], rows: int) -> list[Candidate]:
    """The asked flags, the plain changes (each is the first step to another), and the best of the rest."""
    plain = [c for c in found[1:] if "," not in c.name]
    mixed = [c for c in found[1:] if "," in c.name][: max(rows - 1 - len(plain), 0)]
    return [*found[:1], *(c for c in found[1:] if c in plain or c in mixed)]


def table(found: Sequence[Candidate], rows: int = 12) -> str:
    """A text table of about so many candidates: what each holds and should bring; warnings stand below."""
    head = (
        "setting",
        "slots",
        "per req",
        "cap",
        "runs",
        "limit",
        "KV tokens",
        "est. tok/s",
        "gain",
        "prefill",
    )
    body = [
        (
            c.name,
            "-" if c.capacity.state_slots is None else str(c.capacity.state_slots),
            "-" if c.capacity.slots_per_request is None else str(c.capacity.slots_per_request),
            str(c.capacity.max_running),
            str(c.capacity.running),
            c.capacity.limit,
            str(c.capacity.kv_tokens),
            f"{c.estimate.tok_s:.0f}",
            f"{c.gain:.2f}x",
            f"{c.estimate.prefill_share:.0%}",
        )
        for c in _shown(found, rows)
    ]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *body)
    ]
    asked = found[0].capacity
    lines += [f"refused: {reason}" for reason in asked.refusals]
    lines += [f"warning: {warning}" for warning in asked.warnings]
    return "\n".join(lines)


def as_json(
    found: Sequence[Candidate], gpu: Gpu, architecture: Architecture, workload: Workload
) -> Mapping[str, object]:
    """The candidates, the asked one's roofline and the sources, as a JSON-ready mapping (bytes, s, tok/s)."""
    asked = found[0]
    line = roofline(architecture, gpu, asked.flags, workload, asked.capacity.running)

    def plain(candidate: Candidate) -> dict[str, object]:
        step = candidate.estimate.step_s
        return {
            "name": candidate.name,
            "flags": list(candidate.flags.asked),
            **asdict(candidate.capacity),
            "estimated_tok_s": candidate.estimate.tok_s,
            "estimated_step_s": step if math.isfinite(step) else None,
            "estimated_prefill_share": candidate.estimate.prefill_share,
            "gain": candidate.gain,
            "changes_answers": candidate.changes_answers,
        }

    return {
        **plain(asked),
        "model": {"name": architecture.name, "parameters": architecture.parameters},
        "gpu": asdict(gpu),
        "workload": {**asdict(workload), "held_tokens": workload.held_tokens},
        "roofline": asdict(line),
        "alternatives": [plain(candidate) for candidate in found[1:]],
        "table": table(found),
    }
