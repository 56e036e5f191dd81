"""The dispatch, measured: the real workflow against stand-in servers, beside its two alternatives on the same work.

    python tests/bench/bench.py [--only CASE …] [--slots 32] [--scale 40] [--out bench.json] [--table docs/benchmarks.md]

Eight stand-in servers model continuous batching at the pace of recorded GPUs (tests/faults/standin_server.py);
`scale` is how many times faster their clock runs, and all times below are in their seconds, not in ours. Answers are
heavy-tailed: median 1,800, mean 3,000, cap 8,192 tokens. Policies:

    draftmill     the workflow as it is, Snakemake included; timed from its first request to its last answer
    pinned        each shard on one server, which drains before it takes its next shard
    round_robin   strictly in turn over all servers, blocking on a full one

bench.json: case -> policy -> `makespan_s`, `bound_s` (all tokens over the fleet's full rate), `drain_s` (from when
fewer turns are left than the fleet has slots), `longest_turn_s`, `utilisation` (slots held, up to the drain),
`idle_server_s`, `client_cpu_ms_per_turn`, `peak_rss_mb`, `turns`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))
import harness
import pyarrow.parquet as pq
import tiny_model
from harness import STANDIN, Run
from simulation import Outcome, Span, full_rate, judge
from standin_server import Pace

KEY = "bench"
START_S = 60.0  # a server's start with a warm kernel cache, in its own seconds
LEASES = 8  # shards at work at once, as the documented command has them
POLICIES = ("draftmill", "pinned", "round_robin")


@dataclass(frozen=True)
class Case:
    """One piece of work on one fleet. `scale` is of the workflow's own run: starts of processes and the rendering of
    chains take our time, not the servers'."""

    name: str
    shards: int
    servers: int = 8
    chain: int = 1
    turns_per_slot: int = 40
    slow: bool = False
    dying: bool = False
    lengths: dict[str, float] = field(default_factory=lambda: {"median": 1800, "mean": 3000, "cap": 8192})
    slots: int | None = None
    scale: float | None = None
    policies: tuple[str, ...] = POLICIES


CASES = (
    Case("equal, 8 shards", shards=8),
    # 5 capacities a shard at 40 turns a slot: the most that still hold so much
    Case("equal, 64 shards", shards=64, scale=10),
    Case("one server four times slower", shards=8, slow=True),
    Case("one server dies at half-time", shards=8, dying=True),
    Case("four servers, chains of four turns", shards=8, servers=4, chain=4, scale=12),
    Case(
        "four servers, 80 shards (2 capacities each)",
        shards=80,
        servers=4,
        scale=30,
        policies=POLICIES[:1],
    ),
    Case(
        "one server, short answers, 1,024 in flight",
        shards=2,
        servers=1,
        slots=1024,
        scale=20,
        lengths={"median": 24, "mean": 30, "cap": 60},
        policies=("draftmill",),
    ),
)


class Usage:
    """CPU seconds and peak memory of a run's generate jobs, sampled from /proc while they live."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cpu: dict[int, float] = {}
        self.peak_mb = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Ends the sampling; returns the CPU seconds of all jobs together."""
        self._over.set()
        self._thread.join()
        return sum(self.cpu.values())

    def _watch(self) -> None:
        jobs: list[int] = []
        looked = 0.0
        while not self._over.wait(0.2):
            if time.monotonic() - looked > 2:
                looked = time.monotonic()
                jobs = [process.pid for process in self.run.having("generate")]
            for pid in jobs:
                with contextlib.suppress(OSError, AttributeError):
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self.cpu[pid] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
                    self.peak_mb = max(self.peak_mb, peak_rss_mb(pid))


def peak_rss_mb(pid: int | str) -> float:
    """The most memory that a process has held."""
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) / 1024 if peak else 0.0


# ---- what happened, from the servers' own logs


def spans_and_downs(folder: Path, scale: float) -> tuple[list[Span], list[tuple[float, float, int]]]:
    """Every answered turn's span, and when which server was down, in the servers' seconds; servers by slot."""
    starts = {}
    for path in sorted(folder.glob("start-*.json")):
        facts = orjson.loads(path.read_bytes())
        starts[int(path.stem[6:])] = str(facts["slot"])
    order = {slot: number for number, slot in enumerate(sorted(set(starts.values())))}
    spans: list[Span] = []
    lives: dict[int, list[tuple[float, float]]] = {}
    for number, slot in starts.items():
        given: dict[str, tuple[float, int]] = {}
        ready = last = 0.0
        for line in (folder / f"requests-{number:04d}.jsonl").read_bytes().splitlines():
            event = orjson.loads(line)
            last = event["t"] * scale
            if event["event"] == "ready":
                ready = last
            elif event["event"] == "start":
                given[event["rid"]] = last, event["prompt"]
            elif event["event"] == "finish" and harness.sound(event):
                began = last - event["run_s"] * scale
                sent, prompt = given[event["rid"]]
                spans.append(Span(order[slot], sent, began, last, event["out"], prompt))
        if ready:
            lives.setdefault(order[slot], []).append((ready, last))
    downs = [
        (earlier[1], later[0], server)
        for server, all_lives in lives.items()
        for earlier, later in pairwise(all_lives)
    ]
    return spans, downs


def figures(case: Case, folder: Path, slots: int, scale: float) -> Outcome:
    """The figures of one run of a case."""
    spans, downs = spans_and_downs(folder, scale)
    paces = [
        Pace(slots, speed=0.25 if case.slow and server == case.servers - 1 else 1.0)
        for server in range(case.servers)
    ]
    rates = [full_rate(pace, [(span.prompt_tokens, span.output_tokens) for span in spans]) for pace in paces]
    if case.slow:  # which slot got the slow start is not ours to choose: the one that answered least
        counts = [sum(span.server == server for span in spans) for server in range(case.servers)]
        slowest = counts.index(min(counts))
        rates[slowest], rates[-1] = rates[-1], rates[slowest]
    return judge(spans, [slots] * case.servers, rates, downs)


def behaviour(case: Case, slots: int, scale: float, bound_s: float) -> dict[str, Any]:
    """How the servers of a case behave."""
    spec: dict[str, Any] = {
        "slots": slots,
        "scale": scale,
        "start_s": START_S,
        "lengths": case.lengths,
        "prefill_ms": [85, 0.094],
        "together": case.servers,  # starting a process takes 40 times as long on this clock
    }
    if case.slow:
        spec["speed"] = {str(case.servers): 0.25}
    if case.dying:
        spec["faults"] = [{"fault": "dies", "starts": [3], "s": bound_s / 2}]
    return spec


# ---- (a) this project


def draftmill(case: Case, run: Run, slots: int, scale: float) -> dict[str, Any]:
    """Runs the workflow; returns its figures."""
    usage = Usage(run)
    targets = [f"results/generated/{i}-of-{case.shards}.parquet" for i in range(1, case.shards + 1)]
    code = run.finish(*targets, timeout_s=1200, cores=32, leases=LEASES)
    cpu = usage.stop()
    if code != 0:
        raise RuntimeError(f"{case.name}: the workflow ended with {code}: {run.log().read_text()[-2000:]}")
    got = asdict(figures(case, run.folder / "standin", slots, scale))
    turns = run.answered()
    return {
        **got,
        "client_cpu_ms_per_turn": cpu / turns * 1000,
        "peak_rss_mb": usage.peak_mb,
        "turns": turns,
        "turns_per_core_s": turns / cpu if cpu else 0.0,
        "turns_per_s": turns / (got["makespan_s"] / scale),
    }


def work_of(run: Run) -> list[list[list[bytes]]]:
    """The same work for the other policies: shards of conversations of request bodies."""
    from draftmill import engines

    engine = engines.load("sglang")
    shards = []
    for path in sorted(
        (run.results / "generated").glob("*.parquet"), key=lambda p: int(p.name.split("-")[0])
    ):
        chains: dict[str, list[tuple[int, bytes]]] = {}
        columns = ["primary_id", "turn_index", "prompt_ids", "sampling"]
        for row in pq.read_table(path, columns=columns).to_pylist():
            _, body = engine.request(row["prompt_ids"], json.loads(row["sampling"]))
            chains.setdefault(row["primary_id"], []).append((row["turn_index"], orjson.dumps(body)))
        shards.append([[body for _, body in sorted(chain)] for chain in chains.values()])
    return shards


# ---- (b) and (c): a bare client of our own, so that only the policy differs


class Fleet:
    """Stand-in servers started without the workflow, and a bare client over raw sockets."""

    def __init__(self, folder: Path, model: Path, spec: dict[str, Any], servers: int, slots: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.model, self.servers = folder, model, servers
        (folder / "standin.json").write_text(json.dumps({**spec, "folder": str(folder / "standin")}))
        (folder / "key.yaml").write_text(f"api-key: {KEY}\n")
        self.ports = [_free_port() for _ in range(servers)]
        self.permits = [slots + max(2, slots // 8)] * servers
        self.held = [0] * servers
        self.alive = [False] * servers
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * servers
        self.changed = asyncio.Event()

    async def keep(self, server: int) -> None:
        """Starts a server, and starts it again when it dies."""
        while True:
            command = [sys.executable, str(STANDIN), "--host", "127.0.0.1", "--port", str(self.ports[server])]
            command += ["--config", str(self.folder / "key.yaml"), "--model-path", str(self.model)]
            with (self.folder / f"server{server}.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    env={
                        **os.environ,
                        "STANDIN": str(self.folder / "standin.json"),
                        "DRAFTMILL_SLOT": f"s{server}",
                    },
                    stdout=log,
                    stderr=log,
                )
            self.processes[server] = process
            while process.poll() is None:
                if not self.alive[server]:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", self.ports[server])
                        writer.close()
                        self.alive[server] = True
                        self.changed.set()
                await asyncio.sleep(0.05)
            self.alive[server] = False

    async def ask(self, server: int, body: bytes) -> bool:
        """One request; whether it was answered."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[server], limit=1 << 20)
            head = f"POST /generate HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", answer)
            await reader.readexactly(int(found[1]) if found else 0)
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            return False
        return answer.startswith(b"HTTP/1.1 200")

    def stop(self) -> None:
        """Ends the servers."""
        for process in self.processes:
            if process:
                process.kill()
                process.wait()


async def dispatch(fleet: Fleet, policy: str, shards: list[list[list[bytes]]]) -> None:
    """Asks for all of it under one policy; returns when everything is answered."""
    keepers = [asyncio.create_task(fleet.keep(server)) for server in range(fleet.servers)]
    while not all(fleet.alive):
        await asyncio.sleep(0.05)
    queues = [deque([(chain, 0) for chain in shard]) for shard in shards]
    left = [sum(len(chain) for chain in shard) for shard in shards]
    unopened = deque(range(len(shards)))
    own: list[int | None] = [None] * fleet.servers
    everything = deque((shard, item) for shard, queue in enumerate(queues) for item in queue)
    if policy == "round_robin":
        everything = deque(
            (i, queue[n])
            for n in range(max(map(len, queues)))
            for i, queue in enumerate(queues)
            if n < len(queue)
        )
    next_server = 0
    running: set[asyncio.Task[None]] = set()

    async def one(server: int, shard: int, chain: list[bytes], turn: int) -> None:
        answered = await fleet.ask(server, chain[turn])
        fleet.held[server] -= 1
        if answered:
            left[shard] -= 1
        following = turn + answered
        if following < len(chain):
            if policy == "pinned":
                queues[shard].appendleft((chain, following))
            else:
                everything.appendleft((shard, (chain, following)))
        if not answered:
            await asyncio.sleep(0.05)
        fleet.changed.set()

    def give(server: int, shard: int, chain: list[bytes], turn: int) -> None:
        fleet.held[server] += 1
        task = asyncio.create_task(one(server, shard, chain, turn))
        running.add(task)
        task.add_done_callback(running.discard)

    while any(left):
        fleet.changed.clear()
        if policy == "pinned":
            for server in range(fleet.servers):
                shard = own[server]
                if shard is None or not left[shard]:
                    shard = own[server] = unopened.popleft() if unopened else None
                while (
                    shard is not None
                    and queues[shard]
                    and fleet.alive[server]
                    and fleet.held[server] < fleet.permits[server]
                ):
                    give(server, shard, *queues[shard].popleft())
        else:
            while (
                everything
                and fleet.alive[next_server]
                and fleet.held[next_server] < fleet.permits[next_server]
            ):
                shard, item = everything.popleft()
                give(next_server, shard, *item)
                next_server = (next_server + 1) % fleet.servers
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(fleet.changed.wait(), 0.2)
    for keeper in keepers:
        keeper.cancel()


def alternative(
    policy: str,
    case: Case,
    folder: Path,
    model: Path,
    shards: list[list[list[bytes]]],
    how: tuple[int, float, float],
) -> dict[str, Any]:
    """Runs one alternative on the same work; returns its figures."""
    slots, scale, bound_s = how
    fleet = Fleet(folder, model, behaviour(case, slots, scale, bound_s), case.servers, slots)
    before = time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    try:
        asyncio.run(dispatch(fleet, policy, shards))
    finally:
        fleet.stop()
    cpu, peak_mb = time.process_time() - before, peak_rss_mb("self")
    turns = sum(len(chain) for shard in shards for chain in shard)
    got = asdict(figures(case, folder / "standin", slots, scale))
    return {**got, "client_cpu_ms_per_turn": cpu / turns * 1000, "peak_rss_mb": peak_mb, "turns": turns}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# ---- the whole


def prompts(case: Case, slots: int) -> list[dict[str, Any]]:
    """The conversations of a case, each prompt of about 200 tokens."""
    import random

    draw, words = random.Random(9), tiny_model.words()
    rows: list[dict[str, Any]] = []
    for number in range(case.servers * slots * case.turns_per_slot // case.chain):
        messages = []
        for turn in range(case.chain):
            text = " ".join(draw.choices(words, k=round(70 * draw.lognormvariate(0, 0.4)) + 1))
            messages.append({"role": "user", "content": text})
            if turn < case.chain - 1:
                messages.append({"role": "assistant", "content": "old"})
        rows.append({"id": f"b{number:06d}", "messages": messages})
    return rows


def settings(case: Case) -> dict[str, Any]:
    """The workflow's configuration for a case."""
    return {
        "shards": case.shards,
        "sampling": {"max_tokens": 8192},
        "validation": dict.fromkeys(("truncated", "loop", "garbage", "duplicate_answer"), "keep"),
        "operation": {
            "cpu_servers": case.servers,
            "server": {"start_timeout_s": 120, "stall_s": 120, "restarts": 5, "warm_s": 10},
            "client": {"request_timeout_s": 600},
            "progress_interval_s": 5,
        },
    }


def measure(case: Case, base: Path, model: Path, slots: int, scale: float) -> dict[str, dict[str, Any]]:
    """One case under its policies."""
    slots, own_scale = case.slots or slots, case.scale or scale
    folder = base / re.sub(r"\W+", "-", case.name)
    mean = case.lengths["mean"]
    bound_s = case.turns_per_slot * slots * mean / full_rate(Pace(slots), [(200, round(mean))])
    run = Run(folder, model, settings=settings(case), standin=behaviour(case, slots, own_scale, bound_s))
    run.prompts(prompts(case, slots))
    results = {}
    try:
        results["draftmill"] = draftmill(case, run, slots, own_scale)
        show(case.name, "draftmill", results["draftmill"])
        shards = work_of(run)
    finally:
        run.stop_all()
    for policy in case.policies[1:]:
        where = base / f"{folder.name}-{policy}"
        results[policy] = alternative(policy, case, where, model, shards, (slots, scale, bound_s))
        show(case.name, policy, results[policy])
    run.remove()
    return results


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "makespan": lambda r: f"{r['makespan_s']:.0f}",
    "bound": lambda r: f"{r['bound_s']:.0f}",
    "drain": lambda r: f"{r['drain_s']:.0f}",
    "longest turn": lambda r: f"{r['longest_turn_s']:.0f}",
    "utilisation": lambda r: f"{r['utilisation']:.3f}",
    "idle server-s": lambda r: f"{r['idle_server_s']:.0f}",
    "makespan / (bound + drain)": lambda r: f"{r['makespan_s'] / (r['bound_s'] + r['drain_s']):.3f}",
    "client ms/turn": lambda r: f"{r['client_cpu_ms_per_turn']:.2f}",
    "peak MB": lambda r: f"{r['peak_rss_mb']:.0f}",
}


def show(case: str, policy: str, result: dict[str, Any]) -> None:
    """One line of the table, as soon as it is known."""
    cells = ", ".join(f"{name} {cell(result)}" for name, cell in COLUMNS.items())
    print(f"{case} / {policy}: {cells}", flush=True)


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The table in Markdown."""
    lines = ["| case | policy | " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " --- |" * len(COLUMNS)]
    for case, policies in results.items():
        for policy, result in policies.items():
            cells = " | ".join(cell(result) for cell in COLUMNS.values())
            lines.append(f"| {case} | {policy} | {cells} |")
    return "\n".join(lines)


def into(path: Path, text: str) -> None:
    """Replaces what stands between the marks of the dispatch table in a document."""
    begin, end = "<!-- dispatch: made by make bench -->", "<!-- /dispatch -->"
    if path.exists() and begin in (content := path.read_text(encoding="utf-8")):
        front, back = content.split(begin, 1)[0], content.split(end, 1)[1]
        path.write_text(f"{front}{begin}\n{text}\n{end}{back}", encoding="utf-8")


def main() -> None:
    """Measure all cases, print the table, write bench.json."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", nargs="*", default=[], help="parts of the names of the cases to run")
    arguments.add_argument("--slots", type=int, default=32)
    arguments.add_argument("--scale", type=float, default=40.0)
    arguments.add_argument("--turns-per-slot", type=int)
    arguments.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments.add_argument("--table", type=Path, default=Path("docs/benchmarks.md"))
    asked = arguments.parse_args()
    chosen = [case for case in CASES if not asked.only or any(part in case.name for part in asked.only)]
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        base = Path(name)
        model = tiny_model.make(base / "model", context=65536)
        for case in chosen:
            size = asked.turns_per_slot or case.turns_per_slot
            work = replace(case, turns_per_slot=size)
            results[case.name] = measure(work, base, model, asked.slots, asked.scale)
    asked.out.write_text(json.dumps(results, indent=1))
    print(table(results))
    if not asked.only:
        into(asked.table, table(results))


if __name__ == "__main__":
    main()
