"""A run of the real workflow against stand-in servers, in a folder of its own, that may be hit in the middle.

What it gives to the driver and to the tests: the run's processes by role, signals to them, a census, the journal's
keys, the servers' request log, and the laws as functions that return what broke them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import tiny_model
import yaml
from standin_server import identify

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))

from draftmill import engines
from draftmill.fleet import processes
from draftmill.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "faults" / "standin_server.py"
MARK = "DRAFTMILL_CHAOS_RUN"
END_S = 10.0  # law 5: nothing of a run is left after so long
# A process's role by what its command line holds; the first that fits counts.
ROLES = {
    "generate": "generate.py",
    "lease": "lease.py",
    "keeper": "keeper.py",
    "supervisor": "supervisor.py",
    "server": "standin_server.py",
    "snakemake": "-m snakemake",
}

SETTINGS: dict[str, Any] = {
    "shards": 4,
    "prompts": {"files": ["prompts.jsonl"], "limit": None},
    "sampling": {"max_tokens": 160},
    "validation": {"min_supervised_tokens": 1, "reject_limit": 1.0},
    "operation": {
        "engine": "sglang",
        "cpu_servers": 3,
        "server": {
            "flags": ["--device", "cpu"],
            "start_timeout_s": 8,
            "stall_s": 4,
            "restarts": 5,
            "warm_s": 2,
        },
        "client": {"request_timeout_s": 8},
        "progress_interval_s": 1,
    },
}
STANDIN_SPEC: dict[str, Any] = {
    "slots": 6,
    "scale": 1.0,
    "start_s": 0.2,
    "prefill_ms": [10.0, 0.01],
    "lengths": {"median": 40, "mean": 60, "cap": 150, "min": 3},
}


def over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, mapping by mapping."""
    out = dict(base)
    for name, value in changes.items():
        out[name] = over(out.get(name, {}), value) if isinstance(value, Mapping) else value
    return out


@dataclass(frozen=True)
class Process(processes.Process):
    """One process of the run. `role` is a key of ROLES, `child` for a server's child, or `other`."""

    role: str = "other"


@dataclass
class Run:
    """One working folder with its configuration, its prompts and its servers' behaviour."""

    folder: Path
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    standin: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    started: int = 0
    moment: float = 0.0  # when the journal was last read (monotonic s)

    def __post_init__(self) -> None:
        """Writes config, prompts and the servers' behaviour."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (
            "Snakefile",
            "workflow",
            "profiles",
            "envs",
        ):  # as in a clone: the plain commands work here
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(ROOT / name)
        self.configure(self.settings)
        self.behave(self.standin)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def runtime(self) -> Path:
        """Where sockets lie: a socket's path must be short."""
        return Path(tempfile.gettempdir()) / f"dm-{self.mark}"

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Writes config.yaml: SETTINGS, this run's model, and `changes` laid over them."""
        self.settings = dict(changes)
        merged = over(over(SETTINGS, {"model": {"path": str(self.model)}}), changes)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(merged))

    def behave(self, changes: Mapping[str, Any]) -> None:
        """Writes how servers behave from their next start on."""
        spec = {**STANDIN_SPEC, **changes, "folder": str(self.folder / "standin")}
        (self.folder / "standin.json").write_text(json.dumps(spec))

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the prompt file."""
        with (self.folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    # ---- running

    def env(self) -> dict[str, str]:
        """The environment of everything that this run starts."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTMILL_")}
        return {
            **mine,
            "PATH": f"{Path(sys.executable).parent}:{mine['PATH']}",
            "DRAFTMILL_SGLANG_COMMAND": f"{sys.executable} {STANDIN}",
            "DRAFTMILL_RUNTIME_DIR": str(self.runtime),
            "STANDIN": str(self.folder / "standin.json"),
            "PYTHONPATH": f"{ROOT / 'tests' / 'faults' / 'clock'}:{ROOT / 'workflow' / 'scripts'}",
            MARK: self.mark,
            **self.environment,
        }

    def start(self, *arguments: str, cores: int = 8, leases: int = 8) -> subprocess.Popen[bytes]:
        """Starts Snakemake in a process group of its own; its output goes to snakemake-<n>.log."""
        return self._start("snakemake", *arguments, *self._flags(cores, leases))

    def start_resume(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts the documented command that goes on after any end."""
        return self._start("draftmill", "resume", *arguments, *self._flags())

    def _start(self, module: str, *words: str) -> subprocess.Popen[bytes]:
        self.started += 1
        command = [sys.executable, "-m", module, *words]
        with self.log().open("wb") as output:
            return subprocess.Popen(
                command, env=self.env(), stdout=output, stderr=output, start_new_session=True, cwd=self.folder
            )

    @staticmethod
    def _flags(cores: int = 8, leases: int = 8) -> list[str]:
        return ["--cores", str(cores), "--resources", f"gpu={leases}"]

    def log(self, number: int | None = None) -> Path:
        """Where the n-th (by default the last) call of Snakemake wrote."""
        return self.folder / f"snakemake-{number or self.started}.log"

    def finish(self, *arguments: str, timeout_s: float = 60, cores: int = 8, leases: int = 8) -> int:
        """Runs Snakemake to its end; kills its group when it takes longer. Returns the exit code (-9 then)."""
        process = self.start(*arguments, cores=cores, leases=leases)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop_all()
            return process.wait()

    def command(self, *words: str, module: str = "draftmill") -> subprocess.CompletedProcess[str]:
        """Runs `python -m draftmill …` in the run's folder."""
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            env=self.env(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def dry_run(self, *targets: str) -> dict[str, list[str]]:
        """What `snakemake -n` would run: rule -> the shards (wildcards), or [""] for a rule without."""
        done = self.command("-n", *targets, *self._flags(), module="snakemake")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        out = done.stdout + done.stderr
        table = re.search(r"\njob +count\n[- ]+\n((?:\w+ +\d+\n)+)", out)
        planned = {row.split()[0]: [""] for row in table[1].splitlines()} if table else {}
        for rule, message in (
            ("generate", "Generating shard"),
            ("launch_server", "Leasing a server for shard"),
        ):
            if rule in planned:
                planned[rule] = sorted(set(re.findall(rf"{message} (\S+)\.", out)))
        return planned

    # ---- its processes

    def processes(self) -> list[Process]:
        """Every living process of this run, by the mark in its environment."""
        paths = (self.folder / "standin").glob("start-*.json")
        servers = {facts["pid"] for path in paths if (facts := _parsed(path.read_bytes()))}
        found = []
        for process in processes.carrying(f"{MARK}={self.mark}"):
            command = " ".join(process.command)
            role = next((role for role, part in ROLES.items() if part in command), "other")
            if role == "server" and process.pid not in servers:
                role = "child"
            found.append(Process(process.pid, process.started, role))
        return found

    def having(self, role: str) -> list[Process]:
        """The living processes of one role."""
        return [process for process in self.processes() if process.role == role]

    def census(self, within_s: float = END_S) -> list[Process]:
        """What is left of the run after at most `within_s`; empty as soon as nothing is."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def listening(self) -> set[str]:
        """ "address:port" of every TCP socket on which a process of the run listens."""
        return {local for local, _, state, _ in self._sockets(self.processes()) if state == "0A"}

    def connections_of(self, role: str) -> int:
        """How many TCP connections the processes of one role have open to servers of the run."""
        ports = self.ports()
        sockets = self._sockets(self.having(role))
        counts = Counter(pid for _, remote, state, pid in sockets if state == "01" and _port(remote) in ports)
        return max(counts.values(), default=0)

    def ports(self) -> set[int]:
        """The ports of all servers that were started."""
        paths = (self.folder / "standin").glob("start-*.json")
        return {int(facts["port"]) for path in paths if (facts := _parsed(path.read_bytes()))}

    @staticmethod
    def _sockets(processes: Sequence[Process]) -> list[tuple[str, str, str, int]]:
        """(local, remote, state, pid) of the TCP sockets of some processes; the state as in /proc/net/tcp."""
        owners: dict[str, int] = {}
        for process in processes:
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        owners[str(descriptor.readlink())] = process.pid
        found = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if (pid := owners.get(f"socket:[{words[9]}]")) is not None:
                    found.append((_address(words[1]), _address(words[2]), words[3], pid))
        return found

    def stop_all(self) -> None:
        """Kills everything of the run: the end of a test, never a part of what it judges."""
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                process.send(signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def remove(self) -> None:
        """Ends everything and deletes the folder."""
        self.stop_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what it has written

    def requests(self) -> list[dict[str, Any]]:
        """The servers' log of requests, in the order of time."""
        events = [
            event
            for path in (self.folder / "standin").glob("requests-*.jsonl")
            for line in path.read_bytes().splitlines()
            if (event := _parsed(line))
        ]
        return sorted((e for e in events if e["event"] != "ready"), key=lambda event: event["t"])

    def asked(self) -> int:
        """How many requests have been started."""
        return sum(event["event"] == "start" for event in self.requests())

    def answered(self) -> int:
        """How many requests got a sound answer."""
        return sum(event["event"] == "finish" and sound(event) for event in self.requests())

    def starts(self) -> int:
        """How many servers have been started."""
        return len(list((self.folder / "standin").glob("start-*.json")))

    def records(self) -> dict[str, dict[str, Any]]:
        """key -> record of the journal."""
        view = Journal(self.results / "journal")
        self.moment = time.monotonic()
        records = dict(view.records())
        view.close()
        return records

    def journal(self) -> set[str]:
        """The journal's keys."""
        return set(self.records())

    def segments(self) -> list[Path]:
        """The journal's segments, oldest first."""
        return sorted((self.results / "journal").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)

    def generated(self) -> list[dict[str, Any]]:
        """All rows of results/generated of the configured shards."""
        paths = sorted((self.results / "generated").glob("*.parquet"))
        return [row for path in paths for row in pq.read_table(path).to_pylist()]

    def finished_shards(self) -> set[str]:
        """The shards whose table is there."""
        return {path.stem for path in (self.results / "generated").glob("*.parquet") if path.name[0] != "."}

    def merged(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
        """id -> (input_ids, loss_mask, finish_reason) of the dataset; a doubled id raises."""
        rows = pq.read_table(self.results / "merged.parquet").to_pylist()
        out = {r["id"]: (tuple(r["input_ids"]), tuple(r["loss_mask"]), str(r["finish_reason"])) for r in rows}
        assert len(out) == len(rows), "an id stands twice in merged.parquet"
        return out

    def rejected(self) -> dict[str, str]:
        """id -> reason of the rejected rows."""
        rows = pq.read_table(self.results / "rejected.parquet", columns=["id", "reason"]).to_pylist()
        return {row["id"]: row["reason"] for row in rows}

    def state(self, slot: str) -> dict[str, Any]:
        """What a slot's supervisor published last."""
        return _parsed(next((self.results / "fleet").glob(f"*/{slot}.json")).read_bytes()) or {}

    def validation(self) -> dict[str, Any]:
        """results/validation.json."""
        loaded = json.loads((self.results / "validation.json").read_text())
        assert isinstance(loaded, dict)
        return loaded

    def request_keys(self) -> dict[str, str]:
        """journal key -> the request's name in the servers' log, of every turn of the generated tables."""
        engine = engines.load("sglang")
        named = {}
        for row in self.generated():
            if row["prompt_ids"]:
                _, body = engine.request(row["prompt_ids"], json.loads(row["sampling"]))
                named[row["key"]] = identify(body["input_ids"], body["sampling_params"])[1]
        return named


def sound(event: Mapping[str, Any]) -> bool:
    """Whether a finish in the request log is an answer that the client must keep."""
    return event["status"] == 200 and not event.get("fault") and event.get("reason") != "abort"


# ---- the laws


def unsound_accounts(run: Run, expected: set[str]) -> list[str]:
    """Law 1: every turn accepted or rejected exactly once, and the accounts add up."""
    broken = []
    merged, rejected, facts = run.merged(), run.rejected(), run.validation()
    both = merged.keys() & rejected.keys()
    if both:
        broken.append(f"accepted and rejected: {sorted(both)[:3]}")
    if lost := expected - merged.keys() - rejected.keys():
        broken.append(f"{len(lost)} turns lost: {sorted(lost)[:3]}")
    if strange := (merged.keys() | rejected.keys()) - expected:
        broken.append(f"{len(strange)} turns of nobody: {sorted(strange)[:3]}")
    if facts["rows_in"] != sum(facts[name] for name in ("usable", "duplicates", "contaminated", "skipped")):
        broken.append(f"rows_in does not add up: {facts}")
    if facts["turns"] != facts["accepted"] + facts["rejected"] or facts["accepted"] != len(merged):
        broken.append(f"turns do not add up: {facts['turns']}, {facts['accepted']}, {facts['rejected']}")
    return broken


def differing(run: Run, reference: Mapping[str, Any], but: AbstractSet[str]) -> list[str]:
    """Law 1, resume = no resume: rows that differ from those of an undisturbed run, `but` for some ids."""
    merged = run.merged()
    return sorted(i for i in reference if i not in but and merged.get(i) != reference[i])


def asked_again(run: Run, snapshots: Sequence[tuple[float, set[str]]]) -> list[str]:
    """Law 1: requests for what was finished. `snapshots` = (time, journal keys) after each end of the workflow.

    A request may follow another for the same turn only if that one got no sound answer, or if the workflow ended
    in between and the turn was not in the journal then.
    """
    names = run.request_keys()
    kept = [(t, {names[key] for key in keys if key in names}) for t, keys in snapshots]
    broken: list[str] = []
    last_answer: dict[str, float] = {}
    for event in run.requests():
        name = event["key"]
        if event["event"] == "finish" and sound(event):
            last_answer[name] = event["t"]
        elif event["event"] == "start":
            finished = any(t <= event["t"] and name in keys for t, keys in kept)
            answered = last_answer.get(name)
            if answered is not None and not any(answered <= t <= event["t"] for t, _ in kept):
                finished = True
            if finished:
                broken.append(name)
    return broken


def failover(run: Run, start: int, at: float) -> dict[str, tuple[float, int]]:
    """What became of the turns in flight on the servers' `start` when it died: name -> (seconds from `at`, monotonic,
    until it ran on another server, that server's start); infinity and 0 where it never did."""
    in_flight: set[str] = set()
    again: dict[str, tuple[float, int]] = {}
    for event in run.requests():
        name = event["key"]
        if event["start"] == start and event["t"] <= at:
            (in_flight.add if event["event"] == "start" else in_flight.discard)(name)
        elif event["event"] == "start" and event["t"] > at and name in in_flight:
            again.setdefault(name, (event["t"] - at, event["start"]))
    return {name: again.get(name, (float("inf"), 0)) for name in in_flight}


def untrue_plan(run: Run, shards: int) -> list[str]:
    """Law 2: `snakemake -n` lists exactly the unfinished shards, their leases, and what follows from them."""
    if not (run.results / "prompts.json").exists():
        return []
    unfinished = sorted({f"{i}-of-{shards}" for i in range(1, shards + 1)} - run.finished_shards())
    planned = {rule: sorted(names) for rule, names in run.dry_run().items()}
    broken = [
        f"{rule} is planned for {planned.get(rule, [])}, unfinished are {unfinished}"
        for rule in ("generate", "launch_server")
        if planned.get(rule, []) != unfinished
    ]
    if unfinished and "merge" not in planned:
        broken.append("merge is not planned")
    return broken


def doubled(run: Run) -> int:
    """Ids that stand more than once in the generated tables."""
    return sum(count - 1 for count in Counter(row["id"] for row in run.generated()).values())


# ---- prompts


def conversations(count: int = 70, seed: int = 5) -> list[dict[str, Any]]:
    """Prompts: single turns, conversations of up to three, one that the server refuses, one duplicate."""
    import random

    draw, words = random.Random(seed), tiny_model.words()
    rows = []
    for number in range(count):
        turns = 1 if number % 4 else draw.randint(2, 3)
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(3, 30)))})
            if turn < turns - 1:
                messages.append({"role": "assistant", "content": "an old answer"})
        rows.append({"id": f"c{number:03d}", "messages": messages})
    rows.append({"id": "refused", "messages": [_says("refused")]})
    rows.append({**rows[1], "id": "twin"})
    return rows


def poison(number: int = 0) -> dict[str, Any]:
    """A prompt that kills any server which knows the fault."""
    return {"id": f"poison{number}", "messages": [_says("poison", number)]}


def _says(marker: str, number: int = 0) -> dict[str, str]:
    return {"role": "user", "content": f"{tiny_model.MARKERS[marker]} {tiny_model.words()[number]}"}


REFUSING = {
    "fault": "http",
    "status": 400,
    "token": tiny_model.MARKERS["refused"],
    "body": '{"error": {"message": "this prompt is refused"}}',
}


def _address(text: str) -> str:
    """An address of /proc/net/tcp (hexadecimal, little-endian words) as one writes it."""
    host, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed).removeprefix('::ffff:')}:{int(port, 16)}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        loaded = orjson.loads(line)
    except orjson.JSONDecodeError:  # the last line of a server that was killed
        return None
    return loaded if isinstance(loaded, dict) else None
