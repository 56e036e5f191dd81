"""`draftmill resume`: the one command that goes on after any end of a run.

A killed Snakemake leaves its lock behind. The lock is taken away only when no process of a run is at work in
this folder any more: no Snakemake, and nothing that an ended Snakemake has started.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from draftmill.errors import UserError
from draftmill.fleet import processes
from draftmill.fleet.locks import Lock
from draftmill.fleet.places import Fleet
from draftmill.fleet.processes import Process

LEFT_OVER_S = 15.0  # what a killed Snakemake leaves ends by itself within 10 s
FRESH_S = 30.0  # another host's supervisor writes its telemetry every second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "draftmill resume [targets and options of snakemake; none: as in the profile]"


def run(arguments: argparse.Namespace) -> int:
    asked: list[str] = arguments.rest
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("-d", "--directory", type=Path, default=Path.cwd())
    folder: Path = where.parse_known_args(asked)[0].directory
    snakemake = [sys.executable, "-m", "snakemake"]
    locked = any((folder / ".snakemake" / "locks").glob("*"))
    # Held until Snakemake itself is seen in the folder, so that of two of these commands one refuses.
    if locked and not Lock(folder / ".snakemake" / "resume.lock").take():
        raise UserError(f"Another resume is at work in {folder}; nothing was unlocked.")
    refuse_beside_a_run(folder)
    if locked:
        print("draftmill: unlocking after a run that was killed", flush=True)
        if subprocess.run([*snakemake, *asked, "--unlock", "--quiet", "all"], check=False).returncode:
            raise UserError("Snakemake could not unlock the folder; its own words are above.")
    os.execv(sys.executable, [*snakemake, *asked])  # signals then reach Snakemake itself


def refuse_beside_a_run(folder: Path) -> None:
    """Raises UserError while a process of a run is at work in ``folder``; waits for those that are about to end."""
    deadline = time.monotonic() + LEFT_OVER_S
    while at_work := run_in(folder):
        first = min(at_work, key=lambda process: (not _is_snakemake(process), process.pid))
        if _is_snakemake(first):
            raise UserError(
                f"A run is going on in {folder} (snakemake has pid {first.pid}); nothing was unlocked. "
                "Wait for it, or end it first."
            )
        if time.monotonic() > deadline:
            raise UserError(
                f"Snakemake has ended in {folder}, but {len(at_work)} of its processes are still at work "
                f"(pid {first.pid}: {' '.join(first.command)[:200]}); nothing was unlocked. "
                "End them, then resume."
            )
        time.sleep(0.2)
    if host := busy_host(folder):
        raise UserError(
            f"A run is going on in {folder} on the host {host}, which wrote to results/fleet a moment ago; "
            "nothing was unlocked. Wait for it, or end it there first."
        )


def run_in(folder: Path) -> list[Process]:
    """All processes of runs in ``folder`` on this host: every Snakemake, and all that one has started there."""
    return [
        process
        for process in processes.working_in(folder)
        if _is_snakemake(process) or process.carries(f"{processes.OWNER_VARIABLE}=")
    ]


def _is_snakemake(process: Process) -> bool:
    """Whether it runs Snakemake: by its name, as a script or as a module, behind any options of Python."""
    words = [Path(word).name for word in process.command]
    if not words or words[0] == "snakemake":
        return bool(words)
    return words[0].startswith("python") and "snakemake" in words


def busy_host(folder: Path) -> str | None:
    """Another host whose supervisors are at work in ``folder``, where hosts share a file system."""
    here = Fleet(folder / "results", Process.me()).host
    for telemetry in here.parent.glob("*/*.telemetry.jsonl"):
        if telemetry.parent != here and time.time() - telemetry.stat().st_mtime < FRESH_S:
            return telemetry.parent.name
    return None
