"""SGLang's dialect, by its native route /generate: read and tried in 0.5.15.post1 and 0.5.23.

Knows the names of SGLang's flags, parameters, routes, metrics and messages. Must never know shards,
prompts as text, leases or the journal: it says how to start, ask and understand one server, no more.

What was decided from the source:

- The tokenizer stays loaded on the server (no ``--skip-tokenizer-init``): stop strings and
  ``min_new_tokens`` are refused without it, and the tokenizer's own end token would not end an answer.
- The API key reaches the server in a ``--config`` file of mode 600, so neither the command line nor the
  process title holds it. The server itself prints it at start-up and answers it in /server_info:
  :func:`redact` before anything is stored.
- /metrics and /health answer without a key. Beside its port the server listens on random ports of the
  loopback, and torch's rendezvous store on one random port of every interface (``--nccl-port``).
- The server shortens an answer without a word to what its KV pool and context can hold: the most is
  context - prompt - 2 tokens, and prompts from context - 6 tokens on are refused.

``DRAFTMILL_SGLANG_COMMAND`` names the words that start a server in another interpreter or container,
for instance ``/opt/sglang/bin/python -m sglang.launch_server``; the default is this interpreter.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import requests

from draftmill.aside import write_aside
from draftmill.engines import Completion, Facts, Launch, Refused, ServerSpec, Transient
from draftmill.engines.asking import get
from draftmill.errors import UserError
from draftmill.server_flags import read_flags

COMMAND_VARIABLE = "DRAFTMILL_SGLANG_COMMAND"
MAX_RUNNING_FLAG = "--max-running-requests"
ADAPTER = "target"  # the name under which the run's one LoRA adapter is loaded and asked for
HELP_TIMEOUT_S = 300  # importing SGLang for its --help takes 6 s warm, more from a cold disk

Flags = dict[str, tuple[str, ...]]  # every flag one version knows, with the values it allows (() = any)

# Old and new names of one flag: whichever the installed version knows is the one that is used.
RENAMED = (
    ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"),
    ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
    ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
)

SECRET_NAME = re.compile(r"(api|access|auth|watermark|ssl)_?key|password|secret|credential", re.IGNORECASE)
SECRET_IN_TEXT = re.compile(
    r"""((?:admin[_-])?api[_-]key['"]?(?:\s*[=:]\s*|\s+))('[^']*'|"[^"]*"|[^\s'",})]+)""", re.IGNORECASE
)
LENGTH = re.compile(
    r"longer than|exceeds the (model's )?maximum|maximum allowed length|is too long|context length",
    re.IGNORECASE,
)
NOT_THE_REQUEST = re.compile(r"disconnected|abort|shutting down|queue is full|memory|retry", re.IGNORECASE)

# What the log shows, and what it means; the first that matches counts, {0} is what its first group caught.
CAUSES = {
    r"No module named '?sglang\b": "SGLang is not installed for this interpreter; install it there, or set "
    "operation.server.python to the one that has it.",
    r"unrecognized arguments: (.+)$": "The installed SGLang does not know {0}; correct operation.server.flags.",
    r"error: (argument .+)$": "SGLang refuses a flag: {0}.",
    r"address already in use|port \S+ is already in use|at \d+ is not available in": "The port is taken by another "
    "process; set operation.server.port to a free one, or leave it null.",
    r"no space left on device": "The disk is full; make room, then run again.",
    r"CUDA(?: error:)? out of memory|OutOfMemoryError|cudaErrorMemoryAllocation": "The GPU ran out of memory; see "
    "that nothing else holds it, lower --mem-fraction-static or model.context_length, or use more GPUs per server.",
    r"Not enough memory\. Please try to increase --mem-fraction-static": "The weights leave no memory for the "
    "caches; raise --mem-fraction-static, use a smaller number format or more GPUs per server.",
    r"cannot allocate memory|DefaultCPUAllocator: can't allocate|\bMemoryError": "The machine ran out of memory; "
    "lower --max-total-tokens or run fewer servers.",
    r"Torch not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver|libcuda\.so\.1"
    r"|driver version is insufficient|driver on your system is too old|CUDA unknown error|no CUDA-capable device"
    r"|No accelerator \(CUDA": "SGLang finds no usable GPU (device, driver, or the CUDA build of torch); "
    "look at nvidia-smi, or serve on the CPU with --device cpu.",
    r"no kernel image is available|operator torchvision::\w+ does not exist|No module named '?sgl_kernel"
    r"|Could not find nvcc|nvcc: not found|Ninja is required|undefined symbol|CUDA_HOME environment variable is not"
    r"|kernel sgl_kernel\.\S+ has no": "A compiled kernel is missing, or was built for another GPU or torch; "
    "install the sgl-kernel and torch that belong to this SGLang.",
    r"Repo id must be in the form .*?: '([^']+)'|(\S+) is not a local folder and is not a valid model"
    r"|Can't load the configuration of '([^']+)'|(\S+) does not appear to have a file named config\.json"
    r"|Incorrect path_or_model_id: '([^']+)'": "There is no model at {0}; check model.path.",
    r"Cannot find any model weights with `?([^\s`]+)": "There are no weights in {0}; check model.path.",
    r"model type `?([\w.-]+)`? but Transformers does not recognize|Model architectures \[?'?([\w.-]+)": "The "
    "installed SGLang does not know this kind of model ({0}); use a newer version.",
    r"requires you to execute the .*(?:code|file)": "The model brings its own code; read it, and set "
    "model.trust_remote_code: true if you trust it.",
    r"no_buffer do(?:es)? not support overlap schedule": "SGLang refuses no_buffer beside the overlap schedule; "
    "add --disable-overlap-schedule.",
}
LAST_ERROR = re.compile(r"^(?:\[[^\]]*\] )?((?:[\w.]+\.)?\w*(?:Error|Exception): .+)$", re.MULTILINE)
LOST = re.compile(r"address already in use|Initialization failed|Scheduler hit an exception|SIGQUIT received")


def slot_flags(gpus: int, capacity: int | None, asked: Sequence[str]) -> tuple[str, ...]:
    """The flags that a server's GPUs and operation.server.capacity add to those asked."""
    flags = read_flags(asked)
    # who asks for pipeline or data parallelism divides the GPUs by himself
    parallel = ("--tp-size", str(gpus)) if gpus > 1 and flags.dp == flags.pp == flags.tp == 1 else ()
    limit = (MAX_RUNNING_FLAG, str(capacity)) if capacity is not None and flags.max_running is None else ()
    return *parallel, *limit


class SGLang:
    """The engine this project exists for."""

    name = "sglang"

    def numerics_flags(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        """The flags of the config's ``model`` block, in a fixed order: they are part of every key."""
        path = str(model["path"])
        if path == "embedded" or path.endswith(".gguf"):
            raise UserError(
                f"model.path is {path}, a GGUF file, which operation.engine sglang does not serve here; "
                "set model.path to a Hugging Face folder or hub id, or operation.engine to llamacpp."
            )
        flags: list[str] = []
        for flag, key in (
            ("--dtype", "dtype"),
            ("--quantization", "quantization"),
            ("--kv-cache-dtype", "kv_cache_dtype"),
            ("--mamba-ssm-dtype", "state_dtype"),
            ("--load-format", "load_format"),
        ):
            if model.get(key) not in (None, "auto"):
                flags += [flag, str(model[key])]
        adapters = model.get("adapters") or []
        if len(adapters) > 1:
            raise UserError(
                f"model.adapters names {len(adapters)} adapters, but a run has one target model; "
                "name one, or merge them into the weights first."
            )
        if adapters:
            flags += ["--lora-paths", f"{ADAPTER}={adapters[0]}"]
        if model.get("overrides"):
            flags += ["--json-model-override-args", json.dumps(model["overrides"], sort_keys=True)]
        if model.get("trust_remote_code"):
            flags += ["--trust-remote-code"]
        if model.get("revision") and not Path(path).expanduser().exists():
            flags += ["--revision", str(model["revision"])]
        further = model.get("flags") or []
        for text in [further] if isinstance(further, str) else further:
            flags += shlex.split(text)
        return tuple(flags)

    def launch(self, spec: ServerSpec, port: int, key_file: Path, folder: Path) -> Launch:
        """The command for ``spec``; UserError when the installed SGLang lacks a flag or a GPU is missing."""
        asked = {word.partition("=")[0] for word in spec.flags}
        environment = dict(spec.env)
        if _value(spec.flags, "--device") == "cpu":
            environment.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        elif not spec.gpus and environment.get("SGLANG_USE_CPU_ENGINE") != "1":
            raise UserError(
                "operation.engine is sglang, but this server has no GPU; use a machine with one, add --device cpu to "
                "operation.server.flags (an SGLang built for the CPU), or set operation.engine to llamacpp."
            )
        if spec.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        if spec.threads is not None:
            environment["OMP_NUM_THREADS"] = str(spec.threads)
        flags = ["--model-path", spec.model_path, "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--enable-metrics", "--context-length", str(spec.context_length)]
        flags += slot_flags(len(spec.gpus), spec.capacity, spec.flags)
        known = known_flags(environment)
        if "--log-level-http" in known and "--log-level-http" not in asked:
            flags += ["--log-level-http", "warning"]  # no line for each look at the metrics
        settled = settle((*flags, *spec.numerics, *spec.flags), known)
        secret = _secret_file(folder / f"sglang-{port}.yaml", key_file.read_text(encoding="utf-8").strip())
        return Launch((*_command(environment), "--config", str(secret), *settled), environment)

    def facts(self, address: str, key: str, log: Path | None = None) -> Facts | None:
        """What the server says of itself once its own warm-up is over; None before.

        None too for a server that refuses the key: somebody else has taken the port, which ours will
        find out (``start_failed``). The effective running requests stand in ``internal_states``, which
        older versions lack: for those give the server's ``log``, whose start-up line names them.
        UserError where neither does.
        """
        try:
            if get(address, "/health", key).status_code != 200:  # 503 until the warm-up has passed
                return None
            reply = get(address, "/server_info", key)
            if reply.status_code == 404:
                reply = get(address, "/get_server_info", key)
        except requests.RequestException:
            return None
        info = _object(reply.content)
        if reply.status_code != 200 or info is None:
            return None
        states = info.get("internal_states") or [{}]
        ranks = int(info.get("dp_size") or 1)
        effective = states[0].get("effective_max_running_requests_per_dp")
        if effective is None and log is not None and log.exists():
            effective = capacity_in_log(log.read_text(encoding="utf-8", errors="replace"))
        if effective is None:
            raise UserError(
                f"SGLang {info.get('version', 'of an unknown version')} at {address} does not say how many requests "
                "it runs at once; use a newer version."
            )
        pool = info.get("max_total_num_tokens") or states[0].get("memory_usage", {}).get("token_capacity")
        return Facts(
            version=str(info.get("version", "")),
            capacity=int(effective) * ranks,
            asked_capacity=info.get("max_running_requests"),
            kv_tokens=None if pool is None else int(pool) * ranks,
            state_slots=self._state_slots(address, key),
            flags=_redacted(info, key),
        )

    def metrics(self, address: str, key: str) -> str:
        """The Prometheus text of the server; requests.RequestException when there is none."""
        reply = get(address, "/metrics", key)
        reply.raise_for_status()
        return reply.text

    def request(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """(route, body): every sampling parameter is sent, so that no default of the server counts.

        ``seed`` is always sent; SGLang honours it with ``--enable-deterministic-inference`` only.
        ``adapter`` (true where model.adapters names one) asks the adapter instead of the base model.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt_ids),
            "sampling_params": {
                "temperature": sampling["temperature"],
                "top_p": sampling["top_p"],
                "top_k": sampling["top_k"] if sampling["top_k"] > 0 else -1,
                "min_p": sampling["min_p"],
                "repetition_penalty": sampling["repetition_penalty"],
                "frequency_penalty": sampling["frequency_penalty"],
                "presence_penalty": sampling["presence_penalty"],
                "max_new_tokens": sampling["max_tokens"],
                "min_new_tokens": sampling["min_new_tokens"],
                "stop": list(sampling["stop"]),
                "stop_token_ids": list(sampling["stop_token_ids"]),
                "stop_regex": list(sampling["stop_regex"]),
                "logit_bias": dict(sampling["logit_bias"]) or None,
                "ignore_eos": sampling["ignore_eos"],
                "sampling_seed": sampling["seed"],
                "n": 1,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "no_stop_trim": True,
            },
        }
        if sampling.get("adapter"):
            body["lora_path"] = ADAPTER
        return "/generate", body

    def completion(self, status: int, body: bytes) -> Completion:
        """The answer in a reply of /generate.

        Refused for what the server will never answer (in its own words); Transient for everything that
        is not a whole answer: a busy, broken or foreign server, an aborted request, a torn body.
        """
        reply = _object(body)
        if status in (401, 403):
            raise Transient(
                f"The server refuses the API key (HTTP {status}): another run's server may listen on this port, or "
                "the run's key file was replaced after the server had started."
            )
        if status in (400, 413, 422) and reply is not None:
            sentence = _sentence(reply)
            if sentence and (LENGTH.search(sentence) or not NOT_THE_REQUEST.search(sentence)):
                raise Refused(sentence)
            raise Transient(f"HTTP {status}: {sentence or 'no reason given'}")
        if status != 200:
            sentence = _sentence(reply) if reply else body[:200].decode("utf-8", "replace")
            raise Transient(f"HTTP {status}: {sentence}")
        if reply is None:
            raise Transient(
                "The reply is not a whole JSON object; the connection was cut, or no SGLang answers there."
            )
        meta = reply.get("meta_info")
        finish = meta.get("finish_reason") if isinstance(meta, dict) else None
        if not isinstance(meta, dict) or not isinstance(finish, dict):
            raise Transient("The reply has no finish_reason.")
        kind = finish.get("type")
        if kind == "abort":
            sentence = str(finish.get("message") or "aborted")[:500]
            if LENGTH.search(sentence):
                raise Refused(sentence)
            raise Transient(f"The server aborted the request: {sentence}")
        if kind not in ("stop", "length"):
            raise Transient(f"The reply's finish_reason is {kind!r}.")
        ids = reply.get("output_ids")
        if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0:
            raise Transient("The reply has no output_ids.")
        if meta.get("completion_tokens", len(ids)) != len(ids):
            raise Transient(
                f"The reply holds {len(ids)} output_ids, but counts {meta['completion_tokens']} tokens."
            )
        return Completion(
            output_ids=tuple(ids),
            finish_reason=kind,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            queue_s=float(meta.get("queue_time") or 0.0),
        )

    def likely_cause(self, log_tail: str) -> str:
        """A sentence on why a start failed, from the end of the log; "" when it shows no error."""
        for pattern, meaning in CAUSES.items():
            if found := re.search(pattern, log_tail, re.IGNORECASE | re.MULTILINE):
                caught = next((group for group in found.groups() if group), "")
                return redact(meaning.format(caught.strip()))
        errors = LAST_ERROR.findall(log_tail)
        return redact(f"SGLang ended with {errors[-1].strip()[:300]}") if errors else ""

    def start_failed(self, log_tail: str) -> bool:
        """Whether this start can no longer succeed, though the process may live on.

        With a taken port the launcher loads everything, then lives on for two minutes and sends its
        warm-up to whoever holds the port (measured, 0.5.23).
        """
        return LOST.search(log_tail) is not None

    def _state_slots(self, address: str, key: str) -> int | None:
        """Slots of the recurrent state's pool, from the metrics; None for a model or version without."""
        try:
            text = self.metrics(address, key)
        except requests.RequestException:
            return None
        slots = 0.0
        for line in text.splitlines():
            if re.match(r"sglang:mamba_(available|evictable|used)_tokens\b", line) and (
                "tp_rank=" not in line or 'tp_rank="0"' in line
            ):
                slots += float(line.rsplit(" ", 1)[1])
        return round(slots) or None


def redact(text: str, key: str = "") -> str:
    """``text`` without API keys: those that stand behind their name, and ``key`` wherever it stands."""
    if key:
        text = text.replace(key, "[redacted]")
    return SECRET_IN_TEXT.sub(
        lambda found: found[1] + (found[2] if found[2] in ("None", "null") else "[redacted]"), text
    )


def capacity_in_log(log: str) -> int | None:
    """The effective running requests of one data-parallel rank, from the last start-up line that names them."""
    found = re.findall(r"max_total_num_tokens=.*?\bmax_running_requests=(\d+)", log)
    return int(found[-1]) if found else None


def settle(words: Sequence[str], known: Flags) -> tuple[str, ...]:
    """``words`` with each renamed flag under the name that is known; UserError for an unknown flag or value."""
    settled = list(words)
    for at, word in enumerate(settled):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        if name not in known:
            for pair in RENAMED:
                if name in pair and (other := pair[name == pair[0]]) in known:
                    name = other
                    break
            else:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {nearest[0]}?" if nearest else "see python -m sglang.launch_server --help."
                )
                raise UserError(f"The installed SGLang does not know the flag {name}; {hint}")
            settled[at] = name + equals + value
        allowed = known[name]
        if not equals:
            value = settled[at + 1] if at + 1 < len(settled) else ""
        if allowed and value not in allowed:
            raise UserError(
                f"The installed SGLang takes no {value!r} for {name}; it takes {', '.join(allowed)}."
            )
    return tuple(settled)


def known_flags(environment: Mapping[str, str]) -> Flags:
    """The flags that the installed SGLang knows, by its own ``--help``.

    Kept on disk for each command and version (``draftmill`` in the user's cache folder). UserError where
    SGLang cannot be started at all.
    """
    return _ask(_command(environment), tuple(sorted(environment.items())))


def parse_help(text: str) -> Flags:
    """Flags and their allowed values in argparse's ``--help``; flags in the running text do not count."""
    flags: Flags = {}
    for line in text.splitlines():
        if line.startswith("  -"):
            invocation = re.split(r"\s{2,}", line.strip())[0]
            choices = re.search(r"\{([^{}]+)\}", invocation)
            allowed = tuple(choices[1].split(",")) if choices else ()
            flags.update(dict.fromkeys(re.findall(r"(?<![\w-])--[\w-]+", invocation), allowed))
    return flags


@functools.cache
def _ask(command: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Flags:
    variables = {**os.environ, **dict(environment), "COLUMNS": "200", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    kept = None
    if command[-2:] == ("-m", "sglang.launch_server"):
        question = "import importlib.metadata as m; print(m.version('sglang'))"
        version = _output((*command[:-2], "-c", question), variables).split()[-1]
        cache = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftmill"
        digest = hashlib.blake2b(json.dumps([command, version]).encode(), digest_size=8).hexdigest()
        kept = cache / f"sglang-{version}-{digest}.json"
        try:
            return {flag: tuple(allowed) for flag, allowed in json.loads(kept.read_text("utf-8")).items()}
        except (OSError, ValueError, AttributeError):
            pass  # not asked yet, or torn: ask (again)
    flags = parse_help(_output((*command, "--help"), variables))
    if "--model-path" not in flags:
        raise UserError(f"`{shlex.join(command)} --help` lists no flags of SGLang; check {COMMAND_VARIABLE}.")
    if kept is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be kept costs seconds, not answers
            write_aside(kept, json.dumps(flags))
    return flags


def _output(command: Sequence[str], variables: Mapping[str, str]) -> str:
    try:
        ran = subprocess.run(
            command,
            check=False,
            env=dict(variables),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HELP_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise UserError(
            f"SGLang cannot be asked for its flags ({fault}); check operation.server.python, or {COMMAND_VARIABLE} "
            "where that is set."
        ) from fault
    if ran.returncode != 0 or not ran.stdout.strip():
        cause = SGLang().likely_cause(ran.stderr) or (ran.stderr.strip().splitlines() or ["no output"])[-1]
        if "PackageNotFoundError" in ran.stderr:
            cause = f"SGLang is not installed for {command[0]}; install it, or name its command in {COMMAND_VARIABLE}."
        raise UserError(f"SGLang cannot be started: {cause}")
    return ran.stdout


def _command(environment: Mapping[str, str]) -> tuple[str, ...]:
    words = shlex.split(environment.get(COMMAND_VARIABLE) or os.environ.get(COMMAND_VARIABLE, ""))
    return tuple(words) or (sys.executable, "-m", "sglang.launch_server")


def _value(words: Sequence[str], flag: str) -> str | None:
    """The last value of ``flag``, as ``--flag value`` or ``--flag=value``."""
    value = None
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            value = words[at + 1]
        elif word.startswith(flag + "="):
            value = word[len(flag) + 1 :]
    return value


def _secret_file(path: Path, key: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an old file would keep its mode
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"api-key: {json.dumps(key)}\n")
    return path


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _sentence(reply: Mapping[str, Any]) -> str:
    """The message in any of the shapes in which SGLang and its web framework answer errors."""
    error = reply.get("error")
    for said in (
        error.get("message") if isinstance(error, dict) else error,
        reply.get("message"),
        reply.get("detail"),
    ):
        if said:
            return (said if isinstance(said, str) else json.dumps(said))[:500]
    return ""


def _redacted(info: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The settings that are set, without nested state and without secrets."""
    return {
        name: "[redacted]" if SECRET_NAME.search(name) else _without_key(value, key)
        for name, value in info.items()
        if value is not None
        and not isinstance(value, dict)
        and name not in ("internal_states", "version", "status")
    }


def _without_key(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_without_key(item, key) for item in value]
    if isinstance(value, bool | int | float):
        return value
    return redact(str(value), key)
