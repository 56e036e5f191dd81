"""Rule generate."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import job
from draftmill.answering import generate

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        output = Path(snakemake.output[0])
        generate(
            job.settings(),
            output.parents[1],
            Path(snakemake.input.shard),
            Path(snakemake.input.lease),
            output,
        )
