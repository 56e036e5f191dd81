"""The main job through two real SGLang servers on the CPU, judged by what a user finds afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from tests.sglang.installation import COMMAND, CONTEXT, ENVIRONMENT, FLAGS, MODEL, ROOT

from draftmill.chat import ChatTemplate
from draftmill.tokens import Tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(2400)]

MARK = "DRAFTMILL_TEST_OF_SGLANG"
PROMPTS = 16
MAX_TOKENS = 48


@dataclass(frozen=True)
class Run:
    """A finished run of the shipped configuration, in a folder of its own."""

    folder: Path
    environment: dict[str, str]
    output: str
    wall_s: float

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return snakemake(self.folder, self.environment, *arguments)

    def table(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.folder / "results" / name).to_pylist()
        return rows

    def facts(self, name: str) -> Any:
        return json.loads((self.folder / "results" / name).read_text(encoding="utf-8"))

    @cached_property
    def answers(self) -> list[dict[str, Any]]:
        return [row for path in sorted((self.folder / "results" / "generated").glob("*.parquet"))
                for row in pq.read_table(path).to_pylist()]  # fmt: skip


def snakemake(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ["--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments, *where, "--cores", "2", "--resources", "gpu=2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    config = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    config["model"] |= {"path": str(MODEL), "context_length": CONTEXT}
    config["prompts"]["limit"] = PROMPTS
    config["sampling"] |= {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    config["operation"] |= {"engine": "sglang", "cpu_servers": 2}
    config["operation"]["server"] |= {
        "flags": list(FLAGS),
        "port": 32_100,  # beyond the ports that other tests' servers choose
        "threads": 1,
        "env": ENVIRONMENT,
        "capacity": 4,  # fewer than a shard holds, so that both servers are asked
        "warm_s": 2,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DRAFTMILL_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DRAFTMILL_SGLANG_COMMAND": COMMAND,
        MARK: str(folder),
    }
    began = time.monotonic()
    done = snakemake(folder, environment)
    taken = time.monotonic() - began
    assert done.returncode == 0, done.stdout[-6000:]
    return Run(folder, environment, done.stdout, taken)


def left_over(run: Run) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(run.folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_nothing_is_left_of_the_servers(run: Run) -> None:
    deadline = time.monotonic() + 10
    while left_over(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_over(run) == []


def test_the_accounts_add_up(run: Run) -> None:
    counts = run.facts("validation.json")
    assert (
        counts["rows_in"]
        == counts["usable"] + counts["duplicates"] + counts["contaminated"] + counts["skipped"]
    )
    assert counts["turns"] == counts["accepted"] + counts["rejected"] == PROMPTS
    assert counts["accepted"] == len(run.table("merged.parquet"))
    assert counts["rejected"] == len(run.table("rejected.parquet"))


def test_every_turn_was_answered_by_sglang(run: Run) -> None:
    assert len(run.answers) == PROMPTS
    for row in run.answers:
        assert row["outcome"] == "answered"
        assert row["engine"] == "sglang 0.5.23"
        assert 0 < len(row["output_ids"]) <= MAX_TOKENS
        assert (row["finish_reason"] == "length") == (len(row["output_ids"]) == MAX_TOKENS)
        assert json.loads(row["sampling"])["temperature"] == 0.0


def test_an_ended_answer_keeps_its_stop_token(run: Run) -> None:
    stops = set(run.facts("model/model.json")["eos_token_ids"])
    for row in run.answers:
        assert (row["output_ids"][-1] in stops) == (row["finish_reason"] == "stop")


def test_prompts_are_the_models_own_rendering(run: Run) -> None:
    tokenizer = Tokenizer.load(run.folder / "results" / "model")
    template = ChatTemplate.load(run.folder / "results" / "model")
    for row in run.answers:
        assert tokenizer.encode(template.render(json.loads(row["messages"]))) == row["prompt_ids"]


def test_rows_of_the_dataset_are_whole(run: Run) -> None:
    tokenizer = Tokenizer.load(run.folder / "results" / "model")
    answers = {row["id"]: row for row in run.answers}
    for row in run.table("merged.parquet"):
        asked, answered = answers[row["id"]]["prompt_ids"], answers[row["id"]]["output_ids"]
        assert row["input_ids"] == asked + answered
        assert row["loss_mask"] == [0] * len(asked) + [1] * len(answered)
        assert row["text"] == tokenizer.decode(row["input_ids"])
        assert row["conversations"][-1]["role"] == "assistant"
        assert row["conversations"][-1]["content"] in row["text"]


def test_trainers_can_read_it(run: Run) -> None:
    lines = (run.folder / "results" / "drafter" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["id"] for row in rows} == {row["id"] for row in run.table("merged.parquet")}
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) for row in rows)


def test_both_servers_worked_and_are_named(run: Run) -> None:
    throughput = run.facts("throughput.json")
    tokens = sum(len(row["output_ids"]) for row in run.answers)
    print(
        f"\n{PROMPTS} turns through two servers: {run.wall_s:.0f} s in all, "
        f"{throughput['output_tokens_per_s']:.0f} output tokens/s"
    )
    assert throughput["turns"] == PROMPTS
    assert throughput["output_tokens"] == tokens
    assert len(throughput["servers"]) == 2
    for server in throughput["servers"]:
        assert (server["engine"], server["version"], server["restarts"]) == ("sglang", "0.5.23", 0)
        assert server["output_tokens"] > 0
    assert sum(server["output_tokens"] for server in throughput["servers"]) == tokens


def test_no_key_is_stored(run: Run) -> None:
    shown = re.compile(r"""api[_-]key['"]?(?:\s*[=:]\s*|\s+)['"]?([^\s'",})]+)""")
    for path in (run.folder / "results").rglob("*"):
        if path.is_file() and path.suffix in (".log", ".json", ".jsonl", ".md"):
            found = set(shown.findall(path.read_text(encoding="utf-8", errors="replace")))
            assert found <= {"None", "null", "[redacted]", "<redacted>"}, path


def test_afterwards_there_is_nothing_to_do(run: Run) -> None:
    again = run.snakemake("-n")
    assert again.returncode == 0
    assert "Nothing to be done" in again.stdout


def test_a_lost_shard_comes_back_without_a_server(run: Run) -> None:
    lost = min((run.folder / "results" / "generated").glob("*.parquet"))
    before = lost.read_bytes()
    logs = {path: path.stat().st_size for path in (run.folder / "results").glob("logs/servers/*.log")}
    lost.unlink()
    back = run.snakemake(f"results/generated/{lost.name}")
    assert back.returncode == 0, back.stdout[-4000:]
    assert lost.read_bytes() == before
    assert {path: path.stat().st_size for path in (run.folder / "results").glob("logs/servers/*.log")} == logs
