"""A turn's key: everything that decides an answer, and nothing else."""

import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draftmill import config as settings
from draftmill.turns import NUMERICS, numerics, turn_id, turn_key, turn_seed

CONFIG = settings.resolve({"prompts": {"files": ["some.jsonl"]}})
SAMPLING = {**settings.sampling(CONFIG, {}), "adapter": False, "max_tokens": 512, "seed": 7}
IDENTITY = "a" * 32
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def key(**changes: Any) -> str:
    parts = {
        "model_identity": IDENTITY,
        "numerics": numerics(CONFIG["model"]),
        "prompt_ids": [1, 2, 3],
        "sampling": SAMPLING,
    }
    return turn_key(**{**parts, **changes})


def other(value: Any) -> Any:
    """Another value for a setting: of its own type where that is possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "more"]
    if isinstance(value, dict):
        return {**value, "more": 1}
    return f"{value}-other"


def test_a_key_is_32_hex_digits_and_the_same_in_every_process() -> None:
    assert len(key()) == 32 and bytes.fromhex(key())
    # A changed formula makes every finished answer of every user worthless: it must be meant.
    assert turn_key("m", {"dtype": "auto"}, [1, 2], {"seed": 1}) == "d3c06b12534e43080ef677c07e086147"


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_every_sampling_parameter_decides(name: str) -> None:
    assert key(sampling={**SAMPLING, name: other(SAMPLING[name])}) != key()


@pytest.mark.parametrize("name", NUMERICS)
def test_every_numerics_setting_decides(name: str) -> None:
    model = {**CONFIG["model"], name: other(CONFIG["model"][name])}
    assert key(numerics=numerics(model)) != key()


@pytest.mark.parametrize("name", sorted(set(CONFIG["model"]) - set(NUMERICS)))
def test_what_acts_through_identity_or_input_ids_is_not_in_the_key_again(name: str) -> None:
    """Path and revision are the identity's; template and context length act on the ids."""
    model = {**CONFIG["model"], name: other(CONFIG["model"][name])}
    assert key(numerics=numerics(model)) == key()


def test_every_key_of_the_model_block_is_accounted_for() -> None:
    elsewhere = {"path", "revision", "chat_template", "template_date", "context_length", "trust_remote_code"}
    assert set(CONFIG["model"]) == elsewhere | set(NUMERICS)


def test_the_model_decides() -> None:
    assert key(model_identity="b" * 32) != key()


@given(tokens, tokens)
def test_the_input_ids_decide(first: list[int], second: list[int]) -> None:
    assert (key(prompt_ids=first) == key(prompt_ids=second)) == (first == second)


def test_the_order_of_settings_does_not_decide() -> None:
    backwards = dict(reversed(list(SAMPLING.items())))
    model = dict(reversed(list(numerics(CONFIG["model"]).items())))
    assert key(sampling=backwards, numerics=model) == key()


def test_a_key_changes_nothing_it_is_made_of() -> None:
    sampling = copy.deepcopy(SAMPLING)
    ids = [5, 6]
    key(sampling=sampling, prompt_ids=ids)
    assert sampling == SAMPLING and ids == [5, 6]


seeds = st.tuples(
    st.integers(0, 2**63 - 1),
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.integers(0, 50),
    st.integers(0, 50),
)


@given(seeds)
def test_a_seed_is_what_every_engine_takes(parts: tuple[int, str, int, int]) -> None:
    assert 0 <= turn_seed(*parts) < 2**31
    assert turn_seed(*parts) == turn_seed(*parts)


@given(seeds, st.integers(0, 3))
def test_run_seed_conversation_turn_and_sample_all_decide_the_seed(
    parts: tuple[Any, ...], which: int
) -> None:
    changed = list(parts)
    changed[which] = "f" * 32 if which == 1 else changed[which] + 1
    assume(changed != list(parts))
    assert turn_seed(*changed) != turn_seed(*parts)


def test_turn_and_sample_do_not_stand_in_for_each_other() -> None:
    found = {turn_seed(0, "0" * 32, turn, sample) for turn in range(30) for sample in range(30)}
    assert len(found) == 900


def test_ids_are_those_of_the_contract() -> None:
    assert turn_id("p", 0, 2) == "p_gen2" and turn_id("p", 3, 0) == "p_s3_gen0"
