"""SGLang's memory and scheduling flags: reading them, how versions name them, what a version refuses.

Knows the flag names of both generations and the checks SGLang makes on them. Must never know a model's
sizes or a GPU (capacity.py), nor ask an installed SGLang itself (engines/ hands its `--help` text in).
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from draftmill.errors import UserError

STRATEGY_FLAGS = ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")
STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
GRAPH_FLAGS = ("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs")
# Capped by the version, or obeyed as asked: see Dialect.free_slots_limit.
FREE_SLOTS_FLAG = "--min-free-slots-delay"
PREFILL_DELAYER_FLAG = "--enable-prefill-delayer"

# Flags that stay with a model's numerics or with other subjects pass through untouched.
_LASTING = frozenset({
    "--mem-fraction-static", "--max-running-requests", "--max-total-tokens", "--chunked-prefill-size",
    "--schedule-conservativeness", "--disable-radix-cache", "--disable-overlap-schedule",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which flags and which values of them one SGLang version knows.

    strategy_flag, graph_flag: the names to use, None where the version knows neither. strategies: values
    of the strategy flag. flags: every flag of the version. sure: read from that version, not assumed.
    free_slots_limit: the largest --min-free-slots-delay the version obeys, None without a limit.
    padding_slots: state slots that the version takes out of the budget beside those it reports.
    """

    strategy_flag: str | None
    strategies: tuple[str, ...]
    graph_flag: str | None
    flags: frozenset[str]
    sure: bool
    free_slots_limit: int | None = None
    padding_slots: int = 0

    def knows(self, flag: str) -> bool:
        """Whether the version takes the flag, as far as is known."""
        return flag in self.flags

    def strategy(self, name: str) -> tuple[str, ...] | None:
        """The flags that choose a strategy, or None where this version would refuse them."""
        if self.strategy_flag is None or name not in self.strategies:
            return None
        overlap = ("--disable-overlap-schedule",) if name == "no_buffer" else ()
        return (self.strategy_flag, name, *overlap)


# Nothing is known of the engine: only flags that versions have kept for years.
UNKNOWN = Dialect(None, (), None, _LASTING, sure=False)


def dialect_of_help(text: str, version: str = "") -> Dialect:
    """The dialect that an installed SGLang's `--help` text shows; version refines what help does not say."""
    flags = frozenset(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", text))
    strategy = next((flag for flag in STRATEGY_FLAGS if flag in flags), None)
    choices = re.search(rf"{strategy}[ =\n]+\{{([^}}]*)\}}", text) if strategy else None
    names = re.findall(r"[a-z_]+", choices[1]) if choices else []
    return Dialect(
        strategy_flag=strategy,
        strategies=tuple(name for name in STRATEGIES if name in names),
        graph_flag=next((flag for flag in GRAPH_FLAGS if flag in flags), None),
        flags=flags,
        sure=True,
        free_slots_limit=_free_slots_limit(version),
        padding_slots=_padding_slots(version),
    )


def dialect_of_version(version: str | None) -> Dialect:
    """What is known of a version by its number alone; UNKNOWN below the versions whose sources were read.

    Read: 0.5.15.post1 (both strategy names) and 0.5.23 (the new name only).
    """
    number = _number(version)
    if number is None or number < (0, 5, 15):
        return UNKNOWN
    flags = {*_LASTING, STRATEGY_FLAGS[0], GRAPH_FLAGS[0], FREE_SLOTS_FLAG, PREFILL_DELAYER_FLAG}
    flags |= {"--mamba-full-memory-ratio", "--mamba-ssm-dtype", "--max-mamba-cache-size"}
    if number < (0, 5, 23):  # deprecated in 0.5.15, gone in 0.5.23; between them not refused on suspicion
        flags |= {STRATEGY_FLAGS[1], GRAPH_FLAGS[1]}
    return Dialect(
        strategy_flag=STRATEGY_FLAGS[0],
        strategies=STRATEGIES,
        graph_flag=GRAPH_FLAGS[0],
        flags=frozenset(flags),
        sure=True,
        free_slots_limit=_free_slots_limit(str(version)),
        padding_slots=_padding_slots(str(version)),
    )


def _number(version: str | None) -> tuple[int, ...] | None:
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return tuple(int(part) for part in found.groups()) if found else None


def _free_slots_limit(version: str) -> int | None:
    """0.5.15 caps the flag at min(4, ...); 0.5.23 obeys it."""
    number = _number(version)
    return None if number is not None and number >= (0, 5, 23) else 4


def _padding_slots(version: str) -> int:
    """0.5.23 pays its one padding slot out of the state budget, 0.5.15 did not."""
    number = _number(version)
    return 1 if number is not None and number >= (0, 5, 23) else 0


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """The flags that decide capacity, at SGLang's defaults unless given; None = SGLang chooses by itself.

    asked: the flags as given, in order. Sizes in tokens or requests; tp, pp, dp: parallel sizes.
    """

    asked: tuple[str, ...] = ()
    mem_fraction: float | None = None
    mamba_ratio: float = 0.9
    strategy: str = "auto"
    radix_cache: bool = True
    overlap: bool = True
    max_running: int | None = None
    max_mamba_cache: int | None = None
    max_total_tokens: int | None = None
    state_dtype: str | None = None
    kv_cache_dtype: str = "auto"
    dtype: str | None = None
    quantization: str | None = None
    context_length: int | None = None
    chunked_prefill: int | None = None
    max_prefill_tokens: int = 16384
    graph_max_batch: int | None = None
    cuda_graph: bool = True
    page_size: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    conservativeness: float = 1.0
    attention_backend: str | None = None
    linear_attention_backend: str = "triton"
    min_free_slots: int | None = None
    prefill_delayer: bool = False
    stochastic_rounding: bool = False

    @property
    def uses_extra_buffer(self) -> bool:
        """Whether the strategy as written is one of the extra-buffer kind."""
        return self.strategy in ("extra_buffer", "extra_buffer_lazy")


_VALUES: dict[str, tuple[str, type[int] | type[float] | type[str]]] = {
    "--mem-fraction-static": ("mem_fraction", float),
    "--mamba-full-memory-ratio": ("mamba_ratio", float),
    "--mamba-radix-cache-strategy": ("strategy", str),
    "--mamba-scheduler-strategy": ("strategy", str),
    "--max-running-requests": ("max_running", int),
    "--max-mamba-cache-size": ("max_mamba_cache", int),
    "--max-total-tokens": ("max_total_tokens", int),
    "--mamba-ssm-dtype": ("state_dtype", str),
    "--kv-cache-dtype": ("kv_cache_dtype", str),
    "--dtype": ("dtype", str),
    "--quantization": ("quantization", str),
    "--context-length": ("context_length", int),
    "--chunked-prefill-size": ("chunked_prefill", int),
    "--max-prefill-tokens": ("max_prefill_tokens", int),
    "--cuda-graph-max-bs": ("graph_max_batch", int),
    "--cuda-graph-max-bs-decode": ("graph_max_batch", int),
    "--page-size": ("page_size", int),
    "--tensor-parallel-size": ("tp", int),
    "--tp-size": ("tp", int),
    "--tp": ("tp", int),
    "--pipeline-parallel-size": ("pp", int),
    "--pp-size": ("pp", int),
    "--data-parallel-size": ("dp", int),
    "--dp-size": ("dp", int),
    "--schedule-conservativeness": ("conservativeness", float),
    "--attention-backend": ("attention_backend", str),
    "--linear-attn-backend": ("linear_attention_backend", str),
    FREE_SLOTS_FLAG: ("min_free_slots", int),
}
_SWITCHES: dict[str, tuple[str, bool]] = {
    "--disable-radix-cache": ("radix_cache", False),
    "--disable-overlap-schedule": ("overlap", False),
    "--disable-cuda-graph": ("cuda_graph", False),
    PREFILL_DELAYER_FLAG: ("prefill_delayer", True),
    "--enable-mamba-cache-stochastic-rounding": ("stochastic_rounding", True),
}


def read_flags(flags: str | Sequence[str]) -> ServerFlags:
    """The settings in server flags, given as one shell-like text or as a list; unknown flags pass through.

    Raises UserError when a flag lacks its value or the value is no number where one is needed.
    """
    try:
        words = shlex.split(flags) if isinstance(flags, str) else [str(flag) for flag in flags]
    except ValueError as error:
        raise UserError(f"the server flags cannot be read ({error}): {flags!r}") from None
    found: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in _SWITCHES:
            field, switched = _SWITCHES[name]
            found[field] = switched
        elif name in _VALUES:
            field, kind = _VALUES[name]
            text = value if equals else next(rest, None)
            if text is None:
                raise UserError(f"the server flag {name} needs a value")
            try:
                found[field] = kind(text)
            except ValueError:
                raise UserError(f"the server flag {name} needs a number, not {text!r}") from None
    read = ServerFlags(asked=tuple(words), **found)  # type: ignore[arg-type]  # kinds are those of _VALUES
    _check_ranges(read)
    return read


def _check_ranges(flags: ServerFlags) -> None:
    if flags.mem_fraction is not None and not 0 < flags.mem_fraction <= 1:
        raise UserError(
            f"--mem-fraction-static {flags.mem_fraction} is no fraction: give a number between 0 and 1"
        )
    if flags.mamba_ratio <= 0:
        raise UserError(f"--mamba-full-memory-ratio {flags.mamba_ratio} must be above 0")
    for name, value in (("tp", flags.tp), ("pp", flags.pp), ("dp", flags.dp), ("page-size", flags.page_size)):
        if value < 1:
            raise UserError(f"--{name} {value} must be at least 1")


def with_flags(flags: ServerFlags, *words: str) -> ServerFlags:
    """The same flags with some set anew; an older spelling of the same setting is dropped."""
    fresh = read_flags(words)
    return read_flags([*without(flags.asked, fresh.asked), *words]) if words else replace(flags)


def without(asked: Iterable[str], others: Sequence[str]) -> list[str]:
    """The flags as asked less every setting that the others set, under whatever name."""
    fields = {_field(word.partition("=")[0]) for word in others} - {None}
    kept: list[str] = []
    skip = False
    for word in asked:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
            continue
        if _field(name) in fields:
            skip = name in _VALUES and not equals
            continue
        kept.append(word)
    return kept


def changes(before: ServerFlags, after: ServerFlags) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags to add to the first to come to the second, and those of the first that must go for it."""
    old, new = _settings(before.asked), _settings(after.asked)
    add = [words for words in new if words not in old]
    drop = [words for words in old if words not in new]
    return tuple(w for words in add for w in words), tuple(w for words in drop for w in words)


def _settings(asked: Sequence[str]) -> list[tuple[str, ...]]:
    """Flags with their values: a word that starts no flag belongs to the one before it."""
    found: list[tuple[str, ...]] = []
    for word in asked:
        if word.startswith("--") or not found:
            found.append((word,))
        else:
            found[-1] = (*found[-1], word)
    return found


def without_settings(asked: Iterable[str], fields: Iterable[str]) -> list[str]:
    """The flags as asked less those that set the named fields of ServerFlags."""
    names = set(fields)
    flags = [flag for flag, (field, _) in {**_VALUES, **_SWITCHES}.items() if field in names]
    return without(asked, flags)


def _field(name: str) -> str | None:
    entry: tuple[str, object] | None = _VALUES.get(name) or _SWITCHES.get(name)
    return entry[0] if entry else None


# Architectures whose kernels snapshot the state while they run (sglang/srt/arg_groups/overrides.py).
EXTRA_BUFFER_ARCHITECTURES = frozenset({
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3",
    "BailingMoeV2_5ForCausalLM", "InternS2PreviewForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration",
})  # fmt: skip


def resolved_strategy(flags: ServerFlags, architecture: str) -> tuple[str, bool]:
    """The state strategy and whether the overlap schedule runs, after SGLang has resolved "auto".

    Returns ("off", overlap) with the radix cache off, where no strategy is needed.
    """
    if not flags.radix_cache:
        return "off", flags.overlap
    if flags.strategy != "auto":
        return flags.strategy, flags.overlap
    extra = architecture in EXTRA_BUFFER_ARCHITECTURES and flags.linear_attention_backend == "triton"
    if (flags.overlap or flags.page_size > 1) and extra:
        return "extra_buffer", flags.overlap
    return "no_buffer", False


def slots_per_request(flags: ServerFlags, architecture: str) -> int:
    """State slots that SGLang reserves for one running request (its _calculate_mamba_ratio).

    Two for the running state and its copy for the cache, one for the peak between prefill and decode, and
    the extra buffer's ping-pong pair (one of it where the overlap schedule is off or the pair is lazy).
    """
    strategy, overlap = resolved_strategy(flags, architecture)
    if strategy == "off":
        return 1
    if strategy == "no_buffer":
        return 3
    return 5 if strategy == "extra_buffer" and overlap else 4


def refusals(flags: ServerFlags, dialect: Dialect, architecture: str = "", hybrid: bool = False) -> list[str]:
    """Why SGLang would not start with these flags, one sentence each; empty where nothing speaks against it."""
    found: list[str] = []
    names = [word.partition("=")[0] for word in flags.asked if word.startswith("--")]
    if dialect.sure:
        found += [
            f"this version does not know {name}"
            + (f"; it is {dialect.strategy_flag} there" if _field(name) == "strategy" else "")
            for name in names
            if name in (*STRATEGY_FLAGS, *GRAPH_FLAGS, FREE_SLOTS_FLAG, PREFILL_DELAYER_FLAG)
            and not dialect.knows(name)
        ]
        if flags.strategy != "auto" and dialect.strategies and flags.strategy not in dialect.strategies:
            found.append(
                f"this version knows no strategy {flags.strategy!r}: it has {', '.join(dialect.strategies)}"
            )
    elif flags.strategy not in STRATEGIES:
        found.append(f"no version knows a strategy {flags.strategy!r}: there are {', '.join(STRATEGIES)}")
    if hybrid:
        found += _hybrid_refusals(flags, architecture)
    if flags.stochastic_rounding and flags.state_dtype != "float16":
        found.append("--enable-mamba-cache-stochastic-rounding needs --mamba-ssm-dtype float16")
    if flags.prefill_delayer and not resolved_overlap(flags, architecture, hybrid):
        found.append(f"{PREFILL_DELAYER_FLAG} needs the overlap schedule")
    if flags.min_free_slots is not None and flags.pp > 1:
        found.append(f"{FREE_SLOTS_FLAG} does not go with pipeline parallelism")
    return found


def resolved_overlap(flags: ServerFlags, architecture: str, hybrid: bool) -> bool:
    """Whether the overlap schedule runs in the end."""
    return resolved_strategy(flags, architecture)[1] if hybrid else flags.overlap


def _hybrid_refusals(flags: ServerFlags, architecture: str) -> list[str]:
    found: list[str] = []
    if not flags.radix_cache:
        if flags.uses_extra_buffer:
            found.append(
                f"strategy {flags.strategy} goes with the radix cache, which --disable-radix-cache turns off"
            )
        return found
    strategy, overlap = resolved_strategy(flags, architecture)
    if strategy == "no_buffer":
        if overlap:
            found.append(
                "strategy no_buffer does not support the overlap schedule: add --disable-overlap-schedule"
            )
        if flags.page_size > 1:
            found.append(f"strategy no_buffer supports only --page-size 1, not {flags.page_size}")
        if flags.attention_backend == "trtllm_mha":
            found.append("strategy no_buffer does not support --attention-backend trtllm_mha")
        return found
    if strategy == "extra_buffer_lazy" and not overlap:
        found.append("strategy extra_buffer_lazy needs the overlap schedule: drop --disable-overlap-schedule")
    if flags.linear_attention_backend != "triton":
        found.append(
            f"strategy {strategy} needs --linear-attn-backend triton, not {flags.linear_attention_backend}"
        )
    if architecture and architecture not in EXTRA_BUFFER_ARCHITECTURES:
        found.append(f"strategy {strategy} is not supported for {architecture}: use no_buffer")
    return found
