"""Prompt files: every row of every file, one by one, with its place.

Knows file formats, compression, globs and packages. Must never know what a row means: a row is an object
(column → value) or Unreadable, with the reason; that is for conversations.py. The bytes of each row decide
what it holds, never the rows before it: nothing is inferred, no type is shared between rows.

Every row is accounted for: it comes out once, as Row or as Unreadable. A damaged container (gzip, zstd,
parquet, Arrow) is a UserError, because nobody can say how many rows are lost behind the damage.

Memory is bounded whatever the file holds: a row of JSON or csv may be LONGEST_ROW characters long and hold
MOST_VALUES values, an unpacked stream may be MOST_UNPACKED times its file.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import importlib.util
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from draftmill.errors import UserError

LONGEST_ROW = 32 << 20
MOST_VALUES = 2_000_000
MOST_UNPACKED = 200
UNPACKED_FREELY = 16 << 20
CHUNK = 1 << 20
BATCH_ROWS = 128
TABLE_SUFFIXES = (".csv", ".tsv")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PACKED_SUFFIXES = (".gz", ".zst", ".zstd")


@dataclass(frozen=True)
class Source:
    """One file (or one `datasets` directory) of prompts: its name in the results, its place, its share."""

    name: str
    path: Path
    share: float = 1.0


@dataclass(frozen=True)
class Row:
    """One object of a file; ``number`` counts the file's rows from 0, blank lines are no rows."""

    number: int
    value: Mapping[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A row that is no object, with a short snake_case kind and a sentence."""

    number: int
    kind: str
    sentence: str


# --- which files


def find_sources(files: Sequence[str | Mapping[str, Any]]) -> list[Source]:
    """The files that the config's ``prompts.files`` name: paths, globs, ``package:module/path``, each alone
    or as ``{path, share, name}``. A file named twice counts once. UserError for a name that finds nothing."""
    sources: dict[str, Source] = {}
    for entry in files:
        settings: Mapping[str, Any] = {"path": entry} if isinstance(entry, str) else entry
        share = 1.0 if settings.get("share") is None else float(settings["share"])
        found = _expand(str(settings["path"]))
        for shown, path in found:
            name = str(settings.get("name") or shown)
            if settings.get("name") and len(found) > 1:
                name = f"{name}/{path.name}"
            name = name.encode("utf-8", "replace").decode()  # a file name may be no UTF-8
            sources.setdefault(os.path.realpath(path), Source(name, path, share))
    for name, count in Counter(source.name for source in sources.values()).items():
        if count > 1:
            raise UserError(
                f"{count} prompt files would be called {name}; name each apart under prompts.files."
            )
    return list(sources.values())


def watched(files: Sequence[str | Mapping[str, Any]]) -> list[str]:
    """The paths that ``files`` name but for those in an installed package, which change with the environment only."""
    paths = [entry if isinstance(entry, str) else str(entry["path"]) for entry in files]
    return [str(source.path) for source in find_sources([p for p in paths if not p.startswith("package:")])]


def _expand(wanted: str) -> list[tuple[str, Path]]:
    """(name to show, path) of every file that ``wanted`` stands for, in order of name."""
    prefix, root = "", ""
    pattern = str(Path(wanted).expanduser())
    if wanted.startswith("package:"):
        module, _, inside = wanted.removeprefix("package:").partition("/")
        root = str(package_folder(module, wanted)) + "/"
        prefix, pattern = f"package:{module}/", root + inside
    try:
        found = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # noqa: PTH207  may be absolute
        paths = sorted(path for path in found if Path(path).exists())  # a dangling link does not
    except OSError as fault:
        raise UserError(f"The prompt file {wanted} cannot be read: {fault.strerror}.") from fault
    if not paths:
        raise UserError(f"No prompt file is found at {wanted}; correct prompts.files.")
    strange = next((path for path in paths if not (Path(path).is_file() or Path(path).is_dir())), None)
    if strange is not None:  # a pipe or device could keep the run waiting for ever
        raise UserError(f"{strange} is neither a file nor a folder; correct prompts.files.")
    return [(prefix + path.removeprefix(root), Path(path)) for path in paths]


def package_folder(module: str, wanted: str) -> Path:
    """The folder of an installed package, found without importing it; ``wanted`` names it in the UserError."""
    found = importlib.util.find_spec(module) if module.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"{wanted} needs the Python package that holds {module}, which is not installed; install it."
        )
    return Path(next(iter(found.submodule_search_locations)))


# --- every row of one file


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row | Unreadable]:
    """The rows of one file or saved `datasets` directory, in order.

    ``columns`` are the only ones that column stores need to give. UserError for a file that is missing, cannot
    be read, is damaged, or is none of the known formats.
    """
    number = 0
    try:
        for found in _values(path, columns):
            if isinstance(found, _Fault):
                yield Unreadable(number, found.kind, found.sentence)
            else:
                yield Row(number, found)
            number += 1
    except (OSError, EOFError, UnicodeError, zlib.error, zstandard.ZstdError, pa.ArrowException) as fault:
        if isinstance(fault, OSError) and fault.errno:  # what damages gzip and parquet has none
            raise UserError(f"The prompt file {path} cannot be read: {fault.strerror}.") from fault
        told = " ".join(str(fault).split())[:200]
        raise UserError(
            f"The prompt file {path} is damaged behind row {number} ({told}); get it again."
        ) from fault


@dataclass(frozen=True)
class _Fault:
    kind: str
    sentence: str


_Value = dict[str, Any] | _Fault


def _values(path: Path, columns: Sequence[str] | None) -> Iterator[_Value]:
    if path.is_dir():
        yield from _saved_dataset(path, columns)
        return
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"PAR1":
            yield from _parquet(path, columns)
            return
        if start[:6] == b"ARROW1" or path.suffix == ".arrow":
            yield from _arrow(path, columns)
            return
        file.seek(0)
        stream = _in_utf8(_unpacked(file, path, start))
        suffixes = [s.lower() for s in path.suffixes]
        while suffixes and suffixes[-1] in PACKED_SUFFIXES:
            suffixes.pop()
        suffix = suffixes[-1] if suffixes else ""
        if suffix in TABLE_SUFFIXES:
            yield from _table(stream, path)
        elif suffix in JSON_SUFFIXES:
            yield from _Json(stream, path).values()
        else:
            if suffix == ".parquet":
                raise UserError(
                    f"The prompt file {path} is named .parquet and is none; it is cut or something else."
                )
            known = ", ".join((*JSON_SUFFIXES, *TABLE_SUFFIXES, ".parquet", ".arrow"))
            raise UserError(
                f"The prompt file {path} is none of the known kinds ({known}, each also .gz or .zst)."
            )


class _Guarded(io.RawIOBase):
    """An unpacking stream that refuses to grow out of all proportion to its file."""

    def __init__(self, unpacked: BinaryIO, path: Path) -> None:
        self._unpacked = unpacked
        self._path = path
        self._left = max(UNPACKED_FREELY, MOST_UNPACKED * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._unpacked.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise UserError(
                f"The prompt file {self._path} unpacks to more than {MOST_UNPACKED} times its size, "
                "as archive bombs do; if it is sound, unpack it first."
            )
        buffer[: len(data)] = data
        return len(data)


class _Zstd(io.RawIOBase):
    """A zstd file unpacked frame by frame; the package's own reader takes a cut file for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = b""  # packed bytes behind the last frame
        self._ready = b""
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._left or self._file.read(1024)  # little: a byte can unpack to 30,000
            self._left = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            self._ready = self._frame.decompress(packed)
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _unpacked(file: io.BufferedReader, path: Path, start: bytes) -> io.BufferedReader:
    if start[:2] == b"\x1f\x8b":
        packed: Any = gzip.GzipFile(fileobj=file)
    elif start[:4] == b"\x28\xb5\x2f\xfd":
        packed = _Zstd(file)
    else:
        return file
    return io.BufferedReader(_Guarded(packed, path), CHUNK)


class _Transcoded(io.RawIOBase):
    """A text of another Unicode encoding as UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._stream.read(CHUNK)
            self._ready = self._decoder.decode(data, not data).encode("utf-8", "surrogatepass")
            if not data:
                break
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _in_utf8(stream: io.BufferedReader) -> BinaryIO:
    """``stream``, transcoded where its first bytes are those of UTF-16 or UTF-32.

    That is a byte order mark or, as JSON and headers begin with ASCII, the place of the NULs.
    """
    start = stream.peek(4)[:4]
    nul = tuple(byte == 0 for byte in start)
    if start[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        encoding = "utf-32"
    elif start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "utf-16"
    elif nul in _ENCODINGS:
        encoding = _ENCODINGS[nul]
    else:
        return stream
    return cast(BinaryIO, io.BufferedReader(_Transcoded(stream, encoding), CHUNK))


_ENCODINGS = {
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
}
"""Which of the first four bytes are NUL, where they are ASCII characters without a byte order mark."""


# --- JSON: lines, arrays, one object per file, or any mixture


class _Fatal(Exception):
    """The value at the cursor cannot be had: (kind, sentence)."""


class _Json:
    """The objects of a text of JSON values: one a line, in arrays, spread over lines, or mixed.

    A broken value ends at the next line that opens a value at the same depth of indentation, so that a torn
    line costs one row. Bytes that are not UTF-8 come out as lone surrogates; whether they matter is decided
    where the row's text is used.
    """

    _SPACE = re.compile(r"[ \t\r\n]*")
    _GAP = re.compile(r"[ \t\r\n,]*")
    _ARRAY_OF_OBJECTS = re.compile(r"\[[ \t\r\n]*\{")
    _ROW_KEYS = frozenset(("messages", "conversations", "prompt", "instruction"))

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text = ""
        self._at = 0
        self._ended = False
        self._line = 1
        self._counted = 0
        self._scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(
            object_pairs_hook=_object, parse_constant=_nothing
        ).raw_decode

    def values(self) -> Iterator[_Value]:
        in_array = False
        self._fill()
        if self._text.startswith("\x00"):
            raise UserError(f"The prompt file {self._path} begins with NUL bytes: it is damaged or binary.")
        self._at = int(self._text.startswith("\ufeff"))
        while self._skip(self._GAP if in_array else self._SPACE):
            opener = self._text[self._at]
            if in_array and opener == "]":
                self._at += 1
                in_array = False
                continue
            try:
                if opener == "[" and not in_array and not self._is_chat():
                    self._at += 1
                    in_array = True
                    continue
                value = self._value(in_array)
            except _Fatal as fault:
                yield _Fault(*fault.args)
                if self._at == len(self._text) and self._ended:
                    return  # what broke off took the end of its array along
                continue
            if isinstance(value, list):
                value = {"messages": value}
            if isinstance(value, dict):
                yield value
            else:
                yield _Fault("not_an_object", f"line {self._line_here()}: it is no object")
        if in_array:
            yield _Fault("truncated", f"line {self._line_here()}: the file ends inside its array; it was cut")

    def _line_here(self) -> int:
        """The number of the cursor's line, from 1; counted piece by piece, or broken files take for ever."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _is_chat(self) -> bool:
        """Whether the array at the cursor is one conversation (a list of messages) and not a list of rows."""
        while len(self._text) - self._at < CHUNK and not self._ended:
            self._fill()
        opening = self._ARRAY_OF_OBJECTS.match(self._text, self._at)
        if opening is None:
            return False
        try:
            first, _ = self._scan(self._text, opening.end() - 1)
        except (ValueError, RecursionError, _Fatal):
            return False
        return bool(first.keys() & {"role", "from"}) and not first.keys() & self._ROW_KEYS

    def _value(self, in_array: bool) -> Any:
        """The value at the cursor, which moves behind it; _Fatal moves it to where reading can go on."""
        margin = None
        while True:
            begin = self._at
            if self._text[begin] not in "{[" and not in_array:
                self._bare_line()
            try:
                value, self._at = self._scan(self._text, begin)
                return value
            except json.JSONDecodeError as fault:
                unended = fault.msg.startswith("Unterminated") or fault.pos >= len(self._text) - 16
                kind, sentence = "invalid_json", f"{fault.msg[0].lower()}{fault.msg[1:]}"
            except RecursionError:
                unended, kind, sentence = False, "too_deep", "its values are nested too deeply"
            except _Fatal as fatal:
                unended, (kind, sentence) = False, fatal.args
            except ValueError:  # the interpreter's limit on the digits of a number
                unended, kind, sentence = False, "invalid_json", "a number has too many digits"
            waiting = len(self._text) - begin
            margin = self._margin() if margin is None else margin
            if unended and not self._ended:
                if waiting > LONGEST_ROW:
                    kind, sentence = "row_too_long", f"it is longer than {LONGEST_ROW >> 20} MiB"
                elif waiting > CHUNK and self._text.count(",", begin) > MOST_VALUES:
                    kind, sentence = "too_many_values", f"it holds more than {MOST_VALUES:,} values"
                else:
                    self._fill(min(waiting, LONGEST_ROW - waiting))
                    continue
            elif unended:
                sentence = "it is cut off: the file ends in the middle of it"
            line = self._line_here()
            self._give_up(margin, in_array)
            raise _Fatal(kind, f"line {line}: {sentence}")

    def _bare_line(self) -> NoReturn:
        """A line outside any object or array; it costs one row, whatever it holds."""
        begin = self._at
        end = self._text.find("\n", begin)
        if end < 0 and not self._ended and len(self._text) - begin <= CHUNK:
            self._fill()
            self._bare_line()
        text = self._text[begin : end if end >= 0 else None]
        line = self._line_here()
        self._to_next_line()
        try:
            json.loads(text)
        except ValueError as fault:
            raise _Fatal("invalid_json", f"line {line}: it is not JSON") from fault
        raise _Fatal("not_an_object", f"line {line}: it is no object")

    def _margin(self) -> str:
        """The white space before the cursor, if nothing else stands before it in its line."""
        before = self._text[max(0, self._at - 100) : self._at].rpartition("\n")[2]
        return before if before.isspace() else ""

    def _give_up(self, margin: str, in_array: bool) -> None:
        """Moves to the next line that begins as far in as the broken value and is no part of it, or to the end."""
        again = re.compile(rf"\n(?:{margin}(?=[^ \t\r\n}}\],\"])" + (r"|(?=\]))" if in_array else ")"))
        while True:
            found = again.search(self._text, self._at)
            if found:
                self._at = found.end()
                return
            if self._ended:
                self._at = len(self._text)
                return
            self._at = max(self._at, len(self._text) - len(margin) - 2)  # a match may lie across two chunks
            self._fill()

    def _to_next_line(self) -> None:
        while (end := self._text.find("\n", self._at)) < 0 and not self._ended:
            self._at = len(self._text)
            self._fill()
        self._at = end + 1 if end >= 0 else len(self._text)

    def _skip(self, gap: re.Pattern[str]) -> bool:
        """Moves behind the gap; False at the end of the text."""
        while True:
            found = gap.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return True
            if self._ended:
                return False
            self._fill()

    def _fill(self, wanted: int = 0) -> None:
        """Drops what lies behind the cursor and reads on, at least ``wanted`` bytes."""
        self._line_here()
        self._counted = 0
        data = self._stream.read(max(CHUNK, wanted))
        self._ended = not data
        self._text = self._text[self._at :] + self._decode(data, self._ended)
        self._at = 0


def _nothing(_: str) -> None:
    """NaN and Infinity are no JSON: they count as absent."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise _Fatal("duplicate_keys", f"the key {_clipped(key)} stands twice with different values")
    return found


def _clipped(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


# --- csv


def _table(stream: BinaryIO, path: Path) -> Iterator[_Value]:
    """The rows of a csv or tsv file with a header; every field is text, an empty one is null."""
    csv.field_size_limit(LONGEST_ROW)
    lines = _Lines(stream)
    first = next(lines, "")
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(lines.from_start(first), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as fault:
        raise UserError(f"The header of the prompt file {path} cannot be read: {_told(fault)}.") from fault
    if len(set(header)) < len(header):
        raise UserError(f"A column of the prompt file {path} stands twice in its header; rename one.")
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as fault:
            yield _Fault("invalid_csv", f"line {line}: {_told(fault)}")
            continue
        if lines.too_long:
            lines.too_long = False
            yield _Fault("row_too_long", f"line {line}: it is longer than {LONGEST_ROW >> 20} MiB")
        elif len(fields) not in (0, len(header)):
            yield _Fault(
                "csv_columns", f"line {line}: it has {len(fields)} fields, the header has {len(header)}"
            )
        elif fields:
            yield {name: field or None for name, field in zip(header, fields, strict=True)}


def _told(fault: csv.Error) -> str:
    """Without the advice to programmers behind it."""
    return str(fault).partition(" - ")[0]


class _Lines(Iterator[str]):
    """The lines of a stream, none longer than LONGEST_ROW (the rest of a longer one is passed over)."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._first: list[str] = []
        self._encoding = "utf-8-sig"
        self.too_long = False

    def from_start(self, first: str) -> Iterator[str]:
        self._first = [first] if first else []
        return self

    def __next__(self) -> str:
        if self._first:
            return self._first.pop()
        data = self._stream.readline(LONGEST_ROW)
        if not data:
            raise StopIteration
        rest = data
        while len(rest) == LONGEST_ROW and not rest.endswith(b"\n"):
            self.too_long = True
            data = b"\n"
            rest = self._stream.readline(LONGEST_ROW)
        text = data.decode(self._encoding, "surrogateescape")
        self._encoding = "utf-8"
        return text


# --- column stores


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[_Value]:
    with pq.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False) as file:
        wanted = [name for name in file.schema_arrow.names if columns is None or name in columns]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
            yield from _batch(batch)


def _arrow(path: Path, columns: Sequence[str] | None) -> Iterator[_Value]:
    with pa.OSFile(str(path)) as file:  # a map of a cut file kills the process
        if file.read(6) == b"ARROW1":
            opened = pa.ipc.open_file(file)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            file.seek(0)
            batches = iter(pa.ipc.open_stream(file))
        for batch in batches:
            batch.validate(full=True)  # a damaged offset would be followed into foreign memory
            wanted = [name for name in batch.schema.names if columns is None or name in columns]
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _batch(batch.select(wanted).slice(start, BATCH_ROWS))


def _batch(batch: pa.RecordBatch) -> Iterator[_Value]:
    if not batch.num_columns:
        for _ in range(batch.num_rows):
            yield {}
        return
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        rows = []
    for i in range(batch.num_rows):
        try:
            row = rows[i] if rows else batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError:
            yield _Fault("not_utf8", "a text of it is not UTF-8")
        except (ValueError, OverflowError, pa.ArrowException) as fault:
            yield _Fault("unreadable_value", f"a value of it cannot be read ({fault})")
        else:
            yield {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """``value`` without null fields: a column store fills every field that any row has into all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _saved_dataset(folder: Path, columns: Sequence[str] | None) -> Iterator[_Value]:
    """A directory written by Hugging Face ``save_to_disk``: its state names the Arrow files in order."""
    if (folder / "dataset_dict.json").exists():
        splits = _facts(folder / "dataset_dict.json").get("splits")
        if not (isinstance(splits, list) and len(splits) == 1):
            raise UserError(
                f"The saved dataset {folder} has the splits {splits}; name one, as {folder}/<split>."
            )
        folder = folder / _inside(splits[0], folder)
    if not (folder / "state.json").exists():
        raise UserError(
            f"{folder} is a folder but no saved dataset; name its files, for instance {folder}/*.jsonl."
        )
    files = _facts(folder / "state.json").get("_data_files")
    for file in files if isinstance(files, list) else []:
        yield from _arrow(
            folder / _inside(file.get("filename") if isinstance(file, dict) else None, folder), columns
        )


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{path} is not valid JSON ({fault}); save the dataset again.") from fault
    return found if isinstance(found, dict) else {}


def _inside(name: Any, folder: Path) -> str:
    """A name that a file gives, if it is a plain one: what a file says never becomes a path elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\x00" in name:
        raise UserError(
            f"The saved dataset {folder} names a file {_clipped(str(name))}, which is no plain name."
        )
    return name
