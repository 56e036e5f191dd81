"""A stand-in for `sglang.launch_server`: its flags, its protocol, its pace, and every way in which it may misbehave.

Started as a command with the engine's flags (`--host --port --config FILE --model-path …`). What it should do
beyond serving stands in the environment variable STANDIN, as JSON or as the name of a JSON file:

    folder      where starts and requests are written down, with monotonic times (default: nothing is)
    seed        of every draw by probability (0)
    scale       how many times faster than the recorded GPU the clock runs (1.0)
    slots       effective max running requests (44); the flag --max-running-requests caps it
    slots_without_radix  the same under --disable-radix-cache (slots)
    step_ms     [a, b]: one decode step of n running requests takes a + b*n ms
    prefill_ms  [c, d]: one prefill batch of m tokens takes c + d*m ms, and decoding waits for it
    start_s     seconds from the command to readiness, divided by scale
    together    servers that are ready at the same moment: each waits until so many have been started (1)
    speed       {"2": 0.25}: the second start runs at a quarter of the pace
    lengths     {"median": …, "mean": …, "cap": …, "min": …} tokens of an answer: log-normal, cut at the cap
    context     longest prompt + answer, tokens (8192)
    quality     {"empty": share, "loop": share}: answers that are no answers, chosen by the request's hash
    version     what /server_info says (0.5.23)
    faults      a list of behaviours, see FAULTS

The pace is that of one H200 with the shape of Qwen3.6-27B: the least-squares fit of the intervals between
"Decode batch" lines (40 steps each) of the three recorded logs to 40*(a + b*n) + k*c + m*d, with k prefill batches
of m tokens together in between, gives a = 17.1 ms, b = 0.085 ms, c = 85 ms, d = 0.094 ms (R2 = 0.98);
tests/bench/step_times.py repeats it.

An answer is a pure function of the input ids and the sampling parameters (the seed among them), so that any two
runs over the same requests must agree. Requests advance by arithmetic on timers, not step by step: the whole costs
a few tenths of a millisecond of CPU a turn whatever its length.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import math
import os
import random
import re
import signal
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

STEP_MS = (17.1, 0.085)
PREFILL_MS = (85.0, 0.094)
PREFILL_CHUNK_TOKENS = 8192

# What a fault may be. All take `starts` (the k-th start over the folder, from 1), `slots` (the supervisor's names)
# or `start_probability`, and apply to every start without any. Request faults also take `requests` (the n-th /generate of that start),
# `probability`, or `token` (a token of the vocabulary that stands in the prompt); `once` lets each prompt meet
# the fault only the first time over all starts.
FAULTS = {
    # of a start
    "crash_at_start": "exits with status 1 after `s` seconds, with the log lines of `cause` (oom, port, flag, model)",
    "never_starts": "lives, and listens nowhere",
    "starts_late": "is ready only after `s` seconds (divided by scale)",
    # of a life: after `answers` answers or `s` seconds
    "dies": "is gone, as after SIGKILL",
    "child_dies": "its child dies, and the server with it, five seconds later (divided by scale)",
    "hangs": "computes nothing any more; /health and /metrics answer",
    "deaf": "accepts connections and answers nothing at all",
    "metrics_vanish": "/metrics answers 404",
    # of a whole life
    "busy_503": "/health answers 503 whenever requests run",
    "ignores_term": "SIGTERM and SIGINT do nothing",
    "leaves_children": "`count` children, reparented, hold the port and ignore SIGTERM",
    # of a request
    "http": "answers `status` with `body`",
    "html": "answers 200 with a page of HTML",
    "truncated": "answers 200 with half of the JSON",
    "no_ids": "answers 200 with valid JSON that holds no output_ids",
    "close": "closes the socket in the middle of the answer",
    "empty": "closes the socket before the answer",
    "abort": "finishes at once with finish_reason abort",
    "late": "keeps the finished answer back for `s` seconds",
    "poison": "the server is killed by this request",
}

STARTUP_TEXTS = {
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
    "139.80 GiB of which 1.12 GiB is free.",
    "port": "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', PORT): address already in use",
    "flag": "launch_server.py: error: unrecognized arguments: --no-such-flag",
    "model": "OSError: Can't load the configuration of 'MODEL'. Make sure that it is a correct path.",
    "": "RuntimeError: the stand-in crashes at its start.",
}


@dataclass(frozen=True)
class Pace:
    """How long a batch takes. Times in virtual seconds."""

    slots: int = 44
    step_ms: tuple[float, float] = STEP_MS
    prefill_ms: tuple[float, float] = PREFILL_MS
    speed: float = 1.0

    def step_s(self, running: int) -> float:
        return (self.step_ms[0] + self.step_ms[1] * running) / 1000 / self.speed

    def prefill_s(self, tokens: int) -> float:
        return (self.prefill_ms[0] + self.prefill_ms[1] * tokens) / 1000 / self.speed


@dataclass(eq=False)
class Work:
    """One request in the batch: its sizes in tokens, and when (virtual seconds) what happened to it."""

    prompt_tokens: int
    output_tokens: int
    submitted: float = 0.0
    admitted: float = 0.0
    finish_step: float = math.inf
    gone: bool = False


@dataclass
class Batch:
    """Continuous batching of one engine in virtual time: no clock, no sockets, no tokens.

    Waiting requests enter free slots in the order of their arrival, as one prefill batch of at most 8,192 tokens
    (a longer prompt alone), during which decoding stands still. All running requests then advance together.
    """

    pace: Pace
    now: float = 0.0
    steps: float = 0.0
    prefill_end: float = math.inf
    frozen: bool = False
    waiting: deque[Work] = field(default_factory=deque)
    prefilling: list[Work] = field(default_factory=list)
    running: list[tuple[float, int, Work]] = field(default_factory=list)
    decoded_tokens: float = 0.0
    prefilled_tokens: int = 0
    slot_s: float = 0.0
    _entered: int = 0

    @property
    def occupied(self) -> int:
        """Slots in use."""
        return len(self.running) + len(self.prefilling)

    def submit(self, work: Work) -> None:
        """Queue work at the present moment; the caller has advanced to it."""
        work.submitted = self.now
        self.waiting.append(work)
        self._prefill()

    def abort(self, work: Work) -> None:
        """Take work out, wherever it is; its slot is free at once."""
        work.gone = True
        if work in self.waiting:
            self.waiting.remove(work)
        elif work in self.prefilling:
            self.prefilling.remove(work)
        else:
            self.running = [entry for entry in self.running if entry[2] is not work]
            heapq.heapify(self.running)
        self._prefill()

    def due(self) -> float:
        """The next moment at which something finishes; infinity if nothing does."""
        if self.frozen:
            return math.inf
        if self.prefill_end < math.inf:
            return self.prefill_end
        if self.running:
            return self.now + max(0.0, self.running[0][0] - self.steps) * self.pace.step_s(len(self.running))
        return math.inf

    def advance(self, now: float) -> list[Work]:
        """Move to `now`; returns what finished on the way, in order."""
        finished: list[Work] = []
        while not self.frozen:
            if self.prefill_end < math.inf:
                if self.prefill_end > now:
                    break
                self._move(self.prefill_end)
                self.prefill_end = math.inf
                for work in self.prefilling:
                    work.finish_step = self.steps + work.output_tokens - 1
                    self._entered += 1
                    heapq.heappush(self.running, (work.finish_step, self._entered, work))
                self.decoded_tokens += len(self.prefilling)
                self.prefilling = []
                self._prefill()
            elif self.running:
                step_s = self.pace.step_s(len(self.running))
                at = self.now + max(0.0, self.running[0][0] - self.steps) * step_s
                gained = (min(at, now) - self.now) / step_s
                self.decoded_tokens += gained * len(self.running)
                if at > now:
                    self.steps += gained
                    break
                self._move(at)
                self.steps = max(self.steps, self.running[0][0])
                while self.running and self.running[0][0] <= self.steps:
                    finished.append(heapq.heappop(self.running)[2])
                self._prefill()
            else:
                break
        self._move(now)
        return finished

    def _move(self, now: float) -> None:
        self.slot_s += self.occupied * max(0.0, now - self.now)
        self.now = max(self.now, now)

    def _prefill(self) -> None:
        if self.prefill_end < math.inf or self.frozen:
            return
        tokens = 0
        while self.waiting and self.occupied < self.pace.slots:
            if self.prefilling and tokens + self.waiting[0].prompt_tokens > PREFILL_CHUNK_TOKENS:
                break
            work = self.waiting.popleft()
            work.admitted = self.now
            tokens += work.prompt_tokens
            self.prefilling.append(work)
        if self.prefilling:
            self.prefilled_tokens += tokens
            self.prefill_end = self.now + self.pace.prefill_s(tokens)


@dataclass(frozen=True)
class Lengths:
    """Answer lengths in tokens: log-normal with this median, cut at `cap`; `mean` is the mean after the cut."""

    median: float = 1800.0
    mean: float = 3000.0
    cap: int = 8192
    least: int = 1

    def sigma(self) -> float:
        """The width at which the mean after the cut is `mean`, by bisection; raises ValueError if none is."""

        def mean(sigma: float) -> float:
            def phi(x: float) -> float:
                return 0.5 * (1 + math.erf(x / math.sqrt(2)))

            edge = math.log(self.cap / self.median) / sigma
            return self.median * math.exp(sigma**2 / 2) * phi(edge - sigma) + self.cap * (1 - phi(edge))

        low, high = 1e-3, 10.0
        if mean(1.2e-3) > self.mean or self.mean > (self.cap + self.median) / 2:
            raise ValueError(
                f"no log-normal with median {self.median} and cap {self.cap} has the mean {self.mean}"
            )
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if mean(middle) < self.mean else (low, middle)
        return low

    def sampler(self) -> Callable[[float], int]:
        """A function from a standard normal deviate to a length."""
        sigma = 0.0 if self.mean <= self.median else self.sigma()
        return lambda z: max(self.least, min(self.cap, round(self.median * math.exp(sigma * z))))


@dataclass(frozen=True)
class Fault:
    kind: str
    spec: dict[str, Any]
    draw: random.Random
    token_id: int | None

    def number(self, name: str, default: float = math.inf) -> float:
        return float(self.spec.get(name, default))

    def meets(self, nth: int, ids: list[int]) -> bool:
        """Whether the nth request (from 1) with these ids meets this request fault."""
        if self.token_id is not None and self.token_id not in ids:
            return False
        if "token" in self.spec and self.token_id is None:
            return False
        if "requests" in self.spec and nth not in self.spec["requests"]:
            return False
        return not ("probability" in self.spec and self.draw.random() >= self.spec["probability"])


REQUEST_FAULTS = ("http", "html", "truncated", "no_ids", "close", "empty", "abort", "late", "poison")
LIFE_FAULTS = ("dies", "child_dies", "hangs", "deaf", "metrics_vanish")


class Vocabulary:
    """Token ids of the served model: plain words for answers, the stop token, and single tokens by their text."""

    def __init__(self, model_path: Path) -> None:
        tokenizer = _json(model_path / "tokenizer.json") or {}
        vocab = tokenizer.get("model", {}).get("vocab") or {}
        self.added = {entry["content"]: int(entry["id"]) for entry in tokenizer.get("added_tokens", [])}
        self.by_text: dict[str, int] = {**vocab, **self.added}
        words = [
            i for text, i in vocab.items() if re.fullmatch("Ġ?[a-zA-Z]{2,}", text) and text not in self.added
        ]
        self.words: list[int] = (
            words[:4096] or [i for i in vocab.values() if i not in self.added.values()] or list(range(3, 259))
        )
        config = (_json(model_path / "generation_config.json") or {}) | {}
        stop = config.get("eos_token_id", (_json(model_path / "config.json") or {}).get("eos_token_id"))
        self.stop_id: int = int(stop[0] if isinstance(stop, list) else stop if stop is not None else 2)
        self.context = int((_json(model_path / "config.json") or {}).get("max_position_embeddings", 0) or 0)


class Answers:
    """Answers as a pure function of the request. Ids lie ready as text, 8 characters each, to be cut out."""

    WIDTH = 8
    TABLE = 1 << 15

    def __init__(self, vocabulary: Vocabulary, lengths: Lengths, quality: dict[str, float]) -> None:
        table = random.Random(20240229).choices(vocabulary.words, k=self.TABLE + lengths.cap)
        self.table = table
        self.text = "".join(f"{i:>7}," for i in table).encode()
        self.length = lengths.sampler()
        self.stop_id = vocabulary.stop_id
        self.words = vocabulary.words
        self.quality = quality

    def of(self, digest: bytes, sampling: dict[str, Any]) -> tuple[bytes, int, dict[str, Any]]:
        """(ids as the inside of a JSON list, number of ids, finish_reason)."""
        numbers = array("Q", digest)
        uniform = ((numbers[0] >> 12) + 0.5) / (1 << 52)
        length = self.length(_normal(uniform))
        most = int(sampling.get("max_new_tokens") or 128)
        length = max(length, int(sampling.get("min_new_tokens") or 0))
        kind = self._kind((numbers[1] >> 12) / (1 << 52))
        if kind == "empty":
            length = 1
        endless = kind == "loop" or bool(sampling.get("ignore_eos"))
        stopped = not endless and length <= most
        n = length if stopped else most
        words = n - 1 if stopped else n
        if kind == "loop":
            chunk = self.text[: self.WIDTH * 7]
            body = (chunk * (words // 7 + 1))[: self.WIDTH * words]
        else:
            # Four ids of the hash make every answer its own; the rest is a piece of the table.
            own = [self.words[(numbers[2] >> shift) % len(self.words)] for shift in (0, 16, 32, 48)][:words]
            offset = numbers[3] % self.TABLE
            rest = max(0, words - len(own))
            body = "".join(f"{i:>7}," for i in own).encode()
            while rest > 0:
                piece = self.text[offset * self.WIDTH : (offset + rest) * self.WIDTH]
                body += piece
                rest -= len(piece) // self.WIDTH
                offset = 0
        if stopped:
            return body + str(self.stop_id).encode(), n, {"type": "stop", "matched": self.stop_id}
        return body[:-1], n, {"type": "length", "length": n}

    def _kind(self, uniform: float) -> str:
        for kind, share in self.quality.items():
            if uniform < share:
                return kind
            uniform -= share
        return ""


def identify(ids: list[int], sampling: dict[str, Any]) -> tuple[bytes, str]:
    """(what decides the answer, but for its limits; the name of the request in the log)."""
    fixed = {name: v for name, v in sampling.items() if name not in ("max_new_tokens", "min_new_tokens")}
    content = array("q", ids).tobytes() + orjson.dumps(fixed, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(content, digest_size=32).digest()
    limit = b"%d" % int(sampling.get("max_new_tokens") or 0)
    return digest, hashlib.blake2b(digest + limit, digest_size=12).hexdigest()


def _normal(uniform: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(uniform)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        loaded = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return loaded if isinstance(loaded, dict) else None


@dataclass(eq=False)
class Request:
    connection: Connection
    rid: str
    key: str
    nth: int
    work: Work
    ids: bytes
    finish: dict[str, Any]
    fault: Fault | None
    arrived: float


class Server:
    """One start of the engine: the batch, its faults, its counters, its log."""

    def __init__(self, flags: argparse.Namespace, spec: dict[str, Any]) -> None:
        self.flags, self.spec = flags, spec
        self.folder = Path(spec["folder"]) if spec.get("folder") else None
        self.slot = os.environ.get("DRAFTMILL_SLOT", str(flags.port)).rpartition("/")[2]
        self.start = self._count_start()
        self.log = os.open(os.devnull, os.O_WRONLY)
        if self.folder:
            self.log = os.open(
                self.folder / f"requests-{self.start:04d}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY
            )
        self.scale = float(spec.get("scale", 1.0))
        model_path = Path(flags.model_path)
        if not model_path.is_dir():
            sys.exit(STARTUP_TEXTS["model"].replace("MODEL", flags.model_path))
        self.vocabulary = Vocabulary(model_path)
        self.faults = self._draw_faults()
        lengths = {("least" if k == "min" else k): v for k, v in spec.get("lengths", {}).items()}
        self.answers = Answers(self.vocabulary, Lengths(**lengths), spec.get("quality", {}))
        asked = flags.max_running_requests
        fitting = spec.get("slots", 44)
        if flags.disable_radix_cache:
            fitting = spec.get("slots_without_radix", fitting)
        slots = min(int(fitting), asked or sys.maxsize)
        speed = float(spec.get("speed", {}).get(str(self.start), 1.0))
        step, prefill = spec.get("step_ms", STEP_MS), spec.get("prefill_ms", PREFILL_MS)
        self.pace = Pace(slots, (step[0], step[1]), (prefill[0], prefill[1]), speed)
        self.batch = Batch(self.pace)
        self.context = int(flags.context_length or spec.get("context") or self.vocabulary.context or 8192)
        self.kv_tokens = int(flags.max_total_tokens or spec.get("kv_tokens", max(299358, slots * 4096)))
        self.requests: dict[Work, Request] = {}
        self.connections: set[Connection] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.received = self.answered = self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.deaf = self.ready = False
        self.rate_mark = (0.0, 0.0)
        self.met: set[str] = set()

    def fault(self, kind: str) -> Fault | None:
        return next((f for f in self.faults if f.kind == kind), None)

    def virtual(self) -> float:
        return self.loop.time() * self.scale

    # ---- starting

    def _count_start(self) -> int:
        """The number of this start among all in the folder, from 1."""
        if not self.folder:
            return 1
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            try:
                with (self.folder / f"start-{number:04d}.json").open("xb") as file:
                    facts = {"pid": os.getpid(), "t": time.monotonic(), "port": self.flags.port}
                    file.write(orjson.dumps({**facts, "slot": self.slot, "argv": sys.argv}))
                return number
            except FileExistsError:
                number += 1

    def _draw_faults(self) -> list[Fault]:
        """The faults of this start, each with its own stream of draws for its requests."""
        chosen = []
        for i, spec in enumerate(self.spec.get("faults", [])):
            kind = spec["fault"]
            if kind not in FAULTS:
                sys.exit(f"STANDIN names the unknown fault {kind}; known: {', '.join(FAULTS)}")
            draw = random.Random(f"{self.spec.get('seed', 0)}:{self.start}:{i}:{kind}")
            if "starts" in spec and self.start not in spec["starts"]:
                continue
            if "slots" in spec and self.slot not in spec["slots"]:
                continue
            if draw.random() >= spec.get("start_probability", 1.0):
                continue
            token = self.vocabulary.by_text.get(spec["token"]) if "token" in spec else None
            chosen.append(Fault(kind, spec, draw, token))
        return chosen

    async def serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._say(
            f"server_args=ServerArgs(model_path={self.flags.model_path!r}, port={self.flags.port}, "
            f"api_key={self.flags.api_key!r}, max_running_requests={self.flags.max_running_requests})"
        )
        crash = self.fault("crash_at_start")
        if crash:
            await asyncio.sleep(crash.number("s", 0.2))
            text = STARTUP_TEXTS[crash.spec.get("cause", "")]
            self._say(text.replace("PORT", str(self.flags.port)).replace("MODEL", self.flags.model_path))
            os._exit(1)
        ignores = self.fault("ignores_term")
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(
                number, (lambda: self._say("signal ignored")) if ignores else self.stop
            )
        if self.fault("never_starts"):
            await asyncio.sleep(1e9)
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.flags.host, self.flags.port))
        except OSError:
            self._say(STARTUP_TEXTS["port"].replace("PORT", str(self.flags.port)))
            os._exit(1)
        self._leave_children(listening)
        while self.folder and len(list(self.folder.glob("start-*.json"))) < self.spec.get("together", 1):
            await asyncio.sleep(0.02)
        late = self.fault("starts_late")
        await asyncio.sleep(
            (late.number("s", 600.0) if late else float(self.spec.get("start_s", 0.0))) / self.scale
        )
        server = await self.loop.create_server(lambda: Connection(self), sock=listening, backlog=4096)
        self.batch.now = self.virtual()
        self.rate_mark = (self.loop.time(), 0.0)
        self.ready = True
        self._say(
            f"max_total_num_tokens={self.kv_tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            f"max_running_requests={self.pace.slots}, context_len={self.context}, available_gpu_mem=52.67 GB"
        )
        self._say("The server is fired up and ready to roll!")
        self._write("ready")
        for kind in LIFE_FAULTS:
            found = self.fault(kind)
            if found and found.number("s") < math.inf:
                self.loop.call_later(found.number("s") / self.scale, self._life, found)
            elif found and found.number("answers", 0.0) == 0.0:
                self._life(found)
        await server.serve_forever()

    def _leave_children(self, listening: socket.socket) -> None:
        """Children that outlive the server, reparented at once, as SGLang's schedulers are when it is killed."""
        found = self.fault("leaves_children")
        for _ in range(int(found.number("count", 1)) if found else 0):
            if os.fork() == 0:
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    listening.fileno()
                    while True:
                        time.sleep(3600)
                os._exit(0)
            os.wait()

    def stop(self) -> None:
        self._say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        self.loop.call_later(float(self.spec.get("stop_s", 0.1)), os._exit, 0)

    # ---- living

    def _life(self, fault: Fault) -> None:
        if fault.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "child_dies":
            self._say(
                "Subprocess scheduler_0 (pid=0) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
            )
            self.batch.frozen = True
            self.loop.call_later(5.0 / self.scale, os._exit, 131)
        elif fault.kind == "hangs":
            self.batch.advance(self.virtual())
            self.batch.frozen = True
        elif fault.kind == "deaf":
            self.deaf = self.batch.frozen = True
        elif fault.kind == "metrics_vanish":
            self.met.add("metrics_vanish")

    def generate(self, connection: Connection, body: bytes) -> None:
        try:
            asked = orjson.loads(body)
            ids, sampling = asked["input_ids"], asked.get("sampling_params") or {}
            if not ids or not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError("input_ids is empty or holds no token ids")
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as problem:
            connection.send(400, orjson.dumps({"error": {"message": str(problem)}}))
            return
        self.received += 1
        digest, key = identify(ids, sampling)
        rid = str(asked.get("rid") or f"{self.start}-{self.received}")
        self._write("start", rid=rid, key=key, prompt=len(ids), nth=self.received, rids=asked.get("rid"))
        most = int(sampling.get("max_new_tokens") or 128)
        if len(ids) + most > self.context:
            message = (
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens. You "
                f"requested a total of {len(ids) + most} tokens: {len(ids)} tokens from the input messages and "
                f"{most} tokens for the completion."
            )
            self._refuse(connection, rid, key, 400, orjson.dumps({"error": {"message": message}}))
            return
        fault = next(
            (f for f in self.faults if f.kind in REQUEST_FAULTS and f.meets(self.received, ids)), None
        )
        if fault and fault.spec.get("once") and self.folder:
            try:
                (self.folder / f"met-{fault.kind}-{key}").touch(exist_ok=False)
            except FileExistsError:
                fault = None
        if fault and fault.kind == "http":
            message = fault.spec.get("body", '{"error": {"message": "the stand-in was told to fail"}}')
            self._refuse(connection, rid, key, int(fault.spec.get("status", 500)), str(message).encode())
            return
        if fault and fault.kind == "html":
            page = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
            self._refuse(connection, rid, key, int(fault.spec.get("status", 200)), page, "html")
            return
        if fault and fault.kind == "empty":
            self._write("finish", rid=rid, key=key, status=0, fault="empty")
            connection.transport.abort()
            return
        text, count, finish = self.answers.of(digest, sampling)
        if fault and fault.kind == "abort":
            text, count, finish = b"", 0, {"type": "abort", "message": "Aborted", "status_code": None}
        self._advance()
        work = Work(prompt_tokens=len(ids), output_tokens=max(1, count))
        request = Request(connection, rid, key, self.received, work, text, finish, fault, self.loop.time())
        connection.request = request
        if fault and fault.kind == "abort":
            self._answer(request, count)
            return
        self.requests[work] = request
        self.batch.submit(work)
        if fault and fault.kind == "poison":
            self.loop.call_later(fault.number("s", 1.0) / self.scale, os.kill, os.getpid(), signal.SIGKILL)
        self._schedule()

    def dropped(self, request: Request) -> None:
        """The client went away: SGLang aborts the request."""
        if request.work in self.requests:
            self._advance()
            if self.requests.pop(request.work, None):
                self.batch.abort(request.work)
                self._write("dropped", rid=request.rid, key=request.key)
            self._schedule()

    def abort(self, rid: str) -> None:
        for request in [r for r in self.requests.values() if r.rid == rid]:
            self.batch.abort(self.requests.pop(request.work).work)
            request.ids, request.finish = b"", {"type": "abort", "message": "Abort in waiting queue"}
            self._answer(request, 0)

    def _advance(self) -> None:
        now = self.virtual()
        for work in self.batch.advance(now):
            request = self.requests.pop(work)
            if request.fault and request.fault.kind == "late":
                delay = request.fault.number("s", 3600.0) / self.scale
                self.loop.call_later(delay, self._answer, request, work.output_tokens)
            else:
                self._answer(request, work.output_tokens)

    def _schedule(self) -> None:
        if self.timer:
            self.timer.cancel()
        due = self.batch.due()
        self.timer = self.loop.call_at(due / self.scale, self._tick) if due < math.inf else None

    def _tick(self) -> None:
        self.timer = None
        self._advance()
        self._schedule()

    def _answer(self, request: Request, count: int) -> None:
        work, now = request.work, self.loop.time()
        request.connection.request = None
        meta = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": work.prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "queue_time": max(0.0, work.admitted - work.submitted) / self.scale,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": 0,
            "e2e_latency": now - request.arrived,
        }
        body = b'{"text":"","output_ids":[' + request.ids + b'],"meta_info":' + orjson.dumps(meta) + b"}"
        kind = request.fault.kind if request.fault else None
        self.answered += 1
        self.prompt_tokens += work.prompt_tokens
        self.generation_tokens += count
        # Written before the answer leaves: whatever a client can have seen stands in the log.
        self._write(
            "finish",
            rid=request.rid,
            key=request.key,
            status=200,
            out=count,
            reason=request.finish["type"],
            queue_s=meta["queue_time"],
            run_s=(self.batch.now - work.admitted) / self.scale,
            fault=kind,
        )
        if kind == "truncated":
            request.connection.send(200, body[: len(body) // 2])
        elif kind == "no_ids":
            request.connection.send(200, b'{"text":"","meta_info":' + orjson.dumps(meta) + b"}")
        elif kind == "close":
            request.connection.send(200, body, cut=len(body) // 2)
        else:
            request.connection.send(200, body)
        for life in self.faults:
            if life.kind in LIFE_FAULTS and self.answered == life.number("answers"):
                self.loop.call_soon(self._life, life)

    def _refuse(
        self,
        connection: Connection,
        rid: str,
        key: str,
        status: int,
        body: bytes,
        fault: str | None = None,
    ) -> None:
        self._write("finish", rid=rid, key=key, status=status, fault=fault)
        connection.send(status, body, "text/html" if fault == "html" else "application/json")

    # ---- being looked at

    def health(self) -> int:
        if not self.ready or (self.fault("busy_503") and self.batch.occupied):
            return 503
        return 200

    def info(self) -> bytes:
        """What /server_info says; the asked figure of max_running_requests, as SGLang does."""
        return orjson.dumps(
            {
                "model_path": self.flags.model_path,
                "port": self.flags.port,
                "api_key": self.flags.api_key,
                "max_running_requests": self.flags.max_running_requests,
                "context_length": self.flags.context_length,
                "max_total_num_tokens": self.kv_tokens,
                "max_req_input_len": self.context - 6,
                "status": "ready",
                "internal_states": [
                    {
                        "effective_max_running_requests_per_dp": self.pace.slots,
                        "memory_usage": {
                            "weight": 50.18,
                            "kvcache": 18.28,
                            "token_capacity": self.kv_tokens,
                            "graph": 0.32,
                        },
                        "last_gen_throughput": 0.0,
                    }
                ],
                "version": self.spec.get("version", "0.5.23"),
            }
        )

    def metrics(self) -> bytes:
        self._advance()
        self._schedule()
        batch = self.batch
        running, state = len(batch.running), self.spec.get("slots_per_request", 1)
        used = sum(
            w.prompt_tokens + w.output_tokens - max(0.0, w.finish_step - batch.steps)
            for _, _, w in batch.running
        )
        usage = used / self.kv_tokens
        mamba = batch.occupied * state / self.spec.get("state_slots", self.pace.slots * state)
        mark, before = self.rate_mark
        seconds = self.loop.time() - mark
        rate = (batch.decoded_tokens - before) / seconds if seconds > 0 else 0.0
        self.rate_mark = (self.loop.time(), batch.decoded_tokens)
        name = self.flags.served_model_name or Path(self.flags.model_path).name
        front = f'engine_type="unified",model_name="{name}"'
        inside = f'{front},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        tokens_done = {
            "prefill_compute": batch.prefilled_tokens,
            "prefill_cache": 0,
            "decode": int(batch.decoded_tokens),
        }
        counters: dict[str, float] = {
            f"prompt_tokens_total{{{front}}}": self.prompt_tokens,
            f"generation_tokens_total{{{front}}}": self.generation_tokens,
            f"num_requests_total{{{front}}}": self.answered,
            f'cached_tokens_total{{cache_source="total",{front}}}': 0,
            f"num_retracted_requests_total{{{inside}}}": 0,
        }
        for mode, tokens in tokens_done.items():
            counters[f'realtime_tokens_total{{mode="{mode}",{inside}}}'] = tokens
        gauges: dict[str, float] = {
            f"max_total_num_tokens{{{inside}}}": self.kv_tokens,
            f"num_running_reqs{{{inside}}}": running,
            f"num_queue_reqs{{{inside}}}": len(batch.waiting) + len(batch.prefilling),
            f"gen_throughput{{{inside}}}": max(0.0, rate),
            f"cache_hit_rate{{{inside}}}": 0.0,
            f"token_usage{{{inside}}}": round(max(usage, mamba), 2),
            f"full_token_usage{{{inside}}}": usage,
            f"mamba_usage{{{inside}}}": mamba,
            f'num_retracted_reqs{{pid="{os.getpid()}",{inside}}}': 0,
        }
        lines = []
        for kind, rows in (("counter", counters), ("gauge", gauges)):
            for labelled, value in rows.items():
                line = f"# TYPE sglang:{labelled.partition('{')[0]} {kind}"
                lines += [line] if line not in lines else []
                lines.append(f"sglang:{labelled} {float(value)}")
        return ("\n".join(lines) + "\n").encode()

    def _write(self, event: str, **facts: Any) -> None:
        if self.folder:
            os.write(
                self.log,
                orjson.dumps({"t": time.monotonic(), "start": self.start, "event": event, **facts}) + b"\n",
            )

    def _say(self, text: str) -> None:
        print(time.strftime("[%Y-%m-%d %H:%M:%S]"), text, flush=True)


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, one request at a time: as much as the client needs, at little cost."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = b""
        self.request: Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self.request:
            self.server.dropped(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end]
            found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            length = int(found[1]) if found else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            self._dispatch(head, body)

    def _dispatch(self, head: bytes, body: bytes) -> None:
        server = self.server
        method, target = head.split(b" ", 2)[:2]
        path = target.split(b"?", 1)[0].decode("latin-1")
        if server.deaf:
            return
        if path in ("/health", "/health_generate"):
            self.send(server.health(), b"")
            return
        if path == "/metrics":
            gone = "metrics_vanish" in server.met
            self.send(404 if gone else 200, b"" if gone else server.metrics(), "text/plain; version=0.0.4")
            return
        if server.flags.api_key:
            found = re.search(rb"\r\nauthorization: *bearer +(\S+)", head, re.IGNORECASE)
            if not found or found[1].decode("latin-1") != server.flags.api_key:
                self.send(401, b'{"error":"Unauthorized"}')
                return
        if path == "/generate" and method == b"POST":
            server.generate(self, body)
        elif path in ("/server_info", "/get_server_info"):
            self.send(200, server.info())
        elif path in ("/model_info", "/get_model_info"):
            self.send(
                200,
                orjson.dumps(
                    {
                        "model_path": server.flags.model_path,
                        "is_generation": True,
                        "weight_version": "default",
                    }
                ),
            )
        elif path == "/v1/models":
            name = server.flags.served_model_name or server.flags.model_path
            self.send(
                200,
                orjson.dumps(
                    {
                        "object": "list",
                        "data": [{"id": name, "object": "model", "max_model_len": server.context}],
                    }
                ),
            )
        elif path == "/abort_request":
            server.abort(str((orjson.loads(body) if body else {}).get("rid", "")))
            self.send(200, b"")
        else:
            self.send(404, b'{"detail":"Not Found"}')

    def send(self, status: int, body: bytes, kind: str = "application/json", cut: int | None = None) -> None:
        """Answer; with `cut`, close the socket after that many bytes of the body."""
        if self.transport.is_closing():
            return
        reason = {
            200: "OK",
            400: "Bad Request",
            401: "Unauthorized",
            404: "Not Found",
            429: "Too Many Requests",
            500: "Internal Server Error",
            502: "Bad Gateway",
            503: "Service Unavailable",
        }.get(status, "Status")
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self.transport.write(head + body[:cut])
        if cut is not None:
            self.transport.close()


# Flags of SGLang that a caller may pass. The stand-in acts on the first, with their types, and takes the others as
# SGLang would (with a value, or as a switch); an unknown one is refused as argparse refuses it.
TEXTS = "--host --config --model-path --api-key --served-model-name"
NUMBERS = "--port --max-running-requests --context-length --max-total-tokens"
TAKEN = """
--tokenizer-path --dtype --quantization --kv-cache-dtype --mem-fraction-static --tp-size --tensor-parallel-size --tp
--dp-size --device --attention-backend --sampling-backend --grammar-backend --load-format --mamba-ssm-dtype
--mamba-scheduler-strategy --mamba-radix-cache-strategy --mamba-full-memory-ratio --max-mamba-cache-size
--schedule-conservativeness --schedule-policy --chunked-prefill-size --max-prefill-tokens --random-seed
--watchdog-timeout --log-level --log-level-http --revision --json-model-override-args --cuda-graph-max-bs --page-size
--lora-paths --max-queued-requests --nccl-port --dist-init-addr --base-gpu-id --decode-log-interval --stream-interval
--reasoning-parser --tool-call-parser --chat-template --download-dir --tokenizer-worker-num
"""
SWITCHES = """
--trust-remote-code --enable-metrics --disable-radix-cache --disable-overlap-schedule --skip-tokenizer-init
--disable-cuda-graph --enable-deterministic-inference --log-requests --enable-cache-report --skip-server-warmup
--disable-custom-all-reduce --enable-mixed-chunk --enable-torch-compile --stream-output
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    for flag in TEXTS.split():
        made.add_argument(flag)
    for flag in NUMBERS.split():
        made.add_argument(flag, type=int)
    for flag in TAKEN.split():
        made.add_argument(flag, nargs="*" if flag.startswith("--lora") else None)
    for flag in SWITCHES.split():
        made.add_argument(flag, action="store_true")
    made.set_defaults(host="127.0.0.1", port=30000)
    return made


def with_config(arguments: list[str]) -> list[str]:
    """The arguments with those of `--config FILE` (flat `key: value` lines of YAML) put before them."""
    for flag, name in pairwise(arguments):
        if flag == "--config":
            before: list[str] = []
            for line in Path(name).read_text().splitlines():
                found = re.fullmatch(r"\s*([\w-]+)\s*:\s*(.*?)\s*", line)
                if found and not line.lstrip().startswith("#"):
                    value = found[2].strip("'\"")
                    before += [f"--{found[1].replace('_', '-')}"] + ([] if value in ("true", "") else [value])
            return before + arguments
    return arguments


def main() -> None:
    flags = parser().parse_args(with_config(sys.argv[1:]))
    given = os.environ.get("STANDIN", "{}")
    spec = orjson.loads(given if given.lstrip().startswith("{") else Path(given).read_bytes())
    asyncio.run(Server(flags, spec).serve())


if __name__ == "__main__":
    main()
