"""What a server can hold before it starts: model, GPU and flags in, slots, tokens and requests out.

Knows how SGLang divides a GPU (read in its 0.5.15.post1 and 0.5.23 sources: `handle_max_mamba_cache`,
`_resolve_max_num_reqs`, `pool_configurator`, `_handle_gpu_memory_settings`, `PrefillAdder`) and what a
decode step must read. Must never know a running server: it computes from sizes alone. How fast a
setting is, is throughput.py's; what a running server shows, telemetry.py's and bottleneck.py's.
"""

from dataclasses import dataclass
from typing import Literal

from draftmill.architecture import DTYPE_BYTES, Architecture
from draftmill.errors import UserError
from draftmill.gpus import GIB, MIB, Gpu
from draftmill.server_flags import FREE_SLOTS_FLAG, UNKNOWN, Dialect, ServerFlags, refusals, slots_per_request

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
    chunk = flags.chunked_prefill or default_chunk(gpu_memory_bytes)
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


def default_chunk(gpu_memory_bytes: int) -> int:
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
    if cap <= 0 < tokens:
        refused.append(f"{slots} state slots at {per_request} per request are too few to run one request")
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
    by_tokens = int(tokens / kept_tokens(workload, flags.conservativeness))
    running = cap
    if by_tokens < running:
        running, limit = by_tokens, "KV tokens"
    if workload.clients is not None and workload.clients < running:
        running, limit = workload.clients, "clients"
    return running, limit if running > 0 else "nothing fits"


def reserved_ratio(conservativeness: float = 1.0) -> float:
    """Share of what a request may still generate that the scheduler keeps free for it."""
    return min(INIT_NEW_TOKEN_RATIO * conservativeness, 1.0) * MIN_NEW_TOKEN_RATIO_FACTOR


def kept_tokens(workload: Workload, conservativeness: float = 1.0) -> float:
    """KV tokens that a running request takes from the pool: what it holds and what is kept free for it."""
    return workload.held_tokens + reserved_ratio(conservativeness) * workload.reserved_tokens


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
