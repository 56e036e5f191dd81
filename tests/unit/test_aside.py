"""What a killed process left half written goes away, and what a living one writes stays."""

import os
import subprocess
import sys
from pathlib import Path

from draftmill.aside import remove_leftovers


def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_what_ended_processes_left_goes_away(tmp_path: Path) -> None:
    ended, living = ended_pid(), os.getppid()
    kept = {
        f".rows.parquet.{living}",
        ".rows.parquet.old",
        f"other.{ended}",
        f".other.{ended}",
        "rows.parquet",
    }
    for name in (*kept, f".rows.parquet.{ended}", f".rows.parquet.{os.getpid()}"):
        (tmp_path / name).write_text("half")
    (tmp_path / f".rows.parquet.x-{ended}").mkdir()
    (tmp_path / f".rows.parquet.x-{ended}" / "part").write_text("half")
    remove_leftovers(tmp_path, ".rows.parquet.")
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_leftovers(tmp_path / "missing", ".")
