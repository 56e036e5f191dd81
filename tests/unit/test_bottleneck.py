"""Verdicts: on recordings of a real server, on synthetic telemetry for each, and their laws."""

import argparse
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import diagnose_command
from draftmill.architecture import read_architecture
from draftmill.bottleneck import Diagnosis, Engine, Verdict, diagnose
from draftmill.errors import UserError
from draftmill.gpus import GPUS, parse_reference
from draftmill.server_flags import (
    STRATEGIES,
    UNKNOWN,
    Dialect,
    dialect_of_help,
    dialect_of_version,
    read_flags,
    refusals,
    with_flags,
    without,
)
from draftmill.telemetry import STATES, Sample, read_samples

RECORDINGS = Path(__file__).parents[1] / "recordings"
QWEN = read_architecture(json.loads((RECORDINGS / "qwen3.6-27b-shape.config.json").read_text()))
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
OLD, NEW = dialect_of_version("0.5.15.post1"), dialect_of_version("0.5.23")
EARLY = dialect_of_help(
    "--mamba-scheduler-strategy {auto,no_buffer,extra_buffer} --disable-radix-cache --disable-overlap-schedule "
    "--mem-fraction-static --max-running-requests --chunked-prefill-size --schedule-conservativeness "
    "--mamba-full-memory-ratio"
)


def recorded(name: str) -> list[Sample]:
    text = gzip.decompress((RECORDINGS / f"{name}.metrics.jsonl.gz").read_bytes()).decode()
    return read_samples(text.splitlines(), name)


def served(
    seconds: int = 120, tok_s: float = 1000.0, prefill_share: float = 0.1, **fixed: object
) -> list[Sample]:
    """A server at constant figures, sampled each second: answers of 500 tokens to prompts of 200."""
    base = Sample(t=0.0, running=50, queued=20, capacity=50, kv_usage=0.3, kv_tokens=300_000, retracted=0)
    base = replace(base, **fixed)  # type: ignore[arg-type]
    return [
        replace(
            base,
            t=1e9 + second,
            decode_tokens=round(tok_s * second),
            generation_tokens=round(tok_s * second),
            finished=round(tok_s * second / 500),
            prompt_tokens=round(tok_s * second / 500) * 200,
            prefill_s=second * prefill_share,
            decode_s=second * (1 - prefill_share),
        )
        for second in range(seconds)
    ]


def hybrid(
    seconds: int = 120, tok_s: float = 1000.0, prefill_share: float = 0.1, **fixed: object
) -> list[Sample]:
    usual = {"running": 44, "capacity": 44, "state_usage": 0.786, "state_slots": 224, "queued": 200}
    return served(seconds, tok_s, prefill_share, **{**usual, **fixed})


def figures(text: str) -> int:
    return len(re.findall(r"\d+", text))


@pytest.mark.parametrize(
    "engine", [Engine(), Engine(dialect=OLD), Engine(dialect=NEW)], ids=["unknown", "old", "new"]
)
def test_the_recorded_default_is_state_bound(engine: Engine) -> None:
    found = diagnose(recorded("extra"), engine)
    assert found.verdict == "state-bound"
    assert "224 state slots at 5 per request run 44" in found.evidence
    assert found.advice is not None and found.advice.flag == "--disable-radix-cache"
    assert found.advice.gain == pytest.approx(2.31, rel=0.05)  # measured
    assert "expect about 2.3x" in found.advice.predicted_effect
    assert found.steady_tok_s == pytest.approx(1520, rel=0.05)


def test_the_recorded_no_buffer_is_state_bound_too() -> None:
    found = diagnose(recorded("nobuf"), Engine(dialect=OLD))
    assert found.verdict is Verdict.STATE
    assert "at 3 per request run 74" in found.evidence
    assert found.advice is not None and found.advice.gain == pytest.approx(3509 / 1962, rel=0.05)
    assert found.steady_tok_s == pytest.approx(1962, rel=0.05)


def test_the_recorded_cure_moves_the_limit_elsewhere() -> None:
    found = diagnose(recorded("radixoff"), Engine(dialect=OLD))
    assert found.verdict is Verdict.PREFILL
    assert "decode alone ran at 62" in found.evidence and "state use 1.00" in found.evidence
    assert found.advice is not None and found.advice.flag == "--min-free-slots-delay 4"
    assert found.windows[0].verdict is Verdict.STARTUP  # requests come in


def test_with_model_and_card_the_effect_is_computed() -> None:
    flags = read_flags(
        "--mem-fraction-static 0.61 --mamba-ssm-dtype bfloat16 --mamba-scheduler-strategy extra_buffer"
    )
    found = diagnose(
        recorded("extra"), Engine(dialect=OLD, flags=flags, architecture=QWEN, gpu=H200, hybrid=True)
    )
    assert found.verdict is Verdict.STATE and found.advice is not None
    assert found.advice.gain == pytest.approx(2.31, rel=0.2)
    assert found.advice.drop == ("--mamba-scheduler-strategy", "extra_buffer")


def test_state_bound() -> None:
    found = diagnose(hybrid(), Engine(dialect=NEW))
    assert found.verdict is Verdict.STATE
    assert "224 state slots at 5 per request run 44" in found.evidence


def test_a_cache_that_is_hit_stays_on() -> None:
    hit = [replace(s, cached_tokens=round((s.prompt_tokens or 0) * 0.8)) for s in hybrid()]
    found = diagnose(hit, Engine(dialect=NEW))
    assert found.advice is not None and found.advice.flag is not None
    assert found.advice.flag == "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule"
    named = diagnose(hit, Engine(dialect=EARLY)).advice
    assert (
        named is not None and named.flag == "--mamba-scheduler-strategy no_buffer --disable-overlap-schedule"
    )


def test_one_slot_per_request_and_an_empty_kv_cache_ask_for_more_slots() -> None:
    found = diagnose(
        hybrid(running=224, capacity=224, state_usage=1.0, kv_usage=0.3, queued=400), Engine(dialect=NEW)
    )
    assert found.verdict is Verdict.STATE and found.advice is not None and found.advice.flag is not None
    name, slots = found.advice.flag.split()
    assert name == "--max-running-requests" and int(slots) > 224


def test_kv_bound() -> None:
    found = diagnose(served(running=30, kv_usage=0.97), Engine(dialect=NEW))
    assert found.verdict is Verdict.KV
    assert "KV use 0.97" in found.evidence
    assert found.advice is not None and "--mem-fraction-static" in (found.advice.flag or "")


def test_kv_bound_while_states_stand_empty() -> None:
    found = diagnose(
        hybrid(running=280, capacity=355, state_slots=355, state_usage=0.6, kv_usage=0.95),
        Engine(dialect=NEW),
    )
    assert found.verdict is Verdict.KV
    assert found.advice is not None and "--mamba-full-memory-ratio 0.54" in (found.advice.flag or "")


def test_retractions_are_kv_bound() -> None:
    rising = [replace(s, retracted=i // 2) for i, s in enumerate(served(running=45, kv_usage=0.96))]
    found = diagnose(rising, Engine(dialect=NEW))
    assert found.verdict is Verdict.KV and "retracted" in found.evidence
    assert found.advice is not None and found.advice.flag == "--schedule-conservativeness 1.5"


def test_prefill_bound() -> None:
    found = diagnose(served(prefill_share=0.6), Engine(dialect=NEW))
    assert found.verdict is Verdict.PREFILL
    assert "prefill takes 60% of the time" in found.evidence
    assert found.advice is not None and found.advice.flag == "--min-free-slots-delay 16"


def test_compute_or_bandwidth_bound() -> None:
    dense = read_architecture(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
        }
    )  # fmt: skip
    samples = served(running=2048, capacity=2048, queued=100, kv_usage=0.5, tok_s=20000)
    found = diagnose(samples, Engine(dialect=NEW, hybrid=False))
    assert found.verdict == "compute- or bandwidth-bound"
    assert found.blind == ()
    with_model = diagnose(
        samples, Engine(dialect=NEW, flags=read_flags(""), architecture=dense, gpu=H200, hybrid=False)
    )
    assert "roofline" in with_model.evidence and "H200" in with_model.evidence


def test_a_request_limit_of_the_users_own_making() -> None:
    engine = Engine(dialect=NEW, flags=read_flags("--max-running-requests 50"), hybrid=False)
    found = diagnose(served(kv_usage=0.1), engine)
    assert found.verdict is Verdict.CAP
    assert found.advice is not None and (found.advice.flag or "").startswith("--max-running-requests")


@pytest.mark.parametrize("wanted", [None, 10, 400])
def test_client_bound(wanted: int | None) -> None:
    found = diagnose(served(running=10, queued=0, wanted=wanted), Engine(dialect=NEW))
    assert found.verdict is Verdict.CLIENT
    assert "10 running of at most 50, 0 queued" in found.evidence
    assert ("clients want 400" in found.evidence) == (wanted == 400)


def test_start_up_steady_and_drain_are_told_apart() -> None:
    starting = [Sample(t=1e9 - 90 + s, state="starting") for s in range(90)]
    steady = hybrid()
    last = steady[-1]
    draining = [
        replace(
            last,
            t=last.t + 1 + s,
            running=44 - s // 2,
            queued=0,
            decode_tokens=(last.decode_tokens or 0) + 500 * s,
        )
        for s in range(80)
    ]
    found = diagnose([*starting, *steady, *draining], Engine(dialect=NEW))
    assert found.verdict is Verdict.STATE
    assert found.windows[0].verdict is Verdict.STARTUP and "90 s" in found.windows[0].evidence
    assert found.windows[-1].verdict is Verdict.DRAIN
    assert found.steady_tok_s == pytest.approx(1000, rel=0.02)
    assert found.phases["drain"] == pytest.approx(80, abs=31)


def test_a_run_that_only_starts_or_is_down_says_so() -> None:
    assert diagnose([Sample(t=float(s), state="starting") for s in range(40)]).verdict is Verdict.STARTUP
    down = diagnose([Sample(t=float(s), state="stalled") for s in range(40)])
    assert down.verdict is Verdict.DOWN and "39 s" in down.evidence


def test_a_restart_is_a_window_of_its_own_and_counters_do_not_run_backwards() -> None:
    first = hybrid()
    gap = [Sample(t=first[-1].t + 1 + s, state="restarting", epoch=1) for s in range(60)]
    second = [replace(s, t=s.t + 180, epoch=1) for s in hybrid()]
    found = diagnose([*first, *gap, *second], Engine(dialect=NEW))
    assert [w.verdict for w in found.windows].count(Verdict.STARTUP) >= 1
    assert found.steady_tok_s == pytest.approx(1000, rel=0.02)


def test_an_old_version_without_state_metrics() -> None:
    unseen = hybrid(state_usage=None, state_slots=None)
    told = diagnose(unseen, Engine(dialect=EARLY))
    assert any("no state metrics" in sentence for sentence in told.blind)
    flags = read_flags("--mem-fraction-static 0.61 --mamba-ssm-dtype bfloat16")
    known = diagnose(unseen, Engine(dialect=EARLY, flags=flags, architecture=QWEN, gpu=H200, hybrid=True))
    assert known.verdict is Verdict.STATE
    assert "by the capacity model 224 state slots run 44" in known.evidence
    assert known.advice is not None and known.advice.flag == "--disable-radix-cache"


def test_llama_cpp_gets_no_flag_of_sglang() -> None:
    samples = [
        Sample(t=float(s), running=8, queued=30, capacity=8, generation_tokens=190 * s) for s in range(100)
    ]
    found = diagnose(samples, Engine(kind="llamacpp", hybrid=False))
    assert found.verdict is Verdict.COMPUTE
    assert found.advice is not None and found.advice.flag is None
    assert found.steady_tok_s == pytest.approx(190)


def test_what_was_expected_and_what_came() -> None:
    told = diagnose(hybrid(tok_s=3900), Engine(dialect=NEW), parse_reference(6250))
    assert told.reference_share == pytest.approx(0.624, abs=0.002)
    assert told.expected == "3900 tok/s are 62% of the reference 6,250 tok/s"
    card = parse_reference("a quarter of a B200")
    unknown = diagnose(hybrid(), Engine(dialect=NEW), card)
    assert unknown.reference_share is None and unknown.expected is not None
    known = diagnose(hybrid(), Engine(dialect=NEW, architecture=QWEN, gpu=H200, hybrid=True), card)
    assert known.reference_share is not None and "25% of a B200" in (known.expected or "")


def test_nothing_to_diagnose_is_said() -> None:
    with pytest.raises(UserError, match="no telemetry"):
        diagnose([])


counts = st.none() | st.integers(0, 2000)
any_sample = st.builds(
    Sample,
    t=st.floats(0, 300),
    state=st.sampled_from(STATES) | st.just("ready"),
    epoch=st.integers(0, 1),
    running=counts,
    queued=counts,
    capacity=st.none() | st.integers(1, 2000),
    wanted=counts,
    decode_tokens=st.none() | st.integers(0, 10**7),
    generation_tokens=st.none() | st.integers(0, 10**7),
    prompt_tokens=st.none() | st.integers(0, 10**7),
    cached_tokens=st.none() | st.integers(0, 10**7),
    finished=st.none() | st.integers(0, 10**5),
    kv_usage=st.none() | st.floats(0, 1),
    kv_tokens=st.none() | st.integers(0, 10**6),
    state_usage=st.none() | st.floats(0, 1),
    state_slots=st.none() | st.integers(1, 1000),
    retracted=st.none() | st.integers(0, 100),
    gen_throughput=st.none() | st.floats(0, 10**5),
    prefill_s=st.none() | st.floats(0, 300),
    decode_s=st.none() | st.floats(0, 300),
    idle_s=st.none() | st.floats(0, 300),
)
flag_lists = st.lists(
    st.sampled_from([
        "--disable-radix-cache", "--disable-overlap-schedule", "--mem-fraction-static 0.8", "--max-running-requests 64",
        *(f"--mamba-radix-cache-strategy {name}" for name in STRATEGIES), "--mamba-full-memory-ratio 2", "--page-size 64",
    ]),
    max_size=4,
    unique=True,
)  # fmt: skip


def check(found: Diagnosis) -> None:
    assert figures(found.evidence) >= 1
    for window in found.windows:
        assert window.verdict in Verdict and figures(window.evidence) >= 1
        assert window.end_s >= window.start_s
    assert sum(found.phases.values()) == pytest.approx(found.windows[-1].end_s - found.windows[0].start_s)
    assert found.verdict in {window.verdict for window in found.windows}
    if found.advice is not None:
        assert found.advice.predicted_effect and found.advice.gain > 0
        assert found.advice.flag is None or figures(found.advice.predicted_effect) >= 1
    json.dumps(diagnose_command.as_json(found), allow_nan=False)
    assert diagnose_command.as_text(found).startswith(found.verdict)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(any_sample, min_size=1, max_size=12),
    flag_lists,
    st.sampled_from([OLD, NEW, EARLY, UNKNOWN]),
    st.booleans(),
)
def test_no_verdict_without_figures_whatever_comes(
    samples: list[Sample], words: list[str], dialect: Dialect, known: bool
) -> None:
    flags = read_flags(" ".join(words))
    engine = Engine(dialect=dialect, flags=flags)
    if known:
        engine = replace(engine, architecture=QWEN, gpu=H200, hybrid=True)
    check(diagnose(samples, engine, parse_reference(1000)))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(0, 400),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([1, 3, 4, 5]),
    st.floats(0, 0.9),
    st.floats(0, 1),
    flag_lists,
    st.sampled_from([OLD, NEW, EARLY]),
    st.booleans(),
)
def test_no_advice_that_the_engine_would_refuse(
    running: int,
    queued: int,
    kv: float,
    state: float,
    per: int,
    prefill: float,
    cached: float,
    words: list[str],
    dialect: Dialect,
    known: bool,
) -> None:
    flags = read_flags(" ".join(words).replace("--mamba-radix-cache-strategy", dialect.strategy_flag or ""))
    if refusals(flags, dialect, QWEN.name, hybrid=True):
        return  # it would not run to be diagnosed
    samples = hybrid(
        seconds=40, running=running, capacity=running, queued=queued, kv_usage=kv, state_usage=state,
        state_slots=running * per, prefill_share=prefill,
    )  # fmt: skip
    samples = [replace(s, cached_tokens=round((s.prompt_tokens or 0) * cached)) for s in samples]
    engine = Engine(dialect=dialect, flags=flags, architecture=QWEN if known else None, gpu=H200, hybrid=True)
    found = diagnose(samples, engine)
    check(found)
    for advice in [found.advice, *(window.advice for window in found.windows)]:
        if advice is None or advice.flag is None:
            continue
        added = advice.flag.split()
        assert all(dialect.knows(word) for word in added if word.startswith("--"))
        changed = with_flags(read_flags(without(flags.asked, advice.drop)), *added)
        assert not refusals(changed, dialect, QWEN.name, hybrid=True)


def arguments(*given_: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    diagnose_command.add_arguments(parser)
    return parser.parse_args(list(given_))


def test_by_hand_on_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose_command.run(arguments(str(RECORDINGS / "extra.metrics.jsonl.gz"), "--json")) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["verdict"] == "state-bound" and "44" in read["evidence"]
    assert read["advice"]["flag"] == "--disable-radix-cache" and read["advice"]["predicted_effect"]


def test_by_hand_on_our_own_telemetry_with_the_state_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slot-0.telemetry.jsonl"
    file.write_text("".join(s.to_json() + "\n" for s in hybrid(capacity=None)))
    state = {
        "engine": "sglang",
        "version": "0.5.23",
        "flags": ["--mamba-radix-cache-strategy", "extra_buffer"],
    }
    (tmp_path / "slot-0.json").write_text(
        json.dumps({**state, "slots_per_request": 5, "gpu_name": "NVIDIA H200"})
    )
    assert diagnose_command.run(arguments(str(file), "--reference", "a quarter of a B200")) == 0
    said = capsys.readouterr().out
    assert said.startswith("state-bound: ")
    assert "(without --mamba-radix-cache-strategy extra_buffer)" in said


def test_by_hand_on_what_is_no_telemetry(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        diagnose_command.run(arguments(str(tmp_path / "absent.jsonl")))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        diagnose_command.run(arguments(str(tmp_path / "bytes.jsonl")))
