"""The resume command: unlocks only when no process of a run is at work in the folder."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill import resume
from draftmill.errors import UserError
from draftmill.fleet import processes
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import Fleet
from draftmill.fleet.processes import Process

# A workflow whose only job tells that it runs and goes on until it is told.
SNAKEFILE = """
rule all:
    input: "done"

rule wait:
    output: "done"
    shell: "touch started; while [ ! -e go ]; do sleep 0.05; done; touch {output}"
"""


def pids(folder: Path) -> list[int]:
    return [process.pid for process in resume.run_in(folder)]


def snakemake(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all", *arguments]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def resumed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-m", "draftmill", "resume", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    yield tmp_path
    (tmp_path / "go").touch()  # whatever still waits in there ends


def started(folder: Path, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "started").exists():
        assert run.poll() is None and time.monotonic() < deadline, "Snakemake did not start its job"
        time.sleep(0.05)


def test_beside_a_running_workflow_nothing_is_unlocked_and_after_its_kill_it_goes_on(folder: Path) -> None:
    run = snakemake(folder)
    started(folder, run)
    locks = sorted((folder / ".snakemake" / "locks").iterdir())
    assert locks and pids(folder)[:1] == [run.pid]
    beside = resumed(folder)
    assert beside.returncode == 1
    assert f"snakemake has pid {run.pid}" in beside.stderr and "Traceback" not in beside.stderr
    assert sorted((folder / ".snakemake" / "locks").iterdir()) == locks
    assert run.poll() is None

    run.kill()
    run.wait()
    assert sorted((folder / ".snakemake" / "locks").iterdir()) == locks, "the lock stays behind"
    assert pids(folder) == []
    (folder / "go").touch()
    after = resumed(folder, "--cores", "1", "--rerun-incomplete")
    assert after.returncode == 0, after.stderr
    assert "unlocking after a run that was killed" in after.stdout
    assert (folder / "done").exists()
    assert not any((folder / ".snakemake" / "locks").glob("*"))


@contextlib.contextmanager
def called(words: list[str], folder: Path) -> Iterator[int]:
    """A process in `folder` with this command line, which does nothing: its output is full at once. Its pid."""
    program = shutil.which("yes")
    assert program is not None
    with subprocess.Popen(words, executable=program, cwd=folder, stdout=subprocess.PIPE) as process:
        while not Path(
            f"/proc/{process.pid}/cmdline"
        ).read_bytes():  # the kernel sets it a moment after the start
            time.sleep(0.01)
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    "words",
    [
        ["python3", "/venv/bin/snakemake", "all"],
        ["snakemake"],
        ["/venv/bin/snakemake"],
    ],
)
def test_snakemake_is_known_by_its_command_line_and_folder(tmp_path: Path, words: list[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with called(words, tmp_path) as pid:
        assert pids(tmp_path) == [pid]
        assert pids(elsewhere) == []


def test_snakemake_is_known_behind_any_options_of_python(tmp_path: Path) -> None:
    (tmp_path / "snakemake.py").write_text(
        "import time; time.sleep(600)"
    )  # `-m` takes the folder's own first
    words = [sys.executable, "-X", "dev", "-W", "ignore", "-u", "-m", "snakemake", "all"]
    with subprocess.Popen(words, cwd=tmp_path) as process:
        assert pids(tmp_path) == [process.pid]
        process.kill()


def test_what_merely_speaks_of_snakemake_is_none(tmp_path: Path) -> None:
    for words in (["editor", "docs/snakemake.md", "snakemake"], ["python3", "notes_on_snakemake.py"]):
        with called(words, tmp_path):
            assert pids(tmp_path) == []


def test_what_an_ended_snakemake_has_left_is_waited_for_and_then_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job script or a supervisor that lives on: it may still write, so nothing is unlocked beside it."""
    (folder / ".snakemake" / "locks").mkdir(parents=True)
    lock = folder / ".snakemake" / "locks" / "0.output.lock"
    lock.touch()
    dead_owner = {**os.environ, processes.OWNER_VARIABLE: "host:999999999:1"}
    left = subprocess.Popen(["sleep", "600"], cwd=folder, env=dead_owner)
    try:
        monkeypatch.setattr(resume, "LEFT_OVER_S", 0.1)
        with pytest.raises(UserError, match=rf"ended .* still at work \(pid {left.pid}: sleep 600\)"):
            resume.refuse_beside_a_run(folder)
    finally:
        left.kill()
        left.wait()
    assert lock.exists()
    monkeypatch.setattr(resume, "LEFT_OVER_S", 60.0)
    left = subprocess.Popen(["sleep", "0.5"], cwd=folder, env=dead_owner)
    resume.refuse_beside_a_run(folder)
    assert not Process(left.pid, 0).alive and left.wait() == 0


def test_of_two_resumes_at_once_one_refuses(folder: Path) -> None:
    (folder / ".snakemake" / "locks").mkdir(parents=True)
    lock = folder / ".snakemake" / "locks" / "0.output.lock"
    lock.touch()
    other = Lock(folder / ".snakemake" / "resume.lock")
    assert other.take()
    refused = resumed(folder)
    other.release()
    assert refused.returncode == 1 and "Another resume" in refused.stderr
    assert lock.exists()


def test_a_run_on_another_host_is_seen_by_what_it_writes(tmp_path: Path) -> None:
    fleets = tmp_path / "results" / "fleet"
    telemetry = fleets / "another-host" / "gpu0.telemetry.jsonl"
    own = Fleet(tmp_path / "results", Process.me()).telemetry("cpu0")
    for path in (telemetry, own):
        path.parent.mkdir(parents=True)
        path.touch()
    assert resume.busy_host(tmp_path) == "another-host"
    with pytest.raises(UserError, match="on the host another-host"):
        resume.refuse_beside_a_run(tmp_path)
    long_ago = time.time() - 2 * resume.FRESH_S
    os.utime(telemetry, (long_ago, long_ago))
    assert resume.busy_host(tmp_path) is None


def test_a_link_to_the_folder_is_the_folder(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    run = snakemake(folder)
    started(folder, run)
    assert pids(link)[:1] == [run.pid]
    (folder / "go").touch()
    assert run.wait() == 0
    assert pids(link) == []


def test_another_folders_run_is_none_of_ours(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = snakemake(folder)
    started(folder, run)
    assert pids(tmp_path_factory.mktemp("other")) == []
    assert pids(folder.parent) == []
    (folder / "go").touch()
    assert run.wait() == 0


def test_the_folder_that_snakemake_is_told_to_work_in_counts(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    run = snakemake(folder)
    started(folder, run)
    beside = resumed(elsewhere, "--directory", str(folder), "--cores", "1")
    assert beside.returncode == 1
    assert f"A run is going on in {folder} (snakemake has pid {run.pid})" in beside.stderr
    (folder / "go").touch()
    assert run.wait() == 0
