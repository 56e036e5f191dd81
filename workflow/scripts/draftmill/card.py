"""The dataset card: README.md as the Hugging Face hub shows it, with the tables a reader looks for.

Pure: facts in, Markdown out. Must never know files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill import __version__
from draftmill.model import Model
from draftmill.validation import READ

PERCENTILES = (5, 50, 95, 99)


@dataclass
class Contents:
    """What the dataset holds, counted while it is written."""

    rows: Counter[str] = field(default_factory=Counter)
    conversations: dict[str, set[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    thinking: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    supervised_tokens: list[int] = field(default_factory=list)
    sampling: dict[str, Any] | None = None

    def add(self, split: str, table: pa.Table) -> None:
        """Counts the rows of ``table`` (schema rows.MERGED), which go into ``split``."""
        self.rows[split] += table.num_rows
        self.conversations.setdefault(split, set()).update(table["primary_id"].to_pylist())
        self.sources.update(table["source"].to_pylist())
        self.finish_reasons.update(table["finish_reason"].to_pylist())
        self.thinking += sum(table["thinking"].to_pylist())
        self.prompt_tokens += table["prompt_len"].to_pylist()
        self.supervised_tokens += table["completion_len"].to_pylist()
        for text in table["metadata"].to_pylist():
            metadata = json.loads(text)
            self.engines[metadata["engine"]] += 1
            self.sampling = self.sampling or metadata["sampling"]

    def empty_validation(self) -> str:
        """What to say of a validation split that was asked for and holds nothing; "" where there is none such."""
        if "validation" not in self.rows or self.rows["validation"] or not self.rows["train"]:
            return ""
        count = len(self.conversations["train"])
        return (
            f"The validation split is empty: by their hashes, none of the {count:,} conversations falls into it; "
            "raise dataset.validation_share or change the seed."
        )


def card(facts: Mapping[str, Any], model: Model, contents: Contents) -> str:
    """The card. ``facts``: config, validation.json, prompts.json and throughput.json under their names."""
    config, validation = facts["config"], facts["validation"]
    prompts, throughput = facts["prompts"], facts["throughput"]
    rows = sum(contents.rows.values())
    sampling = {k: v for k, v in (contents.sampling or {}).items() if k not in ("seed", "max_tokens")}
    partial = bool(prompts.get("partial"))
    sections = [
        _front_matter(config["dataset"], contents),
        f"# Answers of {model.name}, to train a drafter with",
        (
            f"{rows:,} generations by {model.name}, token by token as the model sampled them, made with Draftmill "
            f"{__version__}. A row is one assistant generation: `input_ids` holds the prompt and the sampled "
            "tokens, `loss_mask` is 1 exactly on what was sampled."
        ),
        "**This dataset is partial: the run that makes it had not ended.**" if partial else "",
        "## Contents",
        _table(
            ("split", "rows", "conversations"),
            ((split, count, len(contents.conversations[split])) for split, count in contents.rows.items()),
        ),
        contents.empty_validation(),
        _table(
            ("tokens", *(f"p{p}" for p in PERCENTILES), "longest", "total"),
            (
                ("prompt", *_percentiles(contents.prompt_tokens)),
                ("sampled", *_percentiles(contents.supervised_tokens)),
            ),
        ),
        _table(("source", "rows", "share"), _shares(contents.sources)),
        _table(("finish_reason", "rows", "share"), _shares(contents.finish_reasons)),
        f"{contents.thinking:,} of {rows:,} rows were generated with thinking on.",
        "## Model and sampling",
        _table(
            ("what", "value"),
            (
                ("model", model.name),
                ("identity", f"`{model.identity}`"),
                ("revision", model.revision or "none given"),
                ("chat template", f"`{model.template_hash}`"),
                ("tokenizer", f"`{model.tokenizer_hash}`, {model.vocab_size:,} entries"),
                (
                    "engine",
                    ", ".join(f"{name} ({count:,} rows)" for name, count in contents.engines.most_common()),
                ),
                *((name, f"`{json.dumps(value)}`") for name, value in sorted(sampling.items())),
                ("max_tokens", f"`{config['sampling']['max_tokens']}`"),
                ("seed of the run", f"`{config['seed']}`"),
            ),
        ),
        "Each row's `metadata` (a JSON string) holds its own seed, sampling, server, engine and versions.",
        "## From prompts to rows",
        _table(
            READ,
            ([prompts[name] for name in READ],),
        ),
        _table(
            ("source", *READ),
            (
                (source, *(counts[name] for name in READ))
                for source, counts in prompts.get("sources", {}).items()
            ),
        ),
        _table(("note on usable rows", "rows"), prompts.get("notes", {}).items()),
        _table(
            ("turns", "accepted", "rejected"),
            ([validation[name] for name in ("turns", "accepted", "rejected")],),
        ),
        _table(("rejected because", "turns"), validation["reasons"].items()),
        _table(("flag on accepted rows", "rows"), validation["flags"].items()),
        _table(
            ("max_length of the trainer", "sampled tokens lost"),
            validation["loss_beyond"].items(),
        ),
        (
            f"Retokenising `text` gives other ids than were sampled in {validation['retokenisation_differs']:.2%} "
            "of the rows; train on `input_ids` where you can."
        ),
        "## Throughput",
        _throughput(throughput),
        "## Files",
        _files(config["dataset"]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(settings: Mapping[str, Any], contents: Contents) -> str:
    pattern = "data/{}-*.parquet" if settings["rows_per_file"] is not None else "{}.parquet"
    splits = [split for split, count in contents.rows.items() if count]  # `datasets` loads no empty one
    files = "".join(f"\n      - split: {s}\n        path: {pattern.format(s)}" for s in splits or ["train"])
    rows = sum(contents.rows.values())
    sizes = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
    size = next((name for limit, name in sizes if rows < limit), "1M<n<10M")
    return (
        "---\ntask_categories:\n  - text-generation\ntags:\n  - speculative-decoding\n  - draftmill\n"
        f"size_categories:\n  - {size}\nconfigs:\n  - config_name: default\n    data_files:{files}\n---"
    )


def _throughput(facts: Mapping[str, Any]) -> str:
    names = ("output_tokens", "prompt_tokens", "wall_s", "output_tokens_per_s", "output_tokens_per_s_per_gpu",
             "gpu_hours_per_million_output_tokens")  # fmt: skip
    figures = ((name, facts[name]) for name in names if facts.get(name) is not None)
    return _table(
        ("figure", "value"),
        ((name, f"{v:,.2f}" if isinstance(v, float) else f"{v:,}") for name, v in figures),
    )


def _files(settings: Mapping[str, Any]) -> str:
    formats = set(settings["formats"])
    files = [
        ("`train.parquet`", "all columns, for `datasets` and everything that reads parquet"),
        ("`train.jsonl`", "token ids and loss mask, for SpecForge and speculators as it is"),
    ]
    if settings["rows_per_file"] is not None:
        files.append(("`data/`", f"the parquet rows again, {settings['rows_per_file']:,} a file, for upload"))
    known = {
        "messages": "chats as `messages`, for Model-Optimizer and Automodel",
        "conversations": "chats as `conversations`, for SpecForge's own tokenising",
        "text": "the rendered text (SpecForge: `is_preformatted`)",
        "arrow": "a saved dataset with `token_freq.pt`, for speculators",
    }
    files += [(f"`{name}/`", says) for name, says in known.items() if name in formats]
    return _table(("file", "what"), files)


def _percentiles(values: list[int]) -> list[int]:
    if not values:
        return [0] * (len(PERCENTILES) + 2)
    array = np.array(values)
    return [*(int(v) for v in np.percentile(array, PERCENTILES)), int(array.max()), int(array.sum())]


def _shares(counts: Counter[str]) -> Iterable[tuple[str, int, str]]:
    total = max(1, counts.total())
    return ((name, count, f"{count / total:.1%}") for name, count in counts.most_common())


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; nothing at all without rows."""
    body = [[_cell(cell) for cell in row] for row in rows]
    names = list(head)
    if not body:
        return ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *body))


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
