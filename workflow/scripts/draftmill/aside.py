"""Files that appear whole or not at all: written aside, then renamed. Must never know what is in them."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` if all goes well and disappears if not."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Removes what killed processes left aside in ``folder``: files and folders named ``prefix``…PID.

    Only for names that one process at a time writes: another machine's process would count as ended.
    """
    for path in folder.glob(glob.escape(prefix) + "*"):
        pid = re.fullmatch(r".*[.-](\d+)", path.name)
        if pid is None or (int(pid[1]) != os.getpid() and Path("/proc", pid[1]).exists()):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_aside(path: Path, content: str | bytes) -> None:
    """Replaces ``path`` by ``content`` (text as UTF-8) in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
