"""Rows as parquet: the whole row, with one explicit schema.

Knows parquet. Must never know a trainer's wishes: whoever reads parquet picks the columns it wants.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FEW_VALUES = ["source", "loss_mask", "status", "finish_reason", "reason"]  # columns worth a dictionary


class ParquetFile:
    """A parquet file of rows, zstd, a row group for every table written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(
            path, schema, compression="zstd", compression_level=1, use_dictionary=FEW_VALUES
        )

    def write(self, table: pa.Table) -> None:
        """Appends the rows of ``table``."""
        if table.num_rows:
            self._writer.write_table(table)

    def close(self) -> None:
        """Writes the footer."""
        self._writer.close()
