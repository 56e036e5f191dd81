"""A generated answer as everything that judges or stores it sees it: ids, text, reasoning, content, stop.

Knows the tokenizer and the model's stop tokens. The completion is a partition, to the last character:
opening + reasoning + closing + content + stop. Must never know policies, files or servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from draftmill.reasoning import KNOWN_TAGS, Mark, Split, Tags, marks_in, opened_by_prompt, split, tags_in
from draftmill.tokens import Tokenizer


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer of the target model.

    ``output_ids`` are the sampled ids, stop token included; ``text`` is their decoded form;
    ``prompt_text`` that of the prompt; ``control_tokens`` the spellings of control tokens inside the answer.
    """

    prompt_tokens: int
    output_ids: npt.NDArray[np.int32]
    finish_reason: str
    prompt_text: str
    text: str
    parts: Split
    stop: str = ""
    control_tokens: tuple[str, ...] = field(default=())

    @property
    def content(self) -> str:
        return self.parts.content

    @property
    def reasoning(self) -> str:
        return self.parts.reasoning

    def message(self) -> dict[str, str]:
        """The answer as an assistant message."""
        message = {"role": "assistant", "content": self.content}
        return message | {"reasoning_content": self.reasoning} if self.reasoning else message


class AnswerReader:
    """Turns sampled ids into an Answer. ``template`` is the chat template's source."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], template: str) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self.tags = tags_in(template) or _tags_of_vocabulary(tokenizer)
        self._tag_ids: dict[bool, int] = {}
        if self.tags is not None:
            opening, closing = tokenizer.encode(self.tags.opening), tokenizer.encode(self.tags.closing)
            if len(opening) == len(closing) == 1:
                self._tag_ids = {True: opening[0], False: closing[0]}
        control = sorted(frozenset(tokenizer.special_ids) - frozenset(self._tag_ids.values()))
        # one place more than ids, for the ids beyond the vocabulary that padded models can sample
        self._is_control = np.zeros(max([tokenizer.vocab_size, *control]) + 2, dtype=bool)
        self._is_control[control] = True
        self._control_texts = tuple(text for i in control if len(text := tokenizer.decode([i])) > 2)

    def read(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        finish_reason: str,
        thinking: bool = False,
        sampling: Mapping[str, Any] | None = None,
        tools: bool = False,
    ) -> Answer:
        """The Answer in ``output_ids`` to ``prompt_ids``.

        ``thinking``: reasoning was asked for. ``sampling``: what was sent; its ``stop`` and ``stop_token_ids``
        count as stops. ``tools``: control tokens may be the model's way to call a tool, and are not noise.
        """
        prompt, output = list(prompt_ids), list(output_ids)
        prompt_text = self._tokenizer.decode(prompt)
        whole = self._tokenizer.decode(prompt + output)
        # the suffix of the whole, because some decoders treat the first token of a text in a way of their own
        text = whole[len(prompt_text) :] if whole.startswith(prompt_text) else self._tokenizer.decode(output)
        asked = sampling or {}
        stop_ids = self._eos | frozenset(asked.get("stop_token_ids") or ())
        by_token = finish_reason == "stop" and bool(output) and output[-1] in stop_ids
        stop = self._stop(text, output, by_token, asked, finish_reason)
        body = text[: len(text) - len(stop)]
        inner = output[:-1] if by_token else output
        parts = split(
            body, self.tags, opened_by_prompt(prompt_text, self.tags), thinking, self._marks(body, inner)
        )
        ids = np.asarray(output, dtype=np.int32)
        return Answer(
            prompt_tokens=len(prompt),
            output_ids=ids,
            finish_reason=finish_reason,
            prompt_text=prompt_text,
            text=text,
            parts=parts,
            stop=stop,
            control_tokens=() if tools else self._controls(ids[: len(inner)], parts),
        )

    def _stop(
        self, text: str, output: list[int], by_token: bool, asked: Mapping[str, Any], finish_reason: str
    ) -> str:
        if by_token:
            stop = self._tokenizer.decode(output[-1:])
            return stop if text.endswith(stop) else ""
        if finish_reason != "stop":
            return ""
        wanted = asked.get("stop") or ()
        places = [
            at for word in ([wanted] if isinstance(wanted, str) else wanted) if (at := text.find(word)) >= 0
        ]
        return text[min(places) :] if places else ""

    def _marks(self, body: str, ids: list[int]) -> tuple[Mark, ...] | None:
        """The tags in ``body`` that the model meant as tags: where a tag is a token of its own, one that is
        merely spelt out ("the <think> tag opens …") is text."""
        spelt = marks_in(body, self.tags)
        if not self._tag_ids or not spelt:
            return spelt
        wanted = {i: opens for opens, i in self._tag_ids.items()}
        places = [at for at, token in enumerate(ids) if token in wanted]
        if len(places) == len(spelt):
            return spelt
        offsets = [len(self._tokenizer.decode(ids[:at])) for at in places]
        known = {(mark.offset, mark.opens) for mark in spelt}
        marks = tuple(Mark(offset, wanted[ids[at]]) for offset, at in zip(offsets, places, strict=True))
        return marks if all((mark.offset, mark.opens) in known for mark in marks) else spelt

    def _controls(self, ids: npt.NDArray[np.int32], parts: Split) -> tuple[str, ...]:
        known = np.minimum(ids, self._is_control.size - 1)
        found = [self._tokenizer.decode([int(i)]) for i in np.unique(ids[self._is_control[known]])]
        inside = parts.reasoning + parts.content
        return tuple(found + [text for text in self._control_texts if text in inside and text not in found])


def _tags_of_vocabulary(tokenizer: Tokenizer) -> Tags | None:
    """Tags that are single tokens of the vocabulary, for templates that never mention them."""
    return next(
        (t for t in KNOWN_TAGS if len(tokenizer.encode(t.opening)) == 1 == len(tokenizer.encode(t.closing))),
        None,
    )
