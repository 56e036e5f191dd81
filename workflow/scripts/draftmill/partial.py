"""`draftmill partial`: a valid dataset of what is finished so far.

Reads the shards and the journal only, takes no lock and disturbs nothing, so it may run beside the
workflow or after it was broken off.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from draftmill.aside import remove_leftovers
from draftmill.dataset import dataset
from draftmill.errors import UserError
from draftmill.generation import Shard
from draftmill.journal import Journal
from draftmill.merging import merge
from draftmill.science import recorded
from draftmill.statistics import throughput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=Path("results"), help="the run's results folder")
    parser.add_argument("--out", type=Path, help="where to write the dataset (default: RESULTS/partial)")


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out or arguments.results / "partial"
    done, total = write(arguments.results, out)
    print(f"{done} of {total} turns are finished: {out / 'train.parquet'} (partial)")
    return 0


def write(results: Path, out: Path) -> tuple[int, int]:
    """Writes the dataset of all settled turns into ``out``; gives (settled turns, turns of the whole run)."""
    summary_file = results / "prompts.json"
    shards = sorted((results / "shards").glob("*.parquet"))
    if not summary_file.exists() or not shards:
        raise UserError(
            f"{results} holds no shards yet; a partial dataset needs a run that has begun to generate."
        )
    if out.is_file() or (out.exists() and not (out / "train.parquet").exists() and any(_others(out))):
        raise UserError(
            f"{out} holds something else; name a new folder, or that of an earlier partial dataset."
        )
    config = recorded(results)
    shard = Shard(config, results / "model")
    journal = Journal(results / "journal")
    remove_leftovers(results, ".partial-")
    with tempfile.TemporaryDirectory(dir=results, prefix=".partial-", suffix=f"-{os.getpid()}") as scratch:
        folder = Path(scratch)
        tables = []
        done = 0
        for path in shards:
            tables.append(folder / path.name)
            done += shard.write(shard.rows(path), journal, tables[-1], partial=True)
        if done == 0:
            raise UserError("No turn is finished yet; try again when the first answers are there.")
        summary = json.loads(summary_file.read_text(encoding="utf-8"))
        total = int(summary["turns"])
        prompts = folder / "prompts.json"
        prompts.write_text(json.dumps({**summary, "turns": done, "partial": done < total}), encoding="utf-8")
        merged, verdicts, speed = (
            folder / "merged.parquet",
            folder / "validation.json",
            folder / "throughput.json",
        )
        merge(tables, prompts, results / "model", config, merged, folder / "rejected.parquet", verdicts)
        throughput(tables, results / "fleet", config, speed, folder / "throughput.parquet")
        dataset(config, merged, verdicts, prompts, results / "model", speed, out)
        shutil.copy(verdicts, out / "validation.json")
    journal.close()
    return done, total


def _others(folder: Path) -> Iterator[Path]:
    """What lies in ``folder``, but for what a killed `partial` left there."""
    return (path for path in folder.iterdir() if not path.name.startswith(".aside-"))
