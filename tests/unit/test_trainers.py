"""The trainers' own code on our exports: SpecForge and speculators, where they are installed.

They need torch and much else, so no lock holds them: `pip install --no-deps specforge speculators hs-connectors`
beside torch, transformers, datasets, openai, openai-harmony, yunchang, loguru, pydantic-settings and typer.
Code written to what they document runs everywhere, in test_dataset.py. Measured with 0.2.0 and 0.9.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.generated_rows import PROSE, TEMPLATE, Run
from tests.unit.test_dataset import Exported, thinking_run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Rows = list[tuple[list[int], list[int]]]


def tokenizer_of(run: Run) -> Any:
    """The run's tokenizer as the trainers load it."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(run.model / "tokenizer.json"),
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )


def specforge(path: Path, tokenizer: Any = None, **settings: Any) -> Rows:
    """What SpecForge's online training would send: (input_ids, loss_mask) of each row."""
    builder = pytest.importorskip("specforge.data.prompt_builder")
    defaults: dict[str, Any] = {
        "chat_template": "qwen",
        "max_length": 8192,
        "is_preformatted": False,
        "train_only_last_turn": True,
        "cache_dir": None,
        "cache_key": None,
        "num_proc": None,
        "min_loss_tokens": 2,
    }
    tasks = builder.prepare_prompt_tasks(path, tokenizer, **(defaults | settings))
    return [(task["payload"]["input_ids"], task["payload"]["loss_mask"]) for task in tasks]


def merged(out: Exported) -> Rows:
    return [(row["input_ids"], row["loss_mask"]) for row in out.merged]


def supervised(rows: Rows) -> set[tuple[int, ...]]:
    return {tuple(i for i, m in zip(ids, mask, strict=True) if m) for ids, mask in rows}


def plain_run(folder: Path) -> Run:
    """Two turns each, nothing thought, user columns, and the same system prompt that SpecForge's template has."""
    run = Run(folder, {"prompts": {"thinking": True}})
    start = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "And?"},
    ]
    for name in ("a", "b", "c"):
        first = f"{PROSE} Of {name}."
        run.add(name, first, messages=start, thinking=True, carried=json.dumps({"topic": name}))
        history = [*start, {"role": "assistant", "content": first}, {"role": "user", "content": "Then?"}]
        run.add(
            name,
            f"{PROSE} More of {name}.",
            1,
            messages=history,
            thinking=True,
            carried=json.dumps({"topic": name}),
        )
    return run


def test_specforge_takes_the_sampled_tokens_as_they_are(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path))
    assert specforge(out.folder / "train.jsonl") == merged(out)


def test_specforge_tokenises_chats_and_text_to_the_sampled_tokens(tmp_path: Path) -> None:
    out = Exported(plain_run(tmp_path))
    wanted = supervised(merged(out))
    assert len(wanted) == 6
    newline = out.run.tokenizer.encode("\n")[0]  # SpecForge's end of a turn
    for name, preformatted in (("conversations", False), ("text", True)):
        path = out.folder / name / "train.jsonl"
        rows = specforge(path, tokenizer_of(out.run), is_preformatted=preformatted)
        found = {ids[:-1] if ids[-1] == newline else ids for ids in supervised(rows)}
        assert found == wanted, name


def test_speculators_takes_the_sampled_tokens_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = pytest.importorskip("speculators.data_generation.preprocessing")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = Exported(thinking_run(tmp_path))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.parquet").write_bytes((out.folder / "train.parquet").read_bytes())
    for name in (str(out.folder / "train.jsonl"), f"hf:{tmp_path / 'hub'}"):
        raw, _ = preprocessing.load_raw_dataset(name)
        built = preprocessing.build_speculator_training_dataset(
            raw, tokenizer_of(out.run), max_length=8192, num_proc=1, minimum_valid_tokens=32
        )
        rows = [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in built]
        assert rows == merged(out), name


def test_speculators_trains_from_the_saved_dataset(tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data")
    out = Exported(thinking_run(tmp_path))
    dataset = data.ArrowDataset(8192, out.folder / "arrow" / "train", on_missing="skip")
    assert dataset.approx_lengths == [row["seq_len"] for row in out.merged]
    for at, (ids, mask) in enumerate(merged(out)):
        assert data.build_client_item(dataset.data[at]) == {"input_ids": ids}
        assert dataset.data[at]["loss_mask"].tolist() == mask
    frequencies = torch.load(out.folder / "arrow" / "train" / "token_freq.pt", weights_only=True)
    mapping = pytest.importorskip("speculators.train.vocab_mapping")
    mapping.save_token_frequency_distribution(dataset.data, tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert frequencies == {int(token): int(count) for token, count in theirs.items() if count}
