"""Verdicts: what each check finds, what it leaves alone, and that the accounts add up or say why not."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill import config as settings
from draftmill.answers import Answer
from draftmill.loops import find_loop
from draftmill.reasoning import Tags, split
from draftmill.validation import (
    accounts_fault,
    findings,
    flags,
    loss_beyond,
    rejection,
    too_many_rejected,
    wants_longer,
)

POLICY: dict[str, Any] = settings.resolve({})["validation"]
WORDS = [
    "river",
    "mill",
    "water",
    "wheel",
    "parish",
    "weir",
    "spring",
    "stone",
    "bridge",
    "barge",
    "oak",
    "heron",
    "ledger",
    "miller",
    "flour",
    "sack",
    "cart",
]


def prose(words: int, seed: int = 0) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) + dice.choice(["", "", ",", ".", " and"]) for _ in range(words))


def ids_of(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A token for each word or sign, as good as any tokenizer for what is tested here."""
    return np.array(
        [zlib.crc32(word.encode()) % 50_000 for word in text.replace("\n", " \n ").split(" ")], dtype=np.int32
    )


def answer(text: str, finish_reason: str = "stop", opened: bool = False, **more: Any) -> Answer:
    facts: dict[str, Any] = {
        "prompt_tokens": 20,
        "output_ids": ids_of(text),
        "finish_reason": finish_reason,
        "prompt_text": "",
        "text": text,
        "parts": split(text, Tags("<think>", "</think>"), opened, True),
    }
    return Answer(**(facts | more))


def kinds(given: Answer, **policy: Any) -> list[str]:
    return [finding.kind for finding in findings(given, POLICY | policy)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (answer(prose(60)), []),
        (answer(prose(60), "length"), ["truncated"]),
        (answer(prose(60), "abort"), ["abort"]),
        (answer(prose(60), ""), ["abort"]),
        (answer(" \n "), ["empty", "too_few_supervised"]),
        (answer("\u200b\ufe0f\u2800"), ["empty", "too_few_supervised"]),
        (answer("<think>"), ["empty", "too_few_supervised"]),
        (answer("", opened=True), ["empty", "too_few_supervised"]),
        (answer("Yes."), ["too_few_supervised"]),
        (answer(prose(60), "length", opened=True), ["reasoning_unfinished", "truncated"]),
        (answer(prose(60), opened=True), ["answer_in_reasoning"]),
        (answer(prose(60) + "</think>\n\n", opened=True), ["answer_in_reasoning"]),
        (answer("a</think>" + prose(60) + "</think>", opened=True), ["reasoning_broken"]),
        (answer("<think>" + prose(60) + "</think>so", opened=True), ["reasoning_repaired"]),
        (answer(prose(60) + "\ufffd", "length"), ["truncated"]),
        (answer(prose(30) + "\ufffd" + prose(30), "length"), ["garbage", "truncated"]),
        (answer(prose(60) + "\ufffd"), ["garbage"]),
        (answer(prose(60) + "\x07"), ["garbage"]),
        (answer(prose(60), control_tokens=("<|im_start|>",)), ["garbage"]),
        (answer(prose(60), prompt_tokens=9000), ["beyond_max_length"]),
    ],
)
def test_what_is_found(given: Answer, expected: list[str]) -> None:
    assert kinds(given) == expected


def test_the_policy_decides_what_comes_of_a_finding() -> None:
    cut = answer(prose(60), "length")
    for action, reason, flagged, again in (
        ("keep", None, [], False),
        ("flag", None, ["truncated"], False),
        ("reject", "truncated", [], False),
        ("retry_longer", "truncated", [], True),
    ):
        found = findings(cut, POLICY | {"truncated": action})
        assert (rejection(found), flags(found), wants_longer(found)) == (reason, flagged, again)


def test_the_gravest_finding_names_the_rejection() -> None:
    found = findings(answer(prose(60), "length", opened=True), POLICY | {"truncated": "reject"})
    assert rejection(found) == "reasoning_unfinished"


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (prose(40) + " I am what I am." * 40, False),  # a sentence round and round, late in the answer
        (prose(20, 1) + (" " + prose(70, 2)) * 6, True),  # a paragraph
        (prose(300, 3) + "\n" + "na " * 150 + prose(300, 4), True),  # in the middle, and out of it again
        ("!" * 60, True),
        (prose(30) + "=" * 500, False),
        ("\n".join(f"{n}. More water for the mill" for n in range(1, 60)), False),
        (", ".join(str(n) for n in range(1, 200)), False),
        ("\n".join(f"{n}. Item {n}: the weir" for n in range(1, 400)), True),
        ("\n".join("a" + " and so on" * n for n in range(40)), False),
        ("\n".join(f"{n}. {WORDS[n % 8]} at the weir" for n in range(80)), True),
    ],
)
def test_loops_are_found(text: str, ended: bool) -> None:
    assert find_loop(ids_of(text), text, ended) is not None


@pytest.mark.parametrize(
    "text",
    [
        prose(2000),
        "\n".join(f"{n}. {prose(9, n)}" for n in range(40)),
        ", ".join(str(n) for n in range(1, 101)),  # asked for and ended
        "| stone | flour |\n| --- | --- |\n" + "\n".join(f"| {n} | {n * 7} |" for n in range(40)),
        "-" * 80 + "\n" + prose(100) + "\n" + "-" * 80,
        "\n".join(f"    total_{n} = total_{n - 1} + price[{n}]  # {prose(3, n)}" for n in range(30)),
        "\n".join("*" * n for n in range(1, 12)),
        "",
    ],
)
def test_honest_texts_are_no_loops(text: str) -> None:
    assert find_loop(ids_of(text), text, True) is None


@given(st.integers(2, 300), st.integers(0, 9))
def test_any_block_that_comes_round_often_enough_is_a_loop(period: int, seed: int) -> None:
    block = np.random.default_rng(seed).integers(0, 50_000, period).astype(np.int32)
    rounds = max(4, -(-160 // period)) + 1
    assert find_loop(np.tile(block, rounds), "", True) is not None


@given(st.integers(0, 250), st.integers(150, 260), st.sampled_from("=x\u20ac\U0001f30a"))
def test_one_character_is_found_wherever_it_stands(before: int, count: int, character: str) -> None:
    text = "ab" * before + character * count + "c"
    assert (find_loop(ids_of(""), text, True) is not None) == (count >= 200)


@given(st.lists(st.integers(0, 3), max_size=300), st.text(max_size=400), st.booleans())
def test_the_search_for_loops_takes_anything(ids: list[int], text: str, ended: bool) -> None:
    find_loop(np.array(ids, dtype=np.int32), text, ended)


def test_tokens_lost_to_a_shorter_trainer() -> None:
    assert loss_beyond(100, 3000) == {2048: 1052, 4096: 0, 8192: 0}
    assert loss_beyond(9000, 50) == {2048: 50, 4096: 50, 8192: 50}


def test_a_run_of_rejects_is_stopped() -> None:
    limits = {"reject_limit": 0.5, "reject_limit_after": 100}
    assert not too_many_rejected(99, 99, limits)
    assert too_many_rejected(51, 100, limits)
    assert not too_many_rejected(50, 100, limits)


def test_accounts() -> None:
    prompts = {"rows_in": 10, "usable": 6, "duplicates": 2, "contaminated": 1, "skipped": 1, "turns": 12}
    assert accounts_fault(prompts, 10, 2) is None
    assert "12 turns" in str(accounts_fault(prompts, 10, 1))
    assert "10 rows" in str(accounts_fault(prompts | {"skipped": 0}, 10, 2))
