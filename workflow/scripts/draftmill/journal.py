"""The journal: every finished turn, once, surviving ``kill -9`` at any byte.

A folder of segments. A segment is written by one process and never rewritten; a line is

    <crc32 of the rest, 8 hex> <key, 32 hex> <record, one JSON object>\\n

and beside it lies ``<segment>.index``: 32 bytes a record (key, offset, length, crc32), written after the line.
The index only saves time: what it does not cover is read from the segment itself, and a line whose
checksum fails (torn, overwritten, a page of NULs) counts as never written.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

_ENTRY = struct.Struct(">16sQI")  # key, offset in the segment, length of the line with its newline
_CHECK = struct.Struct(">I")  # crc32 of the entry before it
_HEAD = 8 + 1 + 32 + 1
FSYNC_S = 1.0  # an answer is on the disk at most this long after it is written


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    segment: Path
    offset: int
    length: int


class Writer:
    """Appends records to a segment of its own. Safe to call from many threads.

    The segment is made with the first record, so a writer that has nothing to say leaves no file.
    """

    def __init__(self, folder: Path) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.path = folder / f"{stamp}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._lock = threading.Lock()
        self._segment: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._offset = 0
        self._dirty = threading.Event()
        self._closed = threading.Event()
        self._syncer = threading.Thread(target=self._sync_behind, name="journal-fsync", daemon=True)
        self._fault: OSError | None = None

    def append(self, key: str, record: dict[str, Any]) -> None:
        """Writes one record through to the kernel. Raises OSError when the disk does not take it;
        after that the writer is finished, since the torn line must stay the last."""
        rest = key.encode() + b" " + orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
        line = b"%08x %b\n" % (binascii.crc32(rest), rest)
        with self._lock:
            if self._fault is not None:
                raise self._fault
            try:
                segment, index = self._open()
                _write_all(segment, line)
                entry = _ENTRY.pack(bytes.fromhex(key), self._offset, len(line))
                _write_all(index, entry + _CHECK.pack(binascii.crc32(entry)))
            except OSError as fault:
                self._fault = fault
                raise
            self._offset += len(line)
        self._dirty.set()

    def close(self) -> None:
        """Makes everything durable and ends the segment."""
        self._closed.set()
        self._dirty.set()
        if self._segment is not None and self._index is not None:
            self._syncer.join()
            for file in (self._segment, self._index):
                os.fsync(file.fileno())
                file.close()

    def _open(self) -> tuple[BinaryIO, BinaryIO]:
        if self._segment is None or self._index is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._segment = self.path.open("xb", buffering=0)
            self._index = _index_path(self.path).open("xb", buffering=0)
            self._syncer.start()
        return self._segment, self._index

    def _sync_behind(self) -> None:
        _sync_folder(self.path.parent)
        while not self._closed.is_set():
            self._dirty.wait()
            self._dirty.clear()
            if self._segment is not None:
                with contextlib.suppress(OSError):  # append meets the same fault and reports it
                    os.fdatasync(self._segment.fileno())
            self._closed.wait(FSYNC_S / 2)


class Journal:
    """A view of all segments of a folder, as they were when it was last refreshed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged_lines = 0
        self._places: dict[bytes, Place] = {}
        self._doubles: dict[bytes, list[Place]] = {}  # where a key stands again, for when its line is damaged
        self._lock = threading.Lock()
        self._covered: dict[Path, int] = {}
        self._files: dict[Path, BinaryIO] = {}
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self._places

    def __len__(self) -> int:
        return len(self._places)

    def refresh(self) -> None:
        """Takes in what was appended since; of a key that stands twice, the first one counts."""
        if not self.folder.is_dir():
            return
        for segment in sorted(self.folder.glob("*.jsonl")):
            for key, offset, length in self._new_entries(segment):
                place = Place(segment, offset, length)
                if self._places.setdefault(key, place) is not place:
                    self._doubles.setdefault(key, []).append(place)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under ``key``; None when there is none or its lines are all damaged."""
        name = bytes.fromhex(key)
        while (place := self._places.get(name)) is not None:
            line = self._line(place)
            if _sound(line) and line[9:41] == key.encode():
                return _record(line)
            self._pass_over(name, place)
        return None

    def _line(self, place: Place) -> bytes:
        with self._lock:
            file = self._files.get(place.segment)
            if file is None:
                file = self._files[place.segment] = place.segment.open("rb")
        return os.pread(file.fileno(), place.length, place.offset)

    def _pass_over(self, name: bytes, place: Place) -> None:
        """Forgets a damaged line, so that the turn can be asked again and its new answer found."""
        with self._lock:
            if self._places.get(name) is place:  # no other thread was faster
                self.damaged_lines += 1
                del self._places[name]
                doubles = self._doubles.get(name)
                if doubles:
                    self._places[name] = doubles.pop(0)

    def keys(self) -> Iterable[str]:
        """All keys."""
        return [key.hex() for key in list(self._places)]

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every sound record once."""
        for key in self.keys():
            record = self.get(key)
            if record is not None:
                yield key, record

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _new_entries(self, segment: Path) -> Iterator[tuple[bytes, int, int]]:
        covered = self._covered.get(segment, 0)
        size = segment.stat().st_size
        if covered == 0:
            with contextlib.suppress(FileNotFoundError):
                raw = _index_path(segment).read_bytes()
                for key, offset, length in _entries(raw):
                    if offset != covered or offset + length > size:  # not what the segment holds: read that
                        break
                    yield key, offset, length
                    covered = offset + length
        with segment.open("rb") as file:
            file.seek(covered)
            for line in file:
                if not line.endswith(b"\n"):  # still being written, or torn for good
                    break
                if _sound(line):
                    yield bytes.fromhex(line[9:41].decode()), covered, len(line)
                else:
                    self.damaged_lines += 1
                covered += len(line)
        self._covered[segment] = covered


def _index_path(segment: Path) -> Path:
    return segment.with_suffix(".index")


def _entries(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The entries of an index up to the first damaged or unfinished one."""
    size = _ENTRY.size
    for at in range(0, len(raw) - size - _CHECK.size + 1, size + _CHECK.size):
        if _CHECK.unpack_from(raw, at + size)[0] != binascii.crc32(raw[at : at + size]):
            return
        yield _ENTRY.unpack_from(raw, at)


def _sync_folder(folder: Path) -> None:
    """Makes the names of new files durable, as fsync of a file need not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # some network file systems have no such thing
        os.fsync(descriptor)
    os.close(descriptor)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sound(line: bytes) -> bool:
    if len(line) < _HEAD + 3 or line[8:9] != b" " or not line.endswith(b"\n"):
        return False
    try:
        return (
            int(line[:8], 16) == binascii.crc32(line[9:-1]) and len(bytes.fromhex(line[9:41].decode())) == 16
        )
    except ValueError:
        return False


def _record(line: bytes) -> dict[str, Any]:
    record = orjson.loads(line[_HEAD:])
    assert isinstance(record, dict)
    return record
