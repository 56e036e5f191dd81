"""The resume command: unlocks only when no Snakemake works in the folder."""

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

# A workflow whose only job tells that it runs and goes on until it is told.
SNAKEFILE = """
rule all:
    input: "done"

rule wait:
    output: "done"
    shell: "touch started; while [ ! -e go ]; do sleep 0.05; done; touch {output}"
"""


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
    assert locks and resume.snakemakes_in(folder) == [run.pid]
    beside = resumed(folder)
    assert beside.returncode == 1
    assert f"snakemake has pid {run.pid}" in beside.stderr and "Traceback" not in beside.stderr
    assert sorted((folder / ".snakemake" / "locks").iterdir()) == locks
    assert run.poll() is None

    run.kill()
    run.wait()
    assert sorted((folder / ".snakemake" / "locks").iterdir()) == locks, "the lock stays behind"
    assert resume.snakemakes_in(folder) == []
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
    "words", [["python3", "/venv/bin/snakemake", "all"], ["snakemake"], ["/venv/bin/snakemake"]]
)
def test_snakemake_is_known_by_its_command_line_and_folder(tmp_path: Path, words: list[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with called(words, tmp_path) as pid:
        assert resume.snakemakes_in(tmp_path) == [pid]
        assert resume.snakemakes_in(elsewhere) == []


def test_what_merely_speaks_of_snakemake_is_none(tmp_path: Path) -> None:
    with called(["editor", "docs/snakemake.md", "snakemake-notes", "about=snakemake"], tmp_path):
        assert resume.snakemakes_in(tmp_path) == []


def test_a_link_to_the_folder_is_the_folder(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    run = snakemake(folder)
    started(folder, run)
    assert resume.snakemakes_in(link) == [run.pid]
    (folder / "go").touch()
    assert run.wait() == 0
    assert resume.snakemakes_in(link) == []


def test_another_folders_run_is_none_of_ours(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = snakemake(folder)
    started(folder, run)
    assert resume.snakemakes_in(tmp_path_factory.mktemp("other")) == []
    assert resume.snakemakes_in(folder.parent) == []
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
