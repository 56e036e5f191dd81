"""The configuration: its schema applied, its faults said in sentences, and what of it decides which results.

Knows the schema file and how keys depend on each other. Must never know Snakemake, a server or the clock; of the file
system it asks only whether `model.path` exists.
"""

import copy
import difflib
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jsonschema
import yaml

from draftmill.errors import UserError

if TYPE_CHECKING:
    from draftmill.model import Model

Config = dict[str, Any]
Schema = dict[str, Any]

SCHEMA_FILE = Path(__file__).parents[2] / "schemas" / "config.schema.yaml"

NEUTRAL_SAMPLING: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""What a sampling parameter is where neither the user nor the model says anything (SGLang 0.5.23, SamplingParams)."""

SGLANG_SAMPLING = ("stop_token_ids", "min_new_tokens", "stop_regex", "logit_bias")
"""Sampling parameters that only SGLang takes."""

NUMERIC_FLAGS: dict[str, str] = {
    # SGLang 0.5.23, arg_groups/fields/{model,exec_,lora,spec}.py
    "--model-path": "model.path",
    "--model": "model.path",
    "--revision": "model.revision",
    "--context-length": "model.context_length",
    "--dtype": "model.dtype",
    "--quantization": "model.quantization",
    "--kv-cache-dtype": "model.kv_cache_dtype",
    "--mamba-ssm-dtype": "model.state_dtype",
    "--load-format": "model.load_format",
    "--lora-paths": "model.adapters",
    "--json-model-override-args": "model.overrides",
    "--trust-remote-code": "model.trust_remote_code",
    "--chat-template": "model.chat_template",
    "--quantization-param-path": "model.flags",
    "--modelopt-quant": "model.flags",
    "--quantize-and-serve": "model.flags",
    "--rl-quant-profile": "model.flags",
    "--model-impl": "model.flags",
    "--model-loader-extra-config": "model.flags",
    "--custom-weight-loader": "model.flags",
    "--qsa-indexer-dtype": "model.flags",
    "--torchao-config": "model.flags",
    "--enable-fp32-lm-head": "model.flags",
    "--enable-tf32-matmul": "model.flags",
    "--enable-mamba-cache-stochastic-rounding": "model.flags",
    "--mamba-cache-philox-rounds": "model.flags",
    "--enable-int8-mamba-checkpoint": "model.flags",
    "--enable-quant-communications": "model.flags",
    "--enable-w4a4-mxfp4-megamoe": "model.flags",
    "--flashinfer-mxfp4-moe-precision": "model.flags",
    "--prefill-kv-cache-dequant-dtype": "model.flags",
    "--speculative-accept-threshold-single": "model.flags",
    "--speculative-accept-threshold-acc": "model.flags",
    "--enable-custom-logit-processor": "model.flags",
    "--enable-watermark": "model.flags",
    "--dllm-algorithm": "model.flags",
    # llama.cpp's server
    "-m": "model.path",
    "-c": "model.context_length",
    "--ctx-size": "model.context_length",
    "--lora": "model.adapters",
    "--lora-scaled": "model.flags",
    "--control-vector": "model.flags",
    "--override-kv": "model.flags",
    "--rope-scaling": "model.flags",
    "--rope-scale": "model.flags",
    "--rope-freq-base": "model.flags",
    "--rope-freq-scale": "model.flags",
}
"""Server flags that change what is answered, and the science key each must stand under."""

OWNED_FLAGS: dict[str, str] = {
    "--host": "servers listen on the loopback only; leave it out",
    "--port": "set operation.server.port instead",
    "--api-key": "every run makes a key of its own; leave it out",
    "--admin-api-key": "every run makes a key of its own; leave it out",
    "--config": "write the flags themselves into operation.server.flags",
    "--enable-metrics": "it is always on; leave it out",
    "--tp-size": "set operation.gpus_per_server instead",
    "--tp": "set operation.gpus_per_server instead",
    "--tensor-parallel-size": "set operation.gpus_per_server instead",
    "--base-gpu-id": "each server is given its GPUs; leave it out",
    "--gpu-id-step": "each server is given its GPUs; leave it out",
    "--allow-auto-truncate": "it would cut prompts without a word; leave it out",
    "--skip-tokenizer-init": "stop strings and end tokens need the server's tokenizer; leave it out",
    "--parallel": "set operation.server.capacity instead",
    "-np": "set operation.server.capacity instead",
    "--threads": "set operation.server.threads instead",
    "-t": "set operation.server.threads instead",
    "--cache-type-k": "llama.cpp's KV cache stays at its default format; leave it out",
    "--cache-type-v": "llama.cpp's KV cache stays at its default format; leave it out",
    "-ctk": "llama.cpp's KV cache stays at its default format; leave it out",
    "-ctv": "llama.cpp's KV cache stays at its default format; leave it out",
}
"""Server flags that Draftmill sets itself, and what to do instead."""

STOPS_CONVERSATION = ("reject", "retry_longer")
"""Policies that act while generating: later turns are not asked, or a turn is asked again."""


@cache
def schema() -> Schema:
    """The JSON Schema of the configuration, as in workflow/schemas/config.schema.yaml."""
    loaded: Schema = yaml.safe_load(SCHEMA_FILE.read_text(encoding="utf-8"))
    return loaded


def resolve(raw: Mapping[str, Any], source: str = "config.yaml") -> Config:
    """The whole configuration: `raw` checked against the schema and every missing key at its default.

    Blocks left empty in YAML (null) count as not given. Whole numbers given for a real one become real, so that 1 and
    1.0 are the same configuration; environment variables become texts. Raises UserError with one line for each fault.
    """
    given = _tidy(raw, schema())
    faults = [f"{source}: {fault}" for fault in _unknown_keys(given, schema(), "")]
    faults += [f"{source}: {fault}" for fault in _wrong_values(given)]
    if faults:
        raise UserError("\n".join(faults))
    resolved: Config = _filled(given, schema())
    server = resolved["operation"]["server"]
    server["env"] = {name: str(value) for name, value in server["env"].items()}
    return resolved


def paths(tree: Schema | None = None, prefix: str = "") -> Iterator[tuple[str, Schema]]:
    """Every key of the schema as (dotted path, its schema), blocks before their keys, in the order of the file."""
    for name, child in (schema() if tree is None else tree).get("properties", {}).items():
        yield f"{prefix}{name}", child
        yield from paths(child, f"{prefix}{name}.")


def _tidy(value: Any, tree: Schema) -> Any:
    """A copy of `value` without empty blocks, every key and day a text."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list):
        return [_tidy(item, {}) for item in value]
    if not isinstance(value, Mapping):
        return value
    known = tree.get("properties", {})
    return {
        str(name): _tidy(item, known.get(name, {}))
        for name, item in value.items()
        if item is not None or known.get(name, {}).get("type") != "object"
    }


def _unknown_keys(value: Any, tree: Schema, prefix: str) -> Iterator[str]:
    """A sentence for each key that the schema does not know, with the nearest one that it does."""
    tree = _branch(value, tree)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_keys(item, tree.get("items", {}), f"{prefix.rstrip('.')}[{index}].")
    if not isinstance(value, dict) or "properties" not in tree:
        return
    known = tree["properties"]
    for name, item in value.items():
        if name in known:
            yield from _unknown_keys(item, known[name], f"{prefix}{name}.")
        else:
            nearest = _nearest(str(name), prefix, list(known))
            yield f"{prefix}{name} is unknown; " + (
                f"did you mean {nearest}?" if nearest else f"known here are {', '.join(known)}."
            )


def _nearest(name: str, prefix: str, siblings: list[str]) -> str | None:
    """The known key most like `name`: among its siblings first, then anywhere in the schema."""
    close = difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.6)
    if close:
        return prefix + close[0]
    anywhere = {path.rsplit(".", 1)[-1]: path for path, _ in reversed(list(paths()))}
    close = difflib.get_close_matches(name.lower(), anywhere, n=1, cutoff=0.8)
    return anywhere[close[0]] if close else None


def _branch(value: Any, tree: Schema) -> Schema:
    """Of an anyOf, the branch that fits the kind of `value`; `tree` itself where there is none."""
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    chosen: Schema = next((branch for branch in tree.get("anyOf", ()) if branch.get("type") == kind), tree)
    return chosen


def _wrong_values(given: Config) -> Iterator[str]:
    validator = jsonschema.Draft202012Validator(schema())
    for error in sorted(
        validator.iter_errors(given), key=lambda error: [str(part) for part in error.absolute_path]
    ):
        for fault in _leaves(error):
            if fault.validator != "additionalProperties":  # _unknown_keys says these better
                yield _sentence(fault)
    yield from _no_json(given, "")


def _leaves(error: jsonschema.ValidationError) -> Iterator[jsonschema.ValidationError]:
    """The faults inside the branch of an anyOf that was meant, or the fault itself."""
    tree = cast(Schema, error.schema)
    meant = _branch(error.instance, tree)
    if error.validator != "anyOf" or meant is tree:
        yield error
        return
    for inside in error.context or ():
        if inside.relative_schema_path[0] == tree["anyOf"].index(meant):
            yield from _leaves(inside)


def _sentence(error: jsonschema.ValidationError) -> str:
    path = _dotted(error.absolute_path)
    value, tree = error.instance, cast(Schema, error.schema)
    if error.validator == "required":
        missing = next(name for name in tree["required"] if name not in cast(Config, value))
        return f"{path}.{missing} is missing. {tree['properties'][missing].get('description', 'Give it.')}"
    if "propertyNames" in error.absolute_schema_path:
        return f"{path} has a key that is not a token id; write it as digits in quotes."
    if error.validator == "uniqueItems":
        return f"{path} names something twice; leave one out."
    shown = json.dumps(value, default=str, ensure_ascii=False)
    shown = (
        f"{'the text ' if isinstance(value, str) else ''}{shown if len(shown) <= 80 else shown[:77] + '...'}"
    )
    sentence = f"{path} is {shown}; it must be {wanted(tree)}."
    if (
        isinstance(value, str)
        and _takes(tree, "number", "integer")
        and (number := _as_number(value)) is not None
    ):
        return f"{sentence} YAML reads it as text: write it without quotes, as {number:g}."
    if not isinstance(value, str) and _takes(tree, "string"):
        return f"{sentence} Put it in quotes."
    if isinstance(value, str) and "enum" in tree:
        close = difflib.get_close_matches(value.lower(), [str(word) for word in tree["enum"]], n=1)
        return f"{sentence} Did you mean {close[0]}?" if close else sentence
    return sentence


def _dotted(parts: Any) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".")


def _takes(tree: Schema, *types: str) -> bool:
    allowed = tree.get("type", [])
    return any(kind in types for kind in ([allowed] if isinstance(allowed, str) else allowed))


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _no_json(value: Any, path: str) -> Iterator[str]:
    """A sentence for each value that YAML knows and JSON does not: infinite numbers, sets and the like."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _no_json(item, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _no_json(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}; it must be a finite number."
    elif value is not None and not isinstance(value, str | int | float):
        yield f"{path} is read as a {type(value).__name__}; put it in quotes if it is a text."


def wanted(tree: Schema) -> str:
    """What a key takes, in words: "a number above 0 and at most 1, or null"."""
    if "anyOf" in tree:
        return ", ".join(wanted(branch) for branch in tree["anyOf"][:-1]) + f" or {wanted(tree['anyOf'][-1])}"
    if "enum" in tree:
        return "one of " + ", ".join("null" if word is None else str(word) for word in tree["enum"])
    kinds = tree.get("type", "object")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    names = {
        "integer": "a whole number",
        "number": "a number",
        "string": "a text",
        "boolean": "true or false",
        "null": "null",
        "array": "a list",
        "object": "a block of keys",
    }
    bounds = [
        f"{words} {tree[bound]}"
        for bound, words in {
            "minimum": "at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }.items()
        if bound in tree
    ]
    if kinds[0] == "array":
        items = tree.get("items", {})
        if "enum" in items:
            bounds.append("of " + ", ".join(str(word) for word in items["enum"]))
        if "minItems" in tree:
            bounds.append(f"with at least {tree['minItems']} entry")
        if "maxItems" in tree:
            bounds.append(
                f"with at most {tree['maxItems']} {'entry' if tree['maxItems'] == 1 else 'entries'}"
            )
    if kinds[0] == "string" and tree.get("pattern", "").startswith("^https?"):
        bounds.append("such as http://127.0.0.1:30000")
    elif kinds[0] == "string" and tree.get("pattern", "").startswith("^[0-9]{4}"):
        bounds.append("of the form YYYY-MM-DD")
    elif kinds[0] == "string" and tree.get("minLength"):
        names["string"] = "a text that is not empty" if len(kinds) == 1 else "a text"
    first = " ".join([names[kinds[0]], " and ".join(bounds)]).strip()
    return " or ".join([first, *(names[kind] for kind in kinds[1:])])


def _filled(value: Any, tree: Schema) -> Any:
    """`value` with the defaults of every key below it, keys in the schema's order."""
    tree = _branch(value, tree)
    if isinstance(value, dict) and "properties" in tree:
        return {
            name: _filled(value[name] if name in value else copy.deepcopy(child.get("default")), child)
            for name, child in tree["properties"].items()
        }
    if isinstance(value, list):
        return [_filled(item, tree.get("items", {})) for item in value]
    if isinstance(value, float) and _takes(tree, "integer"):
        return int(value)
    numeric = _takes(tree, "number") or any(_takes(branch, "number") for branch in tree.get("anyOf", ()))
    if isinstance(value, int) and not isinstance(value, bool) and numeric:
        return float(value)
    return value


def sampling(config: Config, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Every sampling parameter with the value that is sent: the user's, else the model's, else the neutral one.

    `generation_config` is the model's own (generation_config.json); only numbers in it count. Its top_k of 0 means all.
    """
    chosen: dict[str, Any] = dict(config["sampling"])
    for name, neutral in NEUTRAL_SAMPLING.items():
        if chosen[name] is None:
            theirs = generation_config.get(name)
            if not isinstance(theirs, int | float) or isinstance(theirs, bool):
                theirs = neutral
            chosen[name] = type(neutral)(theirs)
    if chosen["top_k"] == 0:
        chosen["top_k"] = -1
    return chosen


@dataclass(frozen=True)
class ServerFlags:
    """The user's operational server flags as separate words, and whether the measured best ones are to be added."""

    words: tuple[str, ...]
    tuned: bool


def server_flags(config: Config) -> ServerFlags:
    """operation.server.flags taken apart as a shell would. Raises UserError where a quote does not end."""
    words = _split(config["operation"]["server"]["flags"], "operation.server.flags")
    return ServerFlags(tuple(word for word in words if word != "auto"), "auto" in words)


def model_flags(config: Config) -> tuple[str, ...]:
    """model.flags as separate words."""
    return tuple(_split(config["model"]["flags"], "model.flags"))


def _split(flags: str | list[str], key: str) -> list[str]:
    try:
        return [word for text in ([flags] if isinstance(flags, str) else flags) for word in shlex.split(text)]
    except ValueError as error:
        raise UserError(f"config.yaml: {key} cannot be read as flags ({error}); check its quotes.") from None


def check(config: Config, model: "Model | None", gpus: int | None, source: str = "config.yaml") -> list[str]:
    """Warnings about a resolved configuration; raises UserError with one line for each fault across keys.

    `model` is None before it has been fetched, `gpus` the number of visible GPUs or None where it is not known (the
    submission host of a cluster).
    """
    faults = [
        *_prompt_faults(config),
        *_model_faults(config, model),
        *_length_faults(config, model),
        *_operation_faults(config, gpus),
        *_engine_faults(config, model),
        *_flag_faults(config),
    ]
    if faults:
        raise UserError("\n".join(f"{source}: {fault}" for fault in faults))
    return [f"{source}: {warning}" for warning in _warnings(config, model)]


def _prompt_faults(config: Config) -> Iterator[str]:
    prompts = config["prompts"]
    if not prompts["files"]:
        yield "prompts.files is empty; name at least one prompt file."
    mix = prompts["system_prompt"]
    if isinstance(mix, list) and sum(part["share"] for part in mix) > 1 + 1e-9:
        total = sum(part["share"] for part in mix)
        yield f"prompts.system_prompt: the shares add up to {total:g}; they may add up to 1 at most."


def _model_faults(config: Config, model: "Model | None") -> Iterator[str]:
    chosen, thinking = config["model"], config["prompts"]["thinking"]
    path = chosen["path"]
    if path != "embedded" and not Path(path).expanduser().exists():
        if not is_hub_id(path):
            yield f"model.path {path} does not exist; give a folder, a .gguf file, a hub id such as Qwen/Qwen3-8B, or embedded."
        elif chosen["revision"] is None:
            yield (
                f"model.path {path} is no folder here, so it is read as a hub id, and model.revision is missing; correct the "
                "path, or name the commit to use."
            )
    template = chosen["chat_template"]
    if template is not None and not Path(template).expanduser().is_file():
        yield f"model.chat_template {template} does not exist; give the path of a Jinja file, or null for the model's own."
    if thinking and model is not None and not model.template_has_thinking:
        yield (
            f"prompts.thinking is {json.dumps(thinking)}, but the chat template of {model.name} has no thinking mode; set it "
            "to null, or give a template that has one in model.chat_template."
        )


def _length_faults(config: Config, model: "Model | None") -> Iterator[str]:
    longest, context = config["sampling"]["max_tokens"], config["model"]["context_length"]
    if (
        model is not None
        and context is not None
        and context > model.context_length
        and not config["model"]["overrides"]
    ):
        yield (
            f"model.context_length is {context} tokens, but {model.name} was made for {model.context_length}; lower it, or "
            "give the rope scaling that extends it in model.overrides."
        )
    context = context or (model.context_length if model is not None else None)
    if context is not None and longest >= context:
        yield (
            f"sampling.max_tokens is {longest}, but the context holds {context} tokens for prompt and answer together; set "
            f"it below {context}."
        )
    checks = config["validation"]
    if checks["too_few_supervised"] == "reject" and longest < checks["min_supervised_tokens"]:
        yield (
            f"sampling.max_tokens is {longest}, below validation.min_supervised_tokens ({checks['min_supervised_tokens']}), "
            "so every answer would be rejected; raise the first or lower the second."
        )
    if config["sampling"]["min_new_tokens"] > longest:
        yield (
            f"sampling.min_new_tokens is {config['sampling']['min_new_tokens']}, above sampling.max_tokens ({longest}); "
            "lower it."
        )
    prompts = config["prompts"]
    if prompts["context_policy"] == "shorten" and prompts["min_max_tokens"] > longest:
        yield (
            f"prompts.min_max_tokens is {prompts['min_max_tokens']}, above sampling.max_tokens ({longest}); lower it, since "
            "max_tokens can only be shortened down to it."
        )


def _operation_faults(config: Config, gpus: int | None) -> Iterator[str]:
    operation = config["operation"]
    engine, span = operation["engine"], operation["gpus_per_server"]
    if engine == "attach" and not operation["attach"]:
        yield "operation.engine is attach, but operation.attach lists no server; add the address of each running server."
    if engine != "attach" and operation["attach"]:
        yield (
            f"operation.attach lists servers, but operation.engine is {engine}; set operation.engine to attach, or empty the "
            "list."
        )
    if engine == "attach":
        return
    if engine != "llamacpp" and gpus is not None and span > max(gpus, 1):
        yield f"operation.gpus_per_server is {span}, but this machine shows {gpus or 'no'} GPUs; set it to {max(gpus, 1)} at most."
    if engine == "sglang" and gpus == 0 and not on_cpu(config):
        yield (
            "operation.engine is sglang, but this machine shows no GPU; run on a machine with one, or give SGLang its "
            'CPU settings: operation.server.env {SGLANG_USE_CPU_ENGINE: "1"} and operation.server.flags [--device cpu].'
        )
    if config["model"]["path"] == "embedded" and engine == "sglang":
        yield (
            "operation.engine is sglang, but model.path is embedded, which llama.cpp serves; give a folder in Hugging Face "
            "form in model.path, or set operation.engine to auto."
        )


def _engine_faults(config: Config, model: "Model | None") -> Iterator[str]:
    engine = config["operation"]["engine"]
    if engine == "llamacpp" or (engine == "auto" and model is not None and model.kind == "gguf"):
        for name in SGLANG_SAMPLING:
            if config["sampling"][name]:
                yield f"sampling.{name} is not known to llama.cpp's server, which serves this model; leave it out."


def on_cpu(config: Config) -> bool:
    """Whether the server is told to run SGLang on the CPU."""
    words = server_flags(config).words
    return (
        "SGLANG_USE_CPU_ENGINE" in config["operation"]["server"]["env"]
        or "cpu" in words
        or "--device=cpu" in words
    )


def _flag_faults(config: Config) -> Iterator[str]:
    for key, words in {
        "operation.server.flags": server_flags(config).words,
        "model.flags": model_flags(config),
    }.items():
        for flag in dict.fromkeys(
            word.split("=", 1)[0] for word in words if re.match(r"-{1,2}[A-Za-z]", word)
        ):
            instead, home = _entry(flag, OWNED_FLAGS), _entry(flag, NUMERIC_FLAGS)
            if instead:
                yield f"{key} has {flag}, which Draftmill sets itself: {instead}."
            elif home == "model.flags" and key != home:
                yield f"{key} has {flag}, which changes the answers; move it to model.flags."
            elif home and key != home:
                yield f"{key} has {flag}, which changes the answers; put its value into {home} instead."


def _entry(flag: str, table: Mapping[str, str]) -> str | None:
    """What a table of flags says of `flag`, which may be a long flag cut short: servers take those too."""
    if flag in table:
        return table[flag]
    if flag.startswith("--") and len(flag) >= 6:
        return next((entry for known, entry in table.items() if known.startswith(flag)), None)
    return None


def _warnings(config: Config, model: "Model | None") -> Iterator[str]:
    revision, operation, checks = config["model"]["revision"], config["operation"], config["validation"]
    if revision is not None and not re.fullmatch(r"[0-9a-f]{40}", revision):
        yield f"model.revision {revision} is no full commit id (40 hex digits); a branch or tag can move between two runs."
    if operation["engine"] == "attach" and (server_flags(config).words or server_flags(config).tuned):
        yield "operation.server.flags are not used with engine attach; the running servers keep their own."
    if config["model"]["load_format"] == "dummy":
        yield "model.load_format is dummy: the weights are random and the text is noise; for measuring throughput only."
    if config["sampling"]["ignore_eos"]:
        yield "sampling.ignore_eos is true: answers run on past their end; for measuring throughput only."
    if "retry_longer" in (checks["truncated"], checks["reasoning_unfinished"]):
        context = config["model"]["context_length"] or (model.context_length if model is not None else None)
        longer = int(config["sampling"]["max_tokens"] * checks["retry_longer_factor"])
        if context is not None and longer >= context:
            yield (
                f"validation.retry_longer_factor asks for {longer} tokens, but the context holds {context}; retried answers "
                "get what the context leaves."
            )


def is_hub_id(path: str) -> bool:
    """Whether `path` is written like owner/name on a model hub."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None and not path.endswith(
        ".gguf"
    )


def adapter_files(adapters: Sequence[str]) -> list[Path]:
    """The files of the adapters that lie on this machine."""
    names = ("adapter_config.json", "*.safetensors", "adapter_model.bin")
    return sorted(path for a in adapters for name in names for path in Path(a).expanduser().glob(name))


def science(config: Config) -> Config:
    """All that can change the dataset: every block but operation."""
    return {name: block for name, block in config.items() if name != "operation"}


def model_digest(config: Config) -> str:
    """Changes when another model, template or number format is asked for."""
    return _digest(config["model"])


def prompts_digest(config: Config) -> str:
    """Changes when the shards may: prompts, seed, shards, the model's template and context, max_tokens."""
    return _digest(
        {
            "seed": config["seed"],
            "shards": config["shards"],
            "prompts": config["prompts"],
            "model": config["model"],
            "max_tokens": config["sampling"]["max_tokens"],
        }
    )


def generation_digest(config: Config) -> str:
    """Changes when, given the shards, other turns may be asked or a turn may be another one.

    Of prompts only what acts beyond the shard files; of validation only what acts before the merge: which verdicts end a
    conversation or ask again (keep and flag are the same here), not the early stop, which asks for nothing.
    """
    prompts, checks = config["prompts"], config["validation"]
    acting = {
        check: policy
        for check, policy in checks.items()
        if policy in STOPS_CONVERSATION
        and check != "duplicate_answer"  # known only once all answers are there
    }
    limits = {
        "too_few_supervised": "min_supervised_tokens",
        "beyond_max_length": "max_length",
    }
    acting |= {limit: checks[limit] for check, limit in limits.items() if check in acting}
    if "retry_longer" in acting.values():
        acting["retry_longer_factor"] = checks["retry_longer_factor"]
    return _digest(
        {
            "seed": config["seed"],
            "model": config["model"],
            "prompts": {
                key: prompts[key]
                for key in (
                    "system_prompt",
                    "turns",
                    "samples",
                    "thinking",
                    "context_policy",
                    "min_max_tokens",
                )
            },
            "sampling": config["sampling"],
            "validation": acting,
        }
    )


def validation_digest(config: Config) -> str:
    """Changes when a verdict of the merge may: all checks, but for the early stop."""
    return _digest(
        {key: value for key, value in config["validation"].items() if not key.startswith("reject_limit")}
    )


def dataset_digest(config: Config) -> str:
    """Changes when the exports may: the dataset block, and the seed that splits it."""
    return _digest({"seed": config["seed"], "dataset": config["dataset"]})


def _digest(value: Config) -> str:
    """32 hex digits of the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
