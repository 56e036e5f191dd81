"""Rule fetch_model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from draftmill import config, fetching, job, model, serving

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake


def main(facts: Path) -> None:
    settings = job.settings()
    location = model.locate(settings["model"]) or fetching.fetch(settings["model"])
    frozen = model.freeze(settings["model"], location, facts.parent)
    serving.check(settings, frozen)
    for warning in config.check(settings, frozen, None):
        job.warn(warning)


if __name__ == "__main__":
    with job.logged(snakemake.log[0]):
        main(Path(snakemake.output.facts))
