"""A dataset as Hugging Face ``datasets`` saves one to disk, with token_freq.pt, for speculators.

Knows that folder's layout (Arrow IPC streams, state.json, dataset_info.json) and torch's zip container, and
needs neither library. Must never know what the rows are for.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from draftmill.arrays import list_rows
from draftmill.exports.parts import Parts

COLUMNS = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8())), ("seq_len", pa.int32())]
)


class _StreamFile:
    """One Arrow IPC stream, as ``datasets`` maps it into memory."""

    def __init__(self, path: Path) -> None:
        self._writer = pa.ipc.new_stream(str(path), COLUMNS)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


class SavedDataset:
    """A folder for ``datasets.load_from_disk``; its rows come out as torch tensors, as speculators expects."""

    def __init__(self, folder: Path, split: str, rows_per_file: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._split = folder, split
        self._parts = Parts(folder, "data", "arrow", rows_per_file or 1 << 62, _StreamFile)
        self._counts = np.zeros(0, dtype=np.int64)
        self._fingerprint = hashlib.blake2b(digest_size=8)
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        """Appends the rows of ``table``, and counts their supervised tokens."""
        self._parts.write(table.select(COLUMNS.names))
        self._rows += table.num_rows
        for row_id in table["id"].to_pylist():
            self._fingerprint.update(row_id.encode())
        pairs = zip(list_rows(table["input_ids"]), list_rows(table["loss_mask"]), strict=True)
        supervised = [ids[mask == 1] for ids, mask in pairs]
        if supervised:
            counts = np.bincount(np.concatenate(supervised), minlength=self._counts.size)
            counts[: self._counts.size] += self._counts
            self._counts = counts

    def close(self) -> None:
        """Writes the files that describe the rows."""
        files = [path.name for path in self._parts.close()]
        state: dict[str, object] = {
            "_data_files": [{"filename": name} for name in files],
            "_fingerprint": self._fingerprint.hexdigest(),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": self._split,
        }
        information: dict[str, object] = {
            "citation": "",
            "description": "",
            "homepage": "",
            "license": "",
            "features": {
                "input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"},
                "loss_mask": {"feature": {"dtype": "int8", "_type": "Value"}, "_type": "Sequence"},
                "seq_len": {"dtype": "int32", "_type": "Value"},
            },
        }
        _write_json(self._folder / "state.json", state)
        _write_json(self._folder / "dataset_info.json", information)
        used = np.flatnonzero(self._counts)
        write_torch_dict(
            self._folder / "token_freq.pt", dict(zip(used.tolist(), self._counts[used].tolist(), strict=True))
        )


def write_torch_dict(path: Path, values: dict[int, int]) -> None:
    """What ``torch.save`` writes for a dict of whole numbers: a zip that stores a pickle of protocol 2."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (
            ("data.pkl", pickle.dumps(values, protocol=2)),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"{path.stem}/{name}"), content)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
