"""Every row of every file comes out once: as an object, or with the reason why not."""

import gzip
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import prompts
from draftmill.conversations import RowRefused, normalise
from draftmill.errors import UserError
from draftmill.prompts import Row, Unreadable, find_sources, read_rows, watched

CASES = Path(__file__).parents[1] / "cases"


def values(path: Path) -> list[Any]:
    """Each row's object, or the kind of its fault."""
    found = list(read_rows(path))
    assert [row.number for row in found] == list(range(len(found)))
    return [row.value if isinstance(row, Row) else row.kind for row in found]


def read(tmp_path: Path, data: bytes | str, name: str = "rows.jsonl") -> list[Any]:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return values(path)


A, B = {"prompt": "a"}, {"prompt": "b"}


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "a"}\n{"prompt": "b"}',
        '\ufeff{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}\r\n',
        '[{"prompt": "a"}, {"prompt": "b"}]',
        '[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n',
        '[{"prompt": "a"}]\n[{"prompt": "b"}]\n',
        '{\n  "prompt": "a"\n}\n{\n  "prompt":\n  "b"\n}',
        json.dumps([A, B], indent=2),
        json.dumps([A, B], indent=0),
        '{"prompt": "a"}{"prompt": "b"}',
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_lines_arrays_and_spread_objects_are_the_same_rows(tmp_path: Path, text: str, name: str) -> None:
    assert read(tmp_path, text, name) == [A, B]


def test_an_array_of_messages_is_one_conversation(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert read(tmp_path, json.dumps(chat) + "\n" + json.dumps(chat)) == [{"messages": chat}] * 2
    assert read(tmp_path, json.dumps([chat, chat])) == [{"messages": chat}] * 2


def test_a_broken_line_costs_one_row(tmp_path: Path) -> None:
    for broken in (
        '{"prompt": "cut',
        '{"prompt": "x",',
        '{"a": [1,',
        "garbage",
        '{"a": NULL}',
        "\x00" * 50,
        '"a\tb"',
    ):
        assert read(tmp_path, f'{{"prompt": "a"}}\n{broken}\n{{"prompt": "b"}}\n') == [
            A,
            "invalid_json",
            B,
        ], broken


def test_a_broken_element_of_an_array_costs_one_row(tmp_path: Path) -> None:
    text = json.dumps([A, {"prompt": "x", "n": 7}, B], indent=2)
    assert read(tmp_path, text.replace("7", "seven")) == [A, "invalid_json", B]
    assert read(
        tmp_path, json.dumps([A, {"n": 7}], indent=2).replace("7", "seven") + '\n{"prompt": "b"}'
    ) == [
        A,
        "invalid_json",
        B,
    ]


def test_a_cut_array_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, '[{"prompt": "a"},\n{"prompt": "b"}') == [A, B, "truncated"]
    assert read(tmp_path, '[{"prompt": "a"},\n{"prom') == [A, "invalid_json"]  # once, not twice


def test_rows_that_are_no_objects(tmp_path: Path) -> None:
    assert read(tmp_path, '7\n"x"\nnull\n["x", {"prompt": "a"}]') == ["not_an_object"] * 4 + [A]
    assert read(tmp_path, "") == read(tmp_path, "[]") == read(tmp_path, "\n\n") == []


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    assert read(tmp_path, '{"prompt": "a", "prompt": "b"}\n{"prompt": "a", "prompt": "a"}') == [
        "duplicate_keys",
        A,
    ]


def test_numbers(tmp_path: Path) -> None:
    rows = read(
        tmp_path, f'{{"id": {2**128}}}\n{{"x": NaN, "y": -Infinity}}\n{{"id": {"9" * 5000}}}\n{{"id": 1}}'
    )
    assert rows == [{"id": 2**128}, {"x": None, "y": None}, "invalid_json", {"id": 1}]


def test_latin1_bytes_stay_visible_for_the_row_that_holds_them(tmp_path: Path) -> None:
    assert read(tmp_path, b'{"prompt": "caf\xe9"}\n{"prompt": "a"}') == [{"prompt": "caf\udce9"}, A]


def test_line_separators_of_unicode_are_text(tmp_path: Path) -> None:
    rows = [{"prompt": f"a{mark}b"} for mark in ("\u2028", "\u2029", "\x85", "\x0b", "\x1e")]
    assert read(tmp_path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows[:3])) == rows[:3]


def test_the_fault_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": oops}\n{"a": 1}\nno\n')
    assert [r.sentence.split(":")[0] for r in read_rows(path) if isinstance(r, Unreadable)] == [
        "line 3",
        "line 5",
    ]


def test_rows_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [{"n": n, "prompt": "é" * (n % 13), "in": [{"x": [n]}]} for n in range(60)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[30] = lines[30][:-4]
    lines[40] = "garbage"
    rows[30] = rows[40] = "invalid_json"
    for chunk in (1, 7, 33):
        monkeypatch.setattr(prompts, "CHUNK", chunk)
        assert read(tmp_path, "\n".join(lines)) == rows
        assert read(tmp_path, "[\n " + ",\n ".join(lines[:40]) + "\n]") == rows[:40]
        good = json.dumps(rows[:30], ensure_ascii=False)
        assert read(tmp_path, good) == rows[:30]


# --- csv


def test_csv_fields_are_text(tmp_path: Path) -> None:
    data = '\ufeffid;prompt;note\r\n007;"line one\nline; ""two""";\r\n\r\n8;1e5;NaN\r\n'
    assert read(tmp_path, data, "rows.csv") == [
        {"id": "007", "prompt": 'line one\nline; "two"', "note": None},
        {"id": "8", "prompt": "1e5", "note": "NaN"},
    ]


def test_csv_faults_cost_their_rows(tmp_path: Path) -> None:
    data = 'id,prompt\n1,a,b\n2\n3,"x"y\n4,good\n5,"open'
    assert read(tmp_path, data, "rows.csv") == [
        "csv_columns",
        "csv_columns",
        "invalid_csv",
        {"id": "4", "prompt": "good"},
        "invalid_csv",
    ]
    with pytest.raises(UserError, match="stands twice"):
        read(tmp_path, "a,a\n1,2\n", "rows.csv")
    with pytest.raises(UserError, match=r"new-line character seen in unquoted field\.$"):
        read(tmp_path, "prompt\rone\rtwo\r", "rows.csv")


def test_tsv_and_nul(tmp_path: Path) -> None:
    assert read(tmp_path, "id\tprompt\n1\ta\x00b\n", "rows.tsv") == [{"id": "1", "prompt": "a\x00b"}]


# --- compression


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.zst", "rows.jsonl"])
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_packed_files_are_known_by_their_bytes(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    assert read(tmp_path, pack(b'{"prompt": "a"}\n') + pack(b'{"prompt": "b"}\n'), name) == [A, B]


def test_damaged_packing_is_refused(tmp_path: Path) -> None:
    lines = b"".join(b'{"prompt": "%d"}\n' % random.Random(n).getrandbits(200) for n in range(3000))
    for pack in (gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress):
        for damaged in (pack(lines)[:-20], pack(lines)[:5000] + b"\x00" * 50 + pack(lines)[5050:]):
            with pytest.raises(UserError, match="damaged"):
                read(tmp_path, damaged, "rows.jsonl.gz")


# --- column stores


def test_parquet_rows_have_no_nulls_that_other_rows_gave_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi", "tool_calls": None}, {"role": "assistant", "content": None}]
    table = pa.table({"messages": [chat, None], "id": [1, 2**60], "blob": [b"\xff", None]})
    pq.write_table(table, tmp_path / "p.parquet")
    assert values(tmp_path / "p.parquet")[0] == {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}],
        "id": 1,
        "blob": b"\xff",
    }
    assert [r.value for r in read_rows(tmp_path / "p.parquet", ["id"]) if isinstance(r, Row)] == [
        {"id": 1},
        {"id": 2**60},
    ]
    assert [r.value for r in read_rows(tmp_path / "p.parquet", ["none"]) if isinstance(r, Row)] == [{}, {}]


def test_parquet_text_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xe9b")]
    )
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "p.parquet")
    assert values(tmp_path / "p.parquet") == [A, "not_utf8", B]


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": [str(random.Random(n).random()) for n in range(5000)]}), buffer)
    data = bytearray(buffer.getvalue())
    for damaged in (data[:-10], data[:200], b"PAR1", data[:100] + b"\x00" * 3000 + data[3100:]):
        with pytest.raises(UserError, match="damaged"):
            read(tmp_path, bytes(damaged), "p.parquet")


def save_dataset(folder: Path, rows: list[dict[str, Any]], name: str = "data-00000-of-00001.arrow") -> None:
    """What Hugging Face save_to_disk leaves: streams of Arrow batches, named by state.json."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(folder / Path(name).name, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))


def test_a_saved_dataset_is_read_from_its_folder(tmp_path: Path) -> None:
    save_dataset(tmp_path / "saved" / "train", [A, B, A])
    assert values(tmp_path / "saved" / "train") == [A, B, A]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert values(tmp_path / "saved") == [A, B, A]
    assert values(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow") == [A, B, A]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="name one"):
        values(tmp_path / "saved")


def test_names_in_a_saved_dataset_never_lead_elsewhere(tmp_path: Path) -> None:
    save_dataset(tmp_path / "saved", [A], "../../etc/passwd")
    with pytest.raises(UserError, match="no plain name"):
        values(tmp_path / "saved")


# --- which files


def test_globs_packages_shares_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "x.csv"):
        (tmp_path / name).write_text("")
    package = tmp_path / "some_prompts"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "data.jsonl").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = find_sources(
        [
            "*.jsonl",
            "a.jsonl",
            {"path": "x.csv", "share": 0.5, "name": "math"},
            "package:some_prompts/data.jsonl",
        ]
    )
    assert [(s.name, s.share) for s in found] == [
        ("a.jsonl", 1.0),
        ("b.jsonl", 1.0),
        ("math", 0.5),
        ("package:some_prompts/data.jsonl", 1.0),
    ]
    assert watched([{"path": "*.jsonl"}, "x.csv", "package:some_prompts/data.jsonl"]) == [
        "a.jsonl",
        "b.jsonl",
        "x.csv",
    ]
    assert [s.name for s in find_sources([{"path": "*.jsonl", "name": "all"}])] == [
        "all/a.jsonl",
        "all/b.jsonl",
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none.jsonl", "No prompt file is found at none.jsonl"),
        ("*.nothing", "No prompt file"),
        ("package:no_such_module_here/x", "not installed"),
        ("package:../x", "not installed"),
        ("x" * 5000, "No prompt file|too long"),
    ],
)
def test_a_name_that_finds_nothing_is_the_users_to_correct(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        find_sources([name])


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    for name, told in (
        ("missing.jsonl", "No such file"),
        ("", "is a folder"),
        ("x.docx", "none of the known kinds"),
    ):
        if name.endswith("x"):
            (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(UserError, match=told):
            list(read_rows(tmp_path / name))
    with pytest.raises(UserError, match="begins with NUL bytes"):
        read(tmp_path, b"\x00" * 512 + b"{}")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("packed", [False, True])
def test_utf_16_and_utf_32_are_read_with_and_without_their_mark(
    tmp_path: Path, encoding: str, packed: bool
) -> None:
    rows = [{"prompt": "Gr\u00fc\u00dfe, \U0001f30a\u2028"}, {"prompt": "b"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    table = 'id\tprompt\r\n1\t"Gr\u00fc\u00dfe,\n\U0001f30a"\r\n'
    for name, text, wanted in (
        ("x.jsonl", lines, rows),
        ("x.json", json.dumps(rows, ensure_ascii=False), rows),
        ("x.tsv", table, [{"id": "1", "prompt": "Gr\u00fc\u00dfe,\n\U0001f30a"}]),
        ("x.csv", table.replace("\t", ";"), [{"id": "1", "prompt": "Gr\u00fc\u00dfe,\n\U0001f30a"}]),
    ):
        data = text.encode(encoding)
        assert read(tmp_path, gzip.compress(data) if packed else data, name + ".gz" * packed) == wanted, name


def test_half_a_pair_of_utf_16_costs_its_row_and_a_cut_file_is_damaged(tmp_path: Path) -> None:
    data = '{"prompt": "a"}\n{"prompt": "\ud83c"}\n{"prompt": "b"}'.encode("utf-16", "surrogatepass")
    found = read(tmp_path, data)
    assert (found[0], found[2]) == (A, B)
    with pytest.raises(RowRefused) as refused:
        normalise(found[1])
    assert refused.value.kind == "not_utf8"
    with pytest.raises(UserError, match="damaged"):
        read(tmp_path, data[:-1])


# --- hostile files


LIMITED = """
import resource, sys
from pathlib import Path
from draftmill import prompts
from draftmill.prompts import Row, read_rows
from draftmill.errors import UserError
prompts.UNPACKED_FREELY = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print([r.value["prompt"] if isinstance(r, Row) and "prompt" in r.value else getattr(r, "kind", "row") for r in read_rows(Path(sys.argv[1]))])
except UserError as fault:
    print(fault)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def in_own_process(path: Path) -> tuple[str, int]:
    """(what was read, growth of the process in MiB)."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(prompts.__file__).parents[1])},
    )
    told, grown = done.stdout.splitlines()
    return told, int(grown)


GOOD = b'{"prompt": "good"}\n'


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"x": "' + b"y" * 10_000_000 + b'"}\n' + GOOD, "['row', 'good']"),
        (b'{"x": "' + b"y" * 40_000_000 + b'"}\n' + GOOD, "['row_too_long', 'good']"),
        (b"y" * 40_000_000 + b"\n" + GOOD, "['invalid_json', 'good']"),
        (b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n" + GOOD, "['too_deep', 'good']"),
        (b"[" * 200_000 + b"\n" + GOOD, "['too_deep', 'good', 'truncated']"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(1_000_000)) + b"}\n" + GOOD, "['row', 'good']"),
        (b'{"x":[' + b"[]," * 5_000_000 + b"[]]}\n" + GOOD, "['too_many_values', 'good']"),
    ],
    ids=["10 MB line", "40 MB line", "40 MB garbage", "deep", "deep array", "1e6 keys", "5e6 lists"],
)
def test_hostile_lines_cost_one_row_and_bounded_memory(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    found, grown = in_own_process(path)
    assert found == told
    assert grown < 600


@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv.gz"])
@pytest.mark.parametrize("filling", [b"\x00", b'{"a":1}\n', b"\n"], ids=["zeros", "rows", "blank"])
def test_an_archive_bomb_is_refused_in_bounded_memory(tmp_path: Path, suffix: str, filling: bytes) -> None:
    path = tmp_path / f"rows.{suffix}"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(GOOD)
        for _ in range(12):
            file.write(filling * ((1 << 20) // len(filling)))
    found, grown = in_own_process(path)
    assert "times its size" in found
    assert grown < 600


def hostile(draw: random.Random) -> tuple[str, bytes]:
    """(file name, content): any bytes, any JSON, and sound files with wounds."""
    words = [
        "user",
        "prompt",
        "messages",
        "content",
        "role",
        "\ud83d",
        "é",
        "\x00",
        "",
        "NaN",
        "a" * 300,
        "\u2028",
    ]

    def value(depth: int = 0) -> Any:
        kind = draw.randrange(9 if depth < 4 else 6)
        if kind < 3:
            return draw.choice(words)
        if kind < 6:
            return draw.choice([None, True, 0, -1.5, 2**70, float("nan"), float("inf")])
        if kind == 6:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(words): value(depth + 1) for _ in range(draw.randrange(4))}

    def likely() -> Any:
        return {"prompt": value(3), "messages": [{"role": "user", "content": value(3)}]}

    rows = [likely() if draw.random() < 0.5 else value() for _ in range(draw.randrange(8))]
    suffix = draw.choice(["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.zst"])
    joint = draw.choice(["\n", "\r\n", "\n\n", ",", ""])
    encoding = draw.choice(["utf-8"] * 6 + ["utf-16", "utf-16-be", "utf-32"])
    data = joint.join(json.dumps(r, ensure_ascii=draw.random() < 0.5) for r in rows).encode(
        encoding, "surrogatepass"
    )
    if draw.random() < 0.2:
        data = json.dumps(rows, indent=draw.choice([None, 0, 2])).encode("utf-8", "surrogatepass")
    if suffix in ("parquet", "arrow"):
        buffer = io.BytesIO()
        table = pa.table({"prompt": [f"p{n}" for n in range(50)], "messages": [[{"role": "user"}]] * 50})
        if suffix == "parquet":
            pq.write_table(table, buffer)
        else:
            with pa.ipc.new_stream(buffer, table.schema) as writer:
                writer.write_table(table)
        data = buffer.getvalue()
    if draw.random() < 0.8:
        data = (
            gzip.compress(data)
            if suffix.endswith("gz")
            else zstandard.compress(data)
            if suffix.endswith("zst")
            else data
        )
    wounded = bytearray(data)
    for _ in range(draw.choice([0, 0, 1, 3])):
        at = draw.randrange(len(wounded) + 1)
        match draw.randrange(3):
            case 0:
                wounded[at:at] = draw.randbytes(draw.randrange(5))
            case 1:
                del wounded[at : at + draw.randrange(20)]
            case 2:
                wounded[at : at + 1] = bytes([draw.randrange(256)])
    return f"hostile.{suffix}", bytes(wounded) if draw.random() < 0.95 else draw.randbytes(
        draw.randrange(400)
    )


@settings(max_examples=1000)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_file_is_read_to_its_end_or_refused(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    name, data = hostile(random.Random(seed))
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    try:
        values(path)
    except UserError as fault:
        assert "\n" not in str(fault)


TORN = st.builds(
    lambda row, cut: json.dumps(row)[: -1 - cut], st.just({"p": [{"x": "y"}], "q": 1}), st.integers(0, 20)
)
GARBAGE = st.text(
    st.characters(exclude_characters='\r\n\t [{"]},', exclude_categories=["Cs"]), min_size=1
).filter(lambda text: not text.startswith("\ufeff") and "\x00" not in text)


@settings(max_examples=300)
@given(
    lines=st.lists(st.builds(lambda n: json.dumps({"prompt": n}), st.text()) | TORN | GARBAGE, max_size=12)
)
def test_every_line_is_one_row(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    sound = [json.loads(line) if line.startswith('{"prompt"') else None for line in lines]
    found = [v if isinstance(v, dict) else None for v in values(path)]
    assert found == sound


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        find_sources([str(tmp_path / "prompts.jsonl")])
