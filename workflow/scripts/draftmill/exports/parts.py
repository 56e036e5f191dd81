"""Exports cut into files: ``train.jsonl``, or ``train-00000-of-00003.jsonl`` and so on.

Knows file names and row counts. Must never know what is in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pyarrow as pa


class Sink(Protocol):
    """One open file that takes tables."""

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


class Parts:
    """Writes tables into ``folder/stem.suffix``, or into parts of ``rows_per_file`` rows each.

    The names of parts hold their number, which is known at the end only, so they are renamed then.
    """

    def __init__(
        self, folder: Path, stem: str, suffix: str, rows_per_file: int | None, opener: Callable[[Path], Sink]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._stem, self._suffix = folder, stem, suffix
        self._rows_per_file = rows_per_file
        self._opener = opener
        self._paths: list[Path] = []
        self._room = 0
        self._sink = self._next()

    def write(self, table: pa.Table) -> None:
        """Writes all rows of ``table``, starting a new part when one is full."""
        while table.num_rows:
            if self._rows_per_file is None:
                self._sink.write(table)
                return
            if not self._room:
                self._sink.close()
                self._sink = self._next()
            taken = table.slice(0, self._room)
            self._sink.write(taken)
            self._room -= taken.num_rows
            table = table.slice(taken.num_rows)

    def close(self) -> list[Path]:
        """Closes the last part; the files in their order."""
        self._sink.close()
        if self._rows_per_file is not None:
            self._paths = [
                path.rename(self._folder / f"{self._stem}-{at:05d}-of-{len(self._paths):05d}.{self._suffix}")
                for at, path in enumerate(self._paths)
            ]
        return self._paths

    def _next(self) -> Sink:
        whole = self._rows_per_file is None
        path = self._folder / f"{self._stem}{'' if whole else f'-{len(self._paths):05d}'}.{self._suffix}"
        self._paths.append(path)
        self._room = self._rows_per_file or 0
        return self._opener(path)
