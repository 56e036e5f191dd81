"""The main job as a user meets it: the embedded model behind its real server, through the real workflow."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from pathlib import Path

import polars as pl
import pytest
import yaml
from tests.workflow.project import ROOT, Project

DATASET = (
    "merged.parquet",
    "rejected.parquet",
    "drafter/train.parquet",
    "drafter/train.jsonl",
    "drafter/README.md",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose run has ended; tests work on copies."""
    project = Project.make(tmp_path_factory.mktemp("main") / "project")
    done = project.snakemake("--cores", "8", "--resources", "gpu=8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 9 turns" in done.stderr  # the calm line
    return project


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    return finished.copy(tmp_path / "project")


def rows(path: Path) -> list[tuple[object, ...]]:
    columns = ("id", "input_ids", "loss_mask", "finish_reason")
    return [
        tuple(row)
        for row in pl.read_parquet(path, columns=list(columns)).select(columns).sort("id").iter_rows()
    ]


def planned(dry_run: str) -> dict[str, int]:
    """Rule -> jobs, from a dry-run's table."""
    table = re.search(r"\njob +count\n[- ]+\n((?:\w+ +\d+\n)+)", dry_run)
    return {row.split()[0]: int(row.split()[1]) for row in table[1].splitlines()} if table else {}


def test_the_accounts_add_up_and_every_row_trains(finished: Project) -> None:
    validation = json.loads((finished.results / "validation.json").read_text())
    assert validation["rows_in"] == validation["usable"] == 8
    assert validation["turns"] == validation["accepted"] + validation["rejected"] == 9
    merged = pl.read_parquet(finished.results / "merged.parquet")
    assert merged["id"].is_sorted() and merged["id"].n_unique() == merged.height == validation["accepted"]
    for row in merged.iter_rows(named=True):
        assert len(row["input_ids"]) == len(row["loss_mask"]) == row["seq_len"]
        assert row["loss_mask"] == [0] * row["prompt_len"] + [1] * row["completion_len"]
    second = merged.filter(pl.col("id") == "chat_gen1").row(0, named=True)
    own_answer = merged.filter(pl.col("id") == "chat_gen0").row(0, named=True)["conversations"][-1]["content"]
    history = [message["content"] for message in second["conversations"]]
    assert history[1] == own_answer and "old" not in history
    for name in DATASET:
        assert (finished.results / name).stat().st_size > 0


def test_the_throughput_says_what_ran(finished: Project) -> None:
    throughput = json.loads((finished.results / "throughput.json").read_text())
    assert throughput["turns"] == 9
    assert throughput["output_tokens"] == sum(
        pl.read_parquet(path)["output_ids"].list.len().sum()
        for path in finished.results.glob("generated/*.parquet")
    )
    (server,) = throughput["servers"]
    assert server["engine"] == "llamacpp" and server["version"] and server["effective_capacity"] == 1


def test_nothing_is_left_to_do_nor_left_running(finished: Project) -> None:
    assert "Nothing to be done" in (done := finished.snakemake("-n")).stdout + done.stderr
    deadline = time.monotonic() + 10
    while finished.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert finished.processes() == []


def test_operation_may_change_and_science_may_not(project: Project) -> None:
    project.configure({"operation": {"server": {"port": 24000, "stall_s": 99}, "progress_interval_s": 7}})
    with (project.folder / "config.yaml").open("a") as config:
        config.write("# a comment\n")
    assert "Nothing to be done" in (done := project.snakemake("-n")).stdout + done.stderr
    project.configure({"sampling": {"temperature": 0.1}})
    assert planned(project.snakemake("-n").stdout)["generate"] == 2
    project.configure({"validation": {"truncated": "reject"}})
    assert planned(project.snakemake("-n").stdout)["merge"] == 1


def test_a_lost_shard_comes_back_from_the_journal(project: Project) -> None:
    shard = project.results / "generated" / "1-of-2.parquet"
    before, requests, starts = shard.read_bytes(), project.requests(), project.server_starts()
    shard.unlink()
    plan = planned(project.snakemake("-n", "results/generated/1-of-2.parquet").stdout)
    assert plan["generate"] == plan["launch_server"] == 1
    done = project.snakemake("results/generated/1-of-2.parquet")  # one shard by its name, no flags
    assert done.returncode == 0, done.stderr
    assert shard.read_bytes() == before
    assert (project.requests(), project.server_starts()) == (requests, starts)
    (state,) = (project.results / "fleet").glob("*/*.json")
    assert json.loads(state.read_text())["engine"] == "llamacpp"  # though none was started again


def test_lost_outputs_come_back_without_a_request(project: Project) -> None:
    requests = project.requests()
    lost = [project.results / name for name in ("merged.parquet", "rejected.parquet", "validation.json")]
    for path in lost:
        path.unlink()
    (project.results / "config.json").write_text("")  # as a power cut may leave it
    done = project.snakemake("--cores", "8", "--resources", "gpu=8")
    assert done.returncode == 0, done.stderr
    assert all(path.exists() for path in lost) and project.requests() == requests


def test_growing_asks_for_new_turns_only(project: Project) -> None:
    requests = project.requests()
    old = [json.loads(line) for line in (project.folder / "prompts.jsonl").read_text().splitlines()]
    project.prompts([{"id": "new", "prompt": "Name a fruit."}, *reversed(old)])
    project.configure({"shards": 3})
    done = project.snakemake("results/merged.parquet")
    assert done.returncode == 0, done.stderr
    assert project.requests() == requests + 1
    assert json.loads((project.results / "validation.json").read_text())["turns"] == 10
    assert not list((project.results / "shards").glob("*-of-2.parquet"))


def test_another_temperature_gives_other_answers_and_says_so(project: Project) -> None:
    requests = project.requests()
    project.configure({"sampling": {"temperature": 1.3}})
    done = project.snakemake("results/merged.parquet")
    assert done.returncode == 0, done.stderr
    assert "sampling.temperature: 0.7 -> 1.3; 8 of 8 conversations are new" in done.stderr
    assert project.requests() == 2 * requests
    sent = pl.read_parquet(project.results / "generated" / "1-of-2.parquet")["sampling"]
    assert {json.loads(text)["temperature"] for text in sent} == {1.3}


def test_killed_in_the_middle_it_resumes_to_the_same_dataset(finished: Project, tmp_path: Path) -> None:
    project = Project.make(tmp_path / "killed")
    run = project.start()
    deadline = time.monotonic() + 120
    while project.requests() < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    project.kill_all()
    run.wait()
    answered = project.requests()
    assert 3 <= answered < 9
    partial = project.draftmill("partial")
    assert partial.returncode == 0, partial.stderr
    assert "partial" in (project.results / "partial" / "README.md").read_text()
    done = project.draftmill("resume", "--snakefile", str(ROOT / "Snakefile"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unlocking after a run that was killed" in done.stdout
    assert project.requests() == 9
    assert rows(project.results / "merged.parquet") == rows(finished.results / "merged.parquet")


def test_resume_leaves_a_living_run_alone(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "living")
    run = project.start()
    deadline = time.monotonic() + 60
    while not list((project.folder / ".snakemake" / "locks").glob("*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = project.draftmill("resume", "--snakefile", str(ROOT / "Snakefile"))
    assert second.returncode == 1 and "nothing was unlocked" in second.stderr
    project.kill_all()
    run.wait()


def test_the_report_shows_every_page(project: Project) -> None:
    report = project.folder / "report.html"
    pages = [report.read_text()]  # written when the run had ended
    report.unlink()
    done = project.snakemake("results/merged.parquet")  # needs no page, so no report
    assert done.returncode == 0 and not report.exists()
    done = project.snakemake("--report", "report.html")
    assert done.returncode == 0, done.stderr
    pages.append(report.read_text())
    report.unlink()
    report.mkdir()
    (project.results / "report" / "config.html").unlink()
    done = project.snakemake()  # a run does not fail for its report
    assert done.returncode == 0 and "The report could not be written" in done.stderr
    for page in pages:
        assert len(page) < 10_000_000
        for title in ("Overview", "Token lengths", "Finish reasons", "Output tokens per second"):
            assert title in page


def test_the_command_line_tells_how_it_went(finished: Project) -> None:
    summary = finished.draftmill("summary")
    assert summary.returncode == 0 and len(summary.stdout.splitlines()) == 3
    status = finished.draftmill("status", "--json")
    assert status.returncode == 0, status.stderr
    json.loads(status.stdout)
    check = finished.draftmill("check-prompts", "prompts.jsonl", "--json")
    assert json.loads(check.stdout)["usable"] == 8


def test_as_a_module_of_another_workflow(project: Project) -> None:
    """By the recipe in docs/how-to.md, beside keys of the other workflow's own."""
    (recipe,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to.md").read_text(), flags=re.DOTALL)
    (project.folder / "Snakefile").write_text(
        'configfile: "config.yaml"\n'
        + recipe.replace("path/to/draftmill", str(ROOT))
        + 'rule use_it:\n    default_target: True\n    input: "results/merged.parquet"\n'
        "    output: touch(config['mark'])\n"
    )
    config = project.folder / "config.yaml"
    own = {"mark": "used", "draftmill": yaml.safe_load(config.read_text())}
    config.write_text(yaml.safe_dump(own))
    shutil.rmtree(project.results / "generated")
    (project.results / "merged.parquet").unlink()
    requests = project.requests()
    done = project._run("snakemake", "--cores", "2", "--latency-wait", "60", timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.folder / "used").exists()
    assert project.requests() == requests


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts": {"files": ["nowhere.jsonl"]}}, "nowhere.jsonl"),
        ({"model": {"path": "no/such/model"}}, "no/such/model does not exist"),
        ({"samplin": {"temperature": 1}}, "did you mean sampling"),
        ({"sampling": {"max_tokens": 5000}}, "context"),
        ({"operation": {"engine": "sglang"}}, "sglang"),
        ({"prompts": {"thinking": True}}, "thinking"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    tmp_path: Path, changes: dict[str, dict[str, object]], sentence: str
) -> None:
    project = Project.make(tmp_path / "mistaken")
    project.configure(changes)
    done = project.snakemake("results/prompts.json")
    assert done.returncode == 1
    assert sentence in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_braces_in_a_name_are_refused_in_a_sentence(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    (project.folder / "prompts.jsonl").rename(project.folder / "p{1}.jsonl")
    project.configure({"prompts": {"files": ["p{1}.jsonl"]}})
    done = project.snakemake("-n")
    assert (
        done.returncode == 1 and "takes the braces in p{1}.jsonl for a wildcard" in done.stdout + done.stderr
    )


def test_an_empty_prompt_set(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "empty")
    project.prompts([{"prompt": " "}])
    done = project.snakemake("results/prompts.json")
    assert done.returncode == 1 and "skipped.parquet" in done.stderr


def test_a_changed_benchmark_file_leaves_other_prompts_out(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    benchmark = project.folder / "benchmark.jsonl"
    benchmark.write_text('{"prompt": "What do bees make?"}\n')
    project.configure({"prompts": {"decontaminate": {"files": ["benchmark.jsonl"], "ngram": 3}}})
    for contaminated in (1, 2):
        done = project.snakemake("results/prompts.json")
        assert done.returncode == 0, done.stderr
        assert json.loads((project.results / "prompts.json").read_text())["contaminated"] == contaminated
        assert (
            "Nothing to be done"
            in (done := project.snakemake("-n", "results/prompts.json")).stdout + done.stderr
        )
        with benchmark.open("a") as rows_:
            rows_.write('{"prompt": "Who wrote Hamlet?"}\n')


def test_a_corrected_chat_template_is_frozen_again(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.configure({"model": {"chat_template": "own.jinja"}})
    template, frozen = project.folder / "own.jinja", project.results / "model" / "chat_template.jinja"
    template.write_text("{% if %}")
    done = project.snakemake("results/prompts.json")
    assert done.returncode == 1 and "not valid Jinja" in done.stderr
    for text in ("{{ messages[0].content }}", "{{ messages[0].content }}!"):
        template.write_text(text)
        done = project.snakemake("results/prompts.json")
        assert done.returncode == 0, done.stderr
        assert frozen.read_text() == text
    assert (
        "Nothing to be done" in (done := project.snakemake("-n", "results/prompts.json")).stdout + done.stderr
    )


def test_an_adapter_trained_anew_freezes_the_model_again(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    weights = project.folder / "adapter" / "adapter_model.safetensors"
    weights.parent.mkdir()
    project.configure({"model": {"adapters": ["adapter"]}})
    facts = project.results / "model" / "model.json"
    identities = set()
    for text in ("old", "new"):
        weights.write_text(text)
        done = project.snakemake("results/prompts.json")
        assert done.returncode == 0, done.stderr
        identities.add(json.loads(facts.read_text())["identity"])
    assert len(identities) == 2


def test_results_may_lie_behind_a_link(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.prompts([{"id": "q{0}", "prompt": "Name a colour."}])
    project.configure({"shards": 1})
    (tmp_path / "large-disk").mkdir()
    project.results.symlink_to(tmp_path / "large-disk")
    done = project.snakemake("results/merged.parquet")
    assert done.returncode == 0, done.stderr
    assert project.requests() == 1


def test_a_taken_port(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "port")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        project.configure({"operation": {"server": {"port": port}}})
        done = project.snakemake("results/generated/1-of-2.parquet")
    assert done.returncode == 1
    assert f"Port {port} (operation.server.port) is taken" in done.stderr
