"""A small run as it would be left on disk, made up from a seed: what statistics, report and status read.

`write_run` simulates a fleet that serves turns first come, first served, in as many parts as asked, and writes
generated rows, telemetry, published states and client events; `write_results` adds what merge and the dataset
rule write.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.rows import GENERATED

START = 1_790_000_000.0
CIRCUMSTANCES = {"engine": "sglang", "version": "0.5.23", "gpu": "NVIDIA H200", "model": "m1"}


@dataclass(frozen=True)
class Turn:
    shard: str
    prompt_tokens: int
    output_tokens: int
    server: str
    started_at: float
    queue_s: float
    latency_s: float


def write_run(
    results: Path,
    *,
    turns: int = 60,
    shards: int = 2,
    servers: int = 2,
    capacity: int = 4,
    tokens_per_s: float = 20.0,
    startup_s: float = 3.0,
    pause_s: Sequence[float] = (),
    gpus: bool = True,
    with_ids: bool = True,
    median_tokens: int = 200,
    seed: int = 0,
) -> list[Turn]:
    """Writes results/generated and results/fleet; returns the turns. `pause_s`: a pause after each part but
    the last; every part starts its engines anew and gets an equal share of the turns."""
    rng = random.Random(seed)
    names = [f"slot{index}" for index in range(servers)]
    samples: dict[str, list[dict[str, object]]] = {name: [] for name in names}
    startups: dict[str, list[dict[str, object]]] = {name: [] for name in names}
    made: list[Turn] = []
    counters = dict.fromkeys(names, 0)
    clock = START
    parts = len(pause_s) + 1
    for part in range(parts):
        begin = clock
        todo = [index for index in range(turns) if index * parts // turns == part]
        ready = {name: begin + startup_s * (order + 1) for order, name in enumerate(names)}
        free = [(ready[name] + 0.1, name) for name in names for _ in range(capacity)]
        here: list[Turn] = []
        for index in todo:
            free.sort()
            at, name = free.pop(0)
            length = min(4 * median_tokens, max(8, int(rng.lognormvariate(0, 0.7) * median_tokens)))
            turn = Turn(
                shard=f"{index * shards // turns}-of-{shards}",
                prompt_tokens=rng.randint(20, 120),
                output_tokens=length,
                server=f"node1/{name}",
                started_at=at,
                queue_s=0.02,
                latency_s=0.02 + length / tokens_per_s,
            )
            here.append(turn)
            free.append((turn.started_at + turn.latency_s + 0.01, name))
        clock = max((turn.started_at + turn.latency_s for turn in here), default=begin)
        for name in names:
            own = [turn for turn in here if turn.server.endswith(name)]
            startups[name].append(
                {
                    "epoch": part,
                    "started_at": begin,
                    "ready_at": ready[name],
                    "ended_at": clock,
                    "reason": "start",
                }
            )
            base = counters[name] = 0
            for second in range(int(clock - begin) + 3):
                t = begin + second
                up = t >= ready[name]
                done = sum(turn.output_tokens for turn in own if turn.started_at + turn.latency_s <= t)
                running = sum(
                    turn.started_at + turn.queue_s <= t < turn.started_at + turn.latency_s for turn in own
                )
                samples[name].append(
                    {
                        "t": t,
                        "state": "ready" if up else "starting",
                        "running": running if up else None,
                        "queued": min(2, max(0, len(own) - running)) if up and running == capacity else 0,
                        "capacity": capacity if up else None,
                        "permits": running if up else None,
                        "wanted": sum(turn.started_at + turn.latency_s > t for turn in here),
                        "generation_tokens": base + done if up else None,
                        "prompt_tokens": None,
                        "cached_tokens": None,
                        "decode_tokens": None,
                        "prefill_tokens": None,
                        "kv_usage": 0.1 + 0.02 * running if up else None,
                        "kv_tokens": 100_000,
                        "state_usage": running / capacity if up else None,
                        "state_slots": capacity,
                        "retracted": 0,
                        "gen_throughput": running * tokens_per_s,
                        "epoch": part,
                    }
                )
        made += here
        write_events(results / "fleet" / "node1" / "clients", here, part, begin, clock, turns // shards)
        clock += pause_s[part] if part < len(pause_s) else 0.0
    for order, name in enumerate(names):
        folder = results / "fleet" / "node1"
        lines = "".join(json.dumps(sample) + "\n" for sample in samples[name])
        (folder / f"{name}.telemetry.jsonl").write_text(lines + '{"t": 17900000')  # a torn last line
        state = {
            "slot": name,
            "host": "node1",
            "gpus": [f"GPU-{order}"] if gpus else [],
            "gpu_name": "NVIDIA H200" if gpus else None,
            "gpu_memory_bytes": 150_000_000_000 if gpus else None,
            "engine": "sglang" if gpus else "llamacpp",
            "version": "0.5.23",
            "model": "model-identity",
            "flags": ["--disable-radix-cache"],
            "address": f"http://127.0.0.1:{30000 + 100 * order}",
            "state": "stopped",
            "since": clock,
            "epoch": parts - 1,
            "restarts": 0,
            "capacity": capacity,
            "asked_capacity": capacity,
            "owner": "node1:1:1",
            "error": None,
            "log": f"results/fleet/node1/{name}.log",
            "started_at": startups[name][0]["started_at"],
            "ready_at": startups[name][0]["ready_at"],
            "startups": startups[name],
        }
        (folder / f"{name}.json").write_text(json.dumps(state))
    write_generated(results / "generated", made, shards, with_ids)
    return made


def write_events(
    clients: Path, turns: Sequence[Turn], part: int, begin: float, end: float, planned: int
) -> None:
    clients.mkdir(parents=True, exist_ok=True)
    for shard in sorted({turn.shard for turn in turns}):
        own = [turn for turn in turns if turn.shard == shard]
        events = [
            {"t": begin, "shard": shard, "event": "started", "turns": planned, "reused": planned - len(own)}
        ]
        t = begin + 30.0
        while t < end:
            done = [turn for turn in own if turn.started_at + turn.latency_s <= t]
            events.append(
                {
                    "t": t,
                    "shard": shard,
                    "event": "progress",
                    "turns": planned,
                    "done": planned - len(own) + len(done),
                    "failed": 0,
                    "in_flight": sum(turn.started_at <= t < turn.started_at + turn.latency_s for turn in own),
                    "output_tokens": sum(turn.output_tokens for turn in done),
                }
            )
            t += 30.0
        last = max(turn.started_at + turn.latency_s for turn in own)
        tokens = sum(turn.output_tokens for turn in own)
        events.append(
            {
                "t": last,
                "shard": shard,
                "event": "finished",
                "turns": planned,
                "done": planned,
                "failed": 0,
                "in_flight": 0,
                "output_tokens": tokens,
            }
        )
        path = clients / f"{shard}-{1000 + part}.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


def write_generated(folder: Path, turns: Sequence[Turn], shards: int, with_ids: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sampling = json.dumps({"temperature": 1.0, "max_tokens": 512})
    for shard in (f"{index}-of-{shards}" for index in range(shards)):
        rows = [
            {
                "id": f"p{index}_gen0",
                "primary_id": f"p{index}",
                "turn_index": 0,
                "sample": 0,
                "source": "a.jsonl",
                "content_hash": f"{index:032x}",
                "key": f"{index:032x}",
                "outcome": "answered",
                "thinking": False,
                "messages": json.dumps([{"role": "user", "content": f"question {index}"}]),
                "tools": None,
                "prompt_ids": [1] * turn.prompt_tokens if with_ids else [],
                "output_ids": [2] * turn.output_tokens if with_ids else [],
                "finish_reason": "stop",
                "detail": None,
                "seed": index,
                "sampling": sampling,
                "max_tokens": 512,
                "started_at": turn.started_at,
                "queue_s": turn.queue_s,
                "latency_s": turn.latency_s,
                "server": turn.server,
                "engine": "sglang 0.5.23",
                "cached_tokens": turn.prompt_tokens // 2,
                "attempts": 1,
                "carried": None,
            }
            for index, turn in enumerate(turns)
            if turn.shard == shard
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=GENERATED), folder / f"{shard}.parquet")


def write_results(results: Path, *, reject_every: int = 10) -> None:
    """Writes what merge and shard_prompts leave behind for the generated rows in `results`."""
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("reasoning_content", pa.string())])
    accepted: list[dict[str, object]] = []
    rejected: list[dict[str, object]] = []
    by_shard: dict[str, dict[str, object]] = {}
    for path in sorted((results / "generated").glob("*.parquet")):
        rows = pq.read_table(path).to_pylist()
        bad = 0
        for index, row in enumerate(rows):
            prompt, output = len(row["prompt_ids"]), len(row["output_ids"])
            shared = {name: row[name] for name in ("id", "primary_id", "source", "key")}
            if index % reject_every == 3:
                bad += 1
                reason = "loop" if index % 20 < 10 else "empty"
                rejected.append(
                    shared
                    | {
                        "reason": reason,
                        "detail": f"the {reason} check",
                        "text": "" if reason == "empty" else HOSTILE * 20,
                        "output_ids": row["output_ids"],
                        "finish_reason": "length" if reason == "loop" else "stop",
                    }
                )
                continue
            reason = "length" if index % 7 == 0 else "stop"
            accepted.append(
                shared
                | {
                    "conversations": [
                        {"role": "user", "content": f"question {index} {HOSTILE}", "reasoning_content": None},
                        {"role": "assistant", "content": HOSTILE, "reasoning_content": f"think {HOSTILE}"},
                    ],
                    "finish_reason": reason,
                    "truncated": reason == "length",
                    "prompt_len": prompt,
                    "completion_len": output,
                    "seq_len": prompt + output,
                    "flags": ["truncated"] if reason == "length" else [],
                }
            )
        by_shard[path.stem] = {"turns": len(rows), "accepted": len(rows) - bad, "rejected": bad}
    texts = ("id", "primary_id", "source", "key", "finish_reason")
    lengths = ("prompt_len", "completion_len", "seq_len")
    merged = pa.schema(
        [
            *((name, pa.string()) for name in texts),
            ("conversations", pa.list_(message)),
            ("truncated", pa.bool_()),
            *((name, pa.int32()) for name in lengths),
            ("flags", pa.list_(pa.string())),
        ]
    )
    refused = pa.schema(
        [
            *((name, pa.string()) for name in (*texts, "reason", "detail", "text")),
            ("output_ids", pa.list_(pa.int32())),
        ]
    )
    accepted.sort(key=lambda row: str(row["id"]))
    pq.write_table(pa.Table.from_pylist(accepted, schema=merged), results / "merged.parquet")
    pq.write_table(pa.Table.from_pylist(rejected, schema=refused), results / "rejected.parquet")
    turns = len(accepted) + len(rejected)
    reasons = [str(row["reason"]) for row in rejected]
    accounts = {
        "rows_in": turns + 5,
        "usable": turns,
        "duplicates": 3,
        "contaminated": 0,
        "skipped": 2,
        "turns": turns,
        "accepted": len(accepted),
        "rejected": len(rejected),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "flags": {"truncated": sum(row["truncated"] is True for row in accepted)},
        "by_shard": by_shard,
        "retokenisation_differs": 0.01,
        "loss_beyond": {"2048": 1200, "4096": 30, "8192": 0},
    }
    prompts = {
        "rows_in": turns + 5,
        "usable": turns,
        "turns": turns,
        "sources": {"a.jsonl": {"usable": turns}},
    }
    model = {
        "name": "tiny-model",
        "path": "/models/tiny",
        "identity": "0" * 64,
        "kind": "hf",
        "context_length": 8192,
        "template_hash": "1" * 64,
        "tokenizer_hash": "2" * 64,
    }
    (results / "model").mkdir(exist_ok=True)
    for name, content in (("validation", accounts), ("prompts", prompts), ("model/model", model)):
        (results / f"{name}.json").write_text(json.dumps(content))


def write_tuning(results: Path) -> None:
    """Writes what the tuner leaves behind: the asked flags, a better setting, and one that failed."""
    settings: tuple[tuple[str, list[str], str, float, str, str], ...] = (
        ("as asked", [], "measured", 1436.0, "state-bound", ""),
        ("radix cache off", ["--disable-radix-cache"], "measured", 3253.0, "compute-bound", ""),
        ("more memory", ["--mem-fraction-static", "0.97"], "failed", 0.0, "", "out of memory at start"),
    )
    measurements: list[dict[str, object]] = [
        {
            "name": name,
            "flags": flags,
            "model": {},
            "outcome": outcome,
            "circumstances": CIRCUMSTANCES,
            "tok_s": rate,
            "error": rate / 100,
            "running": 44,
            "capacity": 44,
            "answers": 500,
            "rejected": 5,
            "verdict": verdict,
            "expected_gain": 2.31 if flags else 1.0,
            "detail": detail,
        }
        for name, flags, outcome, rate, verdict, detail in settings
    ]
    winner = {
        "flags": ["--disable-radix-cache"],
        "circumstances": CIRCUMSTANCES,
        "reason": "radix cache off: 3253 tok/s, 2.27× the asked flags' 1436",
        "proposals": [
            "bf16 state ran at 3509 tok/s (1.08×) but changes the answers: set model.state_dtype: bfloat16"
        ],
    }
    folder = results / "tuning"
    folder.mkdir()
    (folder / "measurements.jsonl").write_text("".join(json.dumps(one) + "\n" for one in measurements))
    (folder / "winner.json").write_text(json.dumps(winner))


HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)> \"quoted\" & 'so' </pre> \u202e ü 語 "
CONFIG: dict[str, object] = {
    "seed": 0,
    "model": {"path": "tiny"},
    "operation": {
        "attach": ["http://user:hunter2@host:1/"],
        "server": {"flags": ["--api-key hunter2 --disable-radix-cache"], "env": {"HF_TOKEN": "hunter2"}},
    },
}
