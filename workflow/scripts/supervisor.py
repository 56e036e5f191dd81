"""One slot's supervisor, started by a lease. usage: supervisor.py RESULTS SLOT"""

import sys
from pathlib import Path

from draftmill import job
from draftmill.fleet import supervisor
from draftmill.fleet.slots import slots


def main() -> int:
    results, name = Path(sys.argv[1]), sys.argv[2]
    config = job.settings()
    slot = next(slot for slot in slots(config["operation"]) if slot.name == name)
    return supervisor.main(results, slot, config)


if __name__ == "__main__":
    sys.exit(main())
