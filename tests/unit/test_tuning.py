"""The tuner's judgement, on made-up measurements."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill import answering, tuner, tuning
from draftmill import config as settings
from draftmill.architecture import read_architecture
from draftmill.candidates import candidates
from draftmill.capacity import Workload
from draftmill.errors import UserError
from draftmill.expectations import given_flags
from draftmill.fleet.locks import Lock
from draftmill.fleet.slots import Gpu, Slot
from draftmill.gpus import GPUS
from draftmill.server_flags import dialect_of_version, read_flags
from draftmill.tuning import (
    Circumstances,
    Measurement,
    Setting,
    adopted_flags,
    decide,
    enough,
    remaining,
    worth_trying,
)

SHAPE = Path(__file__).parents[1] / "recordings" / "qwen3.6-27b-shape.config.json"
QWEN = read_architecture(json.loads(SHAPE.read_text()))
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
ASKED = Setting("as asked", ("--tp-size", "2"), 1.0)
HERE = Circumstances("sglang", "0.5.23", "H200", "a model", ASKED.flags)


def setting(name: str, gain: float = 1.2, **model: str) -> Setting:
    return Setting(name, ("--flag", name), gain, dict(model))


def measured(what: Setting, tok_s: float, outcome: str = "measured", **more: Any) -> Measurement:
    return Measurement(
        what.name,
        what.flags,
        what.model,
        outcome,
        HERE,
        tok_s=tok_s,
        expected_gain=what.expected_gain,
        **more,
    )


# --- when is it enough?


@pytest.mark.parametrize("rates", [[], [1000.0], [1000.0] * 2])
def test_a_start_decides_nothing(rates: list[float]) -> None:
    assert enough(rates, best=0.0) is None and enough(rates, best=1e9) is None


def test_steady_rates_are_enough_after_six_windows() -> None:
    assert enough([1000.0, 1010.0, 990.0, 1005.0, 995.0], 0.0) is None
    assert enough([1000.0, 1010.0, 990.0, 1005.0, 995.0, 1000.0], 0.0) == "measured"


def test_shaky_rates_go_on_but_not_for_ever() -> None:
    shaky = [800.0, 1200.0] * (tuning.MOST_WINDOWS // 2)
    assert enough(shaky[:-1], 0.0) is None
    assert enough(shaky, 0.0) == "measured"


def test_a_clearly_beaten_setting_is_left_early() -> None:
    assert enough([500.0, 510.0, 490.0], best=1000.0) == "beaten"
    assert enough([840.0, 900.0, 780.0], best=1000.0) is None, "it may still be close"


def test_a_server_that_decodes_nothing_has_failed() -> None:
    """And is never the base that others are divided by."""
    assert enough([0.0] * (tuning.MOST_WINDOWS - 1), best=0.0) is None
    assert enough([0.0] * tuning.MOST_WINDOWS, best=0.0) == "failed"


@given(st.lists(st.floats(0, 1e6), max_size=30), st.floats(0, 1e6))
def test_only_what_is_surely_slower_is_beaten(rates: list[float], best: float) -> None:
    verdict = enough(rates, best)
    if verdict == "beaten":
        assert sum(rates) / len(rates) < tuning.BEATEN * best
    if len(rates) >= tuning.MOST_WINDOWS:
        assert verdict is not None


# --- what next?


def test_what_has_a_measurement_of_any_outcome_is_not_tried_again() -> None:
    candidates = [ASKED, setting("a"), setting("b"), setting("c", state_dtype="bfloat16")]
    done = [measured(ASKED, 100), measured(setting("b"), 0, "failed"), measured(setting("c"), 50)]
    assert [s.name for s in remaining(candidates, done)] == ["a", "c"], "other numerics are another setting"


def test_what_cannot_win_by_the_model_is_not_tried() -> None:
    done = [measured(ASKED, 1000), measured(setting("a", 1.5), 1500)]
    assert worth_trying(setting("b", 1.4), done, ASKED)  # within the model's tolerance of a tenth
    assert not worth_trying(setting("b", 1.2), done, ASKED)


def test_a_model_that_was_too_careful_is_corrected_by_what_was_measured() -> None:
    """Promised 1.2, brought 2: so may the next one that promises 1.1."""
    done = [measured(ASKED, 1000), measured(setting("a", 1.2), 2000)]
    assert worth_trying(setting("b", 1.1), done, ASKED)
    assert not worth_trying(
        setting("b", 1.0), [measured(ASKED, 1000), measured(setting("a", 2.0), 2000)], ASKED
    )


def test_what_may_not_be_adopted_keeps_nothing_else_from_being_tried() -> None:
    """The fastest changes answers, the next has them rejected: 1.5 times the asked rate is still to be had."""
    done = [
        measured(ASKED, 1000, answers=400, rejected=20),
        measured(setting("half state", 2.0, state_dtype="bfloat16"), 2000),
        measured(setting("broken", 1.8), 1800, answers=400, rejected=200),
    ]
    assert tuning.best_rate(done, ASKED) == 1000
    assert worth_trying(setting("b", 1.5), done, ASKED)
    assert enough([1500.0] * 6, tuning.best_rate(done, ASKED)) == "measured"


def test_without_the_asked_settings_rate_everything_is_worth_trying() -> None:
    assert worth_trying(setting("a", 0.1), [], ASKED)
    assert worth_trying(setting("a", 0.1), [measured(ASKED, 0, "failed"), measured(setting("b"), 9)], ASKED)


# --- who won?


def test_the_fastest_wins_and_the_reason_names_the_gain() -> None:
    decision = decide(
        [measured(ASKED, 1000), measured(setting("a"), 1300), measured(setting("b"), 1200)], ASKED
    )
    assert decision.adopted is not None and decision.adopted.name == "a"
    assert "1300 tok/s" in decision.reason and "1.30×" in decision.reason and "1000" in decision.reason


def test_a_hair_better_than_asked_is_not_better() -> None:
    decision = decide([measured(ASKED, 1000), measured(setting("a"), 1019)], ASKED)
    assert decision.adopted == decision.asked and "as good as any" in decision.reason


@pytest.mark.parametrize("outcome", ["beaten", "failed"])
def test_only_finished_measurements_can_win(outcome: str) -> None:
    decision = decide([measured(ASKED, 1000), measured(setting("a"), 9000, outcome)], ASKED)
    assert decision.adopted == measured(ASKED, 1000)


def test_what_changes_answers_is_proposed_and_never_adopted() -> None:
    fast = setting("half state", state_dtype="bfloat16")
    decision = decide([measured(ASKED, 1000), measured(fast, 2000)], ASKED)
    assert decision.adopted is not None and decision.adopted.name == "as asked"
    (proposal,) = decision.proposals
    assert "model.state_dtype: bfloat16" in proposal and "2.00×" in proposal
    slow = measured(fast, 900)
    assert decide([measured(ASKED, 1000), slow], ASKED).proposals == ()


def test_a_fast_setting_whose_answers_are_rejected_is_out() -> None:
    base = measured(ASKED, 1000, answers=400, rejected=20)
    broken = measured(setting("a"), 3000, answers=400, rejected=120)
    decision = decide([base, broken], ASKED)
    assert decision.adopted == base


def test_a_few_rejections_more_are_noise() -> None:
    base = measured(ASKED, 1000, answers=40, rejected=2)
    fine = measured(setting("a"), 1500, answers=40, rejected=5)
    assert decide([base, fine], ASKED).adopted == fine


@pytest.mark.parametrize(
    "done", [[], [measured(ASKED, 0, "failed")], [measured(setting("a", state_dtype="x"), 5)]]
)
def test_nothing_measured_leaves_the_asked_flags(done: list[Measurement]) -> None:
    decision = decide(done, ASKED)
    assert decision.adopted is None and "the asked flags stay" in decision.reason


def test_a_failed_asked_setting_does_not_hinder_the_others() -> None:
    decision = decide([measured(ASKED, 0, "failed"), measured(setting("a"), 500)], ASKED)
    assert decision.adopted is not None and decision.adopted.name == "a" and decision.asked is None


rates = st.floats(1, 1e5)


@given(rates, st.lists(rates, max_size=6))
def test_the_adopted_setting_is_never_slower_than_the_asked_one(base: float, others: list[float]) -> None:
    done = [measured(ASKED, base), *(measured(setting(f"s{n}"), rate) for n, rate in enumerate(others))]
    decision = decide(done, ASKED)
    assert decision.adopted is not None and decision.adopted.tok_s >= base
    assert decision.adopted.tok_s == base or decision.adopted.tok_s >= tuning.WORTH * base
    assert max([base, *others]) <= max(decision.adopted.tok_s, tuning.WORTH * base)


# --- the files


def config_with(*flags: str) -> settings.Config:
    return settings.resolve({"operation": {"server": {"flags": list(flags)}}})


def in_force(config: settings.Config, results: Path, gpu: str = HERE.gpu, model: str = HERE.model) -> object:
    return adopted_flags(config, results, gpu, model)


def test_measurements_survive_a_kill_and_other_circumstances_are_told_apart(tmp_path: Path) -> None:
    assert tuning.read_measurements(tmp_path) == []
    here = measured(setting("a", state_dtype="bfloat16"), 500, detail="é")
    there = Measurement("b", ("--x",), {}, "measured", replace(HERE, gpu="B200"), tok_s=9.0)
    tuning.keep(tmp_path, here)
    tuning.keep(tmp_path, there)
    path = tmp_path / "tuning" / "measurements.jsonl"
    with path.open("a") as file:
        file.write('{"name": "to')
    assert tuning.read_measurements(tmp_path) == [here, there]
    assert tuning.read_measurements(tmp_path, HERE) == [here]


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    first, second = measured(setting("a"), 1), measured(setting("b"), 2)
    tuning.keep(tmp_path, first)
    with (tmp_path / "tuning" / "measurements.jsonl").open("a") as file:
        file.write('{"name": "to')
    tuning.keep(tmp_path, second)
    assert tuning.read_measurements(tmp_path) == [first, second]


def here(config: settings.Config) -> Circumstances:
    return tuning.circumstances(config, HERE.engine, HERE.version, HERE.gpu, HERE.model)


def test_the_winner_stands_in_for_exactly_the_flags_it_was_measured_against(tmp_path: Path) -> None:
    won = Setting("more", ("--tp-size", "2", "--more"), 1.3)
    assert in_force(config_with("--tp-size 2"), tmp_path) is None
    done = [measured(ASKED, 100), measured(won, 200)]
    tuning.adopt(tmp_path, decide(done, ASKED), ASKED, here(config_with("--tp-size 2")))
    assert in_force(config_with("--tp-size 2"), tmp_path) == won.flags
    assert in_force(config_with("--tp-size", "2", "auto"), tmp_path) == won.flags
    assert in_force(config_with(), tmp_path) is None
    assert in_force(config_with("--tp-size 4"), tmp_path) is None
    assert in_force(config_with("--tp-size 2"), tmp_path, gpu="B200") is None
    assert in_force(config_with("--tp-size 2"), tmp_path, model="another") is None
    assert adopted_flags(config_with("--tp-size 2"), tmp_path, None, HERE.model) == won.flags
    assert adopted_flags(config_with("--tp-size 2"), tmp_path, None, "another") is None
    winner = json.loads((tmp_path / "tuning" / "winner.json").read_text())
    assert winner["tok_s"] == 200 and winner["asked_tok_s"] == 100
    assert [path.name for path in (tmp_path / "tuning").iterdir()] == ["winner.json"]


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({"model": {"kv_cache_dtype": "fp8_e5m2"}}, False),
        ({"sampling": {"max_tokens": 16_000}}, True),
        ({"operation": {"client": {"concurrency": 7}}}, True),
        ({"operation": {"server": {"env": {"A": "b"}}}}, True),
    ],
)
def test_rates_compare_under_the_same_load_only_and_a_winner_outlives_another_load(
    tmp_path: Path, change: dict[str, Any], stays: bool
) -> None:
    before, after = settings.resolve({}), settings.resolve(change)
    here_before, here_after = here(before), here(after)
    tuning.keep(tmp_path, replace(measured(ASKED, 100), circumstances=here_before))
    assert len(tuning.read_measurements(tmp_path, here_before)) == 1
    assert tuning.read_measurements(tmp_path, here_after) == []
    tuning.adopt(tmp_path, decide([], ASKED), ASKED, here_before)
    assert in_force(before, tmp_path) == ASKED.flags
    assert (in_force(after, tmp_path) is not None) == stays


def test_where_nothing_could_be_measured_the_asked_flags_are_kept_as_the_tuned_ones(tmp_path: Path) -> None:
    """So that the next server does not tune again."""
    config = config_with("--tp-size 2")
    tuning.adopt(tmp_path, decide([], ASKED), ASKED, here(config))
    assert in_force(config, tmp_path) == ASKED.flags


# --- from the capacity model to what a server is started with


@pytest.mark.parametrize("capacity_", [None, 32])
@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ({}, ""),
        ({"trust_remote_code": True, "flags": ["--enable-deterministic-inference"]}, ""),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--dp-size 4 --max-running-requests 100"),
        ({"dtype": "bfloat16"}, "--tp 4 --attention-backend triton"),
    ],
)
def test_each_setting_starts_the_server_that_its_name_says(
    model: dict[str, Any], asked: str, gpus: int, capacity_: int | None
) -> None:
    """What the model block and the slot give, and the setting's own flags, are the candidate's, no more and no fewer."""
    server = {"flags": asked, "capacity": capacity_}
    operation = {"server": server, "gpus_per_server": gpus, "tune": {"allow_state_dtype": True}}
    config = settings.resolve({"model": {**model, "path": "some/model"}, "operation": operation})
    slot = Slot("gpus", tuple(Gpu(f"GPU-{n}", "NVIDIA H200", 143_771 << 20) for n in range(gpus)))
    given_ = read_flags(given_flags(config, slot, {}, settings.server_flags(config).words))
    found = candidates(
        QWEN,
        H200,
        read_flags([*given_.asked, *settings.server_flags(config).words]),
        Workload(150, 430),
        dialect_of_version("0.5.15.post1"),
        allow_state_dtype=True,
    )
    assert len(found) > 5 and any(one.changes_answers for one in found)
    for candidate in found:
        one = tuner.as_setting(candidate, given_)
        words = [*given_flags(config, slot, one.model, one.flags), *one.flags]
        if capacity_ is not None and candidate.flags.max_running is None:
            continue  # operation.server.capacity holds: expect offers no such
        assert replace(read_flags(words), asked=()) == replace(candidate.flags, asked=()), candidate.name
        assert set(words) == set(candidate.flags.asked), candidate.name


# --- more than one host


def test_two_tuners_never_measure_over_the_same_results(tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    other = Lock(tmp_path / "tuning" / "lock")
    assert other.take()
    with pytest.raises(UserError, match=r"measures over .* already"):
        tuner.tune(config_with("auto"), tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["tuning", "lock"]


def test_a_slurm_allocation_does_not_measure_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert answering._tune_first(config_with("auto"), tmp_path, HERE.model) is False
    assert list(tmp_path.iterdir()) == []
    assert "its servers start with the flags as asked" in caplog.text


def test_no_rate_is_taken_beside_a_server_that_starts_fills_or_drains() -> None:
    beat = tuner._Beat()
    with beat.part("a"), beat.part("b"):
        assert not beat.measure("a"), "b fills"
        assert beat.measure("b")
        assert beat.measure("a")
        ended = threading.Thread(target=beat.measured, args=("a",), daemon=True)
        ended.start()
        ended.join(0.2)
        assert ended.is_alive(), "a's load goes on: b has no rate yet"
        beat.measured("b")
        ended.join(10)
        assert not ended.is_alive()
        assert not beat.measure("a"), "b drains"
    with beat.part("a"):
        assert beat.measure("a"), "b is idle"


def test_no_server_starts_while_a_rate_is_taken() -> None:
    beat = tuner._Beat()

    def start() -> None:
        with beat.part("b"):
            pass

    with beat.part("a"):
        assert beat.measure("a")
        started = threading.Thread(target=start, daemon=True)
        started.start()
        started.join(0.2)
        assert started.is_alive()
        beat.measured("a")
        started.join(10)
        assert not started.is_alive()
