"""`python -m draftmill diagnose FILE`: what held a server, from its telemetry or from snapshots of metrics.

Knows files and arguments; the judgement is bottleneck.py's.
"""

import argparse
import gzip
import json
import sys
from dataclasses import asdict
from pathlib import Path

from draftmill.bottleneck import Diagnosis, Engine, diagnose
from draftmill.capacity_command import choose_dialect, choose_gpu, positive, read_model
from draftmill.errors import UserError
from draftmill.gpus import find_gpu, parse_reference
from draftmill.server_flags import UNKNOWN, ServerFlags, dialect_of_version, read_flags
from draftmill.telemetry import read_samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this sub-command."""
    parser.add_argument("file", type=Path, help="telemetry or snapshots of metrics, JSON lines, .gz too")
    parser.add_argument("--model", type=Path, help="model folder: predictions then come from its shape")
    parser.add_argument("--gpu", help="GPU model, for example H200")
    parser.add_argument("--gpu-memory-gb", type=positive, help="memory of one GPU, as it is sold")
    parser.add_argument("--flags", help="SGLang flags that the server ran with, as one text")
    parser.add_argument("--engine-version", help="SGLang version, for the flags that it knows")
    parser.add_argument("--engine-help", type=Path, help="file with the output of its --help: more exact")
    parser.add_argument("--reference", help="what was expected: tok/s, or 'a quarter of a B200'")
    parser.add_argument("--window-s", type=positive, default=30.0, help="length of a window (default 30)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis, or JSON with --json."""
    samples = read_samples(_lines(args.file), str(args.file))
    engine = _engine(args)
    found = diagnose(samples, engine, parse_reference(args.reference), args.window_s)
    if args.json:
        print(json.dumps(as_json(found), allow_nan=False, indent=1))
    else:
        sys.stdout.write(as_text(found))
    return 0


def as_json(found: Diagnosis) -> dict[str, object]:
    """The diagnosis as a JSON-ready mapping; advice always has its keys."""
    plain = asdict(found)
    if found.advice is None:
        plain["advice"] = {"flag": None, "predicted_effect": "nothing to change", "gain": 1.0, "drop": []}
    return plain


def as_text(found: Diagnosis) -> str:
    """The diagnosis for a person: verdict, evidence, advice, what cannot be seen, and the windows."""
    lines = [f"{found.verdict}: {found.evidence}"]
    if found.advice is not None:
        drop = f" (without {' '.join(found.advice.drop)})" if found.advice.drop else ""
        lines.append(f"advice: {found.advice.flag or 'no flag'}{drop}; {found.advice.predicted_effect}")
    if found.expected is not None:
        lines.append(f"expected: {found.expected}")
    lines += [f"not visible: {sentence}" for sentence in found.blind]
    start = found.windows[0].start_s
    lines += [
        f"{w.start_s - start:8.0f} to {w.end_s - start:.0f} s  {w.verdict}: {w.evidence}"
        for w in found.windows
    ]
    return "\n".join(lines) + "\n"


def _lines(file: Path) -> list[str]:
    try:
        raw = file.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return data.decode("utf-8").split("\n")
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def _engine(args: argparse.Namespace) -> Engine:
    """What arguments say of the engine, else what the slot's state file beside the telemetry says."""
    state = _state_beside(args.file)
    asked = state.get("flags")
    flags: ServerFlags | None = None
    if args.flags is not None:
        flags = read_flags(args.flags)
    elif isinstance(asked, list):
        flags = read_flags([str(word) for word in asked])
    version = args.engine_version or _text(state.get("version"))
    dialect = choose_dialect(version, args.engine_help)
    if dialect is UNKNOWN and version:
        dialect = dialect_of_version(version)
    architecture = read_model(args.model)[0] if args.model else None
    gpu = memory = None
    if args.gpu or args.gpu_memory_gb:
        gpu, memory = choose_gpu(args.gpu, args.gpu_memory_gb)
    elif name := _text(state.get("gpu_name")):
        given = state.get("gpu_memory_bytes")
        memory = given if isinstance(given, int) else None
        gpu = find_gpu(name, memory)
    per_request = state.get("slots_per_request")
    return Engine(
        kind="llamacpp" if "llama" in str(state.get("engine", "")) else "sglang",
        dialect=dialect,
        flags=flags,
        slots_per_request=per_request if isinstance(per_request, int) else None,
        architecture=architecture,
        gpu=gpu,
        gpu_memory_bytes=memory,
        hybrid=None if architecture is None else architecture.state is not None,
    )


def _state_beside(file: Path) -> dict[str, object]:
    """The slot's published state, `<slot>.json` beside `<slot>.telemetry.jsonl`; empty where there is none."""
    name = file.name.removesuffix(".gz").removesuffix(".telemetry.jsonl")
    state = file.with_name(f"{name}.json")
    if name == file.name or not state.exists():
        return {}
    try:
        read = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # it is replaced while the engine runs; the diagnosis can do without
    return read if isinstance(read, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
