"""The state of a run for a person at another terminal: `python -m draftmill status`.

Knows where a run keeps its files, and how to lay out what progress.py makes of them. Reads files only: never a
server, a lock that somebody else needs, or anything that could disturb a run.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from draftmill.aside import write_aside
from draftmill.errors import UserError
from draftmill.plots import number as said
from draftmill.progress import (
    ENDED,
    Event,
    Progress,
    ServerNow,
    ShardNow,
    line,
    prometheus,
    roughly,
    server_now,
    shard_now,
    summary,
)
from draftmill.records import (
    ends_of,
    number,
    optional,
    read_servers,
    read_state,
    telemetry_files,
    text,
)
from draftmill.telemetry import Sample

PATIENCE = 3.0
"""A client that has missed so many of its events has ended."""
REFRESH_S = 2.0
SAMPLES_TAIL, EVENTS_TAIL = 65_536, 16_384
"""Bytes at the end of a file that hold more than a minute of samples, and some 20 minutes of a client's events."""
LATER_BYTES_PER_TOKEN = 24.0
"""What a token, prompt or output, takes in all files that are made of the journal: generated and merged tables,
train.parquet and train.jsonl, where ids are written out as text."""


@dataclass(frozen=True)
class Disk:
    """Bytes: free on the results' file system, and needed for what is still to come (None: not known yet)."""

    free_bytes: int
    needed_bytes: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--watch", action="store_true", help="refresh in place until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="the run's results folder"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the state once, or again and again. Raises UserError where there is no run."""
    results: Path = args.results
    if not results.is_dir():
        raise UserError(f"There is no run in {results}; give its results folder with --results.")
    if args.json:
        found = look(results, time.time())
        record = asdict(found) | {"disk": asdict(disk(results, found))}
        sys.stdout.write(json.dumps(record, allow_nan=False, indent=1) + "\n")
        return 0
    console = Console()
    if not args.watch:
        console.print(picture(results))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(picture(results), console=console, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(picture(results))
    return 0


def look(results: Path, t: float, interval_s: float = 30.0) -> Progress:
    """How the run in `results` stands at `t` (unix s). `interval_s`: how often clients write their events."""
    fleet = results / "fleet"
    sessions: dict[str, list[Sequence[Event]]] = {}
    for path in sorted(fleet.glob("*/clients/*.jsonl")):
        events = ends_of(path, EVENTS_TAIL)
        if events:
            sessions.setdefault(text(events[0], "shard"), []).append(events)
    names = shard_names(results, sessions)
    servers = servers_now(fleet, t)
    # Servers end with their run, long before a client has been silent for long enough.
    over = bool(servers) and all(server.state in (*ENDED, "silent") for server in servers)
    shards = [
        shard_now(
            name,
            sessions.get(name, []),
            finished=(results / "generated" / f"{name}.parquet").exists(),
            t=t,
            patience_s=0.0 if over else PATIENCE * interval_s,
        )
        for name in names
    ]
    prompts = optional(read_state(results / "prompts.json"), "turns")
    current = [events for name in names for events in sessions.get(name, [])]
    return summary(
        t,
        None if prompts is None else int(prompts),
        current,
        servers,
        shards,
        rejects(results, current),
    )


def servers_now(fleet: Path, t: float) -> list[ServerNow]:
    """Every server that ever published a state in this run."""
    latest = dict(telemetry_files(fleet))
    found = []
    for server in read_servers(fleet):
        state = read_state(fleet / server.host / f"{server.slot}.json")
        samples = []
        for record in ends_of(latest[server.server], SAMPLES_TAIL) if server.server in latest else []:
            with contextlib.suppress(UserError):
                samples.append(Sample.from_dict(record))
        found.append(server_now(server, state, samples[1:] or samples, t))
    return found


def shard_names(results: Path, sessions: Mapping[str, object]) -> list[str]:
    """The shards of the newest cut (`i-of-N`), in order; files of another N are left-overs."""
    files = list((results / "shards").glob("*-of-*.parquet"))
    names = {path.stem for path in files} or set(sessions)
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if newest is not None:
        count = newest.stem.partition("-of-")[2]
        names = {name for name in names if name.endswith(f"-of-{count}")}
    return sorted(names, key=lambda name: (int(name.partition("-")[0]) if name[:1].isdigit() else 0, name))


def rejects(results: Path, sessions: Sequence[Sequence[Event]]) -> dict[str, int]:
    """Reason → turns: the merge's accounts if there are any, else what the clients have counted so far."""
    merged = read_state(results / "validation.json").get("reasons")
    if isinstance(merged, dict):
        return {str(reason): int(count) for reason, count in merged.items()}
    counted: Counter[str] = Counter()
    for events in sessions:
        reasons = events[-1].get("rejects")
        if isinstance(reasons, dict):
            counted.update({str(reason): int(count) for reason, count in reasons.items()})
    return dict(counted.most_common())


def disk(results: Path, found: Progress) -> Disk:
    """Room on the disk, and what the rest of the journal and the files made of it will take."""
    free = shutil.disk_usage(results).free
    if not found.done or (results / "throughput.json").exists():
        return Disk(free, None if not found.done else 0)
    written = sum(path.stat().st_size for path in (results / "journal").glob("*"))
    prompts = read_state(results / "prompts.json").get("prompt_tokens")
    prompt_tokens = number(prompts, "sum") if isinstance(prompts, dict) else 0.0
    per_turn = found.output_tokens / found.done
    still = written / found.done * (found.turns - found.done)
    later = LATER_BYTES_PER_TOKEN * (per_turn * found.turns + prompt_tokens)
    return Disk(free, int(still + later))


def picture(results: Path) -> RenderableType:
    """Everything as tables."""
    t = time.time()
    found = look(results, t)
    room = disk(results, found)
    parts: list[RenderableType] = [f"[bold]{escape(str(results))}[/]  {escape(line(found))}"]
    if found.servers:
        parts.append(servers_table(found.servers, t))
        parts += [
            f"[red]{escape(server.server)}[/]: {escape(server.error)}"
            + (f" (log: {escape(server.log)})" if server.log else "")
            for server in found.servers
            if server.error
        ]
    if found.shards:
        parts.append(shards_table(found.shards))
    if found.rejects:
        parts.append(rejects_table(found.rejects, found.turns))
    short = room.needed_bytes is not None and room.needed_bytes > room.free_bytes
    free = f"Disk: [{'bold red' if short else 'default'}]{_bytes(room.free_bytes)} free[/]"
    if room.needed_bytes is None:
        parts.append(f"{free}; what the run will take is not known yet")
    elif room.needed_bytes:
        parts.append(f"{free}, about {_bytes(room.needed_bytes)} still to come")
    else:
        parts.append(free)
    return Group(*parts)


STYLES = {
    "ready": "green",
    "given_up": "bold red",
    "silent": "bold red",
    "stalled": "red",
    "restarting": "yellow",
}


def servers_table(servers: Sequence[ServerNow], t: float) -> Table:
    """One row per server; where all are of one host, that stands in the title."""
    hosts = {server.server.rpartition("/")[0] for server in servers}
    host = hosts.pop() if len(hosts) == 1 else ""
    table = _table(
        escape(f"Servers on {host}") if host else "Servers",
        ("server", "state"),
        ("since", "restarts", "running", "queued", "KV", "slots", "tok/s"),
    )
    table.add_column("binds", no_wrap=True)
    for server in servers:
        style = STYLES.get(server.state, "default")
        running = "-" if server.running is None else f"{server.running}/{server.capacity or '?'}"
        table.add_row(
            escape(server.server.rpartition("/")[2] if host else server.server),
            f"[{style}]{server.state.replace('_', ' ')}[/]",
            roughly(t - server.since) if server.since else "-",
            str(server.restarts),
            running,
            _cell(server.queued),
            _share(server.kv_usage),
            _share(server.state_usage),
            "-" if server.tok_s is None else said(server.tok_s),
            (server.binds or "").removesuffix("-bound").replace("compute- or bandwidth", "compute"),
        )
    return table


MOST_SHARDS = 40


def shards_table(shards: Sequence[ShardNow]) -> Table:
    """Shards at work first; those done or waiting beyond what a screen shows are counted."""
    order = {"running": 0, "stopped": 1, "waiting": 2, "done": 3}
    shown = sorted(shards, key=lambda shard: order[shard.state])[:MOST_SHARDS]
    states = Counter(shard.state for shard in shards)
    title = "Shards: " + ", ".join(f"{states[name]} {name}" for name in order if states[name])
    table = _table(title, ("shard", "state"), ("turns done", "running", "failed tries", "tok/s", "left"))
    for shard in shown:
        table.add_row(
            escape(shard.shard),
            shard.state,
            f"{shard.done:,}/{shard.turns:,}" if shard.turns is not None else "-",
            f"{shard.in_flight}" if shard.state == "running" else "-",
            str(shard.failed),
            "-" if shard.tok_s is None else said(shard.tok_s),
            "-" if shard.left_s is None else roughly(shard.left_s),
        )
    return table


def rejects_table(reasons: Mapping[str, int], turns: int) -> Table:
    """Rejects by reason."""
    table = _table("Rejected turns", ("reason",), ("turns", "share"))
    for reason, count in reasons.items():
        table.add_row(
            escape(reason.replace("_", " ")), f"{count:,}", f"{100 * count / turns:.3g} %" if turns else "-"
        )
    return table


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cell(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bytes(size: float) -> str:
    for unit, limit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def announce(results: Path, operation: Mapping[str, object]) -> str | None:
    """The line that is due now, or None: of all clients that ask, one an interval gets it.

    `operation`: that block of the config. Writes operation.prometheus_file too, where one is set.
    """
    interval_s = number(operation, "progress_interval_s", 30.0)
    stamp = results / "fleet" / "progress.stamp"
    stamp.parent.mkdir(parents=True, exist_ok=True)
    t = time.time()
    with stamp.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        if file.tell() and abs(t - stamp.stat().st_mtime) < interval_s:
            return None
        file.truncate(0)
        file.write("said\n")
        file.flush()
        os.utime(stamp, (t, t))
    found = look(results, t, interval_s)
    target = text(operation, "prometheus_file")
    if target:
        write_aside(Path(target), prometheus(found))
    return line(found)
