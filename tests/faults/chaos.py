"""Chaos: the real workflow under random faults at random moments, resumed until done, held to its laws.

    python tests/faults/chaos.py [--seeds 50] [--first 1] [--jobs 3] [--out chaos.json] [--keep FOLDER]

A seed decides how the servers misbehave, what is killed, and when. Each seed prints one line; a seed whose laws
are broken keeps its folder (with --keep) and can be run again by `--first SEED --seeds 1`. chaos.json holds
`seeds`, `kills`, `faults` (kind -> how often), `turns`, `lost`, `doubled`, `asked_again`, `left_over_processes`,
and one entry a seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import tiny_model
from harness import REFUSING, Run

TARGET = "results/merged.parquet"
SESSION_S = 150.0
SESSIONS = 8
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
TARGETS = ("snakemake", "group", "generate", "lease", "supervisor", "keeper", "server", "child")
JOURNAL_DAMAGES = ("torn line", "doubled line", "NUL page")
POISONED = "poison0_gen0"
Reference = dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]


def server_faults(draw: random.Random) -> list[dict[str, Any]]:
    """How the servers of one seed misbehave: none to three faults, each of which lets the run end well."""

    def answers() -> int:
        return draw.randint(3, 25)

    share = draw.uniform(0.02, 0.1)
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "dies": lambda: {"answers": answers(), "start_probability": 0.5},
        "child_dies": lambda: {"answers": answers(), "start_probability": 0.4},
        "hangs": lambda: {"answers": answers(), "start_probability": 0.3},
        "deaf": lambda: {"answers": answers(), "start_probability": 0.2},
        "busy_503": dict,
        "metrics_vanish": lambda: {"answers": answers()},
        "ignores_term": dict,
        "leaves_children": lambda: {"count": draw.randint(1, 3)},
        "never_starts": lambda: {"starts": [draw.randint(1, 4)]},
        "starts_late": lambda: {"s": draw.uniform(1, 4), "start_probability": 0.7},
        "crash_at_start": lambda: {"starts": [draw.randint(1, 5)], "cause": draw.choice(["oom", "port", ""])},
        "http": lambda: {"status": draw.choice([429, 500, 502, 503]), "probability": share},
        "html": lambda: {"status": draw.choice([200, 502]), "probability": share},
        "truncated": lambda: {"probability": share},
        "no_ids": lambda: {"probability": share},
        "close": lambda: {"probability": share},
        "empty": lambda: {"probability": share},
        "abort": lambda: {"probability": share},
        "late": lambda: {"s": 3600, "probability": 0.02},
        "poison": lambda: {"token": tiny_model.MARKERS["poison"], "s": 0.2},
    }
    chosen = draw.sample(sorted(kinds), draw.choice([0, 1, 1, 2, 2, 3]))
    return [REFUSING, *({"fault": kind, **kinds[kind]()} for kind in chosen)]


@dataclass(frozen=True)
class Hit:
    """Something that happens to a run: `what` to `target`, `after_s` seconds from its start or its first request."""

    what: str
    target: str
    after_s: float
    from_first_request: bool
    damage: str | None = None

    def __str__(self) -> str:
        named = " ".join(part for part in (self.what, self.target) if part)
        return f"{named} at {self.after_s:.1f} s" + (f", {self.damage}" if self.damage else "")


def hits(draw: random.Random) -> list[Hit]:
    """What happens to one seed's run, one a session: kills mostly; now and then a full disk or a second run."""
    planned = []
    for _ in range(draw.choice([1, 1, 2, 2, 3])):
        working = draw.random() < 0.8
        after_s = draw.uniform(0.2, 8) if working else draw.uniform(0.5, 6)
        what = draw.choices([*SIGNALS, "disk full", "second run"], weights=[5, 3, 3, 1, 1])[0]
        target = draw.choice(TARGETS) if what in SIGNALS else ""
        damage = draw.choice(JOURNAL_DAMAGES) if draw.random() < 0.25 else None
        planned.append(Hit(what, target, after_s, working, damage))
    return planned


@dataclass
class Outcome:
    """What one seed came to. `broken` holds a sentence for each broken law."""

    seed: int
    faults: list[str]
    hits: list[str] = field(default_factory=list)
    kills: int = 0
    sessions: int = 0
    turns: int = 0
    lost: int = 0
    doubled: int = 0
    asked_again: int = 0
    left_over_processes: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = "; ".join([*self.hits, *self.faults]) or "nothing"
        counts = (
            f"{self.sessions} sessions, {self.turns} turns, lost {self.lost}, doubled {self.doubled}, "
            f"asked again {self.asked_again}, left over {self.left_over_processes}"
        )
        verdict = "ok" if not self.broken else "BROKEN: " + " | ".join(self.broken)
        return f"seed {self.seed}: {what} -> {counts}, {self.seconds:.0f} s, {verdict}"


class Seed:
    """One seed's run, from its first session to the check of the laws."""

    def __init__(
        self,
        seed: int,
        base: Path,
        model: Path,
        reference: Reference,
        rejected: set[str],
        prompts: Sequence[Mapping[str, Any]],
    ) -> None:
        self.draw = random.Random(seed)
        self.reference, self.rejected = reference, rejected
        faults = server_faults(self.draw)
        self.poisoned = any(fault["fault"] == "poison" for fault in faults)
        self.hits = hits(self.draw)
        if any(hit.target == "child" for hit in self.hits) and "leaves_children" not in str(faults):
            faults.append({"fault": "leaves_children", "count": 1})  # else there is no child to hit
        shards = self.draw.choice([2, 3, 4])
        self.shards = shards
        environment = {}
        if self.draw.random() < 0.15:
            moment, offset = (
                time.monotonic() + self.draw.uniform(5, 15),
                self.draw.choice([-7200, -60, 60, 7200]),
            )
            environment["CLOCK_JUMP"] = f"{moment}:{offset}"
        folder = base / f"s{seed}"
        self.disk = _small_disk(folder) if any(hit.what == "disk full" for hit in self.hits) else None
        self.run = Run(
            folder,
            model,
            settings={"shards": shards, "operation": {"cpu_servers": self.draw.choice([2, 3])}},
            standin={"faults": faults, "seed": seed},
            environment=environment,
        )
        self.run.prompts(prompts)
        named = [fault["fault"] for fault in faults if fault is not REFUSING]
        self.outcome = Outcome(seed, named + (["clock jump"] if environment else []))
        self.snapshots: list[tuple[float, set[str]]] = []

    def play(self) -> Outcome:
        """Runs session after session until the workflow has ended well and nothing more is to happen."""
        began = time.monotonic()
        try:
            while self.outcome.sessions < SESSIONS:
                if self._session() == 0:
                    break
            else:
                self.outcome.broken.append(f"not finished after {SESSIONS} sessions")
            if (self.run.results / "merged.parquet").exists():
                self._judge()
        except Exception as fault:  # noqa: BLE001 (whatever breaks one seed must not hide the others)
            self.outcome.broken.append(f"{type(fault).__name__}: {fault}")
        self.outcome.seconds = time.monotonic() - began
        self.run.stop_all()
        return self.outcome

    def close(self, keep: Path | None) -> None:
        """Removes the folder, or keeps a broken seed's."""
        if keep and self.outcome.broken:
            shutil.copytree(self.run.folder, keep / self.run.folder.name, dirs_exist_ok=True)
        if self.disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)
        self.run.remove()

    def _session(self) -> int:
        """One start of the workflow, one hit at most; returns its exit code."""
        run, out = self.run, self.outcome
        out.sessions += 1
        hit = self.hits.pop(0) if self.hits else None
        asked = _log_bytes(run)
        process = run.start(TARGET) if out.sessions == 1 else run.start_resume(TARGET)
        limit = time.monotonic() + SESSION_S
        if hit and self._wait_for(hit, process, asked):
            if hit.what != "disk full" or self.disk:  # a large disk is not filled
                out.hits.append(str(hit))
            self._strike(hit, process)
        try:
            code = process.wait(max(1.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            out.broken.append(f"session {out.sessions} did not end in {SESSION_S:.0f} s")
            run.stop_all()
            code = process.wait()
        left = run.census()
        if left:
            out.left_over_processes += len(left)
            out.broken.append(f"left over: {sorted({p.role for p in left})}")
            run.stop_all()
        (run.folder / "filler").unlink(missing_ok=True)
        if hit and hit.damage and run.segments():
            damage(self.draw.choice(run.segments()), hit.damage, self.draw)
        kept = run.journal() if run.segments() else set()
        self.snapshots.append((time.monotonic(), kept))
        if code != 0 and out.sessions == 1 and (run.results / "prompts.json").exists():
            out.broken += harness.untrue_plan(run, self.shards)
        return code

    def _wait_for(self, hit: Hit, process: subprocess.Popen[bytes], asked: int) -> bool:
        """Waits for the hit's moment; False when the session has ended before."""
        while hit.from_first_request and _log_bytes(self.run) == asked:
            if process.poll() is not None:
                return False
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(hit.after_s)
            return False
        return True

    def _strike(self, hit: Hit, process: subprocess.Popen[bytes]) -> None:
        run = self.run
        if hit.what == "disk full":
            fill(run.folder / "filler")
        elif hit.what == "second run":
            if run.finish(TARGET) == 0 and process.poll() is None:
                self.outcome.broken.append("a second run in the same directory did not refuse")
        elif hit.target == "group":
            self.outcome.kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, SIGNALS[hit.what])
        elif found := run.having(hit.target):
            self.outcome.kills += 1
            self.draw.choice(found).send(SIGNALS[hit.what])

    def _judge(self) -> None:
        run, out = self.run, self.outcome
        expected = set(self.reference) | self.rejected | {POISONED}
        accepted, rejected = run.merged(), run.rejected()
        out.turns = len(accepted) + len(rejected)
        out.lost = len(expected - accepted.keys() - rejected.keys())
        out.doubled = harness.doubled(run)
        again = harness.asked_again(run, self.snapshots)
        out.asked_again = len(again)
        out.broken += harness.unsound_accounts(run, expected)
        if again:
            out.broken.append(f"{len(again)} turns asked again: {again[:2]}")
        if out.doubled:
            out.broken.append(f"{out.doubled} doubled rows")
        if differ := harness.differing(run, self.reference, but={POISONED}):
            reasons = Counter(rejected.get(i, "other tokens") for i in differ)
            out.broken.append(
                f"{len(differ)} rows differ from an undisturbed run ({dict(reasons)}): {differ[:2]}"
            )
        if self.poisoned and rejected.get(POISONED) != "poison":
            out.broken.append(f"the poison prompt was not rejected as poison: {rejected.get(POISONED)}")


def damage(segment: Path, kind: str, draw: random.Random) -> None:
    """Hurts a journal segment as a crash of the machine may: its index is left as it is."""
    content = segment.read_bytes()
    lines = content.splitlines(keepends=True)
    if not lines:
        return
    if kind == "torn line":
        segment.write_bytes(content[: len(content) - draw.randint(1, len(lines[-1]))])
    elif kind == "doubled line":
        segment.write_bytes(content + draw.choice(lines))
    else:
        at = draw.randrange(len(content))
        segment.write_bytes(content[:at] + bytes(min(4096, len(content) - at)) + content[at + 4096 :])


def _log_bytes(run: Run) -> int:
    return sum(path.stat().st_size for path in (run.folder / "standin").glob("requests-*"))


def _small_disk(folder: Path) -> Path | None:
    """A file system of 64 MB for the run, where this user may mount one; else None."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    return folder if done.returncode == 0 else None


def fill(path: Path) -> None:
    """Takes all room on the small disk; does nothing on a large one."""
    free = shutil.disk_usage(path.parent).free
    if free < 100 << 20:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))


def reference(base: Path, model: Path) -> tuple[Reference, set[str]]:
    """(accepted rows, ids of rejected rows) of an undisturbed run, without the poison prompt."""
    run = Run(base / "reference", model, standin={"faults": [REFUSING]})
    run.prompts(harness.conversations())
    code = run.finish(TARGET, timeout_s=SESSION_S)
    if code != 0:
        sys.exit(f"the undisturbed run failed: {run.log().read_text()[-3000:]}")
    rows, rejected = run.merged(), set(run.rejected())
    run.remove()
    return rows, rejected


def main() -> None:
    """Play the seeds, print a line each, write the summary; exit 1 when a law is broken."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, default=50)
    arguments.add_argument("--first", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("chaos.json"))
    arguments.add_argument("--keep", type=Path)
    asked = arguments.parse_args()
    base = Path(tempfile.mkdtemp(prefix="chaos"))
    began = time.monotonic()
    try:
        model = tiny_model.make(base / "model")
        rows, rejected = reference(base, model)

        def play(number: int) -> Outcome:
            seed = Seed(
                number, base, model, rows, rejected, prompts=[*harness.conversations(), harness.poison()]
            )
            outcome = seed.play()
            print(outcome, flush=True)
            seed.close(asked.keep)
            return outcome

        with ThreadPoolExecutor(asked.jobs) as pool:
            outcomes = list(pool.map(play, range(asked.first, asked.first + asked.seeds)))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    kinds = Counter(kind for o in outcomes for kind in o.faults)
    kinds.update(" ".join(hit.split(" at ")[0].split()) for o in outcomes for hit in o.hits)
    totals = ("kills", "turns", "lost", "doubled", "asked_again", "left_over_processes")
    summary = {
        "seeds": len(outcomes),
        **{name: sum(getattr(o, name) for o in outcomes) for name in totals},
        "faults": dict(sorted(kinds.items())),
        "broken": sum(bool(o.broken) for o in outcomes),
        "seconds": round(time.monotonic() - began),
        "outcomes": [vars(o) for o in outcomes],
    }
    asked.out.write_text(json.dumps(summary, indent=1))
    head = ", ".join(f"{name} {summary[name]}" for name in ("seeds", *totals, "broken", "seconds"))
    print(f"chaos: {head}")
    sys.exit(1 if summary["broken"] else 0)


if __name__ == "__main__":
    main()
