"""The target model's tokenizer, as it was frozen into results/model/.

Knows text and token ids. Never adds a special token by itself: whatever stands in the rendered
chat template is all there is, so that the ids sent are exactly the ids recorded.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from draftmill.errors import UserError


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face fast tokenizer read from ``tokenizer.json``."""

    backend: tokenizers.Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads ``folder/tokenizer.json``; a missing or broken one is a UserError."""
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            # either would change the ids of what is sent
            backend.no_truncation()
            backend.no_padding()
            return cls(backend)
        except Exception as fault:  # the library raises plain Exception for every kind of fault
            raise UserError(
                f"The tokenizer {path} cannot be read ({fault}); the model folder needs a tokenizer.json."
            ) from fault

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised, none are added."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_again(self, text: str, pieces: dict[bytes, array[int]]) -> array[int]:
        """``encode``, where much of ``text`` was encoded before: control tokens and what stands between them are taken
        from ``pieces`` (ids by the text's digest), which is filled with what is new."""
        marks = [mark for mark in self._marks if mark in text]
        if not marks:
            return array("i", self.encode(text))
        ids = array("i")
        for piece in re.split(f"({'|'.join(map(re.escape, marks))})", text):
            digest = hashlib.blake2b(piece.encode(), digest_size=16).digest()
            if digest not in pieces:
                pieces[digest] = array("i", self.encode(piece))
            ids += pieces[digest]
        return ids

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        """Control tokens at which the library itself divides a text before anything else, longest first, as it looks for
        them; none where what stands between two of them is not encoded as it would be alone."""
        added = self.backend.get_added_tokens_decoder().values()
        exact = [token for token in added if not token.normalized and token.content]
        if any(token.lstrip or token.rstrip or token.single_word for token in exact):
            return ()
        # An added token that reaches into a control token from its left, or around it, would be found first.
        ends = {token.content[at:] for token in exact for at in range(1, len(token.content))}
        free = {
            token.content
            for token in exact
            if token.special and not any(token.content[:n] in ends for n in range(1, len(token.content)))
        }
        others = [token.content for token in exact if token.content not in free]
        marks = [mark for mark in free if not any(mark in other for other in others)]
        probe = [piece for text in ("Ab c\n", " Ab c", "Ab c") for piece in (text, *marks[:1])]
        if self.encode("".join(probe)) != [i for piece in probe for i in self.encode(piece)]:
            return ()
        return tuple(sorted(marks, key=len, reverse=True))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As ``encode`` for many texts, on all cores that TOKENIZERS_PARALLELISM allows."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special (control) tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(int(i) for i, token in added.items() if token.special)

    def spells_special(self, text: str) -> bool:
        """Whether ``text`` holds the spelling of a special token, which ``encode`` makes into that token."""
        starts, spellings = self._special_spellings
        return any(start in text for start in starts) and any(spelling in text for spelling in spellings)

    @cached_property
    def _special_spellings(self) -> tuple[frozenset[str], tuple[str, ...]]:
        added = self.backend.get_added_tokens_decoder().values()
        spellings = tuple(token.content for token in added if token.special and token.content)
        # Their first characters rule most texts out.
        return frozenset(spelling[0] for spelling in spellings), spellings

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))
