"""What a server can hold and how fast it could go, before it starts: model, GPU and flags in, figures out.

Knows how SGLang divides a GPU (read in its 0.5.15.post1 and 0.5.23 sources: `handle_max_mamba_cache`,
`_resolve_max_num_reqs`, `pool_configurator`, `_handle_gpu_memory_settings`, `PrefillAdder`), and a model
of decode and prefill time that ranks settings. Must never know a running server: it computes from sizes
alone. What a running server shows is telemetry.py's and bottleneck.py's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from draftmill.architecture import DTYPE_BYTES, Architecture
from draftmill.errors import UserError
from draftmill.gpus import GIB, MIB, Gpu, Reference
from draftmill.server_flags import (
    FREE_SLOTS_FLAG,
    UNKNOWN,
    Dialect,
    ServerFlags,
    read_flags,
    refusals,
    resolved_overlap,
    resolved_strategy,
    slots_per_request,
    with_flags,
    without_settings,
)

# Between the driver's total and what is free when weights start to load: the CUDA context and the
# communicator, 1.3 GiB (the recordings' H200: 140.40 GiB in all, 139.13 GiB free).
RUNTIME_BYTES = round(1.3 * GIB)
# SGLang takes 100 MiB out of the budget of a multimodal model for its embedding cache, from 0.5.23 on.
MULTIMODAL_CACHE_BYTES = 100 * MIB

# PrefillAdder keeps room for the rest of every running request: this share of what it may still generate
# (SGLANG_INIT_NEW_TOKEN_RATIO x conservativeness, decayed to SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR of it),
# but for at most so many tokens a request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
CLIPPED_NEW_TOKENS = 4096

# The time model's three measured constants (H200, Triton kernels, 64 layers; the recordings): a decode
# step reaches this share of the roofline, a prefill pass of this share of the arithmetic peak, and no
# pass without a CUDA graph is shorter than this a layer, since launching its kernels takes that long.
DECODE_EFFICIENCY = 0.62
PREFILL_EFFICIENCY = 0.6
LAUNCH_S_PER_LAYER = 1.6e-3
# --enable-prefill-delayer holds a prefill back for at most 30 decode steps.
DELAYER_STEPS = 30

Limit = Literal["state slots", "KV tokens", "asked", "scheduler", "clients", "nothing fits"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What the requests look like, in tokens: means, and how much output lengths vary.

    output_cv: standard deviation of output lengths over their mean. max_tokens: the limit sent with a
    request (None: the output's own length). cached_share: share of prompt tokens found in the prefix cache
    where that is on. clients: requests that are sent at once, None for as many as fit.
    """

    prompt_tokens: float = 200
    output_tokens: float = 3000
    output_cv: float = 0.0
    max_tokens: float | None = None
    cached_share: float = 0.0
    clients: int | None = None

    @property
    def generated_tokens(self) -> float:
        """What a request that runs at a random moment has generated so far, on average: E[L^2] / 2 E[L].

        Long answers are met more often than short ones, so variance raises it above half the mean.
        """
        return self.output_tokens * (1 + self.output_cv**2) / 2

    @property
    def held_tokens(self) -> float:
        """Tokens of KV cache that a running request holds on average."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def reserved_tokens(self) -> float:
        """Tokens it may still generate, as the scheduler sees it."""
        if self.max_tokens is None:
            return min(self.generated_tokens, CLIPPED_NEW_TOKENS)
        return min(max(self.max_tokens - self.generated_tokens, 0.0), CLIPPED_NEW_TOKENS)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one server (tensor-parallel group) holds; bytes are on each GPU.

    max_running: the server's own cap ("max_running_requests" on its last start-up line). running: requests
    that run at once under the workload; limit: what holds it there. state_* are None without state layers.
    refusals: why the server would not start; warnings: clamps, and settings that cost throughput.
    """

    mem_fraction: float
    weight_bytes: int
    pool_bytes: int
    state_bytes_per_slot: int | None
    state_slots: int | None
    slots_per_request: int | None
    kv_bytes_per_token: int
    kv_tokens: int
    max_running: int
    running: int
    limit: Limit
    graph_max_batch: int
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time that a decode step of `running` requests can take, and the rate it allows.

    bytes per step on each GPU: weights read once, states read and written, KV cache read.
    """

    running: int
    weight_bytes: float
    state_bytes: float
    kv_bytes: float
    flops: float
    step_s: float
    tok_s: float
    bound: Literal["bandwidth", "compute"]
    source: str


def dtype_bytes(name: str) -> float:
    """Bytes of an element of a dtype by any of its names; raises UserError for an unknown one."""
    size = DTYPE_BYTES.get(name)
    if size is None:
        raise UserError(f"the dtype {name!r} is not known: use one of {', '.join(sorted(DTYPE_BYTES))}")
    return size


def state_dtype_of(architecture: Architecture, flags: ServerFlags) -> str:
    """The dtype of the recurrent state: the flag's, else the model's own."""
    return flags.state_dtype or (architecture.state.dtype if architecture.state else "float32")


def _kv_dtype_bytes(architecture: Architecture, flags: ServerFlags) -> float:
    if flags.kv_cache_dtype != "auto":
        return dtype_bytes(flags.kv_cache_dtype)
    return dtype_bytes(flags.dtype if flags.dtype and flags.dtype != "auto" else architecture.dtype)


def default_graph_batch(gpu_memory_bytes: int, flags: ServerFlags) -> int:
    """The largest decode batch that gets a CUDA graph (SGLang's defaults by memory and parallel size)."""
    if not flags.cuda_graph:
        return 0
    if flags.graph_max_batch is not None:
        return flags.graph_max_batch
    gib = gpu_memory_bytes / GIB
    small = flags.tp < 4
    if gib < 20:
        return 8
    if gib < 35:
        return 24 if small else 80
    if gib < 60:
        return 32 if small else 160
    if gib < 160:
        return 256 if small else 512
    return 512


def default_mem_fraction(architecture: Architecture, gpu_memory_bytes: int, flags: ServerFlags) -> float:
    """--mem-fraction-static as SGLang chooses it: all but what activations and graphs are reckoned to need.

    The reserve is 512 MiB, 1.5 MiB a token of a prefill chunk, 2 MiB a request of the largest graph and
    128 MiB a GPU of the group, 10 GiB at least on cards above 60 GiB; 5 % less for a vision tower of
    ViT-L's size, between 0.25 % and 24 % as it differs from that.
    """
    total = gpu_memory_bytes / MIB
    chunk = flags.chunked_prefill or _default_chunk(gpu_memory_bytes)
    tokens = max(chunk if chunk > 0 else flags.max_prefill_tokens, 2048)
    reserve = (
        512 + tokens * 1.5 + default_graph_batch(gpu_memory_bytes, flags) * 2 + flags.tp * flags.pp * 128
    )
    if total > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    fraction = round((total - reserve) / total, 3)
    if architecture.multimodal:
        depth, hidden = architecture.vision
        complexity = depth * hidden**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (complexity - 1)))
    return fraction


def _default_chunk(gpu_memory_bytes: int) -> int:
    gib = gpu_memory_bytes / GIB
    return 2048 if gib < 35 else 4096 if gib < 60 else 8192 if gib < 160 else 16384


def capacity(
    architecture: Architecture,
    gpu_memory_bytes: int,
    flags: ServerFlags,
    workload: Workload,
    dialect: Dialect = UNKNOWN,
    weight_bytes: int | None = None,
) -> Capacity:
    """What a server with these flags holds on GPUs of that total memory (as the driver reports it).

    weight_bytes: the weights' size where it is known better than from the shape (all GPUs together).
    Flags that SGLang refuses and memory that does not suffice are named in refusals; figures are then those
    the flags would give, 0 where nothing fits. Data parallelism is not modelled: one replica is.
    """
    weights = (
        round(weight_bytes / flags.tp)
        if weight_bytes is not None
        else architecture.weight_bytes(flags.dtype, flags.quantization, flags.tp)
    )
    fraction = flags.mem_fraction
    if fraction is None:
        fraction = default_mem_fraction(architecture, gpu_memory_bytes, flags)
    before_load = max(gpu_memory_bytes - RUNTIME_BYTES, 0)
    pool = round(before_load * fraction) - weights - architecture.rope_bytes
    if architecture.multimodal and dialect.padding_slots:
        pool -= MULTIMODAL_CACHE_BYTES
    refused = refusals(flags, dialect, architecture.name, architecture.state is not None)
    warnings: list[str] = []

    per_slot: int | None = None
    slots: int | None = None
    per_request: int | None = None
    kv_memory = pool
    if architecture.state is not None:
        per_slot = architecture.state.bytes_per_slot(
            dtype_bytes(state_dtype_of(architecture, flags)), flags.tp
        )
        per_request = slots_per_request(flags, architecture.name)
        slots = _state_slots(flags, max(pool, 0), per_slot, dialect.padding_slots)
        kv_memory = pool - (slots + dialect.padding_slots) * per_slot

    cell = architecture.kv_bytes_per_token(_kv_dtype_bytes(architecture, flags), flags.tp)
    if cell == 0:
        raise UserError("the model has no attention layer: its capacity is not computed by this model")
    tokens = max(kv_memory, 0) // cell // flags.page_size * flags.page_size
    if flags.max_total_tokens is not None:
        if flags.max_total_tokens > tokens:
            warnings.append(
                f"--max-total-tokens {flags.max_total_tokens} is more than fits: it is cut to {tokens}"
            )
        tokens = min(tokens, flags.max_total_tokens)
    if tokens <= 0:
        least = weights / before_load if before_load else 1.0
        refused.append(
            f"weights of {weights / GIB:.1f} GiB leave no room for the caches under --mem-fraction-static "
            f"{fraction:.3f} (state slots hold {(slots or 0) * (per_slot or 0) / GIB:.1f} GiB): "
            f"raise it well above {least:.3f}, or ask for fewer slots, more GPUs or smaller weights"
        )

    cap, limit = _cap(flags, architecture, tokens, slots, per_request, warnings)
    graph = default_graph_batch(gpu_memory_bytes, flags)
    if flags.min_free_slots is not None and flags.min_free_slots > 1:
        obeyed = obeyed_free_slots(flags.min_free_slots, cap, dialect)
        if obeyed != flags.min_free_slots:
            warnings.append(f"{FREE_SLOTS_FLAG} {flags.min_free_slots} is cut to {obeyed} by this version")
    running, limit = _running(cap, limit, tokens, workload, flags)
    if flags.cuda_graph and running > graph:
        warnings.append(
            f"{running} requests run but decode graphs end at {graph}: larger batches run without one, slower; "
            f"raise {dialect.graph_flag or '--cuda-graph-max-bs-decode'}"
        )
    return Capacity(
        mem_fraction=fraction,
        weight_bytes=weights,
        pool_bytes=pool,
        state_bytes_per_slot=per_slot,
        state_slots=slots,
        slots_per_request=per_request,
        kv_bytes_per_token=cell,
        kv_tokens=tokens,
        max_running=cap,
        running=running,
        limit=limit,
        graph_max_batch=graph,
        refusals=tuple(refused),
        warnings=tuple(warnings),
    )


def _state_slots(flags: ServerFlags, pool: int, per_slot: int, padding: int) -> int:
    if flags.max_mamba_cache is not None:
        return flags.max_mamba_cache
    if not flags.radix_cache and flags.max_running is not None:
        return flags.max_running
    budget = pool * flags.mamba_ratio / (1 + flags.mamba_ratio)
    return max(int(budget // per_slot) - padding, 0)


def _cap(
    flags: ServerFlags,
    architecture: Architecture,
    tokens: int,
    slots: int | None,
    per_request: int | None,
    warnings: list[str],
) -> tuple[int, Limit]:
    """The server's own limit of running requests, and what sets it."""
    context = flags.context_length or architecture.context_length
    estimated = max(min(int(tokens / context * 512), 4096), 2048)
    cap, limit = min(estimated, tokens // 2), "scheduler"
    if flags.max_running is not None:
        cap, limit = min(flags.max_running, tokens // 2), "asked"
    if slots is not None and per_request is not None and slots // per_request < cap:
        cap, limit = slots // per_request, "state slots"
    if flags.max_running is not None and cap < flags.max_running:
        why = (
            f"{slots} state slots at {per_request} per request"
            if limit == "state slots"
            else f"{tokens} KV tokens"
        )
        warnings.append(f"--max-running-requests {flags.max_running} is cut to {cap} by {why}")
    return cap, limit if cap > 0 else "nothing fits"  # type: ignore[return-value]  # literals by construction


def _running(
    cap: int, limit: Limit, tokens: int, workload: Workload, flags: ServerFlags
) -> tuple[int, Limit]:
    ratio = min(INIT_NEW_TOKEN_RATIO * flags.conservativeness, 1.0) * MIN_NEW_TOKEN_RATIO_FACTOR
    per_request = workload.held_tokens + ratio * workload.reserved_tokens
    by_tokens = int(tokens / per_request)
    running = cap
    if by_tokens < running:
        running, limit = by_tokens, "KV tokens"
    if workload.clients is not None and workload.clients < running:
        running, limit = workload.clients, "clients"
    return running, limit if running > 0 else "nothing fits"


def obeyed_free_slots(asked: int, max_running: int, dialect: Dialect) -> int:
    """What a version makes of --min-free-slots-delay: itself, or the formula of 0.5.15; 1 = no delay."""
    if dialect.free_slots_limit is None:
        return min(asked, max_running)
    if max_running < 8:
        return 1
    return min(asked, dialect.free_slots_limit, max(2, (max_running + 5) // 6))


def roofline(
    architecture: Architecture, gpu: Gpu, flags: ServerFlags, workload: Workload, running: int
) -> Roofline:
    """The bandwidth and arithmetic limit of decode with so many requests running."""
    batch = max(running, 1)
    weights = architecture.read_bytes(batch, flags.dtype, flags.quantization, flags.tp)
    state = 0.0
    if architecture.state is not None:
        slot = architecture.state.bytes_per_slot(dtype_bytes(state_dtype_of(architecture, flags)), flags.tp)
        state = 2.0 * slot * batch
    cell = architecture.kv_bytes_per_token(_kv_dtype_bytes(architecture, flags), flags.tp)
    kv = float(cell) * workload.held_tokens * batch
    flops = 2 * architecture.active_parameters * batch / flags.tp
    by_bandwidth, by_compute = (weights + state + kv) / gpu.bandwidth, flops / gpu.bf16_flops
    step = max(by_bandwidth, by_compute)
    return Roofline(
        running=batch,
        weight_bytes=weights,
        state_bytes=state,
        kv_bytes=kv,
        flops=flops,
        step_s=step,
        tok_s=batch / step,
        bound="bandwidth" if by_bandwidth >= by_compute else "compute",
        source=gpu.source,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Output rate that the time model expects, and where a second goes.

    tok_s holds for kernels like those it was measured with; the ratio of two estimates carries further.
    """

    tok_s: float
    step_s: float
    prefill_share: float
    roofline_share: float


def estimate(
    architecture: Architecture,
    gpu: Gpu,
    flags: ServerFlags,
    workload: Workload,
    have: Capacity,
    dialect: Dialect = UNKNOWN,
) -> Estimate:
    """The rate of a full server. A prefill pass stops decoding; one is due whenever an answer has ended.

    With b requests of L output tokens, b/L answers end a decode step, so without batching of prefills
    1 - exp(-b/L) passes fall on each. Holding them back until g slots are free makes it b/(L g), at the
    price of (g - 1)/2 slots that stand empty on average.
    """
    running = have.running
    if running <= 0:
        return Estimate(0.0, math.inf, 0.0, 0.0)
    ending_per_request = 1 / max(workload.output_tokens, 1)
    passes = 1 - math.exp(-running * ending_per_request)
    group = _prefill_group(flags, have, running * ending_per_request, dialect, architecture)
    batch = float(running)
    if group > 1:
        batch = max(running - (group - 1) / 2, 1.0)
        passes = min(passes, batch * ending_per_request / group)
    line = roofline(architecture, gpu, flags, workload, round(batch))
    launch = architecture.layers * LAUNCH_S_PER_LAYER
    step = line.step_s / DECODE_EFFICIENCY
    if batch > have.graph_max_batch:
        step = max(step, launch)
    cached = workload.cached_share if flags.radix_cache else 0.0
    prompts = batch * ending_per_request / passes * workload.prompt_tokens * (1 - cached)
    compute = 2 * architecture.active_parameters * prompts / flags.tp / (gpu.bf16_flops * PREFILL_EFFICIENCY)
    prefill = passes * max(launch, compute)
    rate = batch / (step + prefill)
    return Estimate(rate, step, prefill / (step + prefill), rate / line.tok_s)


def _prefill_group(
    flags: ServerFlags, have: Capacity, ending_per_step: float, dialect: Dialect, architecture: Architecture
) -> float:
    group = 1.0
    if flags.min_free_slots is not None:
        group = float(obeyed_free_slots(flags.min_free_slots, have.max_running, dialect))
    if flags.prefill_delayer and resolved_overlap(flags, architecture.name, architecture.state is not None):
        group = max(group, DELAYER_STEPS * ending_per_step)
    return group


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
        offer(name, base)
        for add, more in (("", base), *_memory_variants(architecture, memory, base)):
            larger = f"{name}, {add}" if add else name
            offer(larger, more)
            for batching, batched in _batching_variants(architecture, more, dialect):
                offer(f"{larger}, {batching}", batched)
        for balanced_name, balanced in _balanced(
            architecture, base, weigh(name, base).capacity, workload, dialect
        ):
            offer(f"{name}, {balanced_name}", balanced)
    best = max(found.values(), key=lambda c: c.estimate.tok_s)
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
    if dialect.knows("--enable-prefill-delayer") and not base.prefill_delayer and overlap:
        yield "prefill delayed", with_flags(base, "--enable-prefill-delayer")


def _balanced(
    architecture: Architecture, base: ServerFlags, have: Capacity, workload: Workload, dialect: Dialect
) -> Iterable[tuple[str, ServerFlags]]:
    """Slots and KV tokens in the proportion in which requests use them, so that neither stands idle."""
    if architecture.state is None or not have.state_bytes_per_slot or have.pool_bytes <= 0:
        return
    ratio = min(INIT_NEW_TOKEN_RATIO * base.conservativeness, 1.0) * MIN_NEW_TOKEN_RATIO_FACTOR
    kv = (workload.held_tokens + ratio * workload.reserved_tokens) * have.kv_bytes_per_token
    state = have.state_bytes_per_slot * (have.slots_per_request or 1)
    running = int(have.pool_bytes / (kv + state))
    if running <= 0 or abs(running - have.running) <= 0.02 * have.running:
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
    chunk = best.flags.chunked_prefill or _default_chunk(memory)
    if chunk > 0:
        yield f"prefill chunk {2 * chunk}", with_flags(best.flags, "--chunked-prefill-size", str(2 * chunk))


def _sameness(flags: ServerFlags, architecture: Architecture) -> ServerFlags:
    """What two settings share when they start the same server, however they are written."""
    if architecture.state is None:
        return replace(flags, asked=())
    strategy, overlap = resolved_strategy(flags, architecture.name)
    return replace(flags, asked=(), strategy=strategy, overlap=overlap)


def _with_graphs(candidate: Candidate, dialect: Dialect) -> ServerFlags:
    """The flags with decode graphs up to the requests that will run (in steps of 32), where they are short."""
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


def table(found: Sequence[Candidate], rows: int = 12) -> str:
    """A text table of candidates: what each holds, runs and should bring, with refusals and warnings below."""
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
        for c in found[:rows]
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
