"""The merge: every turn exactly once, every accepted row right to the token, or a refusal that names the row."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.generated_rows import PROSE, Run

from draftmill import merging
from draftmill.errors import UserError
from draftmill.judging import JUDGED, Judge
from draftmill.merging import Batch, merge, settle
from draftmill.rows import GENERATED, MERGED, REJECTED


class Merged:
    """What a merge wrote."""

    def __init__(self, run: Run, shards: int = 3, **counts: int) -> None:
        self.paths = {
            name: run.folder / name for name in ("merged.parquet", "rejected.parquet", "validation.json")
        }
        merge(run.shards(shards), run.summary(**counts), run.model, run.config, *self.paths.values())
        self.rows: list[dict[str, Any]] = pq.read_table(self.paths["merged.parquet"]).to_pylist()
        self.rejected: list[dict[str, Any]] = pq.read_table(self.paths["rejected.parquet"]).to_pylist()
        self.report: dict[str, Any] = json.loads(self.paths["validation.json"].read_text(encoding="utf-8"))

    def bytes(self) -> list[bytes]:
        return [path.read_bytes() for path in self.paths.values()]


def mixed_run(folder: Path) -> Run:
    """Something of everything: good rows, each kind of loss, chains of more than ten turns."""
    run = Run(folder)
    for at in range(7):
        run.add(f"good{at}", f"{PROSE} It was told to number {at}. {PROSE[: 40 + at]}")
    for turn in range(13):
        text = "Too short." if turn == 2 else f"{PROSE} Part {turn} of the long one."
        run.add("long", text, turn, outcome="answered")
    for turn in range(12):
        run.add("whole", f"{PROSE} Part {turn} of the whole one.", turn)
    run.add("loop", "I am. " * 100, finish_reason="length")
    run.add("loop", "", 1, outcome="unasked")
    run.add("ill", "", outcome="refused")
    run.add("bad", "", outcome="poison")
    run.add("cut", f"{PROSE} and", finish_reason="length")
    run.add("twin", run.rows[0]["primary_id"] + PROSE)
    run.add("twin2", run.rows[0]["primary_id"] + PROSE)
    run.add("samples", f"{PROSE} The other sample.", id="samples_s1_gen0", sample=1)
    return run


def test_every_turn_is_accepted_or_rejected_once(tmp_path: Path) -> None:
    run = mixed_run(tmp_path)
    out = Merged(run, duplicates=3, rows_in=len({row["primary_id"] for row in run.rows}) + 3)
    ids = [row["id"] for row in out.rows]
    rejected_ids = [row["id"] for row in out.rejected]
    assert ids == sorted(ids)
    assert rejected_ids == sorted(rejected_ids)
    assert sorted(ids + rejected_ids) == sorted(row["id"] for row in run.rows)
    reasons = Counter(row["reason"] for row in out.rejected)
    assert reasons == {
        "earlier_turn_rejected": 10
        + 1,  # turns 3 to 12 of "long", also those that sort before turn 2; "loop" 1
        "too_few_supervised": 1,
        "loop": 1,
        "refused": 1,
        "poison": 1,
    }
    assert {row["id"] for row in out.rejected if row["primary_id"] == "long"} == {
        f"long_gen{t}" for t in range(2, 13)
    }
    assert out.report["reasons"] == dict(reasons)
    assert out.report["accepted"] == len(ids)
    assert out.report["rejected"] == len(rejected_ids)
    assert out.report["turns"] == len(run.rows)
    assert out.report["flags"] == {"duplicate_answer": 1, "truncated": 1}
    by_shard = out.report["by_shard"]
    assert list(by_shard) == ["1-of-3", "2-of-3", "3-of-3"]
    for figure in ("turns", "accepted", "rejected"):
        assert sum(shard[figure] for shard in by_shard.values()) == out.report[figure]


def test_tables_have_plain_types_and_the_rows_keep_what_was_sampled(tmp_path: Path) -> None:
    run = mixed_run(tmp_path)
    out = Merged(run)
    assert pq.read_schema(out.paths["merged.parquet"]) == MERGED
    assert pq.read_schema(out.paths["rejected.parquet"]) == REJECTED
    assert "large" not in str(MERGED) + str(REJECTED)
    generated = {row["id"]: row for row in run.rows}
    for row in out.rows:
        source = generated[row["id"]]
        prompt, output = source["prompt_ids"], source["output_ids"]
        assert row["input_ids"] == prompt + output
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(output)
        assert row["text"] == run.tokenizer.decode(prompt + output)
        assert (row["prompt_len"], row["completion_len"]) == (len(prompt), len(output))
        assert row["seq_len"] == len(row["input_ids"])
        assert row["status"] == "success"
        assert row["truncated"] == (row["finish_reason"] == "length")
        assert json.loads(row["metadata"])["sampling"]["temperature"] == 0.7
    for row in out.rejected:
        assert row["output_ids"] == generated[row["id"]]["output_ids"]
        assert row["text"] == run.tokenizer.decode(row["output_ids"])


def test_the_result_depends_neither_on_the_shards_nor_on_the_day(tmp_path: Path) -> None:
    run = mixed_run(tmp_path)
    first = Merged(run, 1)
    again = Merged(run, 1).bytes()
    assert first.bytes() == again
    many = Merged(run, 11)
    assert (many.rows, many.rejected) == (first.rows, first.rejected)


def test_duplicates_follow_the_policy(tmp_path: Path) -> None:
    for policy, accepted, flagged in (("keep", 2, 0), ("flag", 2, 1), ("reject", 1, 0)):
        run = Run(tmp_path / policy, {"validation": {"duplicate_answer": policy}})
        run.add("a", PROSE)
        run.add("b", PROSE)
        out = Merged(run)
        assert (out.report["accepted"], out.report["flags"].get("duplicate_answer", 0)) == (accepted, flagged)
        assert (
            sum(shard["findings"].get("duplicate_answer", 0) for shard in out.report["by_shard"].values())
            == 1
        )


def test_reasoning_is_kept_apart_and_history_has_none(tmp_path: Path) -> None:
    run = Run(tmp_path, {"prompts": {"thinking": True}})
    run.add("t", f"<think>\nLet me see.\n</think>\n\n{PROSE}", thinking=True)
    history = [
        {"role": "user", "content": "first?"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": "second?"},
    ]
    run.add("t", f"<think>\nAgain.\n</think>\n\nOnce more: {PROSE}", 1, thinking=True, messages=history)
    run.add("u", f"<think>\n{PROSE}", finish_reason="length", thinking=True)
    out = Merged(run)
    assert [row["conversations"][-1]["reasoning_content"] for row in out.rows] == ["Let me see.", "Again."]
    assert all(m["reasoning_content"] is None for row in out.rows for m in row["conversations"][:-1])
    assert [row["reason"] for row in out.rejected] == ["reasoning_unfinished"]


def test_tool_calls_survive(tmp_path: Path) -> None:
    run = Run(tmp_path)
    call = {"type": "function", "function": {"name": "depth", "arguments": {"where": "weir"}}}
    history = [
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2 m", "tool_call_id": "1"},
    ]
    run.add(
        "a", PROSE, messages=history, tools=json.dumps([{"type": "function", "function": {"name": "depth"}}])
    )
    (row,) = Merged(run).rows
    assert json.loads(row["messages"])[1]["tool_calls"] == [call]
    assert json.loads(row["messages"])[-1] == {"role": "assistant", "content": PROSE}
    assert json.loads(row["tools"])[0]["function"]["name"] == "depth"


def test_where_retokenising_differs_is_measured(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add("same", PROSE)
    run.add(
        "other",
        PROSE,
        output_ids=[i for letter in f"{PROSE}!" for i in run.tokenizer.encode(letter)] + run.stop,
    )
    report = Merged(run).report
    assert (report["retokenisation_differs"], report["retokenised_rows"]) == (0.5, 2)


def test_tokens_beyond_max_length_are_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    text = " ".join(random.Random(1).choices(PROSE.split(), k=500))
    row = run.add("long", text)
    size = len(row["prompt_ids"]) + len(row["output_ids"])
    assert size > 2048
    assert Merged(run).report["loss_beyond"] == {"2048": size - 2048, "4096": 0, "8192": 0}


def refusal(run: Run, **counts: int) -> str:
    """The sentence of a merge that refuses; nothing may have been written."""
    with pytest.raises(UserError) as caught:
        Merged(run, **counts)
    left = {path.name for path in run.folder.iterdir()}
    assert left == {"model", "generated", "prompts.json"}
    return str(caught.value)


def test_refusals_name_the_row(tmp_path: Path) -> None:
    def one(name: str) -> Run:
        run = Run(tmp_path / name)
        run.add("fine", PROSE)
        return run

    run = one("prompt")
    run.add("wrong", PROSE + "!")["prompt_ids"][3] += 1
    assert "wrong_gen0" in refusal(run)
    assert "rendered prefix" in refusal(run)

    run = one("twice")
    run.add("two", PROSE + "!")
    run.add("two", PROSE + "?")
    assert "two_gen0" in refusal(run)
    assert "twice" in refusal(run)

    run = one("gap")
    run.add("gap", PROSE + "!", 0)
    run.add("gap", PROSE + "?", 11)
    assert "gap_gen11" in refusal(run)
    assert "turn 1 before it is missing" in refusal(run)

    run = one("outcome")
    run.add("odd", "", outcome="lost")
    assert "odd_gen0" in refusal(run)


def test_accounts_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "turns")
    run.add("fine", PROSE)
    assert "2 turns were to be generated" in refusal(run, turns=2)
    run = Run(tmp_path / "rows")
    run.add("fine", PROSE)
    assert "9 rows were read" in refusal(run, rows_in=9)


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add("a", PROSE)
    paths = run.shards(2)
    unsorted = pa.Table.from_pylist([run.rows[0] | {"id": i} for i in ("b_gen0", "a_gen0")], schema=GENERATED)

    def refused(shards: list[Path]) -> str:
        with pytest.raises(UserError) as caught:
            merge(
                shards, run.summary(), run.model, run.config, *(tmp_path / name for name in ("m", "r", "v"))
            )
        return str(caught.value)

    assert "3-of-2" in refused([*paths, tmp_path / "generated" / "3-of-2.parquet"])
    paths[1].write_bytes(b"PAR1 and no more")
    assert "2-of-2" in refused(paths)
    pq.write_table(unsorted, paths[1])
    assert "not sorted" in refused(paths)


def test_workers_judge_as_the_merge_itself_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mixed_run(tmp_path)
    alone = Merged(run)
    monkeypatch.setattr(merging, "SMALL_RUN", 0)
    monkeypatch.setattr(merging, "BATCH_ROWS", 4)
    with_workers = Merged(run)
    assert (with_workers.rows, with_workers.rejected, with_workers.report) == (
        alone.rows,
        alone.rejected,
        alone.report,
    )


def test_a_worker_that_dies_is_an_error_and_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mixed_run(tmp_path)
    (run.model / "tokenizer.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(merging, "SMALL_RUN", 0)
    monkeypatch.setattr(merging, "BATCH_ROWS", 4)
    with pytest.raises(UserError, match="worker of the merge ended"):
        Merged(run)


def test_an_empty_shard_and_an_empty_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    out = Merged(run, 2)
    assert (out.rows, out.rejected, out.report["turns"]) == ([], [], 0)


# --- settling, as a law


def judged(rows: list[tuple[str, int, bool]], digests: list[bytes | None] | None = None) -> Batch:
    """A batch of (conversation, turn, rejected by itself), and the digest of each answer."""
    columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in JUDGED.names}
    columns["id"] = [f"{name}_gen{turn}" for name, turn, _ in rows]
    columns["turn_index"] = [turn for _, turn, _ in rows]
    columns["reason"] = ["loop" if bad else None for *_, bad in rows]
    columns["digest"] = digests or columns["digest"]
    table = pa.table(
        {name: pa.array(columns[name], JUDGED.field(name).type) for name in JUDGED.names}, schema=JUDGED
    )
    return Batch.of(table, [0] * len(rows))


@given(
    st.dictionaries(
        st.text("ab_gen01", max_size=7),
        st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=14),
        max_size=8,
    ),
    st.integers(1, 9),
)
def test_turns_after_a_rejected_one_are_rejected_and_nothing_else(
    conversations: dict[str, list[bool]], batch_size: int
) -> None:
    rows = sorted(
        ((name, turn, bad) for name, turns in conversations.items() for turn, bad in enumerate(turns)),
        key=lambda row: f"{row[0]}_gen{row[1]}",
    )
    ids = [f"{name}_gen{turn}" for name, turn, _ in rows]
    if len(set(ids)) < len(ids):
        return
    batches = [judged(rows[at : at + batch_size]) for at in range(0, len(rows), batch_size)]
    settled = [
        (row_id, reason, fault)
        for batch in settle(iter(batches), "flag")
        for row_id, reason, fault in zip(batch.ids, batch.reasons, batch.faults, strict=True)
    ]
    assert [row_id for row_id, *_ in settled] == ids
    for (_, reason, fault), (name, turn, bad) in zip(settled, rows, strict=True):
        earlier = any(conversations[name][:turn])
        assert fault is None
        assert reason == ("earlier_turn_rejected" if earlier else "loop" if bad else None)


def test_an_answer_behind_a_rejected_turn_makes_no_duplicate() -> None:
    rows = [("a", 0, False), ("b", 0, False), ("b", 1, False), ("c", 0, False), ("d", 0, False)]
    batch = judged(rows, [b"S", b"S", b"X", b"X", b"X"])
    (settled,) = settle(iter([batch]), "reject")
    assert settled.reasons == [None, "duplicate_answer", "earlier_turn_rejected", None, "duplicate_answer"]


def test_judging_takes_an_empty_table(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert Judge(run.model, run.config).judge(GENERATED.empty_table()).schema == JUDGED
