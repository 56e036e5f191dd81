"""What a run leaves behind, read into tables and values: generated rows, telemetry, states, client events.

Knows the files' places and shapes, and that a writer may be killed in the middle of a line. Must never know
what the facts mean (statistics.py, status.py), a clock or a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import polars as pl  # 30 MB that a generate job, which only looks at the run's state, need not hold

GAUGES = ("running", "queued", "capacity", "permits", "wanted", "kv_usage", "state_usage")
COUNTERS = (
    "generation_tokens",
    "prompt_tokens",
    "cached_tokens",
    "decode_tokens",
    "prefill_tokens",
    "retracted",
)
PAUSE_S = 30.0
"""A stretch without any work that is longer than this is a pause, and no part of the run."""
TELEMETRY_SCHEMA: dict[str, type] = {
    "server": str,
    "t": float,
    "state": str,
    "epoch": int,
    **dict.fromkeys((*GAUGES, *COUNTERS), float),
}
TURN_SCHEMA: dict[str, type] = {
    "shard": str,
    "outcome": str,
    "finish_reason": str,
    "started_at": float,
    "queue_s": float,
    "latency_s": float,
    "server": str,
    "engine": str,
    "cached_tokens": int,
    "attempts": int,
    "prompt_tokens": int,
    "output_tokens": int,
}


@dataclass(frozen=True)
class Server:
    """One slot of the fleet as its supervisor published it (`<host>/<slot>.json`)."""

    server: str
    host: str
    slot: str
    address: str
    engine: str
    version: str
    flags: tuple[str, ...]
    gpus: tuple[str, ...]
    gpu_name: str
    gpu_memory_bytes: int | None
    capacity: int
    restarts: int
    startups: tuple[tuple[float, float | None], ...]
    """(started_at, ready_at or None) of each start of the engine."""

    @property
    def devices(self) -> int:
        """GPUs of this server; a server without a GPU counts as one device."""
        return max(1, len(self.gpus))


@dataclass(frozen=True)
class Session:
    """One client process on one shard, from its events file."""

    shard: str
    start: float
    end: float
    turns: int
    reused: int
    output_tokens: int
    requeued: int
    finished: bool
    """False for a client that ended before its shard was done."""


def read_turns(generated: Iterable[Path]) -> pl.DataFrame:
    """The facts of each generated row (`TURN_SCHEMA`), ids and texts left out; lists become lengths."""
    import polars as pl
    import pyarrow.compute as pc

    frames = [pl.DataFrame(schema=TURN_SCHEMA)]
    plain = [name for name in TURN_SCHEMA if name not in ("shard", "prompt_tokens", "output_tokens")]
    for path in generated:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096, columns=[*plain, "prompt_ids", "output_ids"]):
                table = pa.table(
                    {name: batch.column(name) for name in plain}
                    | {
                        "prompt_tokens": pc.list_value_length(batch.column("prompt_ids")),
                        "output_tokens": pc.list_value_length(batch.column("output_ids")),
                    }
                )
                frame = pl.DataFrame(table).with_columns(pl.lit(path.stem).alias("shard"))
                frames.append(frame.select(pl.col(name).cast(kind) for name, kind in TURN_SCHEMA.items()))
    counts = ("cached_tokens", "attempts", "prompt_tokens", "output_tokens", "queue_s", "latency_s")
    return pl.concat(frames).with_columns(pl.col(*counts).fill_null(0), pl.col("server").fill_null(""))


def json_lines(path: Path, every: int = 1) -> Iterator[dict[str, object]]:
    """The JSON objects of a file, or of every so manieth line of it.

    A torn line (a writer was killed, or is writing) is passed over; a file that is not there holds none.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in islice(file, 0, None, every):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def ends_of(path: Path, tail_bytes: int) -> list[dict[str, object]]:
    """The first object of a JSON-lines file and those of its last `tail_bytes`: enough to see where it stands."""
    with path.open("rb") as file:
        lines = [file.readline()]
        start = max(file.tell(), file.seek(0, 2) - tail_bytes)
        file.seek(start)
        rest = file.read().split(b"\n")
        lines += rest if start == len(lines[0]) else rest[1:]
    found = []
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def number(record: Mapping[str, object], name: str, default: float = 0.0) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else default


def optional(record: Mapping[str, object], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None


def text(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    return "" if value is None else str(value)


def telemetry_files(fleet: Path) -> list[tuple[str, Path]]:
    """(server, file) of every telemetry file, rotated ones (`….jsonl.1`) too."""
    return [
        (f"{path.parent.name}/{path.name.split('.telemetry.jsonl')[0]}", path)
        for path in sorted(fleet.glob("*/*.telemetry.jsonl*"))
    ]


def read_telemetry(fleet: Path) -> pl.DataFrame:
    """All samples of all servers (`TELEMETRY_SCHEMA`), sorted by server and time.

    62 hours of eight servers are 1.8 million samples: columns, not objects, and 50,000 lines at a time.
    """
    import polars as pl

    frames = [pl.DataFrame(schema=TELEMETRY_SCHEMA)]
    names = (*GAUGES, *COUNTERS)
    for server, path in telemetry_files(fleet):
        for lines in chunks(json_lines(path), 50_000):
            columns: dict[str, list[float | None]] = {
                name: [optional(x, name) for x in lines] for name in names
            }
            fixed = {
                "server": [server] * len(lines),
                "t": [number(x, "t") for x in lines],
                "state": [text(x, "state") for x in lines],
                "epoch": [int(number(x, "epoch")) for x in lines],
            }
            frames.append(pl.DataFrame(fixed | columns, schema=TELEMETRY_SCHEMA))
    return pl.concat(frames).sort("server", "t")


def chunks(records: Iterable[dict[str, object]], size: int) -> Iterator[list[dict[str, object]]]:
    chunk: list[dict[str, object]] = []
    for record in records:
        chunk.append(record)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def read_state(path: Path) -> dict[str, object]:
    """A server's state file as it is; {} for one that is missing or unreadable."""
    try:
        record = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return record if isinstance(record, dict) else {}


def read_servers(fleet: Path) -> list[Server]:
    """Every server that published a state."""
    servers = []
    for path in sorted(fleet.glob("*/*.json")):
        record = read_state(path)
        if "slot" not in record or "engine" not in record:
            continue
        startups = record.get("startups")
        starts = startups if isinstance(startups, list) else []
        flags, gpus = record.get("flags"), record.get("gpus")
        servers.append(
            Server(
                server=f"{path.parent.name}/{path.stem}",
                host=path.parent.name,
                slot=path.stem,
                address=text(record, "address"),
                engine=text(record, "engine"),
                version=text(record, "version"),
                flags=tuple(str(flag) for flag in flags) if isinstance(flags, list) else (),
                gpus=tuple(str(gpu) for gpu in gpus) if isinstance(gpus, list) else (),
                gpu_name=text(record, "gpu_name"),
                gpu_memory_bytes=int(number(record, "gpu_memory_bytes")) or None,
                capacity=int(number(record, "capacity")),
                restarts=int(number(record, "restarts")),
                startups=tuple(
                    (number(start, "started_at"), optional(start, "ready_at"))
                    for start in starts
                    if isinstance(start, dict)
                ),
            )
        )
    return servers


def read_sessions(fleet: Path) -> list[Session]:
    """What each client process did, from its events."""
    sessions = []
    for path in sorted(fleet.glob("*/clients/*.jsonl")):
        events = list(json_lines(path))
        if not events:
            continue
        started = next((event for event in events if event.get("event") == "started"), {})
        sessions.append(
            Session(
                shard=text(events[0], "shard"),
                start=min(number(event, "t") for event in events),
                end=max(number(event, "t") for event in events),
                turns=int(number(started, "turns")),
                reused=int(number(started, "reused")),
                output_tokens=int(max(number(event, "output_tokens") for event in events)),
                requeued=int(max(number(event, "requeued") for event in events)),
                finished=any(
                    e.get("event") == "finished" and number(e, "done") >= number(e, "turns") for e in events
                ),
            )
        )
    return sessions


def canonical_server(name: str, servers: Sequence[Server]) -> str:
    """`<host>/<slot>` of the server that a row names by slot, by address or already so."""
    for server in servers:
        if name in (server.server, server.slot) or (name and name == server.address):
            return server.server
    return name
