"""Log files of clients and supervisors, which a long run must not let grow without end.

(An engine's own output is written, and rotated alike, by its keeper.)
"""

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES = 20_000_000


def rotated(path: Path, layout: str) -> logging.Handler:
    """A log that goes on at the end of `path`; beyond `LOG_BYTES` it moves to <path>.1, and the .1 before it goes.

    `layout`: a format of the logging module.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter(layout))
    return handler
