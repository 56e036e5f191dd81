"""Rule report_items."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import job
from draftmill.report import write_report

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        folder = Path(snakemake.output[0]).parent
        write_report(folder.parent, job.settings(), folder)
