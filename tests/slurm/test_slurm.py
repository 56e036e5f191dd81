"""The workflow on a real Slurm, as its user runs and loses it: setup.sh has started two nodes of eight pretend GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.slurm.cluster import (
    SETUP,
    STATE,
    ClusterProject,
    command,
    jobs_of,
    preempt,
    processes_of,
    wait_for,
)

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not STATE.is_dir(), reason="make test-slurm starts the Slurm that this needs"),
]

TURNS = 9  # of Project.make
LONG = {"sampling": {"max_tokens": 160, "ignore_eos": True}}  # seconds an answer


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test finds an empty queue, and leaves one."""
    yield
    command("scancel", "--user=root")
    wait_for(lambda: command("squeue", "--noheader") == "")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ClusterProject:
    """A run that has ended, one shard an allocation; tests work on copies."""
    project = ClusterProject.make(tmp_path_factory.mktemp("main") / "project")
    project.configure({"shards": 4})
    done = project.on_slurm("--group-components", "shards=1", "--slurm-keep-successful-logs")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def prepared(
    folder: Path, shards: int, prompts: int = 0, changes: dict[str, Any] | None = None
) -> ClusterProject:
    """A project that is about to generate."""
    project = ClusterProject.make(folder)
    project.configure({"shards": shards, **(changes or {})})
    if prompts:
        project.prompts([{"id": f"q{i}", "prompt": f"Tell a story of {i} bees."} for i in range(prompts)])
    done = project.snakemake("results/prompts.json", "--cores", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def targets(shards: int) -> list[str]:
    return [f"results/generated/{i}-of-{shards}.parquet" for i in range(1, shards + 1)]


def accounts(project: ClusterProject, turns: int) -> None:
    """No turn is lost, and none stands twice, in the shards' tables or in the journal."""
    tables = pl.read_parquet(project.results / "generated" / "*.parquet", columns=["id", "outcome"])
    assert tables["id"].n_unique() == tables.height == turns and set(tables["outcome"]) == {"answered"}
    assert [key for key, count in Counter(project.keys()).items() if count > 1] == []
    assert len(project.keys()) == turns


def seconds(text: str) -> int:
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def test_the_whole_workflow_over_allocations(
    finished: ClusterProject, capsys: pytest.CaptureFixture[str]
) -> None:
    accounts(finished, TURNS)
    validation = json.loads((finished.results / "validation.json").read_text())
    assert validation["turns"] == validation["accepted"] + validation["rejected"] == TURNS
    allocations = jobs_of(finished)
    assert len(allocations) == 4 and {job["JobState"] for job in allocations} == {"COMPLETED"}
    assert {job["NodeList"] for job in allocations} == {"mill1", "mill2"}
    assert finished.processes() == []

    throughput = json.loads((finished.results / "throughput.json").read_text())
    assert throughput["turns"] == TURNS
    states = [json.loads(path.read_text()) for path in finished.results.glob("fleet/mill*/*.json")]
    slots = {(state["host"], *state["gpus"]) for state in states}
    assert len(slots) == len(throughput["servers"]) == len(states)
    assert throughput["gpus"] == sum(len(gpus) for _, *gpus in slots)
    status = json.loads(finished.draftmill("status", "--json").stdout)
    assert (status["done"], status["turns"], len(status["servers"])) == (TURNS, TURNS, len(states))

    with capsys.disabled():
        for job in allocations:
            beyond_s = seconds(job["RunTime"]) - asking_s(finished, job)
            print(
                f"\nan allocation of {job['RunTime']}: {beyond_s:.0f} s beyond its server's start and answers"
            )


def asking_s(project: ClusterProject, job: dict[str, str]) -> float:
    """Seconds from an allocation's first line about its one shard to the last, the server's start included."""
    shard = re.findall(r"Leasing a server for shard (\S+)\.", Path(job["StdOut"]).read_text())[0]
    lines = (project.results / "logs" / "generate" / f"{shard}.log").read_text().splitlines()
    return clock(lines[-1]) - clock(lines[0])


def clock(line: str) -> float:
    moment = time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
    return time.mktime(moment) + int(line[20:23]) / 1000


def test_one_shard_by_name_reuses_every_turn(
    finished: ClusterProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = finished.copy(tmp_path / "project")
    shard = project.results / "generated" / "2-of-4.parquet"
    before, keys, starts = shard.read_bytes(), project.keys(), project.server_starts()
    shard.unlink()
    done = project.on_slurm("results/generated/2-of-4.parquet")
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = jobs_of(project)
    with capsys.disabled():
        print(f"\nan allocation with nothing to ask: {seconds(job['RunTime'])} s")
    assert job["JobState"] == "COMPLETED"
    assert shard.read_bytes() == before
    assert (project.keys(), project.server_starts()) == (keys, starts)


def test_scancel_leaves_nothing_and_both_shards_go_on(tmp_path: Path) -> None:
    """They share an allocation and its one server, before and after."""
    project = prepared(tmp_path / "project", 2, changes=LONG)
    run = project.start_on_slurm(*targets(2))
    wait_for(lambda: project.requests() >= 2)
    (job,) = jobs_of(project)
    command("scancel", job["JobId"])
    wait_for(lambda: processes_of(job["JobId"]) == [], 10)
    assert project.requests() < TURNS and project.server_starts() == 1
    assert run.wait(500) == 0, project.started_log
    accounts(project, TURNS)
    assert [job["JobState"] for job in jobs_of(project)] == ["CANCELLED", "COMPLETED"]
    assert project.server_starts() == 2


def test_preemption_loses_nothing(tmp_path: Path) -> None:
    """First it starts the allocation again; then, as an administrator may have it, it ends the allocation."""
    project = prepared(tmp_path / "project", 2, 10, LONG)
    run = project.start_on_slurm(*targets(2))
    wait_for(lambda: project.requests() > 0)
    (first,) = jobs_of(project)
    preempt(first)
    answered = project.requests()
    wait_for(lambda: project.requests() > answered)
    (again,) = jobs_of(project)
    assert (again["JobId"], again["Restarts"]) == (first["JobId"], "1")
    command("scontrol", "update", "partitionname=main", "preemptmode=cancel")
    try:
        preempt(again)
        assert project.requests() < 10
        assert run.wait(500) == 0, project.started_log
    finally:
        command("scontrol", "update", "partitionname=main", "preemptmode=requeue")
    accounts(project, 10)
    assert [job["JobState"] for job in jobs_of(project)] == ["PREEMPTED", "COMPLETED"]
    assert project.server_starts() == 3
    assert project.processes() == []


def test_the_time_limit_ends_a_shard_with_a_sentence(tmp_path: Path) -> None:
    project = prepared(tmp_path / "project", 1, 30, LONG)
    # the list takes the place of the profile's
    one_minute = ("generate:runtime=1", "launch_server:runtime=1", "generate:cpus_per_task=8")
    done = project.on_slurm(*targets(1), "--set-resources", *one_minute, "--retries", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    accounts(project, 30)
    *ended, last = jobs_of(project)
    assert ended and {job["JobState"] for job in ended} == {"FAILED"} and last["JobState"] == "COMPLETED"
    for job in ended:
        assert "so nothing more is asked in it" in Path(job["StdOut"]).read_text()


def test_a_node_that_goes_down_loses_nothing(tmp_path: Path) -> None:
    project = prepared(tmp_path / "project", 2, changes=LONG)
    run = project.start_on_slurm(*targets(2), "--group-components", "shards=1")
    wait_for(lambda: len(jobs_of(project)) == 2 and project.requests() >= 2)
    (lost,) = [job for job in jobs_of(project) if job["NodeList"] == "mill1"]
    pid = int((STATE / "mill1.pid").read_text())
    try:
        os.kill(pid, signal.SIGKILL)  # a power cut: every process of the node is gone at once
        command("scontrol", "update", "nodename=mill1", "state=down", "reason=test")
        wait_for(lambda: processes_of(lost["JobId"]) == [], 10)
        assert run.wait(500) == 0, project.started_log
    finally:
        subprocess.run(["bash", str(SETUP), "node", "1"], check=True)
    accounts(project, TURNS)
    assert [(job["JobId"], job["NodeList"]) for job in jobs_of(project)] == [
        (job["JobId"], "mill2") for job in jobs_of(project)
    ], "Slurm has started the lost job again elsewhere"


def test_settings_are_measured_once_and_by_name(tmp_path: Path) -> None:
    flags = {"server": {"flags": ["auto", "--no-cache-prompt"]}, "tune": {"budget_s": 1}}
    project = prepared(tmp_path / "project", 14, 56, {**LONG, "operation": flags})
    last = targets(14)[-2:]  # the tuner asks the first shards' turns
    refused = project.on_slurm(*last)
    assert refused.returncode == 1 and "type snakemake tune" in refused.stderr
    assert jobs_of(project) == []
    done = project.on_slurm("tune")
    assert done.returncode == 0, done.stdout + done.stderr
    measurements = (project.results / "tuning" / "measurements.jsonl").read_bytes()
    assert measurements.count(b'"measured"') == 1 and project.requests() > 0
    done = project.on_slurm(*last, "--group-components", "shards=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [job["JobState"] for job in jobs_of(project)] == ["COMPLETED"] * 3
    assert (project.results / "tuning" / "measurements.jsonl").read_bytes() == measurements
    logs = (path.read_text() for path in (project.results / "logs" / "generate").glob("*.log"))
    assert "nothing was measured" not in "".join(logs)
    assert max(Counter(project.keys()).values()) == 1


def test_eight_gpus_at_once(tmp_path: Path) -> None:
    project = prepared(tmp_path / "project", 8, 24)
    done = project.on_slurm(*targets(8), "--resources", "gpu=8", "--group-components", "shards=8")
    assert done.returncode == 0, done.stdout + done.stderr
    accounts(project, 24)
    (job,) = jobs_of(project)
    assert job["TresPerJob"] == "gres:gpu:8"
    states = [json.loads(path.read_text()) for path in project.results.glob("fleet/mill*/*.json")]
    assert len({state["gpus"][0] for state in states}) == len(states) == 8


def test_two_hundred_waiting_shards_cost_the_login_node_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = prepared(tmp_path / "project", 200)
    command("scontrol", "update", "partitionname=main", "state=down")
    try:
        run, began = project.start_on_slurm(*targets(200), "--group-components", "shards=1"), time.monotonic()
        wait_for(lambda: len(command("squeue", "--noheader").splitlines()) == 200)
        queued_s = time.monotonic() - began
        time.sleep(10)  # and looks after them
        elapsed_s = time.monotonic() - began
        cores, memory_mb = cpu_s(run.pid) / elapsed_s, peak_mb(run.pid)
        run.send_signal(signal.SIGINT)
        run.wait(60)
        assert command("squeue", "--noheader") == "", "Ctrl-C takes the waiting jobs back"
    finally:
        command("scontrol", "update", "partitionname=main", "state=up")
    with capsys.disabled():
        print(
            f"\n200 shards queued in {queued_s:.0f} s: {cores:.2f} cores in {elapsed_s:.0f} s, {memory_mb:.0f} MB"
        )
    assert cores < 1 and memory_mb < 500


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak) / 1000
