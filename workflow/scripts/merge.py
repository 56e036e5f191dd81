"""Rule merge."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import job
from draftmill.merging import merge

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        merged = Path(snakemake.output.merged)
        merge(
            [Path(shard) for shard in snakemake.input.generated],
            Path(snakemake.input.prompts),
            merged.parent / "model",
            job.settings(),
            merged,
            Path(snakemake.output.rejected),
            Path(snakemake.output.validation),
        )
