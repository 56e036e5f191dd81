"""The exports: each is read back the way its trainer reads it, and holds what was sampled."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.generated_rows import PROSE, Run
from tests.unit.test_aside import ended_pid

from draftmill.dataset import dataset, in_validation
from draftmill.merging import merge
from draftmill.rows import MERGED

ALL = ["parquet", "jsonl", "messages", "conversations", "text", "arrow"]


class Exported:
    """A merged run and its exports in ``folder``."""

    def __init__(self, run: Run, **settings: Any) -> None:
        run.config["dataset"] |= {"formats": ALL, "rows_per_file": None, "validation_share": 0.0} | settings
        self.run = run
        self.folder = run.folder / "drafter"
        merged, validation = run.folder / "merged.parquet", run.folder / "validation.json"
        prompts, throughput = run.summary(), run.folder / "throughput.json"
        throughput.write_text(
            json.dumps({"output_tokens": 1234, "output_tokens_per_s": 567.8}), encoding="utf-8"
        )
        merge(
            run.shards(), prompts, run.model, run.config, merged, run.folder / "rejected.parquet", validation
        )
        dataset(run.config, merged, validation, prompts, run.model, throughput, self.folder)
        self.merged: list[dict[str, Any]] = pq.read_table(merged).to_pylist()
        self.card = (self.folder / "README.md").read_text(encoding="utf-8")

    def lines(self, name: str) -> list[dict[str, Any]]:
        raw = (self.folder / name).read_bytes()
        return [json.loads(line) for line in raw.decode("utf-8", "strict").splitlines()]


def thinking_run(folder: Path, conversations: int = 6) -> Run:
    """Rows without reasoning first and rows with it later: what column types must not be guessed from."""
    run = Run(folder, {"prompts": {"thinking": 0.5}})
    for at in range(conversations):
        thinks = at >= conversations // 2
        answer = f"{PROSE} Number {at}, with \u2028, \u00e9 and \U0001f30a."
        run.add(
            f"c{at:03d}", f"<think>\nHm, {at}.\n</think>\n\n{answer}" if thinks else answer, thinking=thinks
        )
    return run


def specforge_prompts(path: Path, max_length: int, least: int) -> list[tuple[list[int], list[int]]]:
    """What SpecForge's online training makes of a JSON-lines file, as its prompt builder documents it."""
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    assert {"input_ids", "loss_mask"} <= records[0].keys()  # this selects the path without a tokenizer
    prompts = []
    for record in records:
        ids, mask = record["input_ids"], record["loss_mask"]
        assert all(type(i) is int for i in ids)
        assert set(mask) <= {0, 1}
        assert len(ids) == len(mask) > 0
        ids, mask = ids[:max_length], mask[:max_length]
        consecutive = any(a and b for a, b in pairwise(mask))
        if sum(mask) >= least and consecutive:
            prompts.append((ids, mask))
    return prompts


def specforge_valid(record: dict[str, Any]) -> bool:
    """What SpecForge's validator of regenerated data asks of a row."""
    roles = [message["role"] for message in record["conversations"]]
    start = next(at for at, role in enumerate(roles) if role != "system")
    wanted = ["user", "assistant"] * len(roles)
    return (
        isinstance(record["id"], str)
        and bool(record["id"].strip())
        and record["status"] == "success"
        and roles[start:] == wanted[: len(roles) - start]
        and roles[-1] == "assistant"
        and all(message["content"].strip() for message in record["conversations"])
        and all(isinstance(message["reasoning_content"], str) for message in record["conversations"])
    )


def test_specforge_trains_from_train_jsonl(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path))
    prompts = specforge_prompts(out.folder / "train.jsonl", 8192, 2)
    assert prompts == [(row["input_ids"], row["loss_mask"]) for row in out.merged]
    assert all(specforge_valid(record) for record in out.lines("train.jsonl"))


def test_specforge_tokenises_by_itself_from_conversations(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path))
    records = out.lines("conversations/train.jsonl")
    assert all(specforge_valid(record) for record in records)
    # every other column would go into the chat template as a keyword
    assert {name for record in records for name in record} == {"id", "status", "conversations", "tools"}
    assert all(json.loads(record["tools"]) == [] for record in records)


def test_lines_have_no_nulls_and_one_shape(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path))

    def shape(value: Any) -> Any:
        assert value is not None
        if isinstance(value, dict):
            return {name: shape(inner) for name, inner in value.items()}
        if isinstance(value, list):
            assert value
            return [shape(value[0])]
        return type(value).__name__

    for name in ("train.jsonl", "messages/train.jsonl", "conversations/train.jsonl", "text/train.jsonl"):
        shapes = [shape(record) for record in out.lines(name)]
        if name.startswith(("messages", "conversations")):
            for record in shapes:
                record.pop("tools")
        assert shapes == shapes[:1] * len(out.merged)


def test_parquet_and_lines_hold_the_merged_rows(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path))
    assert pq.read_schema(out.folder / "train.parquet") == MERGED
    assert pq.read_table(out.folder / "train.parquet").to_pylist() == out.merged
    for line, row in zip(out.lines("train.jsonl"), out.merged, strict=True):
        for name in line.keys() - {"conversations"}:
            assert line[name] == row[name]
    for line, row in zip(out.lines("messages/train.jsonl"), out.merged, strict=True):
        last = line["messages"][-1]
        assert last["content"] == row["conversations"][-1]["content"]
        assert last["reasoning_content"] == (row["conversations"][-1]["reasoning_content"] or "")
    assert [line["text"] for line in out.lines("text/train.jsonl")] == [row["text"] for row in out.merged]


def test_tool_calls_reach_the_chat_exports(tmp_path: Path) -> None:
    run = Run(tmp_path)
    call = {"type": "function", "function": {"name": "depth", "arguments": {"where": "weir"}}}
    history = [{"role": "user", "content": "How deep?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
               {"role": "tool", "content": "2 m"}]  # fmt: skip
    run.add(
        "a", PROSE, messages=history, tools=json.dumps([{"type": "function", "function": {"name": "depth"}}])
    )
    (line,) = Exported(run).lines("messages/train.jsonl")
    assert line["messages"][1]["tool_calls"] == [call]
    assert json.loads(line["tools"])[0]["function"]["name"] == "depth"


def test_the_saved_dataset_is_complete(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path), rows_per_file=4)
    folder = out.folder / "arrow" / "train"
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    names = [entry["filename"] for entry in state["_data_files"]]
    assert names == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    rows = [row for name in names for row in pa.ipc.open_stream(str(folder / name)).read_all().to_pylist()]
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in out.merged]
    assert [row["seq_len"] for row in rows] == [len(row["input_ids"]) for row in out.merged]
    with zipfile.ZipFile(folder / "token_freq.pt") as archive:
        frequencies = pickle.loads(archive.read("token_freq/data.pkl"))
    sampled = Counter(
        i for row in out.merged for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m
    )
    assert frequencies == dict(sampled)


def test_speculators_reads_the_saved_dataset(tmp_path: Path) -> None:
    """As its training dataset does: load_from_disk, tensors by index, lengths without them, frequencies."""
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")
    out = Exported(thinking_run(tmp_path))
    folder = out.folder / "arrow" / "train"
    loaded = datasets.load_from_disk(str(folder))
    assert list(loaded.with_format(None)["seq_len"]) == [row["seq_len"] for row in out.merged]
    item = loaded[0]
    assert item["input_ids"].tolist() == out.merged[0]["input_ids"]
    assert item["input_ids"].dtype == torch.long
    assert int(item["loss_mask"].sum()) == out.merged[0]["completion_len"]
    frequencies = torch.load(folder / "token_freq.pt", weights_only=True)
    assert sum(frequencies.values()) == sum(row["completion_len"] for row in out.merged)


def test_hugging_face_datasets_loads_every_export(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    out = Exported(thinking_run(tmp_path, 40), rows_per_file=7, validation_share=0.3)
    cache = str(tmp_path / "cache")
    sizes = {
        split: sum(
            in_validation(row["content_hash"], 0, 0.3) == (split == "validation") for row in out.merged
        )
        for split in ("train", "validation")
    }
    assert min(sizes.values()) > 0

    def load(kind: str, pattern: str) -> Any:
        files = {split: str(out.folder / pattern.format(split)) for split in sizes}
        loaded = datasets.load_dataset(kind, data_files=files, cache_dir=cache)
        assert {split: loaded[split].num_rows for split in sizes} == sizes
        return loaded["train"]

    for pattern in ("{}.parquet", "data/{}-*.parquet"):
        parquet = load("parquet", pattern)
        assert "List(Value('int32')" in str(parquet.features["input_ids"])
        assert "arge" not in str(parquet.features)
        assert len(parquet[0]["input_ids"]) == len(parquet[0]["loss_mask"])
    lines = load("json", "{}.jsonl")  # what speculators does with a .jsonl file
    assert {"input_ids", "loss_mask", "conversations", "primary_id"} <= set(lines.column_names)
    lines.shuffle(seed=0)
    for name in ("messages", "conversations", "text"):
        load("json", name + "/{}-*.jsonl")
    by_card = datasets.load_dataset(str(out.folder), cache_dir=cache)  # the files that the card names
    assert {split: by_card[split].num_rows for split in sizes} == sizes
    for split, size in sizes.items():
        folder = out.folder / "arrow" / split
        state = (folder / "state.json").read_text(encoding="utf-8")
        (folder / "state.json").write_text(
            state.replace('"torch"', "null"), encoding="utf-8"
        )  # need no torch here
        saved = datasets.load_from_disk(str(folder))
        assert saved.num_rows == size
        assert str(saved.features["input_ids"]) == "List(Value('int32'))"
        assert sum(saved[0]["loss_mask"]) > 0


def test_the_split_keeps_conversations_together(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for at in range(12):
        for turn in range(3):
            run.add(f"c{at}", f"{PROSE} {at} and {turn}.", turn)
    out = Exported(run, validation_share=0.4)
    train, aside = (pq.read_table(out.folder / f"{split}.parquet") for split in ("train", "validation"))
    assert train.num_rows + aside.num_rows == len(out.merged)
    assert aside.num_rows > 0
    assert not set(train["primary_id"].to_pylist()) & set(aside["primary_id"].to_pylist())


@given(st.text(min_size=1), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_adds_to_the_split(name: str, seed: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert in_validation(name, seed, small) <= in_validation(name, seed, large)
    assert not in_validation(name, seed, 0)
    assert in_validation(name, seed, 1)


def test_an_empty_validation_split_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = Exported(thinking_run(tmp_path), validation_share=1e-9)
    sentence = "The validation split is empty: by their hashes, none of the 6 conversations falls into it"
    assert sentence in out.card
    assert sentence in caplog.text
    assert pq.read_table(out.folder / "validation.parquet").num_rows == 0
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(str(out.folder), cache_dir=str(tmp_path / "cache"))
    assert {split: rows.num_rows for split, rows in loaded.items()} == {"train": 6}
    assert "split is empty" not in Exported(out.run, validation_share=0.5).card


def test_the_users_columns_are_carried_along(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in "ab":
        run.add(name, f"{PROSE} {name}", carried=json.dumps({"topic": name}))
    out = Exported(run)
    for name in ("train.jsonl", "messages/train.jsonl", "conversations/train.jsonl"):
        assert [json.loads(line["carried"]) for line in out.lines(name)] == [{"topic": "a"}, {"topic": "b"}]


def test_files_of_a_given_size(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path, 10), rows_per_file=4)
    sizes = [pq.read_metadata(path).num_rows for path in sorted((out.folder / "data").iterdir())]
    assert sizes == [4, 4, 2]
    lines = [len(path.read_bytes().splitlines()) for path in sorted((out.folder / "messages").iterdir())]
    assert lines == [4, 4, 2]
    assert pq.read_metadata(out.folder / "train.parquet").num_rows == 10


def test_what_is_not_asked_for_any_more_goes_away_and_foreign_files_stay(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path), rows_per_file=4, validation_share=0.5)
    (out.folder / "notes.txt").write_text("mine", encoding="utf-8")
    Exported(out.run, formats=["parquet", "jsonl"])
    assert {path.name for path in out.folder.iterdir()} == {
        "README.md",
        "train.parquet",
        "train.jsonl",
        "notes.txt",
    }


def test_what_a_killed_export_left_goes_away(tmp_path: Path) -> None:
    run = thinking_run(tmp_path)
    ended = ended_pid()
    for pid in (ended, os.getpid()):
        (run.folder / "drafter" / f".aside-{pid}").mkdir(parents=True)
    for name in ("merged.parquet", "rejected.parquet", "validation.json"):
        (run.folder / f".{name}.{ended}").write_text("half")
    Exported(run)
    assert not [path for path in run.folder.rglob(".*") if path.name.startswith(".")]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    out = Exported(thinking_run(tmp_path))
    files = [path for path in out.folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    Exported(out.run)
    assert {path: path.read_bytes() for path in files} == before


def test_the_card_says_what_a_reader_looks_for(tmp_path: Path) -> None:
    card = Exported(thinking_run(tmp_path), validation_share=0.5).card
    for fact in (
        "made-up",
        "1" * 32,
        "2" * 32,
        "book.jsonl",
        "temperature",
        "none 1.0",
        "stop",
        "567.8",
        "8192",
    ):
        assert fact in card
    assert "path: validation.parquet" in card
    assert "partial" not in card
    assert "| 6 | 6 | 0 |" in card


def test_a_partial_dataset_says_so(tmp_path: Path) -> None:
    run = thinking_run(tmp_path)
    Exported(run)
    run.summary(partial=True, notes={"control_tokens_in_text": 3})
    merged, validation, prompts, throughput = (
        run.folder / name for name in ("merged.parquet", "validation.json", "prompts.json", "throughput.json")
    )
    dataset(run.config, merged, validation, prompts, run.model, throughput, run.folder / "partial")
    card = (run.folder / "partial" / "README.md").read_text(encoding="utf-8")
    assert "partial" in card
    assert "| control_tokens_in_text | 3 |" in card


def test_an_empty_run_exports_empty_files(tmp_path: Path) -> None:
    out = Exported(Run(tmp_path))
    assert pq.read_table(out.folder / "train.parquet").num_rows == 0
    assert (out.folder / "train.jsonl").read_bytes() == b""
