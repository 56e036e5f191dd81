"""Rule shard_prompts."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import job
from draftmill.sharding import shard_prompts

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        shard_prompts(
            job.settings(),
            Path(snakemake.input.model[0]).parent,
            [Path(shard) for shard in snakemake.output.shards],
            Path(snakemake.output.skipped),
            Path(snakemake.output.summary),
        )
