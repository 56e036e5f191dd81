"""A working folder of a user's, and the commands that a user types in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "Name a colour.", "What is two plus two?", "Who wrote Hamlet?", "Say hello in French.", "What do bees make?",
    "Name a planet.", "What is the capital of Italy?", "Give a word that rhymes with cat.",
)  # fmt: skip
# One slot, and no prompt cache: then llama.cpp answers the same whatever it answered before.
CONFIG: dict[str, Any] = {
    "shards": 2,
    "model": {"path": "embedded", "context_length": 1024},
    "prompts": {"files": ["prompts.jsonl"], "limit": None},
    "sampling": {"max_tokens": 24, "temperature": 0.7},
    "validation": {"min_supervised_tokens": 1, "loop": "flag"},
    "operation": {
        "server": {"capacity": 1, "flags": ["--no-cache-prompt"], "warm_s": 5},
        "progress_interval_s": 1,
    },
}


@dataclass(frozen=True)
class Project:
    """A folder with config.yaml and prompts.jsonl; the workflow stays where it was cloned."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        folder.mkdir()
        project = cls(folder)
        project.configure({})
        rows = [{"id": f"q{i}", "prompt": question} for i, question in enumerate(QUESTIONS[:7])]
        turns = [{"role": "user", "content": QUESTIONS[7]}, {"role": "assistant", "content": "old"}]
        rows.append({"id": "chat", "messages": [*turns, {"role": "user", "content": "Another one?"}]})  # type: ignore[dict-item]
        project.prompts(rows)
        return project

    def copy(self, folder: Path) -> Self:
        """The same folder with its results, elsewhere."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return type(self)(folder)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def configure(self, changes: dict[str, Any]) -> None:
        """Writes config.yaml: CONFIG with ``changes`` laid over it."""
        text = yaml.safe_dump(_over(CONFIG, changes), allow_unicode=True)
        (self.folder / "config.yaml").write_text(text, encoding="utf-8")

    def prompts(self, rows: list[dict[str, Any]]) -> None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", *words]

    def snakemake(self, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Runs snakemake to its end."""
        return self._run("snakemake", *words, "--snakefile", str(ROOT / "Snakefile"), timeout_s=timeout_s)

    def draftmill(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run("draftmill", *words, timeout_s=240)

    def _run(self, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Starts snakemake in the background, in a process group of its own."""
        log = (self.folder / "started.log").open("wb")
        with log:
            return subprocess.Popen(
                self.command("snakemake", *words, "--snakefile", str(ROOT / "Snakefile")),
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTMILL_")}
        scripts = str(ROOT / "workflow" / "scripts")
        return {**kept, "PYTHONPATH": scripts, "DRAFTMILL_TEST": str(self.folder)}

    def processes(self) -> list[int]:
        """Every process that came of this project's commands."""
        mark = f"DRAFTMILL_TEST={self.folder}".encode()
        return [pid for pid, environment in _environments() if mark in environment.split(b"\0")]

    def kill_all(self) -> None:
        """SIGKILL to everything of this project, as when the machine's power fails."""
        while found := self.processes():
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)

    def requests(self) -> int:
        """Turns that were answered so far: lines of the journal."""
        return sum(len(path.read_bytes().splitlines()) for path in (self.results / "journal").glob("*.jsonl"))

    def server_starts(self) -> int:
        logs = (self.results / "logs" / "servers").glob("*.log")
        return sum(path.read_text(errors="replace").count("=== start ") for path in logs)


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if state != "Z":
                yield int(entry.name), environment


def _over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        below = merged.get(name)
        merged[name] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
