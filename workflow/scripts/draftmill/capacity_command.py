"""`python -m draftmill capacity`: what a server would hold and how its settings compare, before it starts.

Knows files and arguments; the figures are capacity.py's.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from draftmill.architecture import Architecture, read_architecture
from draftmill.candidates import as_json, candidates, table
from draftmill.capacity import Workload, roofline
from draftmill.errors import UserError
from draftmill.gpus import GPUS, Gpu, find_gpu, gpu_with_memory, memory_bytes_of
from draftmill.server_flags import UNKNOWN, Dialect, dialect_of_help, dialect_of_version, read_flags

# It knows the flag names of both generations.
ASSUMED_VERSION = "0.5.15.post1"


def positive(text: str) -> float:
    """A finite number above 0, for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value


def not_negative(text: str) -> float:
    """0, or a finite number above it, for argparse."""
    return 0.0 if float(text) == 0 else positive(text)


def positive_count(text: str) -> int:
    """A whole number above 0, for argparse."""
    return int(positive(str(int(text))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this sub-command."""
    parser.add_argument(
        "--model", type=Path, required=True, help="model folder with a config.json, or that file"
    )
    parser.add_argument(
        "--gpu-memory-gb", type=positive, help="memory of one GPU, as it is sold (141 for an H200)"
    )
    parser.add_argument("--gpu", help="GPU model, for its bandwidth and arithmetic, for example H200")
    parser.add_argument("--flags", default="", help="SGLang flags as one text")
    parser.add_argument("--engine-version", help=f"SGLang version (default {ASSUMED_VERSION})")
    parser.add_argument("--engine-help", type=Path, help="file with the output of its --help: more exact")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=200, help="mean prompt length (default 200)"
    )
    parser.add_argument(
        "--output-tokens", type=positive, default=3000, help="mean output length (default 3000)"
    )
    parser.add_argument(
        "--output-cv", type=not_negative, default=0.0, help="spread of output lengths over their mean"
    )
    parser.add_argument("--mean-length", type=positive, help="mean prompt + output; sets --output-tokens")
    parser.add_argument(
        "--clients", type=positive_count, help="requests sent at once (default: as many as fit)"
    )
    parser.add_argument(
        "--allow-state-dtype", action="store_true", help="offer a bf16 state: it changes answers"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON with --json. Flags that SGLang would refuse are said, not a failure."""
    architecture, weights = read_model(args.model)
    gpu, memory = choose_gpu(args.gpu, args.gpu_memory_gb)
    flags = read_flags(args.flags)
    output = args.output_tokens
    if args.mean_length is not None:
        output = max(args.mean_length - args.prompt_tokens, 1.0)
    work = Workload(args.prompt_tokens, output, args.output_cv, clients=args.clients)
    found = candidates(
        architecture,
        gpu,
        flags,
        work,
        choose_dialect(args.engine_version or ASSUMED_VERSION, args.engine_help),
        allow_state_dtype=args.allow_state_dtype,
        weight_bytes=weights,
        gpu_memory_bytes=memory,
    )
    if args.json:
        print(json.dumps(as_json(found, gpu, architecture, work), allow_nan=False, indent=1))
    else:
        line = roofline(architecture, gpu, flags, work, found[0].capacity.running)
        sys.stdout.write(table(found) + "\n")
        sys.stdout.write(
            f"roofline as asked: {line.tok_s:.0f} tok/s ({line.bound}; {gpu.name}: {line.source})\n"
        )
    return 0


def read_model(path: Path) -> tuple[Architecture, int | None]:
    """The architecture in a model folder (or a config.json) and, where files tell, its weights' bytes.

    The folder may be the run's own results/model, whose model.json holds the config.
    """
    folder = path if path.is_dir() else path.parent
    file = path if path.is_file() else folder / "config.json"
    config: object
    if file.exists():
        config = _json(file)
    elif (folder / "model.json").exists():
        whole = _json(folder / "model.json")
        config = whole.get("config") if isinstance(whole, dict) else None
    else:
        raise UserError(f"{path} holds no config.json: give the folder of a Hugging Face model")
    if not isinstance(config, dict):
        raise UserError(
            f"{file} holds no model configuration: the capacity model needs a Hugging Face config.json"
        )
    return read_architecture(config), weight_bytes(folder)


def weight_bytes(folder: Path) -> int | None:
    """Bytes of the safetensors files in a folder, by their index or their sizes; None without any."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        read = _json(index)
        metadata = read.get("metadata") if isinstance(read, dict) else None
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and total > 0:
            return int(total)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def choose_gpu(name: str | None, memory_gb: float | None) -> tuple[Gpu, int]:
    """The GPU's row and its memory in bytes, from a name, a size, or both."""
    memory = None if memory_gb is None else memory_bytes_of(memory_gb)
    gpu = find_gpu(name, memory) if name else None
    if name and gpu is None:
        raise UserError(f"the GPU {name!r} is not in the table: it has {', '.join(row.name for row in GPUS)}")
    if gpu is None:
        if memory is None or memory_gb is None:
            raise UserError("the GPU is not given: add --gpu H200 or --gpu-memory-gb 141")
        same = gpu_with_memory(memory_gb)
        nearest = min(GPUS, key=lambda row: abs(row.memory_bytes - memory))
        # Only the memory is known then: bandwidth and arithmetic are the nearest card's, and say so.
        gpu = same or replace(
            nearest, source=f"{nearest.source}; taken as the nearest in memory, name it with --gpu"
        )
    return gpu, memory or gpu.memory_bytes


def choose_dialect(version: str | None, help_file: Path | None) -> Dialect:
    """The flags that the engine knows, by its --help text, else by its version, else the lasting ones."""
    if help_file is not None:
        try:
            text = help_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{help_file} cannot be read as the text of --help: {error}") from None
        return dialect_of_help(text, version or "")
    return dialect_of_version(version) if version else UNKNOWN


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from None
