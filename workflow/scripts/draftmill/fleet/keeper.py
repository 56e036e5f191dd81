"""Holds one engine: starts it, writes its log, and ends every process that came of it.

Run by path, with nothing but the standard library, as the only child of a supervisor:

    keeper.py --parent PID --log FILE --redact FILE --grace SECONDS -- COMMAND…

If the supervisor ends, even by SIGKILL, the kernel sends the keeper SIGTERM and it ends the engine. If
the keeper itself is killed, the kernel kills the engine, and the engine's orphans fall to the supervisor.
Exit code: the engine's, or 128 + the signal that ended it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from draftmill.fleet import processes

LOG_BYTES = 20_000_000  # the log moves to <log>.1 beyond this size, and the .1 before it is dropped


class _Log:
    """A file that receives the engine's output, without the API key, and is rotated by size."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self._path, self._secret = path, secret
        self._file = path.open("ab", buffering=0)
        self._held = b""

    def write(self, line: bytes, last: bool = False) -> None:
        """Writes a line, or a piece of one; of a piece the end waits, since the key may begin in it."""
        data = self._held + line
        if self._secret:
            data = data.replace(self._secret, b"[redacted]")
        whole = last or data.endswith(b"\n")
        end = len(data) if whole else max(0, len(data) - len(self._secret))
        self._held = data[end:]
        self._file.write(data[:end])
        if self._file.tell() > LOG_BYTES:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            full, self._file = self._file, self._path.open("ab", buffering=0)
            full.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--redact", type=Path, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    processes.die_with_parent(signal.SIGTERM, arguments.parent)
    processes.adopt_orphans()
    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_end.set())
    me = os.getpid()
    log = _Log(arguments.log, arguments.redact.read_bytes().strip())
    try:
        engine = subprocess.Popen(
            arguments.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, me),  # noqa: PLW1509  no thread runs yet
        )
    except OSError as fault:
        log.write(f"cannot start {arguments.command[0]}: {fault.strerror}\n".encode())
        return 127
    assert engine.stdout is not None
    output = engine.stdout

    def pump() -> None:
        for line in iter(lambda: output.readline(65536), b""):
            # On a full disk lines are lost; unread, they would block the engine.
            with contextlib.suppress(OSError):
                log.write(line)
        with contextlib.suppress(OSError):
            log.write(b"", last=True)

    writer = threading.Thread(target=pump, daemon=True)
    writer.start()
    while not asked_to_end.wait(0.1) and engine.poll() is None:
        pass
    if engine.poll() is None:
        engine.send_signal(signal.SIGTERM)
        try:
            engine.wait(arguments.grace)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()
    processes.end(lambda: processes.descendants(me), grace_s=0)
    writer.join(1)
    code = engine.returncode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
