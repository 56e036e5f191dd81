"""Prompt files become shards: every row accounted for, nothing decided by a row's position."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frozen_model import THINKING, freeze

from draftmill import sharding
from draftmill.errors import UserError
from draftmill.model import SPARE_TOKENS
from draftmill.sharding import SHARD_SCHEMA, SKIPPED_SCHEMA, shard_of, shard_prompts, summarise, unique_ids

CASES = Path(__file__).parents[1] / "cases"
PROMPTS: dict[str, Any] = {
    "limit": None,
    "carry": [],
    "system_prompt": None,
    "turns": "all",
    "samples": 1,
    "thinking": None,
    "context_policy": "skip",
    "min_max_tokens": 16,
    "decontaminate": {"benchmarks": [], "files": [], "ngram": 13, "threshold": 0.5},
}


class Result:
    def __init__(self, folder: Path) -> None:
        self.summary: dict[str, Any] = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
        self.skipped: list[dict[str, Any]] = pq.read_table(folder / "skipped.parquet").to_pylist()
        files = sorted((folder / "shards").glob("*.parquet"))
        self.shards: list[list[dict[str, Any]]] = [pq.read_table(path).to_pylist() for path in files]
        self.rows: dict[str, dict[str, Any]] = {
            row["primary_id"]: row for shard in self.shards for row in shard
        }

    def turns(self, name: str) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = json.loads(self.rows[name]["turns"])
        return found


Shard = Callable[..., Result]


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    """Shards files (rows as objects, or paths) with some of the prompts' settings, two shards unless told."""

    def run(
        *files: Any,
        shards: int = 2,
        template: str | None = None,
        context: int = 1024,
        max_tokens: int = 64,
        **keys: Any,
    ) -> Result:
        model = freeze(tmp_path / "model", context, **({"template": template} if template else {}))
        paths: list[Any] = []
        for number, rows in enumerate(files):
            if isinstance(rows, list):
                path = tmp_path / f"{number}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                paths.append(str(path))
            else:
                paths.append(rows)
        config = {
            "seed": keys.pop("seed", 0),
            "prompts": PROMPTS | keys | {"files": paths},
            "sampling": {"max_tokens": max_tokens},
        }
        out = tmp_path / "results"
        shard_prompts(
            config,
            model,
            [out / "shards" / f"{i + 1}-of-{shards}.parquet" for i in range(shards)],
            out / "skipped.parquet",
            out / "prompts.json",
        )
        return Result(out)

    return run


def asks(*texts: str) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "prompt": text} for n, text in enumerate(texts)]


def many(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "prompt": f"question {n}"} for n in range(start, start + count)]


# --- what stands in the files


def test_a_shard_row_says_all_that_generate_needs(shard: Shard) -> None:
    row = {
        "id": 7,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "so?"},
        ],
        "tools": [{"name": "clock"}],
        "stars": float("nan"),
        "note": "é\ud83d",
    }
    result = shard([row], carry=["stars", "note", "none"], shards=1, samples=3)
    (found,) = result.shards[0]
    assert found.keys() == set(SHARD_SCHEMA.names)
    assert found["primary_id"] == "7" and found["row"] == 0 and found["source"].endswith("0.jsonl")
    assert json.loads(found["turns"]) == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "so?"}],
    ]
    assert json.loads(found["tools"]) == [{"type": "function", "function": {"name": "clock"}}]
    assert json.loads(found["carried"]) == {"stars": None, "note": "é?"}
    assert found["thinking"] is False and found["max_tokens"] == 64
    assert len(found["prompt_ids"]) == len("user\nhi\nassistant\n") + 3  # three special tokens
    assert result.summary["turns"] == 2 * 3


def test_types_are_plain(shard: Shard, tmp_path: Path) -> None:
    shard(asks("a"))
    for path in (tmp_path / "results" / "shards").iterdir():
        assert pq.read_schema(path).equals(SHARD_SCHEMA)
    assert pq.read_schema(tmp_path / "results" / "skipped.parquet").equals(SKIPPED_SCHEMA)


def test_conversations_go_where_their_content_says_sorted_by_id(shard: Shard) -> None:
    result = shard(many(50), shards=3)
    for number, rows in enumerate(result.shards):
        assert rows and all(shard_of(row["content_hash"], 3) == number for row in rows)
        assert [row["primary_id"] for row in rows] == sorted(row["primary_id"] for row in rows)


def test_the_account_names_each_source(shard: Shard) -> None:
    result = shard(asks("a", "", "a"), [{"prompt": "a"}, {"prompt": "b"}, {"x": 1}])
    assert {name.rpartition("/")[2]: counts for name, counts in result.summary["sources"].items()} == {
        "0.jsonl": {"rows_in": 3, "usable": 1, "duplicates": 1, "contaminated": 0, "skipped": 1},
        "1.jsonl": {"rows_in": 3, "usable": 1, "duplicates": 1, "contaminated": 0, "skipped": 1},
    }
    assert [(s["source"][-7:], s["row"], s["id"], s["reason"]) for s in result.skipped] == [
        ("0.jsonl", 1, "r1", "empty"),
        ("0.jsonl", 2, "r2", "duplicate"),
        ("1.jsonl", 0, None, "duplicate"),
        ("1.jsonl", 2, None, "no_prompt"),
    ]
    assert "row 0 of" in result.skipped[1]["detail"]


# --- the cases


EXPECTED = {
    "d01_last_turn_assistant.jsonl": (1, 1, 0),
    "d02_sharegpt_starts_with_gpt.jsonl": (4, 2, 0),
    "d03_system_position.jsonl": (4, 2, 0),
    "d05_thinking.jsonl": (3, 3, 0),
    "d06_duplicate_ids.jsonl": (5, 5, 0),
    "d07_exact_duplicates.jsonl": (3, 1, 2),
    "d08_empty_prompts.jsonl": (7, 1, 0),
    "d09_bom.jsonl": (2, 2, 0),
    "d11_lone_surrogate.jsonl": (3, 2, 0),
    "d12_unicode_line_separators.jsonl": (3, 3, 0),
    "d14_crlf_blank_trailing.jsonl": (2, 2, 0),
    "d16_huge_int.jsonl": (3, 3, 0),
    "d18_torn_line.jsonl": (3, 2, 0),
    "d20_late_key.jsonl": (151, 151, 0),
    "d22_mixed_formats.jsonl": (6, 6, 0),
    "d24_prompt_newlines.csv": (3, 3, 0),
}


def test_control_tokens_spelt_in_a_prompt_become_them_and_are_counted(shard: Shard) -> None:
    found = shard(asks("what is <|im_end|>?", "and <|im_ end|>?"))
    assert found.summary["notes"] == {"control_tokens_in_text": 1}
    assert [found.rows[name]["prompt_ids"].count(257) for name in ("r0", "r1")] == [2, 1]


def test_every_case_has_its_line() -> None:
    assert {path.name for path in CASES.iterdir()} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_cases(shard: Shard, name: str) -> None:
    result = shard(str(CASES / name))
    counts = result.summary
    assert (counts["rows_in"], counts["usable"], counts["duplicates"]) == EXPECTED[name]
    assert counts["rows_in"] == counts["usable"] + counts["duplicates"] + counts["skipped"]
    assert len(result.rows) == counts["usable"]
    assert len(result.skipped) == counts["rows_in"] - counts["usable"]
    everything = json.dumps([row["turns"] for row in result.rows.values()])
    assert "OLD ANSWER" not in everything and "old reasoning" not in everything


def test_cases_in_detail(shard: Shard) -> None:
    result = shard(str(CASES / "*"), shards=1)
    assert [len(turn) for turn in result.turns("a1")] == [1, 1]
    assert result.turns("s1") == [[{"role": "user", "content": "Sort 3,1,2."}]]
    assert result.turns("s3") == [[{"role": "user", "content": "part one\n\npart two"}]]
    assert result.turns("m1")[0][0] == {"role": "system", "content": "Answer in French."}
    assert result.turns("m2")[0][0] == {"role": "system", "content": "Be brief.\n\nUse metric units."}
    assert "<think>" in result.turns("k2")[0][0]["content"]
    assert result.turns("n2")[0][0]["content"] == "gamma\x85delta"
    assert {"14933243513335727983", "340282366920938463463374607431768211456"} <= result.rows.keys()
    assert len([name for name in result.rows if name.startswith("7~")]) == 4  # d20 has one too
    assert result.turns("150")[0][0] == {"role": "system", "content": "Only this row has a system prompt."}
    details = {(row["source"].rpartition("/")[2][:3], row["row"]): row["detail"] for row in result.skipped}
    assert '"narrator"' in details["d02", 3]
    assert "line 3" in details["d18", 2]
    assert result.summary["notes"]["leading_assistant_dropped"] == 1


# --- nothing depends on the order of rows


def test_reordered_and_grown_files_give_the_same_rows(shard: Shard) -> None:
    rows = [*many(40), {"id": "q1", "prompt": "another with the same id"}, {"prompt": "none"}]
    wanted = ["content_hash", "thinking", "max_tokens", "prompt_ids", "turns"]

    def facts(result: Result) -> dict[str, list[Any]]:
        return {name: [row[key] for key in wanted] for name, row in result.rows.items()}

    keys: dict[str, Any] = {
        "template": THINKING,
        "thinking": 0.5,
        "system_prompt": [{"text": "one", "share": 0.3}, {"text": "two", "share": 0.3}],
    }
    first = facts(shard(rows, **keys))
    shuffled = random.Random(1).sample(rows, len(rows))
    assert facts(shard(shuffled, **keys)) == first
    grown = facts(shard(many(5, 100) + shuffled, shards=5, **keys))
    assert {name: grown[name] for name in first} == first
    assert len({one[4].partition("question")[0] for one in first.values()}) > 2  # both prompts, and none


def test_shares_are_decided_by_hash(shard: Shard, tmp_path: Path) -> None:
    rows = many(200)
    result = shard(rows, template=THINKING, thinking=0.25)
    assert 25 < sum(row["thinking"] for row in result.rows.values()) < 80
    path = tmp_path / "half.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    small = shard({"path": str(path), "share": 0.2, "name": "part"})
    large = shard({"path": str(path), "share": 0.6, "name": "part"})
    assert small.rows.keys() < large.rows.keys()
    assert small.summary["rows_in"] == small.summary["usable"] + 1
    assert small.summary["usable"] + small.summary["notes"]["left_out_by_share"] == 200
    assert shard({"path": str(path), "share": 0.2}, seed=1).rows.keys() != small.rows.keys()


def test_a_limit_counts_left_out_rows_up_to_it(shard: Shard, tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in many(900)))
    result = shard({"path": str(path), "share": 0.5, "name": "part"}, limit=100)
    last = max(row["row"] for row in result.rows.values())
    assert result.summary["notes"]["left_out_by_share"] == last + 1 - 100


def test_thinking_follows_the_template_where_nothing_is_asked(shard: Shard) -> None:
    on, off = shard(asks("a"), template=THINKING), shard(asks("a"), template=THINKING, thinking=False)
    assert on.rows["r0"]["thinking"] and not off.rows["r0"]["thinking"]
    assert len(off.rows["r0"]["prompt_ids"]) == len(on.rows["r0"]["prompt_ids"]) + len("<think></think>")
    with pytest.raises(UserError, match="no thinking mode"):
        shard(asks("a"), thinking=0.5)


def test_ids_are_unique_and_come_from_no_position() -> None:
    wanted = [
        ("a", "1" * 32),
        ("a", "2" * 32),
        (None, "3" * 32),
        ("b", "4" * 32),
        ("b_s1", "5" * 32),
        ("a~11111111", "6" * 32),
    ]
    names = unique_ids(wanted)
    assert names == [
        "a~11111111~" + "1" * 32,
        "a~22222222",
        "3" * 16,
        "b",
        "b_s1~55555555",
        "a~11111111~" + "6" * 32,
    ]
    assert unique_ids(wanted[::-1]) == names[::-1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a_s1", "a~0", None]), st.integers(0, 2**128 - 1)),
        unique_by=lambda p: p[1],
    )
)
def test_ids_are_always_unique(wanted: list[tuple[str | None, int]]) -> None:
    names = unique_ids([(name, f"{number:032x}") for name, number in wanted])
    assert len(set(names)) == len(wanted)


# --- policies


def test_a_prompt_that_does_not_fit_is_skipped_or_gets_fewer_tokens(shard: Shard) -> None:
    rows = asks("a" * 10, "b" * 80, "c" * 120, "d" * 1_000_000)  # and 19 tokens of the template
    skip = shard(rows, context=150, max_tokens=64)
    assert skip.rows.keys() == {"r0"}
    shorten = shard(rows, context=150, max_tokens=64, context_policy="shorten")
    assert {name: row["max_tokens"] for name, row in shorten.rows.items()} == {
        "r0": 64,
        "r1": 150 - len(shorten.rows["r1"]["prompt_ids"]) - SPARE_TOKENS,
    }
    assert shorten.summary["notes"]["max_tokens_shortened"] == 1
    assert {row["reason"] for row in shorten.skipped} == {"too_long"}
    assert "bytes cannot fit into the context" in shorten.skipped[1]["detail"]


def test_turns_first_and_last(shard: Shard) -> None:
    chat = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "A"), ("user", "b"))]
    assert shard([{"id": "x", "messages": chat}], turns="first").turns("x") == [chat[:1]]
    assert shard([{"id": "x", "messages": chat}], turns="last").turns("x") == [chat]


def test_a_system_prompt_for_those_without(shard: Shard) -> None:
    result = shard(
        [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "a", "system": "own"}], system_prompt="ours"
    )
    assert result.turns("x")[0][0]["content"] == "ours"
    assert result.turns("y")[0][0]["content"] == "own"


def test_what_the_template_refuses_is_skipped_with_its_words(shard: Shard) -> None:
    call = {"function": {"name": "clock", "arguments": {}}}
    chat = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "12"},
    ]
    result = shard([{"messages": chat}, {"prompt": "a"}])
    assert [(row["reason"], "tools are missing" in row["detail"]) for row in result.skipped] == [
        ("template_refused", True)
    ]


def test_contaminated_prompts_are_dropped_and_listed(shard: Shard, tmp_path: Path) -> None:
    question = " ".join(f"word{n}" for n in range(30))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": question}))
    settings = {
        "benchmarks": [],
        "files": [{"path": str(tmp_path / "bench.jsonl"), "name": "bench"}],
        "ngram": 13,
        "threshold": 0.5,
    }
    result = shard(asks("Answer: " + question, "clean"), decontaminate=settings)
    assert result.rows.keys() == {"r1"}
    assert result.summary["contaminated"] == 1
    assert result.summary["decontaminated_against"] == {"bench": 1}
    assert (
        result.skipped[0]["reason"] == "contaminated" and "100% of bench row 0" in result.skipped[0]["detail"]
    )


def test_the_limit_counts_usable_conversations(shard: Shard) -> None:
    result = shard([{"prompt": ""}, *many(20), {"prompt": ""}], limit=5)
    assert (result.summary["rows_in"], result.summary["usable"], result.summary["skipped"]) == (6, 5, 1)


# --- faults of the user and of the machine


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([[{"prompt": ""}, {"prompt": ""}]], "None of the 2 rows .* is usable; the first, row 0 .* empty"),
        ([[]], "There is no row to use"),
        (["/nowhere/none.jsonl"], "No prompt file is found"),
    ],
)
def test_an_empty_prompt_set_is_one_sentence(shard: Shard, files: list[Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        shard(*files)


def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharding._Spool, "_table", full)
    with pytest.raises(UserError, match="no space left"):
        shard(asks("a"))
    assert not [
        path
        for path in (tmp_path / "results").rglob("*")
        if path.is_file() and path.name != "skipped.parquet"
    ]


def test_shards_of_another_count_are_removed_and_nothing_else(shard: Shard, tmp_path: Path) -> None:
    shard(many(9), shards=3)
    (tmp_path / "results" / "shards" / "notes-of-may.txt").write_text("x")
    shard(many(9), shards=2)
    assert sorted(path.name for path in (tmp_path / "results" / "shards").iterdir()) == [
        "1-of-2.parquet",
        "2-of-2.parquet",
        "notes-of-may.txt",
    ]


def test_the_same_input_gives_the_same_bytes(shard: Shard, tmp_path: Path) -> None:
    def content() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (tmp_path / "results").rglob("*") if p.is_file()}

    shard(many(30))
    first = content()
    shard(many(30))
    assert content() == first


def test_workers_give_what_one_process_gives(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*many(700), {"prompt": ""}, *asks("a" * 2000)]
    alone = shard(rows)
    monkeypatch.setattr(sharding, "WORTH_A_POOL_BYTES", 0)
    monkeypatch.setattr(sharding, "CHUNK_ROWS", 50)
    together = shard(rows)
    assert (together.rows, together.skipped, together.summary) == (alone.rows, alone.skipped, alone.summary)
    assert shard(rows, limit=60).summary["usable"] == 60


STUCK = """
import os, sys, time
from pathlib import Path
from draftmill import sharding
class Slow:
    def prepare(self, candidates):
        print(os.getpid(), flush=True)
        time.sleep(600)
with sharding._pool(Slow()) as prepare:
    waiting = [prepare([]) for _ in range(2)]
    [one.result() for one in waiting]
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux")
def test_workers_die_with_their_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(sharding.__file__).parents[1])},
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker outlived its parent")


def test_percentiles_are_by_nearest_rank() -> None:
    assert summarise(range(1, 101)) == {"p5": 5, "p50": 50, "p95": 95, "p99": 99, "max": 100, "sum": 5050}
    assert summarise([]) == {"p5": 0, "p50": 0, "p95": 0, "p99": 0, "max": 0, "sum": 0}


# --- the law


LINE = st.one_of(
    st.builds(lambda n: json.dumps({"id": n % 3, "prompt": f"p{n}"}), st.integers(0, 20)),
    st.builds(lambda text: json.dumps({"prompt": text}), st.text(max_size=6)),
    st.sampled_from(
        ['{"messages": []}', "torn", '{"prompt": 1}', '{"id": "p0"}', '{"prompt": "x", "images": [1]}']
    ),
)


@settings(max_examples=60)
@given(lines=st.lists(LINE, max_size=30))
def test_rows_in_is_usable_duplicates_contaminated_and_skipped(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "law"
    model = freeze(folder / "model")
    (folder / "in.jsonl").write_text("\n".join([*lines, '{"prompt": "one is always usable"}']))
    config = {
        "seed": 0,
        "prompts": PROMPTS | {"files": [str(folder / "in.jsonl")]},
        "sampling": {"max_tokens": 8},
    }
    shards = [folder / "shards" / f"{i}-of-2.parquet" for i in (1, 2)]
    shard_prompts(config, model, shards, folder / "skipped.parquet", folder / "prompts.json")
    result = Result(folder)
    counts = result.summary
    assert (
        counts["rows_in"]
        == len(lines) + 1
        == sum(counts[w] for w in ("usable", "duplicates", "contaminated", "skipped"))
    )
    places = [row["row"] for row in result.rows.values()] + [row["row"] for row in result.skipped]
    assert sorted(places) == list(range(len(lines) + 1))
    assert len(result.rows) == sum(map(len, result.shards)) == counts["usable"]
