"""check-prompts tells before a run what would come of a file."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tests.frozen_model import freeze

from draftmill import check_prompts
from draftmill.errors import UserError

CASES = Path(__file__).parents[1] / "cases"


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    check_prompts.add_arguments(parser)
    try:
        code = check_prompts.run(parser.parse_args(words))
    except UserError as fault:  # main() makes a sentence and this code of it
        if str(fault) != "No prompt is usable: a run with these files would have nothing to ask.":
            raise
        code = 1
    return code, capsys.readouterr().out


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(check(capsys, *words, "--json")[1])
    return told


@pytest.mark.parametrize("path", sorted(CASES.iterdir()), ids=lambda path: path.name)
def test_every_row_of_every_case_is_accounted_for(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    told = checked(capsys, str(path))
    assert told["rows_in"] == told["usable"] + told["duplicates"] + len(told["skipped"])
    assert all(
        row["file"] == str(path) and row["row"] >= 0 and row["reason"] and row["detail"]
        for row in told["skipped"]
    )


def test_the_account_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = check(capsys, str(CASES / "d07*"), str(CASES / "d18*"))
    assert code == 0
    assert told.splitlines() == [
        f"{CASES}/d18_torn_line.jsonl, row 2: line 3: it is cut off: the file ends in the middle of it (invalid_json)",
        "6 rows: 3 usable (3 turns), 2 duplicates, 1 skipped (rows count from 0): invalid_json 1",
    ]


def test_turns_and_notes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    paths = str(CASES / "d02*"), str(CASES / "d03*")
    told = checked(capsys, *paths)
    assert (told["usable"], told["turns"]) == (4, 5)
    notes = {
        "leading_assistant_dropped": 1,
        "users_joined": 1,
        "systems_merged": 1,
        "system_moved_to_front": 1,
    }
    assert told["notes"] == notes
    assert "4 usable (5 turns)" in (text := check(capsys, *paths)[1])
    assert "notes on usable rows: " in text
    assert checked(capsys, *paths, "--turns", "last")["turns"] == 4


def test_control_tokens_spelt_in_a_prompt_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = ["the <|im_end|> tag", "<|im_start|>", "<|im_ end|>", "<| not one"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = str(tmp_path / "x.jsonl"), "--tokenizer", str(freeze(tmp_path / "model"))
    assert checked(capsys, *words)["notes"] == {"control_tokens_in_text": 2}
    assert "notes on usable rows: control_tokens_in_text 2" in check(capsys, *words)[1]


def test_a_long_list_is_cut_for_a_person_and_whole_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": ""}\n' * 50)
    code, told = check(capsys, str(tmp_path / "x.jsonl"))
    assert code == 1
    assert "… and 30 more; --json lists them all" in told
    assert len(checked(capsys, str(tmp_path / "x.jsonl"))["skipped"]) == 50


def test_lengths_with_a_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "four"}\n{"prompt": "sixsix"}\n')
    model = freeze(tmp_path / "model")
    rendered = checked(capsys, str(tmp_path / "x.jsonl"), "--tokenizer", str(model))["prompt_tokens"]
    (model / "model.json").unlink()
    bare = checked(capsys, str(tmp_path / "x.jsonl"), "--tokenizer", str(model))["prompt_tokens"]
    assert bare == {"p5": 4, "p50": 4, "p95": 6, "p99": 6, "max": 6, "sum": 10}
    assert rendered["sum"] > bare["sum"]
    assert "prompt tokens: p5 4" in check(capsys, str(tmp_path / "x.jsonl"), "--tokenizer", str(model))[1]


def test_what_a_hostile_row_says_is_valid_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        b'{"messages": [{"role": "\xff\x1b[2J"}]}\n{"id": "a\\nb", "prompt": "\\ud800"}'
    )
    told = checked(capsys, str(tmp_path / "x.jsonl"))
    assert [row["reason"] for row in told["skipped"]] == ["invalid_json", "lone_surrogate"]


def test_a_missing_file_is_the_users_to_correct(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="No prompt file is found"):
        check(capsys, "none.jsonl")
