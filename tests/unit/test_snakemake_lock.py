"""SIGTERM in the middle of the scheduler's choice."""

import threading

import pytest
from snakemake.scheduling.job_scheduler import JobScheduler

from draftmill import snakemake_lock


def test_a_signal_while_jobs_are_chosen_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(scheduler: JobScheduler) -> None:
        scheduler._lock = threading.Lock()
        scheduler._open_jobs = threading.Semaphore(0)

    monkeypatch.setattr(JobScheduler, "__init__", build)
    snakemake_lock.make_reentrant()
    scheduler = JobScheduler()
    with scheduler._lock:
        ended = threading.Event()

        def watch() -> None:
            if not ended.wait(10):
                scheduler._lock = None  # ends the wait below in an error instead of never

        threading.Thread(target=watch, daemon=True).start()
        assert scheduler._lock.acquire(timeout=5), "the handler would wait for its own thread"
        scheduler._lock.release()
        scheduler.exit_gracefully()
        ended.set()
    assert scheduler._user_kill == "graceful"
