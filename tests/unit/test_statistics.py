import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.synthetic_run import write_run

from draftmill.phases import tokens_until
from draftmill.records import read_servers, read_sessions, read_telemetry, read_turns
from draftmill.statistics import account, duration, summary_lines, throughput

Account = dict[str, Any]


def counted(results: Path, operation: dict[str, object] | None = None) -> tuple[Account, pl.DataFrame]:
    fleet = results / "fleet"
    turns = read_turns(sorted((results / "generated").glob("*.parquet")))
    return account(turns, read_telemetry(fleet), read_servers(fleet), read_sessions(fleet), operation or {})


def test_totals_are_those_of_the_rows_and_rates_follow_from_them(tmp_path: Path) -> None:
    turns = write_run(tmp_path)
    result, _ = counted(tmp_path, {"price_per_gpu_hour": 3.0})
    tokens = sum(turn.output_tokens for turn in turns)
    assert (result["turns"], result["output_tokens"]) == (len(turns), tokens)
    assert result["output_tokens_per_s"] == pytest.approx(tokens / result["wall_s"])
    assert result["output_tokens_per_s_per_gpu"] == pytest.approx(result["output_tokens_per_s"] / 2)
    assert result["gpu_hours"] == pytest.approx(2 * result["wall_s"] / 3600)
    assert result["gpu_hours_per_million_output_tokens"] == pytest.approx(result["gpu_hours"] / tokens * 1e6)
    assert result["cost"] == pytest.approx(3.0 * result["gpu_hours"])
    assert result["cache_hit_rate"] == pytest.approx(0.5, abs=0.02)
    assert [server["output_tokens"] for server in result["servers"]] == [
        sum(turn.output_tokens for turn in turns if turn.server.endswith(slot)) for slot in ("slot0", "slot1")
    ]
    assert sum(shard["output_tokens"] for shard in result["shards"]) == tokens


def test_steady_state_is_told_from_startup_ramp_and_drain(tmp_path: Path) -> None:
    write_run(tmp_path, turns=200, tokens_per_s=20.0, capacity=4, servers=2)
    result, _ = counted(tmp_path)
    assert result["steady_state"]["output_tokens_per_s"] == pytest.approx(2 * 4 * 20.0, rel=0.01)
    assert result["output_tokens_per_s"] < result["steady_state"]["output_tokens_per_s"]
    assert result["utilisation_before_drain"] > result["utilisation"] > 0.8
    assert sum(result["shares"].values()) == pytest.approx(1.0)
    assert result["shares"]["startup"] == pytest.approx((3.0 + 6.0) / (2 * result["wall_s"]), rel=0.1)


def test_a_resumed_run_adds_up_and_names_its_pause(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", turns=120)
    write_run(tmp_path / "resumed", turns=120, pause_s=(7200.0,))
    whole, _ = counted(tmp_path / "whole")
    resumed, table = counted(tmp_path / "resumed")
    assert whole["pauses"] == [] and len(resumed["parts"]) == 2
    assert [pause["seconds"] for pause in resumed["pauses"]] == [pytest.approx(7200, abs=5)]
    assert resumed["output_tokens"] == whole["output_tokens"]
    assert resumed["wall_s"] == pytest.approx(sum(part["wall_s"] for part in resumed["parts"]))
    assert resumed["wall_s"] < 2 * whole["wall_s"]
    assert table["output_tokens"].sum() == pytest.approx(whole["output_tokens"])
    assert table["elapsed_s"].max() <= resumed["wall_s"]


def test_the_table_over_time_holds_every_token_once(tmp_path: Path) -> None:
    turns = write_run(tmp_path)
    _, table = counted(tmp_path)
    assert table["output_tokens"].sum() == pytest.approx(sum(turn.output_tokens for turn in turns))
    assert table["prompt_tokens"].sum() == sum(turn.prompt_tokens for turn in turns)
    assert table["turns"].sum() == len(turns)
    assert table.filter(pl.col("running") > 4).is_empty() and set(table["server"]) == {
        "node1/slot0",
        "node1/slot1",
    }


def test_servers_and_clients_agree_or_the_reason_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    result, _ = counted(tmp_path)
    assert result["token_agreement"]["agrees"] is True and result["token_agreement"]["reason"] is None

    (tmp_path / "fleet/node1/slot1.telemetry.jsonl").unlink()
    result, _ = counted(tmp_path)
    assert result["token_agreement"]["agrees"] is False
    assert result["token_agreement"]["reason"] == "no counters of node1/slot1"

    (tmp_path / "fleet/node1/slot0.telemetry.jsonl").unlink()
    result, _ = counted(tmp_path)
    assert result["token_agreement"]["agrees"] is None
    assert "no server counters were recorded" in result["token_agreement"]["reason"]
    assert 0.5 < result["utilisation"] <= 1.0, "known from the turns alone"


def test_tokens_of_turns_sent_again_are_the_servers_only(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "generated/0-of-2.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows[:10]:
        row["attempts"], row["output_ids"] = 2, row["output_ids"][:8]
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    for events in (tmp_path / "fleet/node1/clients").glob("*.jsonl"):
        events.unlink()
    result, _ = counted(tmp_path)
    assert result["retries"] == 10
    assert "10 turns were sent again" in result["token_agreement"]["reason"]


def test_work_for_another_dataset_is_left_out_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, turns=40, pause_s=(3600.0,))
    full, _ = counted(tmp_path)
    for path in (tmp_path / "generated").glob("0-*.parquet"):
        path.unlink()  # the first part's turns belong to other keys now
    result, _ = counted(tmp_path)
    assert len(result["parts"]) == 1 and len(result["left_out"]) == 1 and result["pauses"] == []
    assert result["wall_s"] < full["wall_s"]


def test_a_restart_is_counted_and_its_time_is_down(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "fleet/node1/slot0.telemetry.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    for sample in samples[20:30]:
        sample["state"], sample["running"] = "restarting", None
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    result, table = counted(tmp_path)
    assert result["restarts"] == 1 and table["restarts"].sum() == 1
    assert result["shares"]["down"] == pytest.approx(10 / (2 * result["wall_s"]), rel=0.2)
    assert sum(result["shares"].values()) == pytest.approx(1.0)


def test_a_run_without_any_answer_has_figures_too(tmp_path: Path) -> None:
    write_run(tmp_path)
    for path in (tmp_path / "generated").glob("*.parquet"):
        table = pq.read_table(path)
        rows = [
            row | {"outcome": "refused", "output_ids": [], "finish_reason": ""} for row in table.to_pylist()
        ]
        pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    result, _ = counted(tmp_path)
    assert result["turns"] == 0 and result["output_tokens_per_s"] == 0.0
    assert result["outcomes"] == {"refused": 60}
    json.dumps(result, allow_nan=False)


def test_a_run_shorter_than_its_slots_says_that_it_has_no_steady_state(tmp_path: Path) -> None:
    write_run(tmp_path, turns=6)
    result, _ = counted(tmp_path)
    assert result["steady_state"]["output_tokens_per_s"] is None
    assert "too short" in result["steady_state"]["reason"]


def test_cpu_servers_count_as_devices(tmp_path: Path) -> None:
    write_run(tmp_path, gpus=False)
    result, _ = counted(tmp_path)
    assert (result["gpus"], result["devices"], result["device"]) == (0, 2, "cpu server")
    assert result["output_tokens_per_s_per_gpu"] == pytest.approx(result["output_tokens_per_s"] / 2)


def test_files_are_written_and_summed_up_in_three_lines(tmp_path: Path) -> None:
    write_run(tmp_path)
    generated = sorted((tmp_path / "generated").glob("*.parquet"))
    throughput(
        generated, tmp_path / "fleet", {}, tmp_path / "throughput.json", tmp_path / "throughput.parquet"
    )
    (tmp_path / "validation.json").write_text(
        '{"accepted": 58, "rejected": 2, "reasons": {"too_few_supervised": 2}}'
    )
    needed = {
        "turns",
        "prompt_tokens",
        "output_tokens",
        "wall_s",
        "output_tokens_per_s",
        "output_tokens_per_s_per_gpu",
        "gpu_hours_per_million_output_tokens",
        "servers",
    }
    result = json.loads((tmp_path / "throughput.json").read_text())
    assert needed <= result.keys()
    keys = {"engine", "version", "flags", "effective_capacity", "restarts", "output_tokens"}
    assert all(keys <= server.keys() for server in result["servers"])
    assert pl.read_parquet(tmp_path / "throughput.parquet").height > 0
    lines = summary_lines(tmp_path)
    assert (
        len(lines) == 3
        and "58 rows accepted, 2 rejected, most for too_few_supervised" in lines[0]
        and "tok/s" in lines[1]
    )
    assert not list(tmp_path.glob("*.part"))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 100), st.integers(0, 5000)), min_size=1, max_size=30)
)
def test_spread_tokens_sum_to_the_tokens(turns: list[tuple[float, float, int]]) -> None:
    answered = pl.DataFrame(
        [(start, 0.0, latency, tokens) for start, latency, tokens in turns],
        schema=["started_at", "queue_s", "latency_s", "output_tokens"],
        orient="row",
    )
    until = tokens_until(answered, [-1.0, 500.0, 2000.0])
    assert until[0] == 0.0 and until[0] <= until[1] + 1e-6
    assert until[2] == pytest.approx(sum(tokens for _, _, tokens in turns), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (99, "99 s"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (18720, "5 h 12 min"),
        (223_200, "2 d 14 h"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
