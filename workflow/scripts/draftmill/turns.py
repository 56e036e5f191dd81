"""Turns and their keys: what is asked of the target model, and the name under which an answer is kept.

Pure. A key is a hash of everything that decides an answer and of nothing else: never a row's position,
a shard, a server or a policy.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

NUMERICS = (
    "dtype", "quantization", "kv_cache_dtype", "state_dtype", "load_format", "adapters", "overrides", "flags",
)  # fmt: skip


def numerics(model: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the config's model block that changes how the engine computes."""
    return {name: model[name] for name in NUMERICS}


def turn_seed(run_seed: int, content_hash: str, turn: int, sample: int) -> int:
    """The seed of one turn, 0 to 2^31 - 1 (what every engine takes)."""
    text = f"{run_seed}/{content_hash}/{turn}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def turn_key(
    model_identity: str, numerics: Mapping[str, Any], prompt_ids: Sequence[int], sampling: Mapping[str, Any]
) -> str:
    """The key of one turn, 32 hex digits. ``sampling`` holds max_tokens and seed too."""
    decides = json.dumps([model_identity, numerics, sampling], sort_keys=True, ensure_ascii=False)
    digest = hashlib.blake2b(decides.encode(), digest_size=16)
    digest.update(array("i", prompt_ids).tobytes())
    return digest.hexdigest()


def turn_id(primary_id: str, sample: int, turn: int) -> str:
    """The row id of one generation."""
    return f"{primary_id}_gen{turn}" if sample == 0 else f"{primary_id}_s{sample}_gen{turn}"
