"""Reasoning and answer: every split is a partition, repairs move tags only, and no reasoning becomes an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.generated_rows import make_model

from draftmill.answers import Answer, AnswerReader
from draftmill.reasoning import State, Tags, opened_by_prompt, split, tags_in
from draftmill.tokens import Tokenizer

THINK = Tags("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "opened", "expected", "reasoning", "content", "state", "repaired"),
    [
        ("plain", False, False, "", "plain", State.NONE, False),
        ("plain", False, True, "", "plain", State.NONE, False),
        ("<think>\nwhy\n</think>\n\nso", False, True, "why", "so", State.CLOSED, False),
        ("why\n</think>\n\nso", True, True, "why", "so", State.CLOSED, False),
        ("\n</think>\n\nso", True, True, "", "so", State.CLOSED, False),
        ("<think>\n\n</think>\n\nso", False, False, "", "so", State.CLOSED, False),
        # doubled and orphaned tags that one reading makes sense of
        ("<think>\nwhy</think>so", True, True, "why", "so", State.CLOSED, True),
        ("<think><think>why</think>so", False, True, "why", "so", State.CLOSED, True),
        ("why</think>\n</think>\nso", True, True, "why", "so", State.CLOSED, True),
        ("why</think>so", False, True, "why", "so", State.CLOSED, True),
        ("</think>\n\nso", False, False, "", "so", State.NONE, True),
        # and those that none does
        ("why</think>so", False, False, "", "why</think>so", State.BROKEN, False),
        ("so <think> what", False, True, "", "so <think> what", State.BROKEN, False),
        ("a</think>b</think>c", True, True, "a", "b</think>c", State.BROKEN, False),
        ("a<think>b</think>c", True, True, "a<think>b", "c", State.BROKEN, False),
        ("<think>a</think>b<think>c</think>d", False, True, "a", "b<think>c</think>d", State.BROKEN, False),
        # reasoning that never ended
        ("why, oh why", True, True, "why, oh why", "", State.UNFINISHED, False),
        ("<think>\nwhy", False, True, "why", "", State.UNFINISHED, False),
        ("", True, True, "", "", State.UNFINISHED, False),
    ],
)
def test_a_text_is_taken_apart(
    text: str, opened: bool, expected: bool, reasoning: str, content: str, state: State, repaired: bool
) -> None:
    parts = split(text, THINK, opened, expected)
    assert (parts.reasoning, parts.content, parts.state) == (reasoning, content, state)
    assert (parts.repair is not None) == repaired
    assert parts.text == text


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "\n", " ", "a", "why not", "\n\n", "é"]), max_size=12
)


@given(pieces, st.booleans(), st.booleans())
def test_a_split_is_a_partition_and_unfinished_reasoning_is_no_answer(
    parts: list[str], opened: bool, expected: bool
) -> None:
    text = "".join(parts)
    found = split(text, THINK, opened, expected)
    assert found.text == text
    if found.state is State.UNFINISHED:
        assert found.content == ""
    if found.state in (State.CLOSED, State.NONE):
        assert "<think>" not in found.reasoning + found.content
        assert "</think>" not in found.reasoning + found.content


def test_without_tags_everything_is_content() -> None:
    assert split("<think>a</think>b", None).content == "<think>a</think>b"


def test_tags_come_from_the_template() -> None:
    assert tags_in("… {{ '[THINK]' }} … [/THINK]") == Tags("[THINK]", "[/THINK]")
    assert tags_in("{{ message.content }}") is None
    assert opened_by_prompt("<|im_start|>assistant\n<think>\n", THINK)
    assert not opened_by_prompt("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not opened_by_prompt("user: what is <think>?\nassistant:", THINK)


class Reading:
    """Answers read from text through the real tokenizer path."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(make_model(folder))
        self.stop = self.tokenizer.encode("<|im_end|>")
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self.reader = AnswerReader(self.tokenizer, self.stop, template)

    def read(
        self, output: list[int], prompt: str = "hi", finish_reason: str = "stop", **more: object
    ) -> Answer:
        return self.reader.read(self.tokenizer.encode(prompt), output, finish_reason, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Reading:
    return Reading(tmp_path_factory.mktemp("model"))


def test_the_stop_token_is_no_content(reading: Reading) -> None:
    answer = reading.read(reading.tokenizer.encode("the end") + reading.stop)
    assert (answer.content, answer.stop) == ("the end", "<|im_end|>")
    cut = reading.read(reading.tokenizer.encode("the end"), finish_reason="length")
    assert (cut.content, cut.stop) == ("the end", "")


def test_a_stop_string_and_a_stop_token_of_the_user(reading: Reading) -> None:
    answer = reading.read(reading.tokenizer.encode("one\n\nEND."), sampling={"stop": ["END"]})
    assert (answer.content, answer.stop) == ("one\n\n", "END.")
    (bang,) = reading.tokenizer.encode("!")
    answer = reading.read(reading.tokenizer.encode("one!"), sampling={"stop_token_ids": [bang]})
    assert (answer.content, answer.stop) == ("one", "!")


def test_a_tag_that_is_spelt_out_is_text(reading: Reading) -> None:
    """The tag has a token of its own; the same letters from other tokens are what the model says about it."""
    spelt = [i for letter in "<think>" for i in reading.tokenizer.encode(letter)]
    tag = reading.tokenizer.encode("<think>")
    close = reading.tokenizer.encode("</think>")
    assert len(spelt) == 7
    assert len(tag) == 1
    said = reading.tokenizer.encode("The tag ") + spelt + reading.tokenizer.encode(" opens it.")
    answer = reading.read(said + reading.stop)
    assert answer.parts.state is State.NONE
    assert answer.content == "The tag <think> opens it."
    thought = reading.read(tag + said + close + reading.tokenizer.encode("So.") + reading.stop)
    assert thought.parts.state is State.CLOSED
    assert (thought.reasoning, thought.content) == ("The tag <think> opens it.", "So.")


def test_control_tokens_inside_are_seen_sampled_or_spelt(reading: Reading) -> None:
    start = reading.tokenizer.encode("<|im_start|>")
    answer = reading.read(
        reading.tokenizer.encode("a") + start + reading.tokenizer.encode("b") + reading.stop
    )
    assert answer.control_tokens == ("<|im_start|>",)
    spelt = [i for letter in "<|im_start|>" for i in reading.tokenizer.encode(letter)]
    assert reading.read(spelt + reading.stop).control_tokens == ("<|im_start|>",)
    assert reading.read(reading.tokenizer.encode("fine") + reading.stop).control_tokens == ()


@given(
    st.lists(st.integers(0, 264), max_size=40), st.sampled_from(["stop", "length", "abort"]), st.booleans()
)
def test_any_ids_come_apart_without_loss(
    reading: Reading, output: list[int], finish_reason: str, thinking: bool
) -> None:
    answer = reading.read(output, finish_reason=finish_reason, thinking=thinking)
    assert answer.parts.text + answer.stop == answer.text
    assert answer.prompt_text + answer.text == reading.tokenizer.decode(
        reading.tokenizer.encode("hi") + output
    )
