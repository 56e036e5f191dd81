import logging
from pathlib import Path

import pytest

from draftmill import logs


def test_a_log_goes_on_where_it_ended_and_never_grows_beyond_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    path = tmp_path / "supervisors" / "node1-cpu0.log"
    written = []
    for start in range(3):
        handler = logs.rotated(path, "%(message)s")
        for number in range(40):
            message = f"start {start}, line {number:04} {'ü' * 5}"
            written.append(message)
            handler.emit(logging.LogRecord("run", logging.INFO, "", 0, message, (), None))
        handler.close()
    before = path.with_name(path.name + ".1")
    assert sorted(path.parent.iterdir()) == [path, before]
    assert all(file.stat().st_size <= 1000 for file in (path, before))
    kept = (before.read_text(encoding="utf-8") + path.read_text(encoding="utf-8")).splitlines()
    assert kept == written[-len(kept) :]
