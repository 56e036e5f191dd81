"""The tuner on the real workflow: stand-in servers that hold as many requests as a hybrid model's on two H200s would.

The driver is made up (a `nvidia-smi` that names two GPUs), and so is the pace; what is tried, measured, adopted and
kept is the product's.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import tiny_model
from harness import Run

from draftmill.fleet.locks import Lock

pytestmark = pytest.mark.slow

SHAPE = Path(__file__).parents[1] / "recordings" / "qwen3.6-27b-shape.config.json"
GPUS = ("GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002")
NVIDIA_SMI = f"""#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA H200 (UUID: {GPUS[0]})"
    echo "GPU 1: NVIDIA H200 (UUID: {GPUS[1]})";;
*) echo "{GPUS[0]}, NVIDIA H200, 143771"
   echo "{GPUS[1]}, NVIDIA H200, 143771";;
esac
"""
# The recordings' figures for all defaults (249 state slots, of which a request takes 4 of its 5) and radix cache off.
HYBRID = {
    "slots": 49,
    "slots_without_radix": 248,
    "state_slots": 248,
    "slots_per_request": 4,
    "start_s": 3.0,
    "lengths": {"median": 250, "mean": 350, "cap": 700, "min": 20},
}
PATIENCE_S = 400.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Two GPUs, the model's shape, and `auto` among the server's flags."""
    model = tiny_model.make(tmp_path / "model")
    shutil.copy(SHAPE, model / "config.json")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    made = Run(
        tmp_path / "run",
        model,
        settings={
            "shards": 2,
            "sampling": {"max_tokens": 700},
            "operation": {
                "server": {"flags": ["auto"], "start_timeout_s": 60, "stall_s": 30},
                "client": {"request_timeout_s": 120},
                "tune": {"budget_s": 30},
            },
        },
        standin=HYBRID,
    )
    made.environment["PATH"] = f"{tools}:{made.env()['PATH']}"
    made.prompts(harness.conversations(1800))
    yield made
    made.stop_all()


def measurements(run: Run) -> list[dict[str, Any]]:
    lines = (run.results / "tuning" / "measurements.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


def starts(run: Run) -> list[float]:
    """When a server was found starting (unix s), of all servers."""
    return [
        sample["t"]
        for path in run.results.glob("fleet/*/*.telemetry.jsonl")
        for sample in map(json.loads, path.read_text().splitlines()[1:])
        if sample["state"] == "starting"
    ]


def test_a_run_with_auto_measures_on_its_own_first_turns_and_goes_on_with_what_was_best(run: Run) -> None:
    assert run.finish("results/merged.parquet", timeout_s=PATIENCE_S, leases=2) == 0, run.log().read_text()[
        -3000:
    ]

    winner = json.loads((run.results / "tuning" / "winner.json").read_text())
    assert winner["circumstances"]["asked"] == [] and "--disable-radix-cache" in winner["flags"]
    assert winner["tok_s"] > 1.5 * winner["asked_tok_s"]
    by_name = {one["name"]: one for one in measurements(run)}
    asked = by_name["as asked"]
    assert (asked["capacity"], asked["verdict"]) == (49, "state-bound")
    assert "49 running of at most 49" in asked["evidence"]
    assert asked["expected_capacity"] == pytest.approx(49, abs=1)
    assert len(by_name) == len(measurements(run)) >= 2, "a setting was measured twice"
    # both GPUs' rates were taken at the same time, and no server started meanwhile
    windows = [(one["measured_at"] - one["seconds"], one["measured_at"]) for one in measurements(run)[:2]]
    assert abs(windows[0][0] - windows[1][0]) < 5
    started = starts(run)
    assert started and not any(begin < t < end for begin, end in windows for t in started)
    # the servers of the run itself use it
    states = [json.loads(path.read_text()) for path in run.results.glob("fleet/*/*.json")]
    assert any("--disable-radix-cache" in state["flags"] and state["trial"] is None for state in states)
    # what to expect stood in the log before the run's own servers started
    logs = "".join(path.read_text() for path in (run.results / "logs" / "generate").glob("*.log"))
    assert logs.count("expected of each server") == 1 and "radix cache off" in logs
    # what was measured on is in the dataset, and nothing was asked twice
    accounts = run.validation()
    assert accounts["turns"] == accounts["accepted"] + accounts["rejected"]
    answered = Counter(e["key"] for e in run.requests() if e["event"] == "finish" and harness.sound(e))
    assert max(answered.values()) == 1
    assert 0 < sum(one["answers"] for one in measurements(run)) < accounts["turns"]


def test_a_second_tune_goes_on_where_the_first_stopped(run: Run) -> None:
    run.prompts(harness.conversations(4000))
    run.configure(harness.over(run.settings, {"operation": {"tune": {"budget_s": 1}}}))
    assert run.finish("tune", timeout_s=PATIENCE_S, leases=2) == 0, run.log().read_text()[-3000:]
    first = measurements(run)
    assert [one["name"] for one in first] == ["as asked"]
    run.configure(harness.over(run.settings, {"operation": {"tune": {"budget_s": 15}}}))
    assert run.finish("tune", timeout_s=PATIENCE_S, leases=2) == 0, run.log().read_text()[-3000:]
    second = measurements(run)
    assert second[:1] == first and len(second) > 1
    assert all(one["name"] != "as asked" for one in second[1:])


def test_a_server_that_shows_no_metrics_has_failed_and_holds_up_nobody(run: Run) -> None:
    run.prompts(harness.conversations(4000))  # the silent server answers on, until it counts as failed
    run.behave({**HYBRID, "faults": [{"fault": "metrics_vanish", "answers": 20, "starts": [2]}]})
    assert run.finish("tune", timeout_s=PATIENCE_S, leases=2) == 0, run.log().read_text()[-3000:]
    asked, silent = sorted(measurements(run)[:2], key=lambda one: one["name"] != "as asked")
    assert (asked["name"], asked["outcome"], silent["outcome"]) == ("as asked", "measured", "failed")
    assert silent["detail"].startswith("its server failed: 404")
    winner = json.loads((run.results / "tuning" / "winner.json").read_text())
    assert winner["flags"] != silent["flags"]


def test_a_gpu_that_is_taken_and_a_setting_that_does_not_start_hold_up_nothing(run: Run) -> None:
    run.prompts(harness.conversations(4000))
    run.behave({**HYBRID, "faults": [{"fault": "crash_at_start", "s": 0.5, "cause": "oom", "starts": [2]}]})
    gpus = run.runtime / "gpus"
    gpus.mkdir(parents=True)
    held = Lock(gpus / f"{GPUS[1]}.lock")
    assert held.take()
    run.configure(harness.over(run.settings, {"operation": {"tune": {"budget_s": 120}}}))
    assert run.finish("tune", timeout_s=PATIENCE_S, leases=2) == 0, run.log().read_text()[-3000:]
    asked, broken, next_one = measurements(run)[:3]
    assert (asked["name"], asked["outcome"]) == ("as asked", "measured")
    assert broken["outcome"] == "failed" and "out of memory" in broken["detail"]
    assert next_one["outcome"] == "measured"
    text = (run.results / "logs" / "tune.log").read_text()
    assert f"waiting for {GPUS[1]}, which another run of this user holds" in text


def test_where_the_turns_run_out_no_further_server_starts_and_nothing_counts_as_measured(run: Run) -> None:
    run.prompts(harness.conversations(60))
    assert run.finish("results/merged.parquet", timeout_s=PATIENCE_S, leases=2) == 0, run.log().read_text()[
        -3000:
    ]
    assert not (run.results / "tuning" / "measurements.jsonl").exists()
    assert json.loads((run.results / "tuning" / "winner.json").read_text())["flags"] == []
    assert run.starts() <= 4, "two that measured, two of the run itself"
    accounts = run.validation()
    assert accounts["turns"] == accounts["accepted"] + accounts["rejected"]
