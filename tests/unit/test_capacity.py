"""The capacity model: against real servers' logs, against known models, and its laws."""

import argparse
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import capacity_command
from draftmill.architecture import Architecture, read_architecture
from draftmill.candidates import as_json, candidates, reference_tok_s, table
from draftmill.capacity import Workload, capacity, roofline
from draftmill.errors import UserError
from draftmill.gpus import GIB, GPUS, parse_reference
from draftmill.server_flags import (
    STRATEGIES,
    UNKNOWN,
    Dialect,
    dialect_of_help,
    dialect_of_version,
    read_flags,
    refusals,
    with_flags,
)
from draftmill.throughput import estimate

RECORDINGS = Path(__file__).parents[1] / "recordings"
QWEN = read_architecture(json.loads((RECORDINGS / "qwen3.6-27b-shape.config.json").read_text()))
LLAMA_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA = read_architecture(LLAMA_CONFIG)
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
OLD, NEW = dialect_of_version("0.5.15.post1"), dialect_of_version("0.5.23")
ASKED = "--mem-fraction-static 0.61 --mamba-ssm-dtype bfloat16"
LOAD = Workload(prompt_tokens=200, output_tokens=500, output_cv=0.289)  # uniform between 250 and 750


def startup(name: str) -> dict[str, float]:
    """What a recorded server says that it allocated."""
    log = gzip.decompress((RECORDINGS / f"{name}.startup.log.gz").read_bytes()).decode()
    found = re.findall(r"(max_mamba_cache_size|max_total_num_tokens|max_running_requests)[:=] ?(\d+)", log)
    weights = re.search(r"Load weight end.*mem usage=([\d.]+) GB", log)
    assert weights is not None
    return {**{key: int(value) for key, value in found}, "weights": float(weights[1]) * GIB}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("extra", "--mamba-scheduler-strategy extra_buffer"),
        ("nobuf", "--mamba-scheduler-strategy no_buffer --disable-overlap-schedule"),
        ("radixoff", "--disable-radix-cache"),
    ],
)
def test_a_recorded_server_is_foretold(name: str, flags: str) -> None:
    real = startup(name)
    have = capacity(QWEN, H200.memory_bytes, read_flags(f"{ASKED} {flags}"), LOAD, OLD)
    assert not have.refusals
    assert have.max_running == real["max_running_requests"]
    assert have.running == have.max_running and have.limit == "state slots"
    assert have.state_slots == pytest.approx(real["max_mamba_cache_size"], rel=0.03)
    assert have.kv_tokens == pytest.approx(real["max_total_num_tokens"], rel=0.01)
    assert have.weight_bytes == pytest.approx(real["weights"], rel=0.01)


@pytest.mark.parametrize(
    ("flags", "slots", "running"),
    [  # sglang-facts.md; running of the sixth: its state use of 0.80 of 355 slots
        (f"{ASKED} --mamba-radix-cache-strategy extra_buffer", 224, 44),
        (f"{ASKED} --mamba-radix-cache-strategy extra_buffer_lazy", 224, 56),
        (f"{ASKED} --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule", 224, 74),
        (f"{ASKED} --disable-radix-cache", 224, 224),
        (f"{ASKED} --disable-radix-cache --mamba-full-memory-ratio 3", 355, 284),
        ("", 249, 49),
        ("--disable-radix-cache", 248, 248),
    ],
)
def test_the_measured_table(flags: str, slots: int, running: int) -> None:
    have = capacity(QWEN, H200.memory_bytes, read_flags(flags), LOAD, OLD)
    assert have.state_slots == pytest.approx(slots, rel=0.03)
    assert have.running == pytest.approx(running, rel=0.03)


def test_the_time_model_ranks_as_measured() -> None:
    measured = {
        f"{ASKED} --mamba-radix-cache-strategy extra_buffer": 1520,
        f"{ASKED} --mamba-radix-cache-strategy extra_buffer_lazy": 1618,
        f"{ASKED} --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule": 1962,
        f"{ASKED} --disable-radix-cache": 3509,
        "": 1436,
        "--disable-radix-cache": 3253,
    }
    rates = {}
    for text in measured:
        flags = read_flags(text)
        rates[text] = estimate(
            QWEN, H200, flags, LOAD, capacity(QWEN, H200.memory_bytes, flags, LOAD, OLD), OLD
        ).tok_s
    assert sorted(rates, key=rates.__getitem__) == sorted(measured, key=measured.__getitem__)
    assert rates == {text: pytest.approx(rate, rel=0.15) for text, rate in measured.items()}


def test_figures_of_the_shape() -> None:
    assert QWEN.state is not None
    assert QWEN.state.bytes_per_slot(4) == 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    assert QWEN.kv_bytes_per_token(2) == 64 * 1024
    assert QWEN.attention_layers == 16 and QWEN.state.layers == 48


def config(**other: object) -> dict[str, object]:
    return {**LLAMA_CONFIG, **other}


@pytest.mark.parametrize(
    ("shape", "billions", "active"),
    [
        (LLAMA_CONFIG, 8.030, 7.505),
        (
            config(
                architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4,
                head_dim=128, vocab_size=151936, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
                num_experts_per_tok=8,
            ),
            30.53, 3.04,
        ),
        (
            config(
                architectures=["Qwen3NextForCausalLM"], hidden_size=2048, num_hidden_layers=48, num_attention_heads=16,
                num_key_value_heads=2, head_dim=256, vocab_size=151936, intermediate_size=5120,
                moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
                num_experts_per_tok=10, linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128,
                linear_value_head_dim=128, full_attention_interval=4,
            ),
            79.67, 3.56,
        ),
        (
            config(
                architectures=["NemotronHForCausalLM"], hidden_size=4480, num_attention_heads=40, head_dim=128,
                hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", vocab_size=131072,
                intermediate_size=15680, mamba_num_heads=128, mamba_head_dim=80, n_groups=8, ssm_state_size=128,
                conv_kernel=4,
            ),
            8.89, 8.30,
        ),
        (
            config(
                architectures=["DeepseekV3ForCausalLM"], hidden_size=7168, num_hidden_layers=61,
                num_attention_heads=128, vocab_size=129280, intermediate_size=18432, moe_intermediate_size=2048,
                n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
                kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            ),
            671.0, 36.6,
        ),
    ],
    ids=["Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "Nemotron-Nano-9B-v2", "DeepSeek-V3"],
)  # fmt: skip
def test_parameters_of_known_models(shape: dict[str, object], billions: float, active: float) -> None:
    read = read_architecture(shape)
    assert read.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert read.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


def test_cache_bytes_of_latent_and_grouped_attention_and_of_tensor_parallelism() -> None:
    latent = read_architecture(
        config(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=61
        )
    )
    assert latent.kv_bytes_per_token(2) == latent.kv_bytes_per_token(2, 8) == 61 * 576 * 2
    assert LLAMA.kv_bytes_per_token(2) == 131072
    assert LLAMA.kv_bytes_per_token(1, 4) == 131072 // 8
    assert LLAMA.kv_bytes_per_token(2, 16) == 131072 // 8  # 8 heads on 16 GPUs: replicated
    assert QWEN.state is not None and QWEN.state.bytes_per_slot(2, 4) * 4 == QWEN.state.bytes_per_slot(2)


@pytest.mark.parametrize(
    ("given", "bytes_per_parameter"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq"}, 0.52),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            1.0,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
    ],
)
def test_quantized_weights(given: dict[str, object], bytes_per_parameter: float) -> None:
    read = read_architecture(config(quantization_config=given))
    assert read.weight_bytes() == pytest.approx(read.matrices * bytes_per_parameter + read.kept * 2, rel=0.01)


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"])
def test_a_config_without_a_size_is_named(missing: str) -> None:
    with pytest.raises(UserError, match=missing):
        read_architecture({key: value for key, value in LLAMA_CONFIG.items() if key != missing})


def test_unknown_layers_and_quantization_are_named() -> None:
    with pytest.raises(UserError, match="retention"):
        read_architecture(config(layer_types=["retention"] * 32))
    with pytest.raises(UserError, match="exotic"):
        read_architecture(config(quantization_config={"quant_method": "exotic"})).weight_bytes()


flag_texts = st.builds(
    lambda radix, strategy, overlap, ratio, dtype: " ".join(
        [
            *(["--disable-radix-cache"] if not radix else []),
            f"--mamba-radix-cache-strategy={strategy}",
            *(["--disable-overlap-schedule"] if not overlap else []),
            f"--mamba-full-memory-ratio {ratio:.3f}",
            f"--mamba-ssm-dtype {dtype}",
        ]
    ),
    st.booleans(),
    st.sampled_from(STRATEGIES),
    st.booleans(),
    st.floats(0.1, 5),
    st.sampled_from(["float32", "bfloat16"]),
)
memories = st.integers(60 * GIB, 300 * GIB)


@given(flag_texts, memories, st.integers(0, 40 * GIB), st.sampled_from([OLD, NEW]))
def test_more_memory_never_holds_less(text: str, memory: int, more: int, dialect: Dialect) -> None:
    flags = with_flags(read_flags(text), "--mem-fraction-static", "0.9")
    small, large = (capacity(QWEN, size, flags, LOAD, dialect) for size in (memory, memory + more))
    assert (large.state_slots or 0) >= (small.state_slots or 0)
    # One slot more may take its memory from the tokens.
    slack = (small.state_bytes_per_slot or 0) // small.kv_bytes_per_token + 1
    assert large.kv_tokens >= small.kv_tokens - slack
    assert large.max_running >= small.max_running - slack


@given(flag_texts, st.floats(0.1, 5), memories)
def test_a_larger_ratio_trades_tokens_for_slots(text: str, ratio: float, memory: int) -> None:
    first = with_flags(read_flags(text), "--mem-fraction-static", "0.9")
    second = with_flags(first, "--mamba-full-memory-ratio", f"{first.mamba_ratio + ratio:.3f}")
    a, b = (capacity(QWEN, memory, flags, LOAD, OLD) for flags in (first, second))
    assert (b.state_slots or 0) >= (a.state_slots or 0)
    assert b.kv_tokens <= a.kv_tokens


@given(flag_texts, memories, st.sampled_from([OLD, NEW]))
def test_a_smaller_state_never_holds_fewer_slots(text: str, memory: int, dialect: Dialect) -> None:
    wide, narrow = (
        capacity(QWEN, memory, with_flags(read_flags(text), "--mamba-ssm-dtype", dtype), LOAD, dialect)
        for dtype in ("float32", "bfloat16")
    )
    assert (narrow.state_slots or 0) >= (wide.state_slots or 0)
    assert narrow.max_running >= wide.max_running


@given(memories, st.sampled_from(["auto", "fp8_e4m3"]), st.sampled_from([1, 2, 4, 8]))
def test_a_smaller_cache_and_more_gpus_never_hold_fewer_tokens(memory: int, dtype: str, tp: int) -> None:
    plain = capacity(LLAMA, memory, read_flags(""), LOAD)
    other = capacity(
        LLAMA, memory, read_flags(f"--kv-cache-dtype {dtype} --tp {tp} --mem-fraction-static 0.95"), LOAD
    )
    assert other.kv_tokens >= plain.kv_tokens
    assert other.state_slots is None and other.slots_per_request is None


@given(flag_texts, memories)
def test_pools_never_hold_more_than_there_is(text: str, memory: int) -> None:
    have = capacity(QWEN, memory, read_flags(text), LOAD, OLD)
    if not have.refusals:
        used = (have.state_slots or 0) * (
            have.state_bytes_per_slot or 0
        ) + have.kv_tokens * have.kv_bytes_per_token
        assert have.weight_bytes + used <= memory * have.mem_fraction
        assert have.max_running > 0 and 0 <= have.running <= have.max_running


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_roofline_rises_and_levels_off(a: int, b: int) -> None:
    few, many = sorted((a, b))
    flags = read_flags("")
    low, high = (roofline(QWEN, H200, flags, LOAD, n) for n in (few, many))
    assert low.tok_s <= high.tok_s * 1.0001
    assert low.step_s <= high.step_s * 1.0001
    assert low.weight_bytes == pytest.approx(high.weight_bytes)


def test_experts_are_read_as_they_are_chosen() -> None:
    moe = read_architecture(
        config(
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            hidden_size=2048,
            num_hidden_layers=48,
        )
    )
    one, all_ = moe.read_bytes(1), moe.read_bytes(10**6)
    assert one == pytest.approx(2 * moe.active_parameters, rel=0.01)
    assert all_ == pytest.approx(moe.weight_bytes() - 2 * 128256 * 2048, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--mamba-radix-cache-strategy no_buffer", "--disable-overlap-schedule"),
        ("--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule --page-size 64", "page-size"),
        ("--mamba-radix-cache-strategy extra_buffer_lazy --disable-overlap-schedule", "overlap"),
        ("--mamba-radix-cache-strategy extra_buffer --disable-radix-cache", "radix"),
        ("--mamba-radix-cache-strategy extra_buffer --linear-attn-backend flashinfer", "triton"),
        ("--mamba-radix-cache-strategy buffer_extra", "buffer_extra"),
        ("--mem-fraction-static 0.2", "mem-fraction-static"),
        ("--enable-prefill-delayer --disable-overlap-schedule", "overlap"),
    ],
)
@pytest.mark.parametrize("dialect", [OLD, NEW, UNKNOWN], ids=["0.5.15", "0.5.23", "unknown"])
def test_what_sglang_refuses_is_foretold(flags: str, reason: str, dialect: Dialect) -> None:
    have = capacity(QWEN, H200.memory_bytes, read_flags(flags), LOAD, dialect)
    assert any(reason in sentence for sentence in have.refusals)


def test_the_recorded_refusal_is_one_of_ours() -> None:
    log = gzip.decompress((RECORDINGS / "nobuf-refused.log.gz").read_bytes()).decode()
    assert "no_buffer do not support overlap schedule" in log
    assert refusals(read_flags("--mamba-scheduler-strategy no_buffer"), OLD, QWEN.name, hybrid=True)


def test_each_version_by_its_own_names() -> None:
    old_name = read_flags("--mamba-scheduler-strategy extra_buffer")
    assert not refusals(old_name, OLD, QWEN.name, hybrid=True)
    assert any("--mamba-radix-cache-strategy" in s for s in refusals(old_name, NEW, QWEN.name, hybrid=True))
    early = dialect_of_help(
        "  --mamba-scheduler-strategy {auto,no_buffer,extra_buffer}\n  --disable-radix-cache"
    )
    assert early.strategy("no_buffer") == (
        "--mamba-scheduler-strategy",
        "no_buffer",
        "--disable-overlap-schedule",
    )
    assert early.strategy("extra_buffer_lazy") is None and not early.knows("--min-free-slots-delay")
    assert refusals(read_flags("--mamba-radix-cache-strategy auto"), early)


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--max-running-requests 500", "is cut to"),
        (
            "--disable-radix-cache --max-running-requests 300 --cuda-graph-max-bs 64",
            "decode graphs end at 64",
        ),
        ("--max-total-tokens 99999999", "is cut to"),
        ("--min-free-slots-delay 32", "is cut to 4"),
    ],
)
def test_clamps_are_foretold(flags: str, warning: str) -> None:
    have = capacity(QWEN, H200.memory_bytes, read_flags(flags), LOAD, OLD)
    assert any(warning in sentence for sentence in have.warnings)


def test_with_the_radix_cache_off_the_pool_is_what_was_asked() -> None:
    flags = read_flags(f"{ASKED} --disable-radix-cache --max-running-requests 100")
    have = capacity(QWEN, H200.memory_bytes, flags, LOAD, OLD)
    assert have.state_slots == have.max_running == 100
    freed = capacity(QWEN, H200.memory_bytes, read_flags(f"{ASKED} --disable-radix-cache"), LOAD, OLD)
    assert have.kv_tokens > freed.kv_tokens


@settings(max_examples=25)
@given(flag_texts, st.sampled_from([OLD, NEW, UNKNOWN]), st.booleans())
def test_no_candidate_is_one_that_the_engine_refuses(text: str, dialect: Dialect, allow: bool) -> None:
    found = candidates(QWEN, H200, read_flags(text), LOAD, dialect, allow_state_dtype=allow)
    for candidate in found[1:]:
        assert not candidate.capacity.refusals
        assert not refusals(candidate.flags, dialect, QWEN.name, hybrid=True)
        assert allow or not candidate.changes_answers
    assert [c.gain for c in found[1:]] == sorted((c.gain for c in found[1:]), reverse=True)


def test_the_best_candidate_turns_the_radix_cache_off_and_gathers_prefills() -> None:
    found = candidates(QWEN, H200, read_flags(""), LOAD, OLD)
    off = next(c for c in found if c.name == "radix cache off")
    assert off.gain == pytest.approx(2.27, rel=0.2)  # measured
    assert "--disable-radix-cache" in found[1].flags.asked
    assert found[1].gain > off.gain
    graphs = [c for c in found if c.capacity.running > 256]
    assert graphs and all(c.capacity.graph_max_batch >= c.capacity.running for c in graphs)


def test_a_prefix_cache_that_is_hit_keeps_its_place() -> None:
    shared = Workload(prompt_tokens=6000, output_tokens=200, cached_share=0.95)
    found = candidates(QWEN, H200, read_flags(""), shared, OLD)
    assert "--disable-radix-cache" not in found[1].flags.asked


def test_a_dense_model_has_candidates_of_its_own() -> None:
    found = candidates(LLAMA, H200, read_flags("--max-running-requests 32"), Workload(), NEW)
    assert found[1].gain > 2
    assert all("mamba" not in word and "radix" not in word for c in found for word in c.flags.asked)


def test_the_table_and_the_json_are_for_readers() -> None:
    found = candidates(QWEN, H200, read_flags("--mamba-radix-cache-strategy no_buffer"), LOAD, OLD)
    text = table(found)
    assert "refused: strategy no_buffer" in text and "est. tok/s" in text and "radix cache off" in text
    read = json.loads(json.dumps(as_json(found, H200, QWEN, LOAD), allow_nan=False))
    assert read["roofline"]["source"] == H200.source
    assert read["alternatives"][0]["gain"] >= 1


def test_a_reference_card_stands_for_a_rate() -> None:
    quarter, whole = (parse_reference(said) for said in ("a quarter of a B200", "B200"))
    assert quarter is not None and whole is not None
    due, all_ = (reference_tok_s(r, QWEN, LOAD, OLD) for r in (quarter, whole))
    assert due is not None and all_ is not None and due == pytest.approx(all_ / 4)
    assert reference_tok_s(quarter, None, LOAD) is None


@pytest.mark.parametrize(
    "flags", ["--mem-fraction-static", "--tp x", "--mem-fraction-static 1.5", "--tp 0", "'open"]
)
def test_flags_that_cannot_be_read_are_said(flags: str) -> None:
    with pytest.raises(UserError):
        read_flags(flags)


@given(
    st.lists(
        st.sampled_from(["--a", "b", "--tp 2", "--mem-fraction-static=0.5", "--disable-radix-cache"]),
        max_size=6,
    )
)
def test_setting_a_flag_anew_leaves_the_others(words: list[str]) -> None:
    text = " ".join(words)
    changed = with_flags(read_flags(text), "--tensor-parallel-size", "4")
    assert changed.tp == 4 and replace(changed, tp=read_flags(text).tp, asked=()) == replace(
        read_flags(text), asked=()
    )


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((RECORDINGS / "qwen3.6-27b-shape.config.json").read_text())
    import argparse

    parser = argparse.ArgumentParser()
    capacity_command.add_arguments(parser)
    asked = ["--model", str(tmp_path), "--gpu-memory-gb", "141", "--engine-version", "0.5.15.post1"]
    args = parser.parse_args([*asked, "--flags", f"{ASKED} --disable-radix-cache", "--json"])
    assert capacity_command.run(args) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["max_running"], read["state_slots"], read["slots_per_request"]) == (224, 224, 1)
    assert read["gpu"]["name"] == "H200"
    assert (
        capacity_command.run(parser.parse_args([*asked, "--flags", "--mamba-radix-cache-strategy no_buffer"]))
        == 0
    )
    assert "refused" in capsys.readouterr().out


def test_by_hand_with_what_is_not_there(tmp_path: Path) -> None:
    missing = SimpleNamespace(model=tmp_path, gpu=None, gpu_memory_gb=80, flags="", json=True)
    with pytest.raises(UserError, match=r"config\.json"):
        capacity_command.run(missing)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not given"):
        capacity_command.choose_gpu(None, None)
    with pytest.raises(UserError, match="X100"):
        capacity_command.choose_gpu("X100", 80)


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "many"])
def test_odd_numbers_by_hand_are_refused(text: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        capacity_command.positive(text)
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        capacity_command.positive_count(text)


def test_weights_on_disk_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16060522496}}')
    read, weights = capacity_command.read_model(tmp_path)
    assert isinstance(read, Architecture) and weights == 16060522496
    have = capacity(read, H200.memory_bytes, read_flags("--tp 2"), LOAD, OLD, weights)
    assert have.weight_bytes == 16060522496 // 2
