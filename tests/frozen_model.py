"""A frozen model folder (as in results/model) whose tokens are bytes: prompts can be counted by hand."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPECIAL = ("<|im_start|>", "<|im_end|>")
PLAIN = """{%- for message in messages -%}
{%- if message.role == 'tool' and not tools -%}{{ raise_exception('tools are missing') }}{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
THINKING = PLAIN + "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"


def freeze(folder: Path, context: int = 8192, template: str = PLAIN) -> Path:
    """Writes model.json, tokenizer.json and chat_template.jinja; a token is a byte or one of SPECIAL."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    facts: dict[str, object] = {
        "path": "none",
        "name": "bytes",
        "kind": "hf",
        "identity": "0" * 32,
        "revision": None,
        "context_length": context,
        "eos_token_ids": [257],
        "special_tokens": {},
        "generation_config": {},
        "template_date": None,
        "template_hash": "0" * 32,
        "template_has_thinking": "enable_thinking" in template,
        "tokenizer_hash": "0" * 32,
        "vocab_size": 258,
        "config": None,
    }
    (folder / "model.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder
