"""Which server this run needs: from the config and the frozen model to a ServerSpec.

Read when a server starts, never when the workflow is planned: operational settings and tuning results
stay outside the DAG.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from draftmill import config as settings
from draftmill import engines
from draftmill.errors import UserError
from draftmill.fleet.slots import Slot, slots
from draftmill.model import Model

TUNED = Path("tuning") / "winner.json"


def engine_name(operation: Mapping[str, Any], model: Model) -> str:
    """The engine to start: what the config says, or for ``auto`` what can serve the model."""
    if operation["engine"] != "auto":
        return str(operation["engine"])
    return "llamacpp" if model.kind == "gguf" else "sglang"


def check(config: settings.Config, model: Model) -> None:
    """Raises UserError when this machine cannot serve the model as configured."""
    operation = config["operation"]
    name = engine_name(operation, model)
    own = slots(operation)
    if name == "sglang" and model.kind == "gguf":
        raise UserError(
            f"operation.engine is sglang, but {model.path} is a GGUF file; "
            "give the model's Hugging Face folder, or set operation.engine to llamacpp."
        )
    if name == "llamacpp" and model.kind != "gguf":
        raise UserError(
            f"operation.engine is llamacpp, but {model.path} is no GGUF file; give one, or set operation.engine to auto."
        )
    if name == "sglang" and not any(slot.gpus for slot in own) and not settings.on_cpu(config):
        raise UserError(
            "The sglang engine needs a GPU and none is visible here; run on a machine with one, or set "
            "operation.server.flags to '--device cpu' for SGLang's CPU mode (docs/configuration.md)."
        )


def server_spec(config: settings.Config, results: Path, slot: Slot) -> engines.ServerSpec:
    """The spec of ``slot``'s server."""
    operation = config["operation"]
    server = operation["server"]
    model = Model.load(results / "model")
    name = engine_name(operation, model)
    flags = settings.server_flags(config)
    return engines.ServerSpec(
        engine=name,
        model_path=model.path,
        context_length=model.context_length,
        numerics=engines.load(name).numerics_flags(config["model"]),
        flags=flags.words + (_tuned(results) if flags.tuned else ()),
        capacity=server["capacity"],
        threads=server["threads"] or max(1, (os.cpu_count() or 1) // max(1, len(slots(operation)))),
        gpus=tuple(gpu.uuid for gpu in slot.gpus),
        env=dict(server["env"]),
    )


def _tuned(results: Path) -> tuple[str, ...]:
    path = results / TUNED
    return tuple(json.loads(path.read_text())["flags"]) if path.exists() else ()


def dialect(address: str, key: str) -> engines.Engine | None:
    """The adapter for a server that somebody else runs; None while it does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for name, route in (("llamacpp", "/props"), ("sglang", "/get_model_info"), ("sglang", "/model_info")):
        try:
            if requests.get(f"{address}{route}", headers=headers, timeout=10).ok:
                return engines.load(name)
        except requests.RequestException:
            return None
    return None
