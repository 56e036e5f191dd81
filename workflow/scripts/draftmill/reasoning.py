"""Where a model's thinking ends and its answer begins.

Knows the tags that models put around their reasoning, and text. Every split is a partition: opening +
reasoning + closing + content is the generated text to the last character, so a repair only ever moves
a stray tag into a delimiter and never loses or invents text. Must never know tokenizers, policies or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Tags:
    """The pair of markers around a model's reasoning."""

    opening: str
    closing: str


KNOWN_TAGS = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<thinking>", "</thinking>"),
)


class State(StrEnum):
    """How the reasoning of one answer came out."""

    NONE = "none"  # no reasoning
    CLOSED = "closed"  # reasoning, then an answer
    UNFINISHED = "unfinished"  # the reasoning never ended: nothing of it is an answer
    BROKEN = "broken"  # tags that no reading makes sense of


@dataclass(frozen=True)
class Mark:
    """One tag in a text: where it starts, and which of the two it is."""

    offset: int
    opens: bool


@dataclass(frozen=True)
class Split:
    """A generated text taken apart; ``opening + reasoning + closing + content`` is that text."""

    opening: str
    reasoning: str
    closing: str
    content: str
    state: State
    repair: str | None = None  # what had to be put right, in words

    @property
    def text(self) -> str:
        return self.opening + self.reasoning + self.closing + self.content


def tags_in(template: str) -> Tags | None:
    """The reasoning tags that a chat template writes or looks for; None for a model that has none."""
    return next((tags for tags in KNOWN_TAGS if tags.closing in template), None)


def opened_by_prompt(prompt: str, tags: Tags | None) -> bool:
    """Whether the rendered prompt ends inside an open reasoning block, so that the model starts thinking."""
    return tags is not None and prompt.rstrip().endswith(tags.opening)


def marks_in(text: str, tags: Tags | None) -> tuple[Mark, ...]:
    """Every tag in ``text`` in order, found by its spelling."""
    if tags is None:
        return ()
    found = []
    for tag, opens in ((tags.opening, True), (tags.closing, False)):
        at = text.find(tag)
        while at >= 0:
            found.append(Mark(at, opens))
            at = text.find(tag, at + len(tag))
    return tuple(sorted(found, key=lambda mark: mark.offset))


def split(
    text: str,
    tags: Tags | None,
    opened: bool = False,
    expected: bool = False,
    marks: Sequence[Mark] | None = None,
) -> Split:
    """Takes a generated text apart.

    ``opened``: the prompt already opened the reasoning. ``expected``: thinking was asked for, so a closing
    tag without an opening one ends reasoning rather than being noise. ``marks``: the tags that are tags,
    where the caller knows it from the token ids; else every spelling of one counts.
    """
    if tags is None:
        return Split("", "", "", text, State.NONE)
    left = list(marks_in(text, tags) if marks is None else marks)
    start, openings = 0, 0
    while left and left[0].opens and not text[start : left[0].offset].strip():
        start = left.pop(0).offset + len(tags.opening)
        openings += 1
    repair = "opening tag doubled" if openings > (0 if opened else 1) else None
    if not opened and not openings:
        if not left:
            return Split("", "", "", text, State.NONE)
        if left[0].opens:
            return Split("", "", "", text, State.BROKEN)
        if text[: left[0].offset].strip() and not expected:
            return Split("", "", "", text, State.BROKEN)
        repair = "closing tag without an opening one"
    start = _past_newlines(text, start)
    if not any(not mark.opens for mark in left):
        return Split(text[:start], text[start:], "", "", State.UNFINISHED, repair)
    nested = left[0].opens
    while left[0].opens:
        left.pop(0)
    close = left[0].offset
    end = close
    closings = 0
    while left and not left[0].opens and not text[end : left[0].offset].strip():
        end = left.pop(0).offset + len(tags.closing)
        closings += 1
    if closings > 1:
        repair = repair or "closing tag doubled"
    reasoning = text[start:close].rstrip("\n")
    if not reasoning.strip():
        reasoning = ""
    end = _past_newlines(text, end)
    thought = opened or openings > 0 or bool(reasoning)
    state = State.BROKEN if nested or left else State.CLOSED if thought else State.NONE
    return Split(text[:start], reasoning, text[start + len(reasoning) : end], text[end:], state, repair)


def _past_newlines(text: str, at: int) -> int:
    while at < len(text) and text[at] == "\n":
        at += 1
    return at
