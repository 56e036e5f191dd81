"""The shape of a model, from its config.json: parameters, attention layers, state layers, and their bytes.

Knows how dense, grouped-query, latent-attention, mixture-of-experts and hybrid (gated delta net, Mamba-2)
transformers are laid out. Must never know a server, its flags or a GPU (capacity.py puts them together).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from draftmill.errors import UserError

Config = Mapping[str, object]
StateKind = Literal["gated delta net", "mamba-2"]

DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "fp32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "w8a8_int8": 1,
    "w8a8_fp8": 1,
}
# Four-bit formats carry a 16-bit scale a group (128 values; 16 with an 8-bit scale for fp4).
_FOUR_BIT: dict[str, float] = {
    "awq": 0.5 + 2.5 / 128,
    "awq_marlin": 0.5 + 2.5 / 128,
    "gptq": 0.5 + 2.5 / 128,
    "gptq_marlin": 0.5 + 2.5 / 128,
    "modelopt_fp4": 0.5 + 1 / 16,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of all mixture layers together: parameters of one expert over all layers times count."""

    count: int
    per_token: int
    parameters: int

    def touched(self, tokens: float) -> float:
        """Share of the experts that a batch of tokens reads, each token choosing per_token at random."""
        return 1.0 - float((1.0 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Recurrent state of one request in one layer, before tensor parallelism (SGLang: Mamba2StateShape).

    value_heads * key_dim * value_dim elements in the state's dtype; conv_channels * (kernel - 1) elements
    in bf16; conv_channels = inner + 2 * groups * key_dim, where groups are replicated if they do not divide.
    """

    kind: StateKind
    layers: int
    value_heads: int
    key_dim: int
    value_dim: int
    inner: int
    groups: int
    kernel: int
    dtype: str

    def bytes_per_slot(self, dtype_bytes: float, tensor_parallel: int = 1) -> int:
        """Bytes of one slot on one GPU; the convolution's window is always 2 bytes an element."""
        groups = self.groups
        if groups % tensor_parallel:
            groups += tensor_parallel - groups
        conv = (self.inner + 2 * groups * self.key_dim) // tensor_parallel * (self.kernel - 1)
        state = self.value_heads // tensor_parallel * self.value_dim * self.key_dim
        return round(self.layers * (conv * 2 + state * dtype_bytes))


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the capacity model needs of a model; parameters count elements.

    matrices: weights of linear layers outside the routed experts, which quantization shrinks; kept:
    embeddings, head, norms, vision tower, which it leaves in dtype; read_once_kept: the part of kept that a
    decode step reads (head and norms; a lookup reads one row of the embedding, the vision tower nothing).
    kv_heads, key_dim, value_dim: of an attention layer; latent_dim > 0: latent attention (MLA), whose cache
    holds latent_dim elements a token and layer and is not split by tensor parallelism. rope_bytes: the fp32
    table of rotary sines and cosines, one row a position, which every GPU keeps beside the weights.
    """

    name: str
    layers: int
    attention_layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int
    matrices: int
    kept: int
    read_once_kept: int
    experts: Experts | None
    state: StateShape | None
    context_length: int
    dtype: str
    quantization: str | None
    multimodal: bool
    rope_bytes: int = 0
    vision: tuple[int, int] = field(default=(24, 1024))

    @property
    def parameters(self) -> int:
        """All elements, vision tower included."""
        return self.matrices + self.kept + (self.experts.parameters if self.experts else 0)

    @property
    def active_parameters(self) -> float:
        """Elements that take part in one token: its experts, no embedding table, no vision tower."""
        experts = (
            self.experts.parameters * self.experts.per_token / self.experts.count if self.experts else 0.0
        )
        return self.matrices + self.read_once_kept + experts

    def weight_bytes(
        self, dtype: str | None = None, quantization: str | None = None, tensor_parallel: int = 1
    ) -> int:
        """Bytes of weights on one GPU."""
        full, matrix = self._element_bytes(dtype, quantization)
        experts = self.experts.parameters if self.experts else 0
        return round(((self.matrices + experts) * matrix + self.kept * full) / tensor_parallel)

    def read_bytes(
        self,
        tokens: float,
        dtype: str | None = None,
        quantization: str | None = None,
        tensor_parallel: int = 1,
    ) -> float:
        """Bytes of weights that one decode step of so many tokens reads on one GPU."""
        full, matrix = self._element_bytes(dtype, quantization)
        experts = self.experts.parameters * self.experts.touched(tokens) if self.experts else 0.0
        return ((self.matrices + experts) * matrix + self.read_once_kept * full) / tensor_parallel

    def kv_bytes_per_token(self, dtype_bytes: float, tensor_parallel: int = 1) -> int:
        """Bytes of one token in the KV cache on one GPU; KV heads are replicated beyond their number."""
        if self.latent_dim:
            return round(self.attention_layers * self.latent_dim * dtype_bytes)
        heads = max(1, self.kv_heads // tensor_parallel)
        return round(self.attention_layers * heads * (self.key_dim + self.value_dim) * dtype_bytes)

    def _element_bytes(self, dtype: str | None, quantization: str | None) -> tuple[float, float]:
        chosen = self.dtype if dtype in (None, "auto") else str(dtype)
        full = DTYPE_BYTES.get(chosen)
        if full is None:
            raise UserError(f"the dtype {chosen!r} is not known: use one of {', '.join(sorted(DTYPE_BYTES))}")
        method = quantization or self.quantization
        if method is None or method in ("none", "unquant"):
            return full, full
        matrix = _FOUR_BIT.get(method, DTYPE_BYTES.get(method))
        if matrix is None:
            raise UserError(
                f"the quantization {method!r} is not known to the capacity model: give the weights' bytes by hand"
            )
        return full, matrix


def read_architecture(config: Config) -> Architecture:
    """The architecture in a decoded config.json (a multimodal one: its text_config is the language model).

    Raises UserError when a size is missing or the kind of layer is not known, naming it.
    """
    text = _Sizes(_mapping(config.get("text_config")) or config)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "unknown"))
    hidden, layers = text.size("hidden_size"), text.layers()
    kinds = text.layer_kinds(layers, name)
    heads = text.size("num_attention_heads")
    kv_heads = text.size("num_key_value_heads", "multi_query_group_num", default=heads)
    key_dim = text.size("head_dim", "attention_head_dim", default=hidden // heads)
    value_dim = text.size("v_head_dim", default=key_dim)
    latent = text.size("kv_lora_rank", default=0)
    if latent:
        rope = text.size("qk_rope_head_dim")
        attention, latent_dim = text.latent_attention(hidden, heads, latent, rope), latent + rope
    else:
        gate = 2 if text.flag("attn_output_gate") or "Qwen3Next" in name else 1
        attention = (
            hidden * (heads * key_dim * gate + kv_heads * (key_dim + value_dim)) + heads * value_dim * hidden
        )
        latent_dim = 0

    state = text.state(kinds.state)
    mixer = attention * kinds.attention + (text.state_matrices(state, hidden) if state else 0)
    feed_forward, experts = text.feed_forward(hidden, kinds)
    vocabulary = text.size("vocab_size") * hidden
    tied = text.flag("tie_word_embeddings") or bool(config.get("tie_word_embeddings"))
    norms = (2 * layers + 1) * hidden
    vision = _Sizes(_mapping(config.get("vision_config")) or {})
    multimodal = "vision_config" in config
    return Architecture(
        name=name,
        layers=layers,
        attention_layers=kinds.attention,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        latent_dim=latent_dim,
        matrices=mixer + feed_forward,
        kept=vocabulary * (1 if tied else 2)
        + norms
        + (vision.vision_parameters(hidden) if multimodal else 0),
        read_once_kept=vocabulary + norms,
        experts=experts,
        state=state,
        context_length=text.size(
            "max_position_embeddings", "max_sequence_length", "seq_length", default=4096
        ),
        dtype=text.dtype(config),
        quantization=_quantization(config),
        multimodal=multimodal,
        rope_bytes=4 * text.context_length() * text.rotary_dim(key_dim),
        # SGLang reads these two names alone, with these defaults, to shrink its memory fraction.
        vision=(vision.size("num_hidden_layers", default=24), vision.size("hidden_size", default=1024)),
    )


@dataclass(frozen=True, slots=True)
class _Kinds:
    """How many layers hold attention, a recurrent state, a feed-forward block, a mixture of experts."""

    attention: int
    state: int
    dense: int
    mixture: int
    gated: bool = True


class _Sizes:
    """Looks sizes up under the names that models use for them."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def size(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, list) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise UserError(
                f"config.json has no {' or '.join(names)}: the capacity of this model cannot be computed"
            )
        return default

    def context_length(self) -> int:
        return self.size("max_position_embeddings", "max_sequence_length", "seq_length", default=4096)

    def rotary_dim(self, key_dim: int) -> int:
        """Rotated dimensions of a head: all, the MLA's own, or a stated part of it."""
        named = ("rope_parameters", "rope_scaling")
        places = [self._config, *(_mapping(self._config.get(name)) or {} for name in named)]
        parts = [place.get("partial_rotary_factor") for place in places]
        part = next((p for p in parts if isinstance(p, int | float)), 1.0)
        return self.size("qk_rope_head_dim", default=int(key_dim * part))

    def flag(self, name: str) -> bool:
        return bool(self._config.get(name))

    def dtype(self, outer: Config) -> str:
        for config in (self._config, outer):
            for name in ("dtype", "torch_dtype"):
                if isinstance(config.get(name), str):
                    return str(config[name]).removeprefix("torch.")
        return "bfloat16"

    def layers(self) -> int:
        pattern = self._config.get("hybrid_override_pattern")
        if isinstance(pattern, str):
            return len(pattern)
        blocks = self._config.get("layers_block_type")
        if isinstance(blocks, list):
            return len(blocks)
        return self.size("num_hidden_layers", "n_layer", "num_layers")

    def layer_kinds(self, layers: int, name: str) -> _Kinds:
        pattern, blocks = self._config.get("hybrid_override_pattern"), self._config.get("layers_block_type")
        if isinstance(pattern, str):
            names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
            return self._block_kinds([names.get(letter, letter) for letter in pattern])
        if isinstance(blocks, list) and name.startswith("Nemotron"):
            return self._block_kinds([str(block) for block in blocks])
        mixture = self._mixture_layers(layers)
        types = self._config.get("layer_types", blocks)
        if name.startswith("FalconH1"):
            attention = state = layers
        elif isinstance(types, list):
            attention, state = self._typed([str(kind) for kind in types])
        elif "full_attention_interval" in self._config and "linear_num_value_heads" in self._config:
            attention = layers // self.size("full_attention_interval")
            state = layers - attention
        elif "linear_num_value_heads" in self._config:  # Qwen3-Next's own default
            attention, state = layers // 4, layers - layers // 4
        else:
            attention, state = layers, 0
        return _Kinds(attention, state, layers - mixture, mixture)

    def _typed(self, types: list[str]) -> tuple[int, int]:
        attention = sum(
            kind in ("attention", "full_attention", "sliding_attention", "chunked_attention")
            for kind in types
        )
        state = sum(kind in ("linear_attention", "mamba", "mamba2") for kind in types)
        unknown = set(types) - {
            "attention", "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba", "mamba2",
        }  # fmt: skip
        if unknown:
            raise UserError(
                f"config.json has layers of kind {sorted(unknown)}, which the capacity model does not know"
            )
        return attention, state

    def _block_kinds(self, blocks: list[str]) -> _Kinds:
        unknown = set(blocks) - {"mamba", "attention", "mlp", "moe"}
        if unknown:
            raise UserError(
                f"config.json has blocks of kind {sorted(unknown)}, which the capacity model does not know"
            )
        counts = {kind: blocks.count(kind) for kind in ("attention", "mamba", "mlp", "moe")}
        return _Kinds(counts["attention"], counts["mamba"], counts["mlp"], counts["moe"], gated=False)

    def _expert_count(self) -> int:
        return self.size("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)

    def _mixture_layers(self, layers: int) -> int:
        if self._expert_count() <= 1:
            return 0
        only = self._config.get("mlp_only_layers")
        dense = len(only) if isinstance(only, list) else 0
        dense = max(dense, self.size("first_k_dense_replace", default=0))
        step = self.size("decoder_sparse_step", "moe_layer_freq", default=1) or 1
        return (layers - dense) // step

    def latent_attention(self, hidden: int, heads: int, latent: int, rope: int) -> int:
        plain, value = self.size("qk_nope_head_dim"), self.size("v_head_dim")
        query = self.size("q_lora_rank", default=0)
        queries = heads * (plain + rope)
        return (
            (hidden * query + query * queries if query else hidden * queries)
            + hidden * (latent + rope)
            + latent * heads * (plain + value)
            + heads * value * hidden
        )

    def state(self, layers: int) -> StateShape | None:
        if layers == 0:
            return None
        given = self._config.get("mamba_ssm_dtype")
        dtype = str(given) if given in ("float32", "bfloat16", "float16") else "float32"
        if "linear_num_value_heads" in self._config:
            value_heads, value_dim = self.size("linear_num_value_heads"), self.size("linear_value_head_dim")
            return StateShape(
                kind="gated delta net",
                layers=layers,
                value_heads=value_heads,
                key_dim=self.size("linear_key_head_dim"),
                value_dim=value_dim,
                inner=value_heads * value_dim,
                groups=self.size("linear_num_key_heads"),
                kernel=self.size("linear_conv_kernel_dim", default=4),
                dtype=dtype,
            )
        heads = self.size("mamba_num_heads", "mamba_n_heads")
        hidden = self.size("hidden_size")
        inner = self.size("mamba_d_ssm", default=0) or (
            heads * self.size("mamba_head_dim", "mamba_d_head", default=0)
            or hidden * self.size("mamba_expand", default=2)
        )
        return StateShape(
            kind="mamba-2",
            layers=layers,
            value_heads=heads,
            key_dim=self.size("ssm_state_size", "mamba_d_state"),
            value_dim=inner // heads,
            inner=inner,
            groups=self.size("n_groups", "mamba_n_groups", default=1),
            kernel=self.size("conv_kernel", "mamba_d_conv", default=4),
            dtype=dtype,
        )

    def state_matrices(self, state: StateShape, hidden: int) -> int:
        keys = state.groups * state.key_dim
        scalars = 2 * state.value_heads if state.kind == "gated delta net" else state.value_heads
        channels = state.inner + 2 * keys
        return state.layers * (
            hidden * (channels + state.inner + scalars) + channels * state.kernel + state.inner * hidden
        )

    def feed_forward(self, hidden: int, kinds: _Kinds) -> tuple[int, Experts | None]:
        matrices = 3 if kinds.gated else 2
        dense = kinds.dense * matrices * hidden * self.size("intermediate_size", "ffn_hidden_size", default=0)
        if kinds.mixture == 0:
            return dense, None
        width = self.size("moe_intermediate_size", default=0) or self.size("intermediate_size")
        count = self._expert_count()
        shared = self.size("shared_expert_intermediate_size", "shared_intermediate_size", default=0) or (
            self.size("n_shared_experts", default=0)
            * self.size("moe_shared_expert_intermediate_size", default=width)
        )
        router = hidden * count
        dense += kinds.mixture * (router + matrices * hidden * shared)
        experts = kinds.mixture * count * matrices * hidden * width
        return dense, Experts(count, self.size("num_experts_per_tok", "moe_top_k", "moe_topk"), experts)

    def vision_parameters(self, out: int) -> int:
        """A ViT of the Qwen-VL kind; 0 where its sizes are not given (it is small beside the model)."""
        hidden, depth = (
            self.size("hidden_size", default=0),
            self.size("depth", "num_hidden_layers", default=0),
        )
        width = self.size("intermediate_size", default=4 * hidden)
        merged = hidden * self.size("spatial_merge_size", default=1) ** 2
        return depth * (4 * hidden * hidden + 2 * hidden * width) + merged * merged + merged * out


def _mapping(value: object) -> Config | None:
    return value if isinstance(value, Mapping) else None


def _quantization(config: Config) -> str | None:
    found: Iterable[Config | None] = (
        _mapping(config.get("quantization_config")),
        _mapping((_mapping(config.get("text_config")) or {}).get("quantization_config")),
    )
    for given in found:
        if given is None:
            continue
        method = str(given.get("quant_method", given.get("quant_algo", ""))).lower()
        if method == "compressed-tensors":
            return _compressed(given)
        if method == "modelopt":
            return "modelopt_fp4" if "fp4" in str(given.get("quant_algo", "")).lower() else "fp8"
        if method:
            return method
    return None


def _compressed(given: Config) -> str:
    groups = _mapping(given.get("config_groups")) or {}
    for group in groups.values():
        weights = _mapping((_mapping(group) or {}).get("weights")) or {}
        bits = weights.get("num_bits")
        if bits == 4:
            return "nvfp4" if weights.get("type") == "float" else "gptq"
        if bits == 8:
            return "fp8" if weights.get("type") == "float" else "int8"
    return "fp8"
