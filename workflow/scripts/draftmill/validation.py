"""Verdicts on answers, and the law that every turn is accounted for.

Pure: an answer and the config's ``validation`` block in, findings out. A verdict never changes what was
generated and is never part of a key, so another policy costs no GPU second. Must never know files or servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftmill.answers import Answer
from draftmill.conversations import visible
from draftmill.loops import find_loop
from draftmill.reasoning import State

KEEP, FLAG, REJECT, RETRY_LONGER = "keep", "flag", "reject", "retry_longer"
DUPLICATE = "duplicate_answer"
EARLIER = "earlier_turn_rejected"
UNASKED_REASONS = {"refused": "refused", "poison": "poison", "unasked": EARLIER}  # outcome → reason
READ = ("rows_in", "usable", "duplicates", "contaminated", "skipped")  # what became of the rows read
LENGTHS = (2048, 4096, 8192)  # the max_length values that trainers use

# everything of C0 that no text needs; tab, newline, form feed and carriage return do occur
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Finding:
    """Something noticed about an answer, and what the policy says of it."""

    kind: str
    action: str  # keep | flag | reject | retry_longer
    detail: str


def findings(answer: Answer, policy: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Everything that is noticed about ``answer``, gravest first, also what the policy keeps."""
    return tuple(Finding(kind, _action(kind, policy), detail) for kind, detail in _noticed(answer, policy))


def rejection(found: Iterable[Finding]) -> str | None:
    """The kind of the first finding that rejects the answer; None if it is accepted.

    ``retry_longer`` rejects too: an answer that still calls for it has had its second try.
    """
    return next((finding.kind for finding in found if finding.action in (REJECT, RETRY_LONGER)), None)


def wants_longer(found: Iterable[Finding]) -> bool:
    """Whether the policy asks to generate this answer again with more tokens."""
    return any(finding.action == RETRY_LONGER for finding in found)


def flags(found: Iterable[Finding]) -> list[str]:
    """The kinds that an accepted row carries as flags."""
    return [finding.kind for finding in found if finding.action == FLAG]


def too_many_rejected(rejected: int, judged: int, policy: Mapping[str, Any]) -> bool:
    """Whether a run should stop rather than go on producing rejects."""
    return bool(judged >= policy["reject_limit_after"] and rejected > policy["reject_limit"] * judged)


def _action(kind: str, policy: Mapping[str, Any]) -> str:
    if kind == "reasoning_repaired":  # sound once repaired; the flag says that it was
        return FLAG
    return str(policy["reasoning_broken" if kind == "answer_in_reasoning" else kind])


def _noticed(answer: Answer, policy: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    tokens = len(answer.output_ids)
    state = answer.parts.state
    blank = not visible(answer.content)
    ended = answer.finish_reason == "stop"
    if not ended and answer.finish_reason != "length":
        yield "abort", f"finish_reason is {answer.finish_reason or 'missing'}"
    if state is State.UNFINISHED and not ended:
        yield "reasoning_unfinished", f"{tokens} tokens of reasoning and no end of it"
    if answer.reasoning.strip() and blank and ended:
        yield "answer_in_reasoning", "the model stopped by itself with everything inside the reasoning"
    elif blank and (ended or state is not State.UNFINISHED):
        yield "empty", "nothing that can be seen" if answer.content else "no text"
    if state is State.BROKEN:
        yield "reasoning_broken", "reasoning tags that do not pair up"
    elif answer.parts.repair:
        yield "reasoning_repaired", answer.parts.repair
    loop = find_loop(answer.output_ids, answer.reasoning + "\n" + answer.content, ended)
    if loop:
        yield "loop", loop
    garbage = _garbage(answer)
    if garbage:
        yield "garbage", garbage
    if answer.finish_reason == "length":
        yield "truncated", f"cut at {tokens} tokens"
    if tokens < policy["min_supervised_tokens"]:
        yield "too_few_supervised", f"{tokens} tokens, {policy['min_supervised_tokens']} wanted"
    length = answer.prompt_tokens + tokens
    if length > policy["max_length"]:
        yield "beyond_max_length", f"{length} tokens, max_length is {policy['max_length']}"


def _garbage(answer: Answer) -> str | None:
    text = answer.reasoning + answer.content
    # a cut answer may end inside a character; that is truncation and nothing worse
    whole = text if answer.finish_reason == "stop" else text.rstrip("\ufffd")
    replacements = whole.count("\ufffd")
    if replacements:
        return f"{replacements} replacement characters (bytes that are no text)"
    if answer.control_tokens:
        return f"control tokens inside the text: {' '.join(answer.control_tokens[:3])}"
    control = _CONTROL_CHARACTERS.search(text)
    return f"control character {control.group()!r} in the text" if control else None


def loss_beyond(prompt_tokens: int, output_tokens: int) -> dict[int, int]:
    """Supervised tokens of a row that a trainer with each of LENGTHS as max_length would cut off."""
    return {length: min(output_tokens, max(0, prompt_tokens + output_tokens - length)) for length in LENGTHS}


def accounts_fault(prompts: Mapping[str, Any], accepted: int, rejected: int) -> str | None:
    """What does not add up, as a sentence; None if every row and every turn is accounted for once."""
    parts = READ[1:]
    if prompts["rows_in"] != sum(prompts[part] for part in parts):
        figures = " + ".join(f"{prompts[part]} {part}" for part in parts)
        return f"{prompts['rows_in']} rows were read, but {figures} do not make that many"
    if prompts["turns"] != accepted + rejected:
        return f"{prompts['turns']} turns were to be generated, but {accepted} accepted + {rejected} rejected are not that"
    return None
