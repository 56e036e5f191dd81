"""`draftmill resume`: the one command that goes on after any end of a run.

A killed Snakemake leaves its lock behind. The lock is taken away only when no Snakemake works in this
folder any more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from draftmill.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "draftmill resume [targets and options of snakemake; none: as in the profile]"


def run(arguments: argparse.Namespace) -> int:
    asked: list[str] = arguments.rest
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("-d", "--directory", type=Path, default=Path.cwd())
    folder: Path = where.parse_known_args(asked)[0].directory
    running = snakemakes_in(folder)
    if running:
        raise UserError(
            f"A run is going on in {folder} (snakemake has pid {running[0]}); nothing was unlocked. "
            "Wait for it, or end it first."
        )
    snakemake = [sys.executable, "-m", "snakemake"]
    if any((folder / ".snakemake" / "locks").glob("*")):
        print("draftmill: unlocking after a run that was killed", flush=True)
        if subprocess.run([*snakemake, *asked, "--unlock", "--quiet", "all"], check=False).returncode:
            raise UserError("Snakemake could not unlock the folder; its own words are above.")
    os.execv(sys.executable, [*snakemake, *asked])  # signals then reach Snakemake itself


def snakemakes_in(folder: Path) -> list[int]:
    """The pids of all Snakemake processes that work in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            works_in = (entry / "cwd").resolve(strict=True)
        except OSError:
            continue
        is_snakemake = any(word.endswith(b"/snakemake") or word == b"snakemake" for word in words[:3])
        if is_snakemake and works_in == folder.resolve():
            found.append(int(entry.name))
    return sorted(found)
