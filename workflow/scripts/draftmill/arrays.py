"""Arrow list columns as NumPy rows, and back, without a Python object for each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.integer[Any]]


def list_rows(column: pa.ChunkedArray) -> list[Ints]:
    """Each row of a list<int> column as a view of its values; a null row is an empty one."""
    rows: list[Ints] = []
    for array in column.chunks:
        values = array.values.to_numpy(zero_copy_only=False)
        offsets = array.offsets.to_numpy()
        rows += [values[start:end] for start, end in pairwise(offsets)]
    return rows


def list_column(rows: Sequence[Ints], kind: pa.DataType) -> pa.ListArray:
    """A list column of the integer type ``kind``, one list for each of ``rows``."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([row.size for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values.astype(kind.to_pandas_dtype(), copy=False))
    )
