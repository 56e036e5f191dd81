"""The configuration as a user meets it: filled, refused with a sentence, and split into what decides which results."""

import copy
import re
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftmill import config, config_docs
from draftmill.errors import UserError
from draftmill.model import Model

SHIPPED = yaml.safe_load((config_docs.REPOSITORY / "config.yaml").read_text(encoding="utf-8"))


def resolved(**blocks: Any) -> config.Config:
    """The shipped configuration with some blocks' keys replaced."""
    raw = copy.deepcopy(SHIPPED)
    for name, block in blocks.items():
        if isinstance(block, dict):
            raw[name] |= block
        else:
            raw[name] = block
    return config.resolve(raw)


def model(context: int = 8192, *, thinking: bool = False, kind: str = "hf") -> Model:
    facts = SimpleNamespace(name="tiny", context_length=context, template_has_thinking=thinking, kind=kind)
    return cast(Model, facts)


def faults(cfg: config.Config, *, of: Model | None = None, gpus: int | None = 0) -> str:
    with pytest.raises(UserError) as error:
        config.check(cfg, of, gpus)
    return str(error.value)


def test_config_yaml_is_what_the_schema_says() -> None:
    assert (config_docs.REPOSITORY / "config.yaml").read_text(
        encoding="utf-8"
    ) == config_docs.config_yaml(), (
        "config.yaml differs from the schema: run `make docs`, or put the value into your own file"
    )


def test_documentation_is_what_the_schema_says() -> None:
    page = config_docs.REPOSITORY / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == config_docs.configuration_md(), "run `make docs`"


def test_every_key_is_typed_described_and_defaulted() -> None:
    for path, tree in config.paths():
        assert {"type", "enum", "anyOf"} & tree.keys(), path
        assert tree["description"].endswith("."), path
        assert "default" in tree, path
        if "properties" in tree:
            assert tree["additionalProperties"] is False, path


def test_shipped_values_are_defaults_but_for_the_demo() -> None:
    given, default = config.resolve(SHIPPED), config.resolve({})
    different = {
        path
        for path, tree in config.paths()
        if "properties" not in tree and look_up(given, path) != look_up(default, path)
    }
    assert different == {"prompts.files", "prompts.limit", "sampling.temperature", "sampling.top_p"}


def test_defaults_satisfy_the_schema() -> None:
    assert config.resolve(config.resolve({})) == config.resolve({})


def test_units_stand_in_names_or_descriptions() -> None:
    for path, tree in config.paths():
        name = path.rsplit(".", 1)[-1]
        if name.endswith("_s"):
            assert tree["description"].startswith("Seconds"), path
        if name.endswith(("_tokens", "_length")):
            assert "token" in tree["description"].lower() or "enum" in tree, path


def look_up(cfg: config.Config, path: str) -> Any:
    value: Any = cfg
    for name in path.split("."):
        value = value[name]
    return value


def test_missing_keys_and_empty_blocks_take_defaults() -> None:
    cfg = config.resolve({"sampling": None, "operation": {"server": None}})
    assert cfg["sampling"]["max_tokens"] == 512
    assert cfg["operation"]["server"]["stall_s"] == 300.0
    assert cfg["prompts"]["decontaminate"]["ngram"] == 13


def test_defaults_inside_lists_are_filled() -> None:
    cfg = resolved(prompts={"files": ["a.jsonl", {"path": "b.jsonl", "share": 0.5}]})
    assert cfg["prompts"]["files"] == ["a.jsonl", {"path": "b.jsonl", "share": 0.5, "name": None}]


def test_one_and_one_point_zero_are_the_same() -> None:
    whole, real = resolved(sampling={"temperature": 1}), resolved(sampling={"temperature": 1.0})
    assert config.generation_digest(whole) == config.generation_digest(real)
    assert resolved(shards=3.0)["shards"] == 3


def test_keys_that_yaml_reads_as_numbers_are_texts() -> None:
    assert resolved(sampling={"logit_bias": {220: 1}})["sampling"]["logit_bias"] == {"220": 1}


def test_environment_variables_are_texts() -> None:
    server = {"env": {"OMP_NUM_THREADS": 1, "A": "b"}}
    assert resolved(operation={"server": server})["operation"]["server"]["env"] == {
        "OMP_NUM_THREADS": "1",
        "A": "b",
    }


def test_days_that_yaml_reads_as_dates_are_texts() -> None:
    assert resolved(model={"template_date": date(2026, 1, 31)})["model"]["template_date"] == "2026-01-31"


def test_the_given_mapping_and_the_schema_stay_as_they_are() -> None:
    raw: config.Config = {"prompts": {"files": ["a.jsonl"]}}
    before = copy.deepcopy(raw)
    config.resolve(raw)["prompts"]["carry"].append("x")
    assert raw == before
    assert config.resolve(raw)["prompts"]["carry"] == []


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (
            {"sampling": {"temprature": 1}},
            "sampling.temprature is unknown; did you mean sampling.temperature?",
        ),
        ({"temperature": 1}, "temperature is unknown; did you mean sampling.temperature?"),
        ({"operation": {"gpus_per_servers": 2}}, "did you mean operation.gpus_per_server?"),
        ({"operation": {"server": {"stal_s": 3}}}, "did you mean operation.server.stall_s?"),
        ({"model": {"zzz": 1}}, "model.zzz is unknown; known here are path, revision,"),
        (
            {"prompts": {"files": [{"path": "a", "shar": 0.1}]}},
            "prompts.files[0].shar is unknown; did you mean",
        ),
        ({"sampling": {"temperature": "hot"}}, 'is the text "hot"; it must be a number at least 0 or null.'),
        ({"sampling": {"min_p": "1e-3"}}, "write it without quotes, as 0.001."),
        (
            {"sampling": {"temperature": float("nan")}},
            "sampling.temperature is nan; it must be a finite number.",
        ),
        (
            {"sampling": {"top_p": 1.5}},
            "sampling.top_p is 1.5; it must be a number above 0 and at most 1 or null.",
        ),
        (
            {"sampling": {"max_tokens": True}},
            "sampling.max_tokens is true; it must be a whole number at least 1.",
        ),
        (
            {"model": {"revision": 1234567}},
            "model.revision is 1234567; it must be a text or null. Put it in quotes.",
        ),
        ({"validation": {"truncated": "falg"}}, "Did you mean flag?"),
        ({"validation": {"loop": "retry_longer"}}, "it must be one of keep, flag, reject."),
        ({"prompts": {"files": "a.jsonl"}}, 'prompts.files is the text "a.jsonl"; it must be a list.'),
        ({"prompts": {"files": [{"share": 0.5}]}}, "prompts.files[0].path is missing. A file, a glob"),
        ({"prompts": {"files": [{"path": "a", "share": 1.5}]}}, "prompts.files[0].share is 1.5; it must be"),
        (
            {"prompts": {"thinking": 1.5}},
            "prompts.thinking is 1.5; it must be null, true or false or a number",
        ),
        ({"prompts": {"system_prompt": [{"text": "a"}]}}, "prompts.system_prompt[0].share is missing."),
        ({"operation": {"attach": ["localhost:30000"]}}, "it must be a text such as http://127.0.0.1:30000."),
        ({"sampling": {"logit_bias": {"the": 1}}}, "sampling.logit_bias has a key that is not a token id"),
        ({"dataset": {"formats": ["parquet", "parquet"]}}, "dataset.formats names something twice"),
        ({"prompts": {"decontaminate": {"benchmarks": ["gsm8"]}}}, "Did you mean gsm8k?"),
        (
            {"model": {"overrides": {"some": {1, 2}}}},
            "model.overrides.some is read as a set; put it in quotes",
        ),
        ({"model": {"template_date": "today"}}, "it must be a text of the form YYYY-MM-DD or null."),
        ({"sampling": [1]}, "sampling is [1]; it must be a block of keys."),
    ],
)
def test_faults_are_sentences(raw: config.Config, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        config.resolve(raw)
    assert str(error.value).startswith("config.yaml: ")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value), "one fault, one line"


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        config.resolve({"sed": 1, "sampling": {"top_k": 0.5, "topp": 1}}, source="mine.yaml")
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("mine.yaml: ") for line in lines)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
all_paths = [path for path, _ in config.paths()]


@given(st.dictionaries(st.sampled_from(all_paths), json_values, max_size=3))
def test_any_value_under_any_key_is_taken_or_refused_with_a_sentence(values: dict[str, Any]) -> None:
    raw: config.Config = {}
    for path, value in values.items():
        *blocks, name = path.split(".")
        place = raw
        for block in blocks:
            place = place.setdefault(block, {})
            if not isinstance(place, dict):
                return
        place[name] = value
    try:
        cfg = config.resolve(raw)
    except UserError as error:
        assert str(error).startswith("config.yaml: ")
    else:
        assert config.resolve(cfg) == cfg, "resolving again changes nothing"
        assert re.fullmatch("[0-9a-f]{32}", config.generation_digest(cfg))


def test_the_shipped_config_passes_without_warnings() -> None:
    assert config.check(resolved(), model(), 0) == []
    assert config.check(resolved(), None, None) == []
    assert config.check(resolved(), model(), 8) == []


@pytest.mark.parametrize("asked", [True, 0.3])
def test_thinking_needs_a_template_that_has_it(asked: bool | float) -> None:
    cfg = resolved(prompts={"thinking": asked})
    assert "the chat template of tiny has no thinking mode" in faults(cfg, of=model())
    assert config.check(cfg, model(thinking=True), 0) == []
    assert config.check(cfg, None, 0) == [], "not known before the model is there"
    assert config.check(resolved(prompts={"thinking": False}), model(), 0) == []


def test_max_tokens_within_the_context() -> None:
    cfg = resolved(sampling={"max_tokens": 8192})
    assert "sampling.max_tokens is 8192, but the context holds 8192 tokens" in faults(cfg, of=model(8192))
    assert config.check(cfg, model(16384), 0) == []
    short = resolved(sampling={"max_tokens": 512}, model={"context_length": 512})
    assert "the context holds 512 tokens" in faults(short)


def test_a_longer_context_than_the_models_needs_overrides() -> None:
    cfg = resolved(model={"context_length": 16384})
    assert "tiny was made for 8192" in faults(cfg, of=model(8192))
    cfg = resolved(model={"context_length": 16384, "overrides": {"rope_scaling": {"factor": 2}}})
    assert config.check(cfg, model(8192), 0) == []


def test_lengths_fit_each_other() -> None:
    assert "min_new_tokens is 600" in faults(resolved(sampling={"min_new_tokens": 600}))
    cfg = resolved(prompts={"context_policy": "shorten", "min_max_tokens": 1024})
    assert "prompts.min_max_tokens is 1024, above sampling.max_tokens (512)" in faults(cfg)


@pytest.mark.parametrize(
    ("gpus", "says"), [(1, "shows 1 GPUs; set it to 1"), (0, "shows no GPUs; set it to 1")]
)
def test_more_gpus_per_server_than_there_are(gpus: int, says: str) -> None:
    cfg = resolved(operation={"gpus_per_server": 2})
    assert says in faults(cfg, gpus=gpus)
    assert config.check(cfg, None, 2) == []
    assert config.check(cfg, None, None) == [], "the GPUs of a cluster's nodes are not known here"


def test_attach_and_engine_go_together() -> None:
    assert "lists no server" in faults(resolved(operation={"engine": "attach"}))
    address = ["http://127.0.0.1:30000"]
    assert "set operation.engine to attach" in faults(resolved(operation={"attach": address}))
    cfg = resolved(operation={"engine": "attach", "attach": address})
    assert config.check(cfg, None, 0) == []
    cfg["operation"]["server"]["flags"] = ["--disable-radix-cache"]
    assert "are not used with engine attach" in config.check(cfg, None, 0)[0]


def test_sglang_needs_a_gpu_or_its_cpu_settings(tmp_path: Path) -> None:
    cfg = resolved(operation={"engine": "sglang"}, model={"path": str(tmp_path)})
    assert "this machine shows no GPU" in faults(cfg)
    assert config.check(cfg, None, 1) == []
    cfg["operation"]["server"]["env"] = {"SGLANG_USE_CPU_ENGINE": "1"}
    assert config.check(cfg, None, 0) == []
    assert "which llama.cpp serves" in faults(resolved(operation={"engine": "sglang"}), gpus=1)


@pytest.mark.parametrize(
    "sampling",
    [{"stop_regex": ["a+"]}, {"stop_token_ids": [1]}, {"min_new_tokens": 4}, {"logit_bias": {"1": 2}}],
)
def test_what_only_sglang_takes_is_refused_for_llamacpp(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    cfg = resolved(sampling=sampling)
    assert f"sampling.{name} is not known to llama.cpp's server" in faults(cfg, of=model(kind="gguf"))
    assert config.check(cfg, model(kind="hf"), 1) == []
    cfg["operation"]["engine"] = "llamacpp"
    assert name in faults(cfg)


def test_a_hub_id_needs_a_revision() -> None:
    assert (
        "model.path Qwen/Qwen3-8B is no folder here, so it is read as a hub id, and model.revision is missing"
        in faults(resolved(model={"path": "Qwen/Qwen3-8B"}))
    )
    assert config.check(resolved(model={"path": "Qwen/Qwen3-8B", "revision": "0" * 40}), None, 0) == []
    (warning,) = config.check(resolved(model={"path": "Qwen/Qwen3-8B", "revision": "main"}), None, 0)
    assert "is no full commit id" in warning


@pytest.mark.parametrize("path", ["/nowhere/model", "./missing", "missing.gguf", "a/b.gguf"])
def test_a_model_path_must_exist(path: str) -> None:
    assert f"model.path {path} does not exist" in faults(resolved(model={"path": path}))


def test_a_chat_template_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "none.jinja"
    assert f"model.chat_template {missing} does not exist" in faults(
        resolved(model={"chat_template": str(missing)})
    )


def test_shares_add_up_to_one_at_most() -> None:
    mix = [{"text": "a", "share": 0.7}, {"text": "b", "share": 0.4}]
    assert "the shares add up to 1.1" in faults(resolved(prompts={"system_prompt": mix}))
    mix[1]["share"] = 0.3
    assert config.check(resolved(prompts={"system_prompt": mix}), None, 0) == []


def test_prompt_files_must_be_named() -> None:
    assert "prompts.files is empty" in faults(resolved(prompts={"files": []}))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--dtype float16",
            "has --dtype, which changes the answers; put its value into model.dtype instead.",
        ),
        (["--quantization=fp8"], "put its value into model.quantization instead."),
        (["--quantiz", "fp8"], "put its value into model.quantization instead."),
        (["--kv-cache-dtype fp8_e4m3"], "put its value into model.kv_cache_dtype instead."),
        (["--mamba-ssm-dtype bfloat16"], "put its value into model.state_dtype instead."),
        (["--enable-fp32-lm-head"], "move it to model.flags."),
        (["--port 30000"], "set operation.server.port instead."),
        (["--tp", "2"], "set operation.gpus_per_server instead."),
        (
            ["-ctk", "q8_0"],
            "has -ctk, which Draftmill sets itself: llama.cpp's KV cache stays at its default format;",
        ),
    ],
)
def test_flags_that_change_the_answers_are_refused_in_operation(flags: str | list[str], says: str) -> None:
    cfg = resolved()
    cfg["operation"]["server"]["flags"] = flags
    assert says in faults(cfg, gpus=1)


def test_operational_flags_pass() -> None:
    cfg = resolved(model={"flags": ["--enable-fp32-lm-head"]})
    cfg["operation"]["server"]["flags"] = [
        "--mem-fraction-static 0.9",
        "--disable-radix-cache",
        "--mamba-radix-cache-strategy=no_buffer",
        "--attention-backend",
        "triton",
        "--max-running-requests -1",
    ]
    assert config.check(cfg, None, 1) == []
    assert config.model_flags(cfg) == ("--enable-fp32-lm-head",)


def test_flags_are_taken_apart_as_a_shell_would() -> None:
    cfg = resolved()
    assert config.server_flags(cfg) == config.ServerFlags((), tuned=False)
    cfg["operation"]["server"]["flags"] = "auto"
    assert config.server_flags(cfg) == config.ServerFlags((), tuned=True)
    cfg["operation"]["server"]["flags"] = ["auto", "--a '1 2'", "--b"]
    assert config.server_flags(cfg) == config.ServerFlags(("--a", "1 2", "--b"), tuned=True)
    cfg["operation"]["server"]["flags"] = "--a '1"
    assert "check its quotes" in faults(cfg)


def test_sampling_is_the_users_else_the_models_else_neutral() -> None:
    cfg = resolved(sampling={"temperature": 0.2, "top_p": None})
    sent = config.sampling(
        cfg, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True, "eos_token_id": 1}
    )
    assert sent["temperature"] == 0.2
    assert (sent["top_k"], sent["top_p"]) == (20, 0.8)
    assert sent["min_p"] == 0.0
    assert sent["repetition_penalty"] == 1.0
    assert sent["max_tokens"] == 512
    assert None not in sent.values()
    assert config.sampling(cfg, {"top_k": 0, "top_p": None})["top_k"] == -1


DIGESTS = {
    "model": config.model_digest,
    "prompts": config.prompts_digest,
    "generation": config.generation_digest,
    "validation": config.validation_digest,
    "dataset": config.dataset_digest,
}


@pytest.mark.parametrize(
    ("change", "concerns"),
    [
        ({"seed": 1}, {"prompts", "generation", "dataset"}),
        ({"shards": 3}, {"prompts"}),
        ({"model": {"dtype": "bfloat16"}}, {"model", "prompts", "generation"}),
        ({"model": {"flags": ["--enable-fp32-lm-head"]}}, {"model", "prompts", "generation"}),
        ({"prompts": {"limit": 20}}, {"prompts"}),
        ({"prompts": {"carry": ["topic"]}}, {"prompts"}),
        ({"prompts": {"samples": 2}}, {"prompts", "generation"}),
        ({"sampling": {"temperature": 0.5}}, {"generation"}),
        ({"sampling": {"max_tokens": 256}}, {"prompts", "generation"}),
        ({"validation": {"truncated": "keep"}}, {"validation"}),
        ({"validation": {"truncated": "reject"}}, {"validation", "generation"}),
        ({"validation": {"truncated": "retry_longer"}}, {"validation", "generation"}),
        ({"validation": {"min_supervised_tokens": 14}}, {"validation", "generation"}),
        ({"validation": {"retry_longer_factor": 3}}, {"validation"}),
        ({"validation": {"max_length": 4096}}, {"validation"}),
        ({"validation": {"duplicate_answer": "reject"}}, {"validation"}),
        ({"validation": {"reject_limit": 0.9}}, set()),
        ({"dataset": {"validation_share": 0.1}}, {"dataset"}),
        ({"operation": {"cpu_servers": 2, "engine": "llamacpp", "price_per_gpu_hour": 2}}, set()),
    ],
)
def test_a_change_reaches_just_the_results_it_concerns(change: config.Config, concerns: set[str]) -> None:
    before, after = resolved(), resolved(**change)
    assert {name for name, digest in DIGESTS.items() if digest(before) != digest(after)} == concerns


def test_science_is_all_but_operation() -> None:
    cfg = resolved()
    assert config.science(cfg).keys() == cfg.keys() - {"operation"}
    assert config.science(cfg) == config.science(resolved(operation={"cpu_servers": 4}))
