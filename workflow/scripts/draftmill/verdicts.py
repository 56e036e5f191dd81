"""What bound each server of a run, and the run: bottleneck.py put to what the run has left behind.

Knows the telemetry files, the servers' published states and the frozen model's config. Must never know a clock,
a server or how a diagnosis is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from draftmill.architecture import read_architecture
from draftmill.bottleneck import WINDOW_S, Advice, Diagnosis, Engine, diagnose
from draftmill.errors import UserError
from draftmill.gpus import Reference, find_gpu, parse_reference
from draftmill.records import Server, json_lines, read_state, telemetry_files
from draftmill.server_flags import UNKNOWN, dialect_of_version, read_flags
from draftmill.telemetry import Sample

LINE_BYTES = 400  # of a sample, about
MOST_SAMPLES = 20_000
"""Samples of one server that a diagnosis looks at; longer runs are thinned."""
MOST_WINDOWS = 120
"""Windows that each server is judged in: what a cure is worth is worked out for each of them anew."""


def engine_of(server: Server, model_config: Mapping[str, object] | None) -> Engine:
    """What is known of a server beside its telemetry. What cannot be understood is left out."""
    if server.engine != "sglang":
        return Engine(kind="llamacpp")
    gpu = find_gpu(server.gpu_name, server.gpu_memory_bytes) if server.gpu_name else None
    try:
        architecture = read_architecture(dict(model_config)) if model_config else None
    except UserError:
        architecture = None
    try:
        flags = read_flags(server.flags)
    except UserError:
        flags = None
    dialect = dialect_of_version(server.version) if server.version else UNKNOWN
    return Engine(
        dialect=dialect,
        flags=flags,
        architecture=architecture,
        gpu=gpu,
        gpu_memory_bytes=server.gpu_memory_bytes,
    )


def samples_between(paths: Sequence[Path], stretches: Sequence[tuple[float, float]]) -> list[Sample]:
    """The samples inside the stretches of time, about `MOST_SAMPLES` at most; broken lines are left out."""
    lines = sum(path.stat().st_size for path in paths) // LINE_BYTES
    samples = []
    for path in paths:
        for record in json_lines(path, every=max(1, lines // MOST_SAMPLES)):
            try:
                sample = Sample.from_dict(record)
            except UserError:
                continue
            if any(start <= sample.t <= end for start, end in stretches):
                samples.append(sample)
    return samples


def verdicts(
    fleet: Path, servers: Sequence[Server], stretches: Sequence[tuple[float, float]], reference: object = None
) -> dict[str, Diagnosis]:
    """A diagnosis per server that has telemetry within the stretches of time (unix s, sorted).

    `reference`: operation.reference of the config, what one GPU is expected to reach.
    """
    model = read_state(fleet.parent / "model" / "model.json").get("config")
    expected = parse_reference(reference)
    published = {server.server: server for server in servers}
    files: dict[str, list[Path]] = {}
    for name, path in telemetry_files(fleet):
        files.setdefault(name, []).append(path)
    window_s = max(WINDOW_S, sum(end - start for start, end in stretches) / MOST_WINDOWS)
    found = {}
    for name, paths in files.items():
        samples = samples_between(paths, stretches)
        if samples and name in published:
            engine = engine_of(published[name], model if isinstance(model, Mapping) else None)
            found[name] = diagnose(samples, engine, _of_a_server(expected, published[name].devices), window_s)
    return found


def _of_a_server(expected: Reference | None, gpus: int) -> Reference | None:
    """What is expected of one GPU, for a server on several."""
    if expected is None or gpus == 1:
        return expected
    return replace(
        expected,
        tok_s=None if expected.tok_s is None else gpus * expected.tok_s,
        share=gpus * expected.share,
    )


def of_the_run(found: Mapping[str, Diagnosis]) -> tuple[str, Diagnosis] | None:
    """(server, diagnosis) that stands for the run: what binds most servers, from the fastest one so bound."""
    if not found:
        return None
    by_verdict: dict[str, list[str]] = {}
    for name, diagnosis in found.items():
        by_verdict.setdefault(diagnosis.verdict, []).append(name)
    names = max(by_verdict.values(), key=len)
    name = max(names, key=lambda one: found[one].steady_tok_s or 0.0)
    return name, found[name]


def as_record(server: str, diagnosis: Diagnosis) -> dict[str, object]:
    """A diagnosis as it stands in throughput.json."""
    return {
        "server": server,
        "verdict": str(diagnosis.verdict),
        "evidence": diagnosis.evidence,
        "advice": _advice(diagnosis.advice),
        "phases_s": {str(name): seconds for name, seconds in diagnosis.phases.items()},
        "blind": list(diagnosis.blind),
        "expected": diagnosis.expected,
        "reference_share": diagnosis.reference_share,
    }


def _advice(advice: Advice | None) -> dict[str, object] | None:
    if advice is None:
        return None
    return {
        "flag": advice.flag,
        "drop": list(advice.drop),
        "predicted_effect": advice.predicted_effect,
        "gain": advice.gain,
    }
