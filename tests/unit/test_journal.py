"""The journal keeps every finished turn once, whatever happens to its files."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.journal import Journal, Writer

Records = dict[str, dict[str, Any]]
Copies = Callable[[], tuple[Path, Path, Path]]  # a fresh copy of a journal: folder, segment, index
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def key(number: int) -> str:
    return f"{number:032x}"


def record(number: int, tokens: int = 20) -> dict[str, Any]:
    return {"outcome": "answered", "id": f"é{number}", "output_ids": list(range(number, number + tokens))}


def written(folder: Path, count: int, start: int = 0, tokens: int = 20) -> Path:
    """A segment with `count` records, numbered from `start`."""
    writer = Writer(folder)
    for number in range(start, start + count):
        writer.append(key(number), record(number, tokens))
    writer.close()
    return writer.path


def read(folder: Path) -> Records:
    journal = Journal(folder)
    found = dict(journal.records())
    journal.close()
    return found


def index_of(segment: Path) -> Path:
    (index,) = segment.parent.glob(f"{segment.stem}.index")
    return index


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of one segment with 40 records, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("template") / "journal"
    written(folder, 40)
    return folder


@pytest.fixture(scope="module")
def copies(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    def copy() -> tuple[Path, Path, Path]:
        folder = tmp_path_factory.mktemp("copy") / "journal"
        shutil.copytree(template, folder)
        (segment,) = folder.glob("*.jsonl")
        return folder, segment, index_of(segment)

    return copy


def whole_lines(segment: Path) -> list[bytes]:
    return [line for line in segment.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


EXPECTED = {key(number): record(number) for number in range(40)}


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    written(tmp_path, 30)
    written(tmp_path, 30, start=30)
    journal = Journal(tmp_path)
    assert len(journal) == 60 and sorted(journal.keys()) == sorted(map(key, range(60)))
    assert all(journal.get(key(n)) == record(n) for n in range(60))
    assert key(59) in journal and key(60) not in journal and journal.get(key(60)) is None


def test_a_folder_that_is_not_there_is_an_empty_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "none")
    assert len(journal) == 0
    written(tmp_path / "none", 1)
    journal.refresh()
    assert journal.get(key(0)) == record(0)


def test_a_writer_with_nothing_to_say_leaves_no_file(tmp_path: Path) -> None:
    Writer(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_at_any_byte_loses_only_what_comes_after(copies: Copies, data: st.DataObject) -> None:
    folder, segment, index = copies()
    cut = data.draw(st.integers(0, segment.stat().st_size), label="segment")
    index_cut = data.draw(st.integers(0, index.stat().st_size), label="index")
    os.truncate(segment, cut)
    os.truncate(index, index_cut)
    whole = len(whole_lines(segment))
    assert read(folder) == {key(number): record(number) for number in range(whole)}


@pytest.mark.parametrize("index_left", [False, True])
def test_every_cut_of_the_last_line(copies: Copies, index_left: bool) -> None:
    folder, segment, index = copies()
    data = segment.read_bytes()
    last = len(whole_lines(segment)[-1])
    if not index_left:
        index.unlink()
    for cut in range(len(data) - last, len(data)):
        segment.write_bytes(data[:cut])
        assert read(folder) == {key(number): record(number) for number in range(39)}


@settings(max_examples=80)
@given(data=st.data())
def test_damage_costs_the_damaged_lines_and_nothing_else(copies: Copies, data: st.DataObject) -> None:
    """A stretch of NULs or noise anywhere in the segment, with and without its index."""
    folder, segment, index = copies()
    raw = bytearray(segment.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1), label="at")
    length = data.draw(st.integers(1, 700), label="length")
    noise = data.draw(st.sampled_from([b"\0", b"\n", b"x"]), label="noise")
    before = bytes(raw)
    raw[at : at + length] = noise * len(raw[at : at + length])
    segment.write_bytes(raw)
    if data.draw(st.booleans(), label="index lost"):
        index.unlink()
    sound = set()
    offset = 0
    for number, line in enumerate(before.splitlines(keepends=True)):
        untouched = raw[offset : offset + len(line)] == line
        # without an index a line is found by the newline before it
        findable = index.exists() or offset == 0 or raw[offset - 1 : offset] == b"\n"
        if untouched and findable:
            sound.add(key(number))
        offset += len(line)
    found = read(folder)
    assert set(found) == sound
    assert all(found[name] == EXPECTED[name] for name in found)


@settings(max_examples=80)
@given(data=st.data())
def test_a_damaged_index_costs_nothing(copies: Copies, data: st.DataObject) -> None:
    folder, _, index = copies()
    raw = bytearray(index.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1), label="at")
    length = data.draw(st.integers(1, 200), label="length")
    noise = data.draw(st.binary(min_size=1, max_size=3), label="noise")
    raw[at : at + length] = (noise * length)[: len(raw[at : at + length])]
    index.write_bytes(raw)
    journal = Journal(folder)
    assert len(journal) == 40
    assert dict(journal.records()) == EXPECTED


def test_an_index_that_begins_with_nulls_makes_up_no_key(copies: Copies) -> None:
    folder, _, index = copies()
    index.write_bytes(bytes(index.stat().st_size))
    assert sorted(Journal(folder).keys()) == sorted(EXPECTED)


def test_a_damaged_answer_can_be_asked_again_and_is_then_found(tmp_path: Path) -> None:
    """Its key stands in the index of the old segment still, before the new one."""
    segment = written(tmp_path, 3)
    raw = bytearray(segment.read_bytes())
    middle = len(whole_lines(segment)[0]) + 100
    raw[middle : middle + 10] = bytes(10)
    segment.write_bytes(raw)
    journal = Journal(tmp_path)
    assert journal.get(key(1)) is None and journal.damaged_lines == 1
    assert key(1) not in journal
    written(tmp_path, 1, start=1)
    journal.refresh()
    assert journal.get(key(1)) == record(1)
    fresh = Journal(tmp_path)
    assert fresh.get(key(1)) == record(1) and len(dict(fresh.records())) == 3


def test_a_doubled_line_counts_once_and_the_first_one_counts(tmp_path: Path) -> None:
    segment = written(tmp_path, 3)
    index_of(segment).unlink()
    lines = whole_lines(segment)
    segment.write_bytes(b"".join([*lines, lines[1], lines[0]]))
    assert read(tmp_path) == {key(n): record(n) for n in range(3)}
    # In two segments the first is that of the segment whose name sorts first, in every process.
    other = written(tmp_path, 1, start=1, tokens=5)
    first, _ = sorted([segment, other])
    expected = record(1) if first == segment else record(1, 5)
    assert read(tmp_path)[key(1)] == read(tmp_path)[key(1)] == expected


def test_the_second_copy_serves_when_the_first_is_damaged(tmp_path: Path) -> None:
    written(tmp_path, 2)
    written(tmp_path, 2)
    first, _ = sorted(tmp_path.glob("*.jsonl"))
    with first.open("r+b") as file:
        file.write(b"\0" * 60)
    assert read(tmp_path) == {key(0): record(0), key(1): record(1)}


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two writers of one process and two processes, with threads that share a writer."""
    script = (
        "import sys; from pathlib import Path; from draftmill.journal import Writer\n"
        "w = Writer(Path(sys.argv[1]))\n"
        "for n in range(int(sys.argv[2]), int(sys.argv[2]) + 200):\n"
        "    w.append(f'{n:032x}', {'n': n})\n"
        "w.close()"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, str(start)], env=ENVIRONMENT)
        for start in (1000, 2000)
    ]
    writers = [Writer(tmp_path), Writer(tmp_path)]

    def append(worker: int) -> None:
        for number in range(worker * 50, worker * 50 + 50):
            writers[worker % 2].append(key(number), record(number))

    threads = [threading.Thread(target=append, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    assert [other.wait() for other in others] == [0, 0]
    found = read(tmp_path)
    assert len(found) == 800 and all(found[key(n)] == record(n) for n in range(400))
    assert all(found[key(n)] == {"n": n} for start in (1000, 2000) for n in range(start, start + 200))


def test_a_killed_writer_leaves_all_it_had_appended(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from draftmill.journal import Writer\n"
        "w = Writer(Path(sys.argv[1]))\n"
        "for n in range(50):\n"
        "    w.append(f'{n:032x}', {'n': n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], env=ENVIRONMENT, check=False)
    assert read(tmp_path) == {key(n): {"n": n} for n in range(50)}


def test_an_answer_reaches_the_disk_without_another_one_or_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As does the segment's own name in its folder."""
    durable: list[int] = []
    folders: list[str] = []
    to_disk = os.fdatasync
    folder_to_disk = os.fsync

    def fdatasync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        to_disk(descriptor)
        durable.append(size)

    def fsync(descriptor: int) -> None:
        folder_to_disk(descriptor)
        folders.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(os, "fsync", fsync)
    writer = Writer(tmp_path)
    for number in range(3):
        writer.append(key(number), record(number))
        size = writer.path.stat().st_size
        while size not in durable:
            time.sleep(0.01)
    assert folders == [str(tmp_path)]
    writer.close()


def test_reading_beside_a_writer_sees_whole_records_and_in_the_end_all(tmp_path: Path) -> None:
    """Small writes at random moments: the reader never takes half a line for a record, and never skips one."""
    source = written(tmp_path / "source", 60)
    index = index_of(source).read_bytes()
    data = source.read_bytes()
    folder = tmp_path / "journal"
    folder.mkdir()
    draw = random.Random(5)
    journal = Journal(folder)
    with (
        (folder / source.name).open("wb", 0) as segment,
        (folder / f"{source.stem}.index").open("wb", 0) as entries,
    ):
        at = entry_at = 0
        while at < len(data):
            step = draw.randint(1, 300)
            segment.write(data[at : at + step])
            at += step
            if draw.random() < 0.5:  # the index is behind, as it is beside a real writer
                behind = data[:at].count(b"\n") * (len(index) // 60)
                entries.write(index[entry_at:behind])
                entry_at = max(entry_at, behind)
            journal.refresh()
            whole = data[:at].count(b"\n")
            assert len(journal) == whole
            if whole:
                assert journal.get(key(whole - 1)) == record(whole - 1)
    assert dict(journal.records()) == {key(n): record(n) for n in range(60)}
    assert journal.damaged_lines == 0


def test_a_full_disk_is_an_error_and_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """A real full file system, in a mount namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    kept = tmp_path / "kept"
    script = (
        "import shutil, sys; from pathlib import Path; from draftmill.journal import Journal, Writer\n"
        "folder = Path(sys.argv[1]); w = Writer(folder); n = 0; faults = 0\n"
        "while faults < 3:\n"
        "    try:\n"
        "        w.append(f'{n:032x}', {'ids': list(range(300))}); n += 1\n"
        "        assert not faults, 'taken after a fault'\n"
        "    except OSError as fault:\n"
        "        assert fault.errno == 28, fault\n"
        "        faults += 1\n"
        "w.close()\n"
        "j = Journal(folder)\n"
        "assert n > 10 and n <= len(dict(j.records())) <= n + 1, (n, len(j))\n"
        "shutil.copytree(folder, sys.argv[2]); print(n)"
    )
    command = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", command, "sh", disk, sys.executable, script, kept],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    written(kept, 5, start=count + 10)  # the next process goes on in a segment of its own
    assert len(read(kept)) in (count + 5, count + 6)


def test_a_line_that_does_not_fit_stays_the_last_and_torn(tmp_path: Path) -> None:
    """A file that may not grow beyond 10,000 bytes: the kernel takes the beginning of a line only."""
    script = (
        "import resource, signal, sys; from pathlib import Path; from draftmill.journal import Writer\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "w = Writer(Path(sys.argv[1])); n = 0\n"
        "try:\n"
        "    while True:\n"
        "        w.append(f'{n:032x}', {'ids': list(range(300))}); n += 1\n"
        "except OSError:\n"
        "    pass\n"
        "try:\n"
        "    w.append(f'{n:032x}', {})\n"
        "except OSError:\n"
        "    print(n)\n"
        "w.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    count = int(done.stdout)
    (segment,) = tmp_path.glob("*.jsonl")
    assert segment.stat().st_size == 10_000 and not segment.read_bytes().endswith(b"\n")
    assert read(tmp_path) == {key(n): {"ids": list(range(300))} for n in range(count)}


def test_a_journal_opens_from_its_index_without_its_lines(tmp_path: Path) -> None:
    """25,000 turns; the segment is made one hole, so that whoever looked into it would find nothing but damage."""
    segment = written(tmp_path, 25_000, tokens=0)
    size = segment.stat().st_size
    os.truncate(segment, 0)
    os.truncate(segment, size)
    journal = Journal(tmp_path)
    assert len(journal) == 25_000 and journal.damaged_lines == 0
    assert journal.get(key(7)) is None and journal.damaged_lines == 1
