"""Merging and exporting at full size: rows per second and peak memory.

    python tests/bench/bench_merge.py --rows 12000 48000 193000 --tokens 3000 --shards 48

Makes synthetic shards of each size (the embedded model's tokenizer, answers of heavy-tailed length), merges
and exports them in a process of its own. Peak memory is that process's and its workers' together. Runs of
more than 10,000 turns retokenise a sample only, so large ones are faster per row than small ones. No model
generates anything.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "workflow" / "scripts"))

from draftmill import config as settings  # noqa: E402
from draftmill import model  # noqa: E402
from draftmill.arrays import list_column  # noqa: E402
from draftmill.chat import ChatTemplate  # noqa: E402
from draftmill.dataset import dataset  # noqa: E402
from draftmill.merging import WORKERS, merge  # noqa: E402
from draftmill.rows import GENERATED  # noqa: E402
from draftmill.tokens import Tokenizer  # noqa: E402

ROW_GROUP = 512
LONGEST = 8192


def make_run(folder: Path, rows: int, tokens: int, shards: int) -> list[Path]:
    """A run's files before the merge: ``rows`` turns of ``tokens`` sampled tokens on average."""
    resolved = settings.resolve({"dataset": {"formats": ["parquet", "jsonl"]}})
    (folder / "config.json").write_text(json.dumps(resolved), encoding="utf-8")
    location = model.locate(resolved["model"])
    assert location is not None
    model.freeze(resolved["model"], location, folder / "model")
    tokenizer, template = Tokenizer.load(folder / "model"), ChatTemplate.load(folder / "model")
    pool = _pool(tokenizer)
    chance = np.random.default_rng(0)
    paths = []
    (folder / "generated").mkdir()
    for shard in range(shards):
        path = folder / "generated" / f"{shard + 1}-of-{shards}.parquet"
        with pq.ParquetWriter(path, GENERATED, compression="zstd") as writer:
            ids = sorted(f"prompt{at:07d}" for at in range(shard, rows, shards))
            for start in range(0, len(ids), ROW_GROUP):
                writer.write_table(
                    _table(ids[start : start + ROW_GROUP], tokens, pool, chance, tokenizer, template)
                )
        paths.append(path)
    summary = {
        "rows_in": rows,
        "usable": rows,
        "turns": rows,
        "duplicates": 0,
        "contaminated": 0,
        "skipped": 0,
    }
    (folder / "prompts.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "throughput.json").write_text("{}", encoding="utf-8")
    return paths


def _pool(tokenizer: Tokenizer) -> Any:
    """A long text of made-up words, tokenised; answers are pieces of it."""
    dice = random.Random(0)
    syllables = [a + b for a in "bcdfghlmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    words = ["".join(dice.choices(syllables, k=dice.choice((1, 2, 2, 3)))) for _ in range(20_000)]
    parts = [
        f"{' '.join(dice.choices(words, k=dice.randint(6, 20)))}.{dice.choice((' ', chr(10)))}"
        for _ in range(40_000)
    ]
    return np.array([i for ids in tokenizer.encode_batch(parts) for i in ids], dtype=np.int32)


def _table(
    ids: list[str], tokens: int, pool: Any, chance: Any, tokenizer: Tokenizer, template: ChatTemplate
) -> pa.Table:
    count = len(ids)
    messages = [
        [{"role": "user", "content": f"Tell me about {name}, at length. " + "Please. " * 40}] for name in ids
    ]
    lengths = np.minimum(chance.lognormal(np.log(tokens * 0.6), 1.0, count), LONGEST).astype(int) + 40
    starts = chance.integers(0, pool.size - LONGEST - 100, count)
    outputs = [np.append(pool[at : at + size], np.int32(2)) for at, size in zip(starts, lengths, strict=True)]
    prompts = [
        np.array(i, dtype=np.int32)
        for i in tokenizer.encode_batch([template.render(message) for message in messages])
    ]
    sampling = json.dumps(
        {"temperature": 0.7, "top_p": 0.9, "stop": [], "stop_token_ids": [], "max_tokens": LONGEST}
    )
    same: dict[str, Any] = {
        "turn_index": 0, "sample": 0, "source": "made up", "outcome": "answered", "thinking": False, "tools": None,
        "finish_reason": "stop", "detail": None, "seed": 1, "sampling": sampling, "max_tokens": LONGEST,
        "started_at": 1.0, "queue_s": 0.1, "latency_s": 60.0, "server": "host/0", "engine": "none", "cached_tokens": 0,
        "attempts": 1, "carried": None,
    }  # fmt: skip
    columns: dict[str, Any] = {name: [value] * count for name, value in same.items()} | {
        "id": [f"{name}_gen0" for name in ids],
        "primary_id": ids,
        "content_hash": ids,
        "key": ids,
        "messages": [json.dumps(message) for message in messages],
        "prompt_ids": list_column(prompts, pa.int32()),
        "output_ids": list_column(outputs, pa.int32()),
    }
    return pa.table({name: columns[name] for name in GENERATED.names}, schema=GENERATED)


def run(folder: Path) -> None:
    """The work that is measured: the merge, then the export."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shards = sorted((folder / "generated").glob("*.parquet"))
    merged, validation = folder / "merged.parquet", folder / "validation.json"
    started = time.perf_counter()
    merge(
        shards,
        folder / "prompts.json",
        folder / "model",
        config,
        merged,
        folder / "rejected.parquet",
        validation,
    )
    between = time.perf_counter()
    dataset(
        config, merged, validation, folder / "prompts.json", folder / "model", folder / "throughput.json",
        folder / "drafter",
    )  # fmt: skip
    ended = time.perf_counter()
    own, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "merge_s": between - started,
        "export_s": ended - between,
        "cpu_s": own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime,
        # an upper bound: all at their own highest at once (ru_maxrss is in KiB)
        "peak_bytes": (own.ru_maxrss + WORKERS * workers.ru_maxrss) * 1024,
    }
    print(json.dumps(figures), flush=True)


def measure(folder: Path) -> dict[str, float]:
    """The figures of ``run`` on ``folder``, from a process of its own."""
    process = subprocess.run(
        [sys.executable, __file__, "--run", str(folder)], stdout=subprocess.PIPE, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(process.returncode)
    figures: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Prints one line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[3_000, 12_000, 48_000])
    parser.add_argument("--tokens", type=int, default=3_000, help="sampled tokens of a row, on average")
    parser.add_argument("--shards", type=int, default=48)
    parser.add_argument(
        "--folder", type=Path, help="where the synthetic runs lie; a temporary folder by default"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run(given.run)
        return
    print(
        f"{'rows':>8} {'tokens':>12} {'merge s':>8} {'export s':>8} {'cpu s':>7} {'rows/s':>7} {'peak MB':>8}",
        flush=True,
    )
    results = []
    for rows in given.rows:
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            folder = Path(name)
            make_run(folder, rows, given.tokens, given.shards)
            figures = measure(folder)
            tokens = pq.read_table(folder / "merged.parquet", columns=["completion_len"])["completion_len"]
            figures |= {"rows": rows, "tokens": sum(tokens.to_pylist())}
        figures["rows_per_s"] = rows / (figures["merge_s"] + figures["export_s"])
        results.append(figures)
        print(
            f"{rows:>8} {figures['tokens']:>12} {figures['merge_s']:>8.1f} {figures['export_s']:>8.1f} {figures['cpu_s']:>7.1f} "
            f"{figures['rows_per_s']:>7.0f} {figures['peak_bytes'] / 1e6:>8.0f}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
