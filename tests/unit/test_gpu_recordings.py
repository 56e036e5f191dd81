"""What was recorded of the tuner and the fleet on two H200s: what was foretold, and what the diagnosis says of it."""

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from draftmill import tuner, tuning
from draftmill.architecture import read_architecture
from draftmill.bottleneck import Engine, Verdict, diagnose
from draftmill.capacity import Workload, capacity
from draftmill.gpus import GPUS
from draftmill.server_flags import dialect_of_version, read_flags
from draftmill.telemetry import Sample
from draftmill.tuning import Measurement, Setting

RECORDINGS = Path(__file__).parents[1] / "recordings"
TUNING, FLEET = RECORDINGS / "h200-tuning", RECORDINGS / "h200-fleet"
QWEN = read_architecture(json.loads((RECORDINGS / "qwen3.6-27b-shape.config.json").read_text()))
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
VERSION = dialect_of_version("0.5.15.post1")
DELAYED = "--disable-radix-cache --mem-fraction-static 0.935 --enable-prefill-delayer --cuda-graph-max-bs-decode 288"
LOAD = Workload(prompt_tokens=150, output_tokens=430, output_cv=0.77, max_tokens=1000)
# the servers' own start-up lines: state slots, running requests, KV tokens
SERVERS = {
    "default": ("", 249, 49, 654_737),
    "delayed": (DELAYED, 263, 263, 690_878),
    "delayed-464": (f"{DELAYED} --max-running-requests 464", 464, 464, 218_729),
    "pair": ("--tp-size 2", 659, 131, 1_721_451),
}


def recorded(name: str, folder: Path = TUNING) -> list[Sample]:
    """With the turns that the tuner wanted answered: then its trials' telemetry did not say so yet."""
    text = gzip.decompress((folder / f"{name}.telemetry.jsonl.gz").read_bytes()).decode()
    samples = [Sample.from_dict(json.loads(line)) for line in text.splitlines()]
    return samples if any(s.wanted for s in samples) else [replace(s, wanted=36_716) for s in samples]


def engine(flags: str) -> Engine:
    return Engine(dialect=VERSION, flags=read_flags(flags), architecture=QWEN, gpu=H200)


@pytest.mark.parametrize("name", SERVERS)
def test_what_these_servers_hold_is_foretold(name: str) -> None:
    flags, slots, running, tokens = SERVERS[name]
    have = capacity(QWEN, H200.memory_bytes, read_flags(flags), LOAD, VERSION)
    assert not have.refusals
    assert have.state_slots == pytest.approx(slots, rel=0.03)
    assert have.max_running == pytest.approx(running, rel=0.03)
    assert have.kv_tokens == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize(
    ("name", "verdict", "says", "tok_s"),
    [
        ("default", Verdict.STATE, "249 state slots at 5 per request run 49", 905),
        ("delayed", Verdict.COMPUTE, "of the bandwidth roofline", 4460),
        ("delayed-464", Verdict.PREFILL, "prefill takes", 3085),
        ("fleet-b", Verdict.COMPUTE, "of the bandwidth roofline", 4400),
        ("single", Verdict.COMPUTE, "of the bandwidth roofline", 4500),
    ],
)
def test_what_bound_each_is_named(name: str, verdict: Verdict, says: str, tok_s: float) -> None:
    found = diagnose(recorded(name), engine(SERVERS.get(name, SERVERS["delayed"])[0]))
    assert (found.verdict, says in found.evidence) == (verdict, True), found.evidence
    assert found.steady_tok_s == pytest.approx(tok_s, rel=0.1)


def test_the_cure_of_the_default_is_the_one_that_the_tuner_found() -> None:
    advice = diagnose(recorded("default"), engine("")).advice
    assert advice is not None and advice.flag is not None and "--disable-radix-cache" in advice.flag
    assert advice.gain >= 1.5


def test_shards_too_small_for_the_server_leave_it_waiting_for_its_client() -> None:
    """225 turns a shard and one lease, against 263 slots."""
    assert diagnose(recorded("whole"), engine(DELAYED)).verdict is Verdict.CLIENT


def rate(name: str, folder: Path, after_s: float, seconds: float) -> float:
    """Output tok/s over so many seconds, from so long after the server was full."""
    samples = recorded(name, folder)
    full = next(
        sample.t for sample in samples if (sample.running or 0) >= 0.95 * (sample.capacity or math.inf)
    )
    window = [sample for sample in samples if after_s <= sample.t - full <= after_s + seconds]
    tokens = (window[-1].decode_tokens or 0) - (window[0].decode_tokens or 0)
    return tokens / (window[-1].t - window[0].t)


def test_two_gpus_yield_twice_as_much_as_one() -> None:
    """The second server of the fleet was full 90 s before its window, the first one a minute earlier."""
    two = rate("two-a", FLEET, 165, 110) + rate("two-b", FLEET, 95, 110)
    assert two >= 1.95 * rate("one", FLEET, 95, 110)


@pytest.mark.parametrize("name", ["two-a", "two-b", "one"])
def test_what_is_left_to_gain_does_not_hang_on_the_verdict(name: str) -> None:
    """These servers stand between two verdicts: the delayer leaves some of the 263 slots free, now more, now fewer."""
    found = diagnose(recorded(name, FLEET), engine(DELAYED))
    assert found.verdict in (Verdict.COMPUTE, Verdict.STATE)
    advice = found.advice
    assert advice is not None and advice.flag is not None and "--max-running-requests" in advice.flag
    assert advice.gain == pytest.approx(1.15, abs=0.05)


def measured(way: str, folder: Path) -> list[Measurement]:
    """What the tuner wrote down, in the order of its settings."""
    (folder / way / "tuning").mkdir(parents=True)
    shutil.copy(FLEET / f"{way}-measurements.jsonl", folder / way / "tuning" / "measurements.jsonl")
    return tuning.read_measurements(folder / way)


def gain_over(base: Measurement, other: Measurement) -> tuple[float, float]:
    """The gain, and its standard error."""
    gain = other.tok_s / base.tok_s
    return gain, gain * math.hypot(other.error / other.tok_s, base.error / base.tok_s)


def test_the_tuner_side_by_side_agrees_with_the_tuner_on_one_gpu(tmp_path: Path) -> None:
    """The same settings in the same order, the same winner, each rate and gain within twice their standard error."""
    beside, alone = measured("beside", tmp_path), measured("alone", tmp_path)
    asked = Setting("as asked", (), 1.0)
    assert [m.flags for m in beside[:3]] == [m.flags for m in alone] and alone[0].of(asked)
    winners = [tuning.decide(found, asked).adopted for found in (beside, alone)]
    assert winners[0] is not None and winners[1] is not None
    assert winners[0].flags == winners[1].flags == tuple(DELAYED.split())
    for one, same in zip(beside, alone, strict=False):
        assert abs(one.tok_s - same.tok_s) <= 2 * math.hypot(one.error, same.error), one.name
        (gain, error), (other, other_error) = gain_over(beside[0], one), gain_over(alone[0], same)
        assert abs(gain - other) <= 2 * math.hypot(error, other_error), one.name


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("beside", ["default", "delayed-464", "delayed", "chunk"]),
        ("alone", ["default", "delayed-464", "delayed"]),
    ],
)
def test_the_supervisors_telemetry_tells_the_rates_that_the_tuner_measured(
    tmp_path: Path, way: str, names: list[str]
) -> None:
    """Another reader of the same counters, once a second, too."""
    for name, found in zip(names, measured(way, tmp_path), strict=True):
        window = [s for s in recorded(f"{way}-{name}", FLEET) if s.t <= found.measured_at]
        mean, error = tuning.mean_and_error(tuner._rates(window, found.measured_at - found.seconds))
        assert mean == pytest.approx(found.tok_s, rel=0.03)
        assert error == pytest.approx(found.error, rel=0.7)


def test_a_server_on_a_fresh_machine_is_slow_until_its_slots_were_filled_anew() -> None:
    """So the tuner waits for that: no other server ran beside this one, whose kernels were compiled for the first time."""
    assert rate("cold-default", FLEET, 0, 20) < 0.9 * rate("cold-default", FLEET, 30, 30)
    assert rate("alone-default", FLEET, 0, 20) > 0.95 * rate("alone-default", FLEET, 20, 40)


def test_a_server_is_slow_while_its_neighbour_starts_and_fills_its_slots(tmp_path: Path) -> None:
    """So the tuner takes no rate then."""
    assert rate("beside-default", FLEET, 0, 100) < 0.85 * measured("beside", tmp_path)[0].tok_s


def test_the_tuner_more_than_doubled_the_default() -> None:
    lines = (TUNING / "measurements.jsonl").read_text().splitlines()
    rate = {one["name"]: one["tok_s"] for one in map(json.loads, lines)}
    assert max(rate.values()) >= 2.2 * rate["as asked"]
