"""Samples: both engines' metrics, both stored forms, and what a reader must survive."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.telemetry import (
    STATES,
    Sample,
    parse_prometheus,
    prometheus_series,
    read_samples,
    snapshot_sample,
)

RECORDINGS = Path(__file__).parents[1] / "recordings"


def recorded(name: str) -> str:
    return gzip.decompress((RECORDINGS / name).read_bytes()).decode()


counts = st.none() | st.integers(0, 10**12)
shares = st.none() | st.floats(0, 1)
samples = st.builds(
    Sample,
    t=st.floats(0, 4e9),
    state=st.sampled_from(STATES),
    epoch=st.integers(0, 9),
    running=counts,
    queued=counts,
    capacity=counts,
    decode_tokens=counts,
    kv_usage=shares,
    state_usage=shares,
    gen_throughput=st.none() | st.floats(0, 1e6),
)


@given(samples)
def test_a_sample_survives_its_line(sample: Sample) -> None:
    line = sample.to_json()
    assert "\n" not in line
    assert Sample.from_json(line) == sample


@given(st.lists(samples, min_size=1, max_size=5), st.integers(1, 40))
def test_a_torn_last_line_costs_that_line_alone(written: list[Sample], cut: int) -> None:
    whole = "\n".join(s.to_json() for s in [*written, written[0]])
    last = whole.rsplit("\n", 1)[1]
    torn = whole[: len(whole) - min(cut, len(last))]
    assert read_samples(torn.split("\n")) == written


def test_unknown_keys_are_a_newer_writer_and_no_fault() -> None:
    assert Sample.from_json('{"t": 1, "tomorrow": {}}') == Sample(t=1.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"state": "ready"}', "no 't'"),
        ('{"t": "now"}', "t='now'"),
        ('{"t": 1, "state": "asleep"}', "state='asleep'"),
        ('{"t": 1, "running": true}', "running=True"),
        ('{"t": 1, "kv_usage": NaN}', "kv_usage"),
        ('{"t": 1, "epoch": null}', "epoch"),
    ],
)
def test_what_is_no_sample_is_said(line: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Sample.from_json(line)
    assert said in str(caught.value)


def test_a_page_of_sglang() -> None:
    sample = parse_prometheus(recorded("extra.prom.gz"), 5.0)
    assert (sample.running, sample.queued, sample.state_slots, sample.kv_tokens) == (43, 212, 224, 299358)
    assert (sample.decode_tokens, sample.prefill_tokens) == (39864, 20001)
    assert (sample.generation_tokens, sample.prompt_tokens, sample.finished) == (26541, 11200, 56)
    assert sample.state_usage == pytest.approx(176 / 224)
    assert sample.kv_usage == pytest.approx(0.0739, abs=1e-4)
    assert sample.retracted == 0
    assert sample.gen_throughput == pytest.approx(2083.3, abs=0.1)
    assert sample.prefill_s is None  # the device timer was off


def test_a_snapshot_gives_the_same_but_for_the_sums() -> None:
    page = parse_prometheus(recorded("extra.prom.gz"), 5.0)
    snapshots = [json.loads(line) for line in recorded("extra.metrics.jsonl.gz").splitlines()]
    snapshot = next(s for s in snapshots if s.get("sglang:realtime_tokens_total") == 59865)
    sample = snapshot_sample(snapshot)
    assert sample.decode_tokens == pytest.approx(page.decode_tokens, rel=0.02)
    assert (sample.running, sample.state_slots, sample.generation_tokens) == (43, 224, 26541)
    assert sample.prefill_tokens is None


def test_of_tensor_parallel_ranks_one_counts_and_data_parallel_ranks_add_up() -> None:
    page = "\n".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}"}} {10 + dp}\nsglang:token_usage{{dp_rank="{dp}",tp_rank="{tp}"}} 0.{dp + 2}'
        for dp in (0, 1)
        for tp in (0, 1)
    )
    sample = parse_prometheus(page, 0.0)
    assert sample.running == 21
    assert sample.kv_usage == pytest.approx(0.25)


def test_a_dense_model_has_no_state_pool_though_its_metrics_are_there() -> None:
    page = "sglang:mamba_usage 0.0\nsglang:mamba_available_tokens 0.0\nsglang:mamba_used_tokens 0.0\nsglang:num_running_reqs 3.0"
    sample = parse_prometheus(page, 0.0)
    assert sample.state_usage is None and sample.state_slots is None and sample.running == 3


def test_device_seconds_by_kind_of_pass() -> None:
    page = 'sglang:forward_execution_seconds_total{category="extend"} 3.5\nsglang:forward_execution_seconds_total{category="decode"} 6.5'
    sample = parse_prometheus(page, 0.0)
    assert (sample.prefill_s, sample.decode_s) == (3.5, 6.5)


def test_a_page_of_llama_cpp() -> None:
    page = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 30
llamacpp:prompt_tokens_cached_total 12
llamacpp:tokens_predicted_total 80
llamacpp:requests_processing 2
llamacpp:requests_deferred 5
"""
    sample = parse_prometheus(page, 1.0)
    assert (sample.running, sample.queued, sample.generation_tokens) == (2, 5, 80)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.prefill_tokens) == (42, 12, 30)
    assert sample.state_usage is None and sample.kv_usage is None


@given(st.text(max_size=300))
def test_no_page_of_metrics_is_a_fault(text: str) -> None:
    assert parse_prometheus(text, 0.0).t == 0.0


def test_labels_with_odd_values_and_numbers_that_are_none() -> None:
    series = prometheus_series(
        'a{b="x}y\\"z",c="1"} 2 1700000000\nd NaN\ne +Inf\nf{g="h"} 1e3\nnonsense here too'
    )
    assert series == {"a": [({"b": 'x}y\\"z', "c": "1"}, 2.0)], "f": [({"g": "h"}, 1000.0)]}


def test_the_recordings_are_read_whole() -> None:
    read = {
        name: read_samples(recorded(f"{name}.metrics.jsonl.gz").splitlines())
        for name in ("extra", "nobuf", "radixoff")
    }
    assert {name: len(found) for name, found in read.items()} == {"extra": 28, "nobuf": 30, "radixoff": 28}
    assert all(sample.epoch == 0 for found in read.values() for sample in found)


def test_a_restart_shows_in_falling_counters() -> None:
    lines = [json.dumps({"t": t, "sglang:generation_tokens_total": n}) for t, n in enumerate([5, 9, 2, 8])]
    assert [sample.epoch for sample in read_samples(lines)] == [0, 0, 1, 1]


@pytest.mark.parametrize("lines", [[], ["", "  "], ["{}"], ['{"t": 1}', "nonsense", '{"t": 2}'], ["[1]"]])
def test_what_is_no_telemetry_names_its_line(lines: list[str]) -> None:
    with pytest.raises(UserError, match=r"results/a\.jsonl"):
        read_samples(lines, "results/a.jsonl")
