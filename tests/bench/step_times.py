"""How long a step takes: the fit behind the stand-in server's pace, from recorded SGLang logs.

    python tests/bench/step_times.py LOG.gz …

SGLang writes a "Decode batch" line every 40 decode steps, with the running requests n and the throughput since the
line before; so the interval lasted 40 * n / throughput seconds. In between, k prefill batches of m tokens together
made the decoding wait. Least squares over all intervals of all logs of

    interval = 40 * (a + b * n) + k * c + m * d
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator

STEPS = 40
Row = tuple[list[float], float]


def intervals(path: str) -> Iterator[Row]:
    """([40, 40n, k, m], seconds) of each interval in a log but the first, which holds the warm-up."""
    prefills, tokens, first = 0, 0, True
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as log:
        for line in log:
            if found := re.search(r"Prefill batch.*#new-token: (\d+)", line):
                prefills, tokens = prefills + 1, tokens + int(found[1])
            elif found := re.search(
                r"Decode batch.*#running-req: (\d+).*gen throughput \(token/s\): ([\d.]+)", line
            ):
                running, rate = int(found[1]), float(found[2])
                if not first:
                    yield [STEPS, STEPS * running, prefills, tokens], STEPS * running / rate
                prefills, tokens, first = 0, 0, False


def least_squares(rows: list[Row]) -> list[float]:
    """The coefficients that minimise the squared error: normal equations, Gaussian elimination."""
    size = len(rows[0][0])
    matrix = [
        [sum(x[i] * x[j] for x, _ in rows) for j in range(size)] + [sum(x[i] * y for x, y in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(matrix[r][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(size):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def main() -> None:
    """Print the fit over all logs together."""
    rows = [row for path in sys.argv[1:] for row in intervals(path)]
    a, b, c, d = least_squares(rows)
    mean = sum(y for _, y in rows) / len(rows)
    off = sum((y - sum(k * v for k, v in zip((a, b, c, d), x, strict=True))) ** 2 for x, y in rows)
    fit = 1 - off / sum((y - mean) ** 2 for _, y in rows)
    print(
        f"{len(rows)} intervals: step {a * 1e3:.1f} + {b * 1e3:.3f} n ms, prefill {c * 1e3:.1f} + {d * 1e3:.3f} m ms, R2 {fit:.3f}"
    )


if __name__ == "__main__":
    main()
