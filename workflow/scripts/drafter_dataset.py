"""Rule drafter_dataset."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import job
from draftmill.dataset import dataset

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        merged = Path(snakemake.input.merged)
        dataset(
            job.settings(),
            merged,
            Path(snakemake.input.validation),
            Path(snakemake.input.prompts),
            merged.parent / "model",
            Path(snakemake.input.throughput),
            Path(snakemake.output.train).parent,
        )
