"""Where the real SGLang for the CPU lies (tests/sglang/setup.sh), and how its servers are told to run."""

from __future__ import annotations

import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
MODEL = ROOT / ".models" / "smollm2-hf"

# A pool of 16,384 tokens: without a bound SGLang takes 15 GB of a machine's memory.
FLAGS = ("--device", "cpu", "--max-total-tokens", "16384")
CONTEXT = 4096
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "tests" / "sglang" / "stand-ins"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
}
COMMAND = shlex.join([str(PYTHON), "-m", "sglang.launch_server"])
