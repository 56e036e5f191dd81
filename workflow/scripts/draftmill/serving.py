"""Which server this run needs: from the config and the frozen model to a ServerSpec.

Read when a server starts, never when the workflow is planned: operational settings and tuning results
stay outside the DAG.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from draftmill import config as settings
from draftmill import engines, tuning
from draftmill.engines.asking import get
from draftmill.engines.sglang import COMMAND_VARIABLE, known_flags
from draftmill.errors import UserError
from draftmill.fleet.slots import Slot, slots
from draftmill.model import Model
from draftmill.server_flags import Dialect, dialect_of_help


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
            "operation.server.flags to '--device cpu' for SGLang's CPU mode (docs/how-to.md)."
        )


def server_spec(
    config: settings.Config, results: Path, slot: Slot, trial: Mapping[str, Any] | None = None
) -> engines.ServerSpec:
    """The spec of ``slot``'s server; ``trial`` is a setting of the tuner's: all operational flags, and
    values to lay over the model block."""
    operation = config["operation"]
    server = operation["server"]
    model = Model.load(results / "model")
    name = engine_name(operation, model)
    flags = settings.server_flags(config).words if trial is None else tuple(trial["flags"])
    if trial is None:
        flags = tuning.adopted_flags(config, results, slot.hardware, model.identity) or flags
    return engines.ServerSpec(
        engine=name,
        model_path=model.path,
        context_length=model.context_length,
        numerics=engines.load(name).numerics_flags({**config["model"], **(trial or {}).get("model", {})}),
        flags=flags,
        capacity=server["capacity"],
        threads=server["threads"] or max(1, len(os.sched_getaffinity(0)) // max(1, len(slots(operation)))),
        gpus=tuple(gpu.device for gpu in slot.gpus),
        env=_environment(server),
    )


def tunes(config: settings.Config) -> bool:
    """Whether ``auto`` stands among the flags of servers that are ours to start."""
    return config["operation"]["engine"] != "attach" and settings.server_flags(config).tuned


def untuned(config: settings.Config, results: Path) -> bool:
    """Whether ``auto`` among the server's flags stands for nothing yet: nothing was measured for the flags as asked and
    this model, on whatever hardware."""
    if not tunes(config):
        return False
    folder = results / "model"
    if not (folder / "model.json").exists():
        return True
    return tuning.adopted_flags(config, results, None, Model.load(folder).identity) is None


def _environment(server: Mapping[str, Any]) -> dict[str, str]:
    """The servers' own environment variables; operation.server.python names another interpreter's SGLang."""
    python = {COMMAND_VARIABLE: f"{server['python']} -m sglang.launch_server"} if server["python"] else {}
    return {**python, **server["env"]}


def dialect(address: str, key: str) -> engines.Engine | None:
    """The adapter for a server that somebody else runs; None while it does not answer."""
    for name, route in (("llamacpp", "/props"), ("sglang", "/get_model_info"), ("sglang", "/model_info")):
        try:
            if get(address, route, key, timeout_s=10).status_code == 200:
                return engines.load(name)
        except requests.RequestException:
            return None
    return None


def dialect_of(version: str, server: Mapping[str, Any]) -> Dialect:
    """The flags and values that the installed SGLang knows, as the capacity model wants them."""
    known = known_flags(_environment(server))
    page = "\n".join(
        f"  {flag} {{{','.join(values)}}}" if values else f"  {flag}" for flag, values in known.items()
    )
    return dialect_of_help(page, version)
