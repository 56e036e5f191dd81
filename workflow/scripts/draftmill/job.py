"""What surrounds the work of every rule's script: its configuration, its log file, errors as sentences, and its
end with the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftmill import logs
from draftmill.errors import UserError
from draftmill.fleet import processes


def settings() -> dict[str, Any]:
    """The resolved configuration, which the Snakefile exports for all processes of a run."""
    resolved: dict[str, Any] = json.loads(os.environ["DRAFTMILL_CONFIG"])
    return resolved


@contextlib.contextmanager
def logged(path: str) -> Iterator[None]:
    """Sends the log to ``path`` (warnings to the terminal too); a UserError becomes a sentence and exit code 1.

    If Snakemake ends before the work does, even by SIGKILL, this process ends too: what it has not finished
    would only stand in the way of the next run.
    """
    processes.end_with_owner()
    to_file = logs.rotated(Path(path), "%(asctime)s %(levelname)s %(message)s")
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setLevel(logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("draftmill: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    try:
        yield
    except UserError as fault:
        logging.error("%s", fault)
        sys.exit(1)
    except Exception:
        logging.exception("this step failed; the cause is at the end")
        sys.exit(1)


def warn(sentence: str) -> None:
    """Says something that the user should know, in the log and on the terminal."""
    logging.warning("%s", sentence)
