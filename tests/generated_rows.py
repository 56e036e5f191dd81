"""A small model folder and generated rows for it, made on the spot, for the tests of everything after generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from draftmill import config as settings
from draftmill.chat import ChatTemplate
from draftmill.rows import GENERATED
from draftmill.tokens import Tokenizer

# Like Qwen3's: thinking is a switch, the history is rendered without it, the last answer with it.
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.last and message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

PROSE = (
    "The river bends twice before the mill, and in spring it carries enough water to turn both wheels. "
    "Nobody remembers who built the weir; the parish books mention it first in 1642, as already old. "
)


def make_model(folder: Path) -> Path:
    """A byte-level tokenizer with a few merges and single-token tags, a template with thinking, model.json."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("e", "r"), ("i", "n"), ("a", "n"), ("an", "d")]
    vocabulary = {token: at for at, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    facts: dict[str, Any] = {
        "path": "made-up", "name": "made-up", "kind": "hf", "identity": "0" * 32, "revision": None,
        "context_length": 8192, "eos_token_ids": [backend.token_to_id("<|im_end|>")], "special_tokens": {},
        "generation_config": {}, "template_date": None, "template_hash": "1" * 32, "template_has_thinking": True,
        "tokenizer_hash": "2" * 32, "vocab_size": backend.get_vocab_size(), "config": None,
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


class Run:
    """The files of a run as they are before the merge."""

    def __init__(self, folder: Path, changes: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.tokenizer = Tokenizer.load(self.model)
        self.template = ChatTemplate.load(self.model)
        self.stop = self.tokenizer.encode("<|im_end|>")
        self.config: dict[str, Any] = settings.resolve({"prompts": {"thinking": False}})
        for block, values in (changes or {}).items():
            self.config[block] |= values
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        primary_id: str,
        text: str,
        turn: int = 0,
        finish_reason: str = "stop",
        outcome: str = "answered",
        **more: Any,
    ) -> dict[str, Any]:
        """One generated row whose answer is ``text``; keywords replace any of its columns."""
        thinking = more.get("thinking", False)
        messages = more.pop("messages", [{"role": "user", "content": f"What of {primary_id}, part {turn}?"}])
        tools = more.get("tools")
        asked = self.config["prompts"]["thinking"] is not None
        rendered = self.template.render(
            messages, json.loads(tools) if tools else None, thinking if asked else None
        )
        answered = outcome == "answered"
        row = {
            "id": f"{primary_id}_gen{turn}",
            "primary_id": primary_id,
            "turn_index": turn,
            "sample": 0,
            "source": "book.jsonl",
            "content_hash": f"{primary_id}-hash",
            "key": f"{primary_id}-{turn}-key",
            "outcome": outcome,
            "thinking": thinking,
            "messages": json.dumps(messages),
            "tools": None,
            "prompt_ids": self.tokenizer.encode(rendered) if answered else [],
            "output_ids": self.tokenizer.encode(text) + self.stop * (finish_reason == "stop")
            if answered
            else [],
            "finish_reason": finish_reason if answered else "",
            "detail": None if answered else "said the server",
            "seed": 7,
            "sampling": json.dumps({"temperature": 0.7, "stop": [], "stop_token_ids": [], "max_tokens": 512}),
            "max_tokens": 512,
            "started_at": 1.0,
            "queue_s": 0.1,
            "latency_s": 2.0,
            "server": "host/0",
            "engine": "none 1.0",
            "cached_tokens": 0,
            "attempts": 1,
            "carried": None,
        } | more
        self.rows.append(row)
        return row

    def shards(self, count: int = 3) -> list[Path]:
        """Writes results/generated/: conversations dealt out to ``count`` shards, each sorted by id."""
        (self.folder / "generated").mkdir(exist_ok=True)
        dealt = sorted({row["primary_id"] for row in self.rows})
        paths = []
        for shard in range(count):
            mine = [row for row in self.rows if dealt.index(row["primary_id"]) % count == shard]
            table = pa.Table.from_pylist(sorted(mine, key=lambda row: str(row["id"])), schema=GENERATED)
            paths.append(self.folder / "generated" / f"{shard + 1}-of-{count}.parquet")
            pq.write_table(table, paths[-1], row_group_size=5)
        return paths

    def summary(self, **counts: Any) -> Path:
        """Writes prompts.json, adding up unless told otherwise."""
        usable = len({row["primary_id"] for row in self.rows})
        facts = {"rows_in": usable, "usable": usable, "duplicates": 0, "contaminated": 0, "skipped": 0}
        path = self.folder / "prompts.json"
        path.write_text(json.dumps({**facts, "turns": len(self.rows), **counts}), encoding="utf-8")
        return path
