"""The simulated batch and the dispatch policies over it."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "faults"))
sys.path.insert(0, str(TESTS / "bench"))

from simulation import OldestFirst, Span, compare, full_rate, judge, make_turns, simulate  # noqa: E402
from standin_server import Batch, Lengths, Pace, Work  # noqa: E402


def test_one_request_takes_its_prefill_and_one_step_a_token() -> None:
    pace = Pace(slots=4)
    batch, work = Batch(pace), Work(prompt_tokens=200, output_tokens=11)
    batch.submit(work)
    finished = batch.advance(1e6)
    assert finished == [work]
    assert batch.slot_s == pytest.approx(pace.prefill_s(200) + 10 * pace.step_s(1))
    assert batch.decoded_tokens == pytest.approx(11)


def test_the_pace_is_that_of_the_recordings() -> None:
    """Decode rates of the recorded logs without prefill in between: 43, 73 and 223 running requests."""
    for running, tokens_per_s in ((43, 2268), (73, 3094), (223, 6223)):
        assert running / Pace().step_s(running) == pytest.approx(tokens_per_s, rel=0.09)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 300)), min_size=1, max_size=30),
    looks=st.lists(st.floats(0.001, 5.0), max_size=20),
    slots=st.integers(1, 8),
)
def test_looking_at_a_batch_changes_nothing(
    sizes: list[tuple[int, int]], looks: list[float], slots: int
) -> None:
    """The same requests finish at the same times, however often somebody reads the metrics."""

    def run(stops: list[float]) -> list[tuple[int, float]]:
        batch = Batch(Pace(slots))
        works = [Work(*size) for size in sizes]
        for work in works:
            batch.submit(work)
        out: list[tuple[int, float]] = []
        pending = sorted(stops)
        while (due := batch.due()) < math.inf:
            until = min(due, pending[0]) if pending else due
            if pending and until == pending[0]:
                pending.pop(0)
            out += [(works.index(work), batch.now) for work in batch.advance(until)]
        return out

    quiet, watched = run([]), run(looks)
    assert sorted(i for i, _ in quiet) == list(range(len(sizes)))
    times = dict(watched)
    assert all(times[i] == pytest.approx(when, rel=1e-6, abs=1e-6) for i, when in quiet)


def test_an_aborted_request_frees_its_slot() -> None:
    batch = Batch(Pace(slots=1))
    first, second = Work(10, 1000), Work(10, 5)
    batch.submit(first)
    batch.submit(second)
    batch.advance(1.0)
    batch.abort(first)
    assert batch.advance(10.0) == [second]


def test_lengths_have_the_asked_median_and_mean() -> None:
    lengths, sampler = Lengths(), Lengths().sampler()
    from statistics import NormalDist, fmean

    drawn = [sampler(NormalDist().inv_cdf((i + 0.5) / 4000)) for i in range(4000)]
    assert sorted(drawn)[2000] == pytest.approx(lengths.median, rel=0.01)
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.01)
    assert max(drawn) == lengths.cap


def test_judging_spans_by_hand() -> None:
    """One server, two slots, four turns of 10 s that fill it: the drain is the last pair."""
    spans = [Span(0, 0, 0, 10, 100), Span(0, 0, 0, 10, 100), Span(0, 0, 10, 20, 100), Span(0, 0, 10, 20, 100)]
    outcome = judge(spans, slots=[2], rates=[20.0])
    assert (outcome.makespan_s, outcome.bound_s, outcome.utilisation) == (20, 20, 1.0)
    assert (outcome.drain_s, outcome.idle_server_s, outcome.longest_turn_s) == (0.0, 0.0, 20)


FLEET = [Pace(slots=8)] * 4


def test_oldest_first_keeps_the_fleet_full_with_shards_of_five_capacities() -> None:
    results = compare(FLEET, turns=4 * 8 * 40, shards=32)
    ours = results["draftmill"]
    assert ours.utilisation > 0.99
    assert ours.makespan_s < 1.03 * ours.bound_s + ours.drain_s
    assert ours.drain_s < 1.1 * ours.longest_turn_s
    assert all(ours.makespan_s < results[other].makespan_s for other in ("pinned", "round_robin"))


def test_a_slow_server_does_not_hold_up_the_others() -> None:
    results = compare([*FLEET[1:], Pace(slots=8, speed=0.25)], turns=4 * 8 * 40, shards=4)
    assert results["draftmill"].utilisation > 0.98
    assert results["round_robin"].utilisation < 0.6


def test_many_shards_on_unequal_servers_want_two_leases_a_server() -> None:
    """With one a server, every open shard in the end waits for its last turns on the slow one."""
    fleet = [*FLEET[1:], Pace(slots=8, speed=0.25)]
    one, two = (
        compare(fleet, turns=4 * 8 * 40, shards=32, leases=leases)["draftmill"].utilisation
        for leases in (4, 8)
    )
    assert one < 0.9 and two > 0.98


def test_a_dead_server_loses_and_doubles_no_turn() -> None:
    work = make_turns(600, shards=4, seed=3, lengths=Lengths(90, 150, 410), chain=3)
    sizes = Counter(t.output_tokens for shard in work for first in shard for t in first.chain())
    spans = simulate(OldestFirst(work, leases=4), FLEET, turns=600, death=(1, 20.0, 60.0))
    assert Counter(span.output_tokens for span in spans) == sizes
    assert not [s for s in spans if s.server == 1 and 20.0 < s.ended < 80.0]


def test_too_small_shards_are_visible() -> None:
    """Shards of one capacity drain together: the simulation must show what the warning warns of."""
    assert compare(FLEET, turns=4 * 8 * 20, shards=80)["draftmill"].utilisation < 0.6


def test_the_full_rate_grows_with_slots() -> None:
    sizes = [(200, 300), (100, 500)]
    rates = [full_rate(Pace(slots), sizes) for slots in (4, 16, 64)]
    assert rates == sorted(rates)
    assert deque(rates, maxlen=1)[0] < 64 / Pace().step_s(64)
