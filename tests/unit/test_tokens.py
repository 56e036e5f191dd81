"""What is put together from pieces encoded before is what encoding the whole text gives."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from draftmill.tokens import Tokenizer as Ours

TEXTS = ["Ab c, the cat sat on the mat", "as Ab c did before it", "x <tool> y", "\n\n  and so on", "É 中文 ß"]
EXACT = {"normalized": False, "special": True}
KINDS = {
    # normaliser, pre-tokeniser, how the control tokens are added, whether a text is divided at them (None: not here)
    "byte level": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), EXACT, True),
    "byte level, a blank in front": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), EXACT, True),
    "NFC": (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), EXACT, True),
    "a mark before every word": (None, pre_tokenizers.Metaspace(prepend_scheme="always"), EXACT, True),
    "a mark before the first word": (None, pre_tokenizers.Metaspace(prepend_scheme="first"), EXACT, False),
    "others overlap": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), EXACT, None),
    "strips": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), {**EXACT, "rstrip": True}, False),
    "normalised": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), {"normalized": True}, None),
}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<think>"]
OVERLAPPING = ["t<|im_", "<think>\n", "end|>Ab"]  # with control tokens, and no such themselves


def tokenizer(kind: str) -> Ours:
    normaliser, divider, how, _ = KINDS[kind]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if normaliser is not None:
        backend.normalizer = normaliser
    backend.pre_tokenizer = divider
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS * 5, trainer)
    backend.add_tokens([AddedToken(text, **how) for text in CONTROL])
    if kind == "others overlap":
        backend.add_tokens([AddedToken(text, normalized=False) for text in OVERLAPPING])
    return Ours(backend)


TOKENIZERS = {kind: tokenizer(kind) for kind in KINDS}
texts = st.lists(
    st.sampled_from([*TEXTS, *CONTROL, *CONTROL, *OVERLAPPING, " ", "\n", "<|im_", "end|>", "é"]), max_size=12
)


@pytest.mark.parametrize("kind", KINDS)
@given(turns=st.lists(texts, min_size=1, max_size=3))
def test_from_pieces_as_from_the_whole(kind: str, turns: list[list[str]]) -> None:
    ours, so_far = TOKENIZERS[kind], ""
    pieces: dict[bytes, array[int]] = {}
    for turn in turns:
        so_far += "".join(turn)
        assert list(ours.encode_again(so_far, pieces)) == ours.encode(so_far)


@pytest.mark.parametrize("kind", [kind for kind, (*_, divided) in KINDS.items() if divided is not None])
def test_what_was_encoded_before_is_not_encoded_again(kind: str) -> None:
    ours = TOKENIZERS[kind]
    pieces: dict[bytes, array[int]] = {}
    ours.encode_again("<|im_start|>Ab c<|im_end|>the cat", pieces)
    assert bool(pieces) == KINDS[kind][3]
    before = dict(pieces)
    ours.encode_again("<|im_start|>Ab c<|im_end|>the cat<|im_end|>Ab c", pieces)
    assert pieces == before
