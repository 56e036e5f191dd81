"""llama.cpp's own server from the xllamacpp wheel: the embedded engine where there is no GPU."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests

from draftmill.config import SGLANG_SAMPLING
from draftmill.engines import Completion, Facts, Launch, Refused, ServerSpec, Transient
from draftmill.engines.asking import get
from draftmill.errors import UserError

SERVE = Path(__file__).with_name("llamacpp_serve.py")
DEFAULT_CAPACITY = 8
PENALTY_WINDOW = 65_536  # tokens that penalties look back on: all of them, as in SGLang
# The sampling parameters that llama.cpp calls by another name, or counts otherwise.
_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}
_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "ignore_eos",
    "seed",
)
_KNOWN_FLAGS = frozenset({"--no-cache-prompt"})


class LlamaCpp:
    """Token ids in and out of ``/completion``."""

    name = "llamacpp"

    def numerics_flags(self, model: dict[str, Any]) -> tuple[str, ...]:
        neutral = {
            "dtype": "auto",
            "kv_cache_dtype": "auto",
            "quantization": None,
            "state_dtype": None,
            "load_format": "auto",
        }
        for field, value in neutral.items():
            if model[field] not in (value, None):
                raise UserError(
                    f"model.{field} is {model[field]!r}, which a GGUF file decides itself under the llamacpp engine; "
                    f"leave it at {value!r}."
                )
        for field in ("adapters", "overrides", "flags"):
            if model[field]:
                raise UserError(
                    f"model.{field} is not supported by the llamacpp engine; use the sglang engine."
                )
        return ()

    def launch(self, spec: ServerSpec, port: int, key_file: Path, folder: Path) -> Launch:
        unknown = [flag for flag in spec.flags if flag not in _KNOWN_FLAGS]
        if unknown:
            raise UserError(
                f"operation.server.flags has {unknown[0]}, which the llamacpp engine does not know; "
                f"it knows {', '.join(sorted(_KNOWN_FLAGS))}."
            )
        slots = spec.capacity or DEFAULT_CAPACITY
        settings = {
            "model": spec.model_path,
            "port": port,
            "slots": slots,
            "context_tokens": slots * spec.context_length,
            "threads": spec.threads or 1,
            "key_file": str(key_file),
            "cache_prompt": "--no-cache-prompt" not in spec.flags,
        }
        # Waiting threads sleep instead of spinning: on a machine that does something else too, spinning
        # costs far more than it saves.
        return Launch(
            (sys.executable, "-P", str(SERVE), json.dumps(settings)), {"OMP_WAIT_POLICY": "passive"}
        )

    def facts(self, address: str, key: str, log: Path | None = None) -> Facts | None:
        try:
            props = get(address, "/props", key, timeout_s=10)
            if not props.ok:
                return None
            found = props.json()
        except (requests.RequestException, ValueError):
            return None
        settings = found["default_generation_settings"]
        return Facts(
            version=f"xllamacpp {importlib.metadata.version('xllamacpp')}",
            capacity=int(found["total_slots"]),
            kv_tokens=int(settings["n_ctx"]) * int(found["total_slots"]),
            flags={"build_info": found.get("build_info")},
        )

    def metrics(self, address: str, key: str) -> str:
        reply = get(address, "/metrics", key, timeout_s=10)
        reply.raise_for_status()
        return reply.text

    def request(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        for name in SGLANG_SAMPLING:
            if sampling[name]:
                raise UserError(
                    f"sampling.{name} is not supported by the llamacpp engine; leave it out, or use the sglang engine."
                )
        body = {_NAMES.get(name, name): sampling[name] for name in (*_PLAIN, *_NAMES)}
        # SGLang's -1 (all tokens) is llama.cpp's 0; the rest of its samplers are switched off.
        body |= {
            "top_k": max(0, sampling["top_k"]),
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        }
        body |= {"repeat_last_n": PENALTY_WINDOW, "return_tokens": True}
        return "/completion", {"prompt": list(prompt_ids), **body}

    def completion(self, status: int, body: bytes) -> Completion:
        try:
            reply = json.loads(body)
        except ValueError as fault:
            raise Transient(
                f"the server answered {status} with something that is no JSON: {body[:80]!r}"
            ) from fault
        if not isinstance(reply, dict):
            raise Transient(f"the server answered {status} with something else than an object: {body[:80]!r}")
        if status == 400:
            raise Refused(str(reply.get("error", {}).get("message", reply)))
        if status != 200 or not isinstance(reply.get("tokens"), list):
            raise Transient(f"the server answered {status}: {str(reply.get('error', reply))[:200]}")
        reasons = {"limit": "length", "eos": "stop", "word": "stop"}
        timings = reply.get("timings", {})
        return Completion(
            output_ids=tuple(reply["tokens"]),
            finish_reason=reasons.get(reply.get("stop_type", ""), "length"),
            cached_tokens=int(timings.get("cache_n", 0)),
        )

    def start_failed(self, log_tail: str) -> bool:
        return False  # its process ends when it cannot serve

    def likely_cause(self, log_tail: str) -> str:
        signs = {
            "failed to load model": "the GGUF file is broken, or of a kind that this llama.cpp does not know",
            "couldn't bind": "the port is taken",
            "failed to allocate": "out of memory; lower operation.server.capacity or model.context_length",
            "bad_alloc": "out of memory; lower operation.server.capacity or model.context_length",
        }
        return next((cause for sign, cause in signs.items() if sign in log_tail), "")
