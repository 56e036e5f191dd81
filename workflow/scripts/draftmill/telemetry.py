"""What a server said about itself at one instant, and how to read it from its metrics and its logs.

Knows the names under which SGLang and llama.cpp's server publish their metrics, and the two JSON-lines
forms in which samples are stored. Must never know how metrics are fetched, what time it is, or what a
sample means (that is bottleneck.py).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from draftmill.errors import UserError

STATES = ("waiting", "starting", "ready", "stalled", "restarting", "stopped", "given_up")


@dataclass(frozen=True, slots=True)
class Sample:
    """One second of one server. Everything but t, state and epoch is None where it is not known.

    t: unix s. epoch: which start of the engine; counters (generation_tokens, prompt_tokens,
    cached_tokens, decode_tokens, prefill_tokens, retracted, finished, prefill_s, decode_s) are cumulative
    since that start. running, queued, capacity, permits, wanted: requests; wanted = turns that clients
    would send at once. generation_tokens and prompt_tokens move when a request finishes, decode_tokens
    and prefill_tokens with every step. prompt_tokens includes cached_tokens. kv_usage, state_usage: share
    0..1 that running requests hold. kv_tokens, state_slots: size of the pools. gen_throughput: tok/s
    between the engine's own log lines. prefill_s, decode_s: GPU seconds in passes of that kind (SGLang
    publishes them under SGLANG_ENABLE_METRICS_DEVICE_TIMER=1). idle_s: scheduler without work.
    """

    t: float
    state: str = "ready"
    epoch: int = 0
    running: int | None = None
    queued: int | None = None
    capacity: int | None = None
    permits: int | None = None
    wanted: int | None = None
    generation_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    decode_tokens: int | None = None
    prefill_tokens: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None
    state_usage: float | None = None
    state_slots: int | None = None
    retracted: int | None = None
    gen_throughput: float | None = None
    finished: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    idle_s: float | None = None

    def to_json(self) -> str:
        """One line of strict JSON without its newline; unknown values are null."""
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Sample":
        """The sample of one line; unknown keys are ignored, so that an older reader reads a newer file.

        Raises UserError when the line is no JSON object, lacks t, or holds a value of the wrong type.
        """
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"a telemetry line is not JSON ({error}): {line[:80]!r}") from None
        if not isinstance(value, dict):
            raise UserError(f"a telemetry line is not a JSON object: {line[:80]!r}")
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> "Sample":
        """The sample of a decoded line; see from_json."""
        kept: dict[str, object] = {}
        for name in _NAMES & value.keys():
            given = value[name]
            if name == "state":
                good = given in STATES
            elif isinstance(given, bool) or not isinstance(given, int | float):
                good = given is None and name not in ("t", "epoch")
            else:
                good = math.isfinite(given)
                given = float(given) if name in _FLOATS else int(given) if good else given
            if not good:
                raise UserError(
                    f"the telemetry value {name}={given!r} is not usable: write a finite number or null"
                )
            kept[name] = given
        if "t" not in kept:
            raise UserError("a telemetry line has no 't' (unix seconds)")
        return cls(**kept)  # type: ignore[arg-type]  # checked just above


_NAMES = frozenset(field.name for field in fields(Sample))
_FLOATS = frozenset({"t", "kv_usage", "state_usage", "gen_throughput", "prefill_s", "decode_s", "idle_s"})

Labels = Mapping[str, str]
Series = list[tuple[Labels, float]]

# name{labels} value [timestamp]; the braces are matched greedily, since a label value may hold one.
_SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def prometheus_series(text: str) -> dict[str, Series]:
    """Every series of a Prometheus page by metric name; NaN, infinities and broken lines are left out."""
    found: dict[str, Series] = {}
    for line in text.splitlines():
        match = _SERIES.match(line.strip())
        if match is None:  # comments and blank lines too
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), value))
    return found


def parse_prometheus(text: str, t: float, *, state: str = "ready", epoch: int = 0) -> Sample:
    """The sample in a `/metrics` page of SGLang or of llama.cpp's server; t: unix s of the answer.

    Of tensor- and pipeline-parallel ranks only rank 0 counts (they report the same requests); data
    parallel ranks are added up, shares averaged. A page that names neither engine gives an empty sample.
    """
    return _sample(prometheus_series(text), t, state, epoch)


def snapshot_sample(snapshot: Mapping[str, object], *, epoch: int = 0) -> Sample:
    """The sample of a stored snapshot: metric names without labels, summed over them, and "t".

    The sum hides what labels told apart: prompt and decode tokens stand in one number there. Its prompt
    part is the prompts that left the queue, at the mean length of those that are done; decode_tokens is
    the rest, exact where prompts are equally long. prefill_tokens and the seconds stay unknown.
    """
    t = snapshot.get("t")
    if isinstance(t, bool) or not isinstance(t, int | float):
        raise UserError("a snapshot of metrics has no 't' (unix seconds)")
    series: dict[str, Series] = {
        name: [({}, float(value))]
        for name, value in snapshot.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    sample = _sample(series, float(t), "ready", epoch)
    read = _Reader(series)
    steps = read.total("sglang:realtime_tokens_total")
    begun = read.total("sglang:queue_time_seconds_count")
    if steps is None or begun is None or not sample.finished or sample.prompt_tokens is None:
        return sample
    decoded = steps - begun * sample.prompt_tokens / sample.finished
    return replace(sample, decode_tokens=max(round(decoded), 0))


def read_samples(lines: Iterable[str], source: str = "telemetry") -> list[Sample]:
    """Samples of a JSON-lines file, in its order: our own telemetry or snapshots of metrics, told apart
    line by line. A torn last line is left out; an engine restart is seen where a snapshot's counters fall.

    source names the file in errors. Raises UserError with the line's number, or when there is no sample.
    """
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    samples: list[Sample] = []
    epoch = 0
    for at, (number, line) in enumerate(rows):
        try:
            value = json.loads(line)
        except ValueError as error:
            if at == len(rows) - 1 and at > 0:
                break
            raise UserError(f"{source}, line {number}: not JSON ({error}); give a JSON-lines file") from None
        if not isinstance(value, dict):
            raise UserError(f"{source}, line {number}: not a JSON object; give a JSON-lines file")
        try:
            if any(name.startswith(("sglang:", "llamacpp:")) for name in value):
                sample = snapshot_sample(value, epoch=epoch)
                if samples and _fell_back(samples[-1], sample):
                    epoch += 1
                    sample = replace(sample, epoch=epoch)
            else:
                sample = Sample.from_dict(value)
        except UserError as error:
            raise UserError(f"{source}, line {number}: {error}") from None
        samples.append(sample)
    if not samples:
        raise UserError(
            f"{source} holds no sample: give telemetry or snapshots of metrics, one JSON object a line"
        )
    return samples


def _fell_back(before: Sample, after: Sample) -> bool:
    pairs = ((before.generation_tokens, after.generation_tokens), (before.finished, after.finished))
    return any(a is not None and (b or 0) < a for a, b in pairs)


def _sample(series: Mapping[str, Series], t: float, state: str, epoch: int) -> Sample:
    reader = _Reader(series)
    if any(name.startswith("llamacpp:") for name in series):
        return _llamacpp(reader, t, state, epoch)
    return _sglang(reader, t, state, epoch)


class _Reader:
    """Looks metrics up by name; the first name that is there wins."""

    def __init__(self, series: Mapping[str, Series]) -> None:
        self._series = series

    def values(self, names: tuple[str, ...], labels: Labels) -> list[float]:
        for name in names:
            if name in self._series:
                return [
                    value
                    for have, value in self._series[name]
                    if have.get("tp_rank", "0") == "0"
                    and have.get("pp_rank", "0") == "0"
                    and all(have.get(key) == wanted for key, wanted in labels.items())
                ]
        return []

    def total(self, *names: str, **labels: str) -> float | None:
        values = self.values(names, labels)
        return sum(values) if values else None

    def count(self, *names: str, **labels: str) -> int | None:
        total = self.total(*names, **labels)
        return None if total is None else round(total)

    def mean(self, *names: str) -> float | None:
        values = self.values(names, {})
        return sum(values) / len(values) if values else None


def _sglang(read: _Reader, t: float, state: str, epoch: int) -> Sample:
    slots = read.count("sglang:mamba_available_tokens")
    if slots is not None:
        slots += (read.count("sglang:mamba_evictable_tokens") or 0) + (
            read.count("sglang:mamba_used_tokens") or 0
        )
    state_usage = read.mean("sglang:mamba_usage")
    # Dense models publish the state metrics too, as zeros: a pool of no slots is no pool.
    hybrid = bool(slots or state_usage)
    forward = read.values(("sglang:forward_execution_seconds_total",), {})
    retracted = read.count("sglang:num_retracted_requests_total")
    if retracted is None and read.values(("sglang:num_retracted_reqs",), {}):
        retracted = 0  # the counter appears with the first retraction
    return Sample(
        t=t,
        state=state,
        epoch=epoch,
        running=read.count("sglang:num_running_reqs"),
        queued=read.count("sglang:num_queue_reqs"),
        generation_tokens=read.count("sglang:generation_tokens_total"),
        prompt_tokens=read.count("sglang:prompt_tokens_total"),
        cached_tokens=read.count("sglang:cached_tokens_total"),
        decode_tokens=read.count("sglang:realtime_tokens_total", mode="decode"),
        prefill_tokens=read.count("sglang:realtime_tokens_total", mode="prefill_compute"),
        # token_usage is the larger of KV and state use in versions that have full_token_usage beside it.
        kv_usage=read.mean("sglang:full_token_usage", "sglang:token_usage"),
        kv_tokens=read.count("sglang:max_total_num_tokens"),
        state_usage=state_usage if hybrid else None,
        state_slots=slots or None,
        retracted=retracted,
        gen_throughput=read.total("sglang:gen_throughput"),
        finished=read.count("sglang:num_requests_total"),
        prefill_s=_forward_seconds(read, "extend") if forward else None,
        decode_s=_forward_seconds(read, "decode") if forward else None,
        idle_s=read.total("sglang:scheduler_idle_seconds_total"),
    )


def _forward_seconds(read: _Reader, category: str) -> float:
    return read.total("sglang:forward_execution_seconds_total", category=category) or 0.0


def _llamacpp(read: _Reader, t: float, state: str, epoch: int) -> Sample:
    computed = read.count("llamacpp:prompt_tokens_total")
    cached = read.count("llamacpp:prompt_tokens_cached_total")
    return Sample(
        t=t,
        state=state,
        epoch=epoch,
        running=read.count("llamacpp:requests_processing"),
        queued=read.count("llamacpp:requests_deferred"),
        generation_tokens=read.count("llamacpp:tokens_predicted_total"),
        # llama.cpp leaves cached tokens out of the prompt's; SGLang counts them in. Here they are in.
        prompt_tokens=None if computed is None else computed + (cached or 0),
        cached_tokens=cached,
        prefill_tokens=computed,
        kv_usage=read.mean("llamacpp:kv_cache_usage_ratio"),
    )
