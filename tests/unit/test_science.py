"""A run over old results says what changed in the science, and nothing about the rest."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from draftmill import config as settings
from draftmill import science
from draftmill.errors import UserError


@pytest.fixture
def config() -> settings.Config:
    return settings.resolve({"prompts": {"files": ["some.jsonl"]}})


def test_the_first_run_has_changed_nothing(tmp_path: Path, config: settings.Config) -> None:
    assert science.record(config, tmp_path) == []
    assert science.recorded(tmp_path) == config
    assert science.record(config, tmp_path) == []


def test_every_changed_value_is_named_with_both_values(tmp_path: Path, config: settings.Config) -> None:
    science.record(config, tmp_path)
    changed: dict[str, Any] = copy.deepcopy(config)
    changed["sampling"]["temperature"] = 0.7
    changed["prompts"]["files"] = ["größe.jsonl"]
    changed["seed"] = 5
    assert science.record(changed, tmp_path) == [
        'prompts.files: ["some.jsonl"] -> ["größe.jsonl"]',
        "sampling.temperature: null -> 0.7",
        "seed: 0 -> 5",
    ]
    assert science.record(changed, tmp_path) == [], "said once"
    assert science.record(config, tmp_path)[2] == "seed: 5 -> 0"


def test_operation_is_kept_and_not_spoken_of(tmp_path: Path, config: settings.Config) -> None:
    science.record(config, tmp_path)
    changed: dict[str, Any] = copy.deepcopy(config)
    changed["operation"]["client"]["concurrency"] = 3
    assert science.record(changed, tmp_path) == []
    assert science.recorded(tmp_path)["operation"]["client"]["concurrency"] == 3


def test_overrides_of_the_model_are_compared_value_by_value(tmp_path: Path, config: settings.Config) -> None:
    science.record(config, tmp_path)
    changed: dict[str, Any] = copy.deepcopy(config)
    changed["model"]["overrides"] = {"rope_scaling": {"factor": 4}}
    assert science.record(changed, tmp_path) == ['model.overrides.rope_scaling: null -> {"factor": 4}']
    further: dict[str, Any] = copy.deepcopy(changed)
    further["model"]["overrides"]["rope_scaling"]["factor"] = 2
    assert science.record(further, tmp_path) == ["model.overrides.rope_scaling.factor: 4 -> 2"]
    assert science.record(config, tmp_path) == ['model.overrides.rope_scaling: {"factor": 2} -> null']


def test_a_key_of_another_version_counts_as_unset(tmp_path: Path, config: settings.Config) -> None:
    old: dict[str, Any] = copy.deepcopy(config)
    del old["sampling"]["min_p"]
    (tmp_path / science.FILE).write_text(json.dumps(old))
    assert science.record(config, tmp_path) == []  # null then, null now
    assert science.recorded(tmp_path) == config


def test_results_without_a_run_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run that has begun"):
        science.recorded(tmp_path)
