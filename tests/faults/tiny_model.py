"""A model folder small enough to be made on the spot: a trained BPE tokenizer, a config, a chat template, no weights.

Its vocabulary holds a few plain added tokens by which a prompt can carry a fault (see standin_server.py): whoever
writes `MARKERS["poison"]` into a prompt sends exactly one known token id.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

MARKERS = {name: f"@@{name}@@" for name in ("poison", "refused", "aborted", "fussy")}
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def words(seed: int = 0, count: int = 600) -> list[str]:
    """Pronounceable words, the same for the same seed."""
    draw = random.Random(seed)
    syllables = [
        c + v for c in "bdfgklmnprstvz" for v in ("a", "e", "i", "o", "u", "ar", "en", "il", "os", "un")
    ]
    return ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(count)]


def make(folder: Path, context: int = 8192) -> Path:
    """Writes the model folder and returns it; the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    draw = random.Random(1)
    lines = [" ".join(draw.choices(words(), k=12)) for _ in range(800)]
    backend.train_from_iterator([*lines, "system user assistant", " system user assistant"] * 2, trainer)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS.values()])
    backend.save(str(folder / "tokenizer.json"))
    stop = backend.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context,
        "vocab_size": backend.get_vocab_size(),
        "torch_dtype": "bfloat16",
        "eos_token_id": stop,
    }
    generation = {"eos_token_id": stop, "temperature": 0.7, "top_p": 0.9}
    tokenizer = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", tokenizer),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder
