"""Rule throughput."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import job
from draftmill.statistics import throughput

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        summary = Path(snakemake.output.summary)
        throughput(
            [Path(shard) for shard in snakemake.input.generated],
            summary.parent / "fleet",
            job.settings(),
            summary,
            Path(snakemake.output.series),
        )
