"""When a run stops by itself: too many rejects, or a server that takes no request at all."""

from array import array
from typing import Any

import pytest

from draftmill.answering import ALL_REFUSED, JUDGE_EVERY, _Verdicts
from draftmill.errors import UserError
from draftmill.generation import Row, Walk

POLICY = {"reject_limit": 0.5, "reject_limit_after": 10}


def row(number: int) -> Row:
    ids = array("i", [1, 2])
    return Row(f"r{number}", "file", f"{number:032x}", "[]", None, None, False, 10, ids, 1, 0)


def walk(number: int, outcome: str = "answered", rejected: str | None = None, **facts: Any) -> Walk:
    return Walk([{"id": f"r{number}_gen0", "outcome": outcome, **facts}], None, rejected)


def test_a_run_of_rejects_stops_with_examples() -> None:
    verdicts = _Verdicts(POLICY)
    for number in range(9):
        verdicts.count(row(number), walk(number, rejected="loop"))
    with pytest.raises(UserError, match=r"10 of 10 answers were rejected.*reject_limit.*r0_gen0: loop"):
        verdicts.count(row(9), walk(9, rejected="loop"))
    assert verdicts.reasons == {"loop": 10}


def test_half_of_them_rejected_is_not_too_many() -> None:
    verdicts = _Verdicts(POLICY)
    for number in range(40):
        verdicts.count(row(number), walk(number, rejected="loop" if number % 2 else None))


def test_a_server_that_refuses_everything_stops_the_run_with_its_words() -> None:
    verdicts = _Verdicts({**POLICY, "reject_limit": 1.0})
    refusal = {"outcome": "refused", "rejected": "refused", "detail": "unknown field"}
    for number in range(ALL_REFUSED - 1):
        verdicts.count(row(number), walk(number, **refusal))
    with pytest.raises(UserError, match=r"all refused .unknown field."):
        verdicts.count(row(99), walk(99, **refusal))


def test_all_are_judged_until_the_limit_may_count_and_then_a_share_chosen_by_content() -> None:
    verdicts = _Verdicts({**POLICY, "reject_limit_after": 500})
    numbers = [i * 0x9E3779B9 << 96 & (1 << 128) - 1 for i in range(4500)]
    wanted = [verdicts.wants(row(number)) for number in numbers]
    assert all(wanted[:500]) and abs(sum(wanted[500:]) - 4000 / JUDGE_EVERY) < 100
    assert wanted == [verdicts.wants(row(number)) for number in numbers], "a choice stands"
