"""The Slurm that setup.sh has started, and a user's project that runs on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.workflow.project import ROOT, Project

SETUP = Path(__file__).with_name("setup.sh")
OFTEN = Path(__file__).with_name("often.py")
STATE = Path("/run/draftmill-slurm")
os.environ["SLURM_CONF"] = str(STATE / "slurm.conf")
PROFILE = ROOT / "profiles" / "slurm"
# A user waits 40 s for the first look at a job, and longer for each further one (often.py).
POLL = ("--slurm-init-seconds-before-status-checks", "2")


class ClusterProject(Project):
    """A project whose snakemake runs with profiles/slurm."""

    def command(self, *words: str) -> list[str]:
        if words[0] == "snakemake":
            return [sys.executable, str(OFTEN), *words[1:]]
        return super().command(*words)

    def on_slurm(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `snakemake --profile profiles/slurm` to its end."""
        return self.snakemake(*words, "--profile", str(PROFILE), *POLL, timeout_s=600)

    def start_on_slurm(self, *words: str) -> subprocess.Popen[bytes]:
        """The same in the background; its output goes to started.log."""
        return self.start(*words, "--profile", str(PROFILE), *POLL)

    @property
    def started_log(self) -> str:
        return (self.folder / "started.log").read_text(errors="replace")

    def keys(self) -> list[str]:
        """The key of every answered turn, from the journal's lines."""
        lines = (
            path.read_bytes().splitlines() for path in sorted((self.results / "journal").glob("*.jsonl"))
        )
        return [line[9:41].decode() for segment in lines for line in segment]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def jobs() -> dict[str, dict[str, str]]:
    """Every job that Slurm remembers by its id: scontrol's fields."""
    found = {}
    for line in command("scontrol", "show", "jobs", "--oneliner").splitlines():
        fields = dict(re.findall(r"(?:^| )(\w+)=(.*?)(?= \w+=|$)", line.rstrip()))
        if "JobId" in fields:
            found[fields["JobId"]] = fields
    return found


def jobs_of(project: Project) -> list[dict[str, str]]:
    """The project's allocations that held GPUs, oldest first."""
    mine = [job for job in jobs().values() if job["WorkDir"] == str(project.folder) and "TresPerJob" in job]
    return sorted(mine, key=lambda job: int(job["JobId"]))


def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
    """Returns when ``what`` holds; fails with a sentence if it does not in time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"after {seconds} s it is still not so"
        time.sleep(0.1)


def preempt(job: dict[str, str]) -> None:
    """Lets an urgent job take all GPUs of an allocation's node for a moment."""
    before = set(processes_of(job["JobId"]))
    place = ("--partition=urgent", f"--nodelist={job['NodeList']}", "--nodes=1", "--gpus-per-node=8")
    urgent = command(
        "sbatch", "--parsable", *place, "--chdir=/", "--output=/dev/null", "--wrap", "sleep 1"
    ).strip()
    wait_for(lambda: jobs()[urgent]["JobState"] == "COMPLETED", 60)
    assert before
    wait_for(lambda: not before & set(processes_of(job["JobId"])), 10)


def processes_of(job: str) -> list[int]:
    """Every process of an allocation, wherever it moved to."""
    mark = f"SLURM_JOB_ID={job}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
