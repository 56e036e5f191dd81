"""The drafter dataset: what trainers read, a split for validation, and a card that says what it is.

Knows the merged rows and which export is asked for. Must never change a row: what was sampled is what is
written. Reads one row group at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.aside import remove_leftovers
from draftmill.card import Contents, card
from draftmill.exports import lines
from draftmill.exports.arrow import SavedDataset
from draftmill.exports.lines import LinesFile, Shape
from draftmill.exports.parts import Parts
from draftmill.exports.tables import ParquetFile
from draftmill.model import Model
from draftmill.rows import MERGED

log = logging.getLogger("dataset")

ROWS_AT_ONCE = 512
TRAIN, VALIDATION = "train", "validation"
CHATS: dict[str, Shape] = {
    "messages": lines.messages,
    "conversations": lines.conversations,
    "text": lines.text,
}
OWNED = {"README.md", "data", "arrow", *CHATS} | {
    f"{split}.{suffix}" for split in (TRAIN, VALIDATION) for suffix in ("parquet", "jsonl")
}


def dataset(
    config: dict[str, Any],
    merged: Path,
    validation: Path,
    prompts: Path,
    model_folder: Path,
    throughput: Path,
    out_folder: Path,
) -> None:
    """Writes every export that ``config["dataset"]`` asks for, and README.md, into ``out_folder``.

    ``validation``, ``prompts``, ``throughput``: the run's validation.json, prompts.json and throughput.json.
    train.parquet and train.jsonl are always written, whole. Everything appears at the end; exports of an
    earlier run that are not asked for any more go away, other files stay.
    """
    settings = config["dataset"]
    aside = out_folder / f".aside-{os.getpid()}"
    remove_leftovers(out_folder, ".aside-")
    aside.mkdir(parents=True)
    try:
        contents = _export(settings, int(config["seed"]), merged, aside)
        facts = {
            "config": config,
            "validation": _json(validation),
            "prompts": _json(prompts),
            "throughput": _json(throughput),
        }
        (aside / "README.md").write_text(card(facts, Model.load(model_folder), contents), encoding="utf-8")
        for name in sorted(OWNED):
            new, old = aside / name, out_folder / name
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif not new.exists():
                old.unlink(missing_ok=True)
            if new.exists():
                new.replace(old)
        log.info(
            "%s in %s",
            ", ".join(f"{count:,} {split} rows" for split, count in contents.rows.items()),
            out_folder,
        )
        if empty := contents.empty_validation():
            log.warning("%s", empty)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def in_validation(content_hash: str, seed: int, share: float) -> bool:
    """Whether a conversation is put aside; all its turns and samples go the same way."""
    digest = hashlib.blake2b(f"validation/{seed}/{content_hash}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _export(settings: Mapping[str, Any], seed: int, merged: Path, folder: Path) -> Contents:
    share = float(settings["validation_share"])
    splits = {TRAIN: _open(settings, TRAIN, folder)}
    if share > 0:
        splits[VALIDATION] = _open(settings, VALIDATION, folder)
    contents = Contents()
    for table in _tables(merged):
        hashes = table["content_hash"].to_pylist()
        aside = np.array([share > 0 and in_validation(name, seed, share) for name in hashes], dtype=bool)
        for split, exports in splits.items():
            rows = table.filter(pa.array(aside if split == VALIDATION else ~aside)) if share > 0 else table
            contents.add(split, rows)
            for export in exports:
                export.write(rows)
    for exports in splits.values():
        for export in exports:
            export.close()
    return contents


def _open(settings: Mapping[str, Any], split: str, folder: Path) -> list[Parts | SavedDataset]:
    """The exports of one split, open."""
    formats, rows_per_file = set(settings["formats"]), settings["rows_per_file"]

    def parquet(path: Path) -> ParquetFile:
        return ParquetFile(path, MERGED)

    def shaped(shape: Shape, place: Path, limit: int | None) -> Parts:
        return Parts(place, split, "jsonl", limit, lambda path: LinesFile(path, shape))

    exports: list[Parts | SavedDataset] = [
        Parts(folder, split, "parquet", None, parquet),
        shaped(lines.pretokenised, folder, None),
    ]
    if rows_per_file is not None:
        exports.append(Parts(folder / "data", split, "parquet", rows_per_file, parquet))
    exports += [
        shaped(shape, folder / name, rows_per_file) for name, shape in CHATS.items() if name in formats
    ]
    if "arrow" in formats:
        exports.append(SavedDataset(folder / "arrow" / split, split, rows_per_file))
    return exports


def _tables(merged: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(merged, buffer_size=1 << 20, pre_buffer=False) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, use_threads=False):
            yield pa.Table.from_batches([batch]).select(MERGED.names).cast(MERGED)


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
