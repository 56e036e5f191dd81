"""The launch_server rule's process: one shard's lease. usage: lease.py SERVICE_FILE"""

import sys
from pathlib import Path

from draftmill import job
from draftmill.errors import UserError
from draftmill.fleet.lease import Lease


def main() -> int:
    service_file = Path(sys.argv[1])
    try:
        lease = Lease(service_file, service_file.parents[1], job.settings())
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    lease.hold()
    return 0


if __name__ == "__main__":
    sys.exit(main())
