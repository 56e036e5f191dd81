"""A scheduler's lock that a signal's handler may take while its own thread holds it.

Snakemake 9.27 takes the lock in the handler of SIGTERM. A signal that comes while the main thread holds it, as when jobs
are chosen, then stands still for ever (seen once, in a run of sixteen shards). The handler only notes the wish to
end, so that nothing is harmed when the thread takes the lock twice.
"""

from __future__ import annotations

import threading
from typing import Any

from snakemake.scheduling.job_scheduler import JobScheduler


def make_reentrant() -> None:
    """Gives every scheduler that is built from now on such a lock."""
    build = JobScheduler.__init__
    if getattr(build, "reentrant", False):
        return

    def reentrant(scheduler: JobScheduler, *args: Any, **kwargs: Any) -> None:
        build(scheduler, *args, **kwargs)
        scheduler._lock = threading.RLock()

    reentrant.reentrant = True  # type: ignore[attr-defined]
    JobScheduler.__init__ = reentrant
