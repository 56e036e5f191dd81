"""What to try next, when a measurement is good enough, and which setting won: the tuner's judgement.

Pure but for the two files that it reads and writes under results/tuning/. Must never know servers.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftmill import config as settings
from draftmill.aside import write_aside
from draftmill.turns import numerics

FOLDER = "tuning"
WINDOW_S = 5.0
FEWEST_WINDOWS, MOST_WINDOWS = 6, 12
GOOD_ERROR = 0.015  # standard error of the mean rate, as a share of it
BEATEN = 0.85  # a setting whose rate stays below this share of the best one's is not measured to the end
WORTH = 1.02  # a setting must be this much better than what was asked to replace it
REJECTS_MORE = 0.1  # a setting that has this much more of its answers rejected than the asked one is out


@dataclass(frozen=True)
class Setting:
    """One way to start the server. ``model``: values laid over the model block; they change answers."""

    name: str
    flags: tuple[str, ...]
    expected_gain: float
    model: dict[str, Any] = field(default_factory=dict)
    expected_capacity: int = 0  # running requests, by the capacity model


@dataclass(frozen=True)
class Circumstances:
    """Where a measurement holds; those of other circumstances do not compare."""

    engine: str
    version: str
    gpu: str  # Slot.hardware
    model: str  # its identity
    asked: tuple[str, ...] = ()  # operation.server.flags without auto
    numerics: str = ""  # digest of the model block's
    load: str = ""  # digest of what else decides a rate


def circumstances(
    config: settings.Config, engine: str, version: str, hardware: str, model_identity: str
) -> Circumstances:
    """Where what is measured now holds."""
    operation = config["operation"]
    load = [
        config["sampling"],
        operation["client"]["concurrency"],
        *(operation["server"][name] for name in ("capacity", "threads", "env", "python")),
    ]
    asked = settings.server_flags(config).words
    return Circumstances(
        engine, version, hardware, model_identity, asked, _digest(numerics(config["model"])), _digest(load)
    )


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measurement:
    """What one setting brought. Rates in output tok/s of one server; outcome: measured | beaten | failed."""

    name: str
    flags: tuple[str, ...]
    model: dict[str, Any]
    outcome: str
    circumstances: Circumstances
    tok_s: float = 0.0
    error: float = 0.0  # standard error of tok_s
    seconds: float = 0.0
    running: float = 0.0
    capacity: int = 0
    answers: int = 0
    rejected: int = 0
    mean_tokens: float = 0.0
    verdict: str = ""  # what bound it
    evidence: str = ""
    expected_gain: float = 1.0
    expected_capacity: int = 0
    detail: str = ""
    measured_at: float = 0.0  # its end, unix s

    def of(self, setting: Setting) -> bool:
        return self.flags == setting.flags and self.model == setting.model


def enough(rates: Sequence[float], best: float) -> str | None:
    """``measured``, ``beaten`` or ``failed`` (no token at all) once the rates of the windows so far (tok/s) decide it;
    None to go on."""
    if len(rates) < FEWEST_WINDOWS // 2:
        return None
    mean, error = mean_and_error(rates)
    if not mean:
        return "failed" if len(rates) >= MOST_WINDOWS else None
    if best and mean + 3 * error < BEATEN * best:
        return "beaten"
    if len(rates) < FEWEST_WINDOWS:
        return None
    return "measured" if error <= GOOD_ERROR * mean or len(rates) >= MOST_WINDOWS else None


def mean_and_error(rates: Sequence[float]) -> tuple[float, float]:
    """The mean of the windows' rates and its standard error; of one window alone the error is not known: 0."""
    spread = statistics.stdev(rates) if len(rates) > 1 else 0.0
    return statistics.fmean(rates), spread / math.sqrt(len(rates))


def remaining(candidates: Sequence[Setting], done: Sequence[Measurement]) -> list[Setting]:
    """The candidates that have no measurement yet, in their order (the asked one first, then by promise)."""
    return [setting for setting in candidates if not any(measurement.of(setting) for measurement in done)]


def worth_trying(setting: Setting, done: Sequence[Measurement], asked: Setting) -> bool:
    """Whether a setting can still win, going by the capacity model and how it was off so far."""
    measured = [m for m in done if m.outcome == "measured"]
    base = next((m for m in measured if m.of(asked)), None)
    if base is None:
        return True
    best = best_rate(done, asked)
    # The model's gain may be off by as much as it was for the settings measured so far, and a bit.
    off = max((m.tok_s / base.tok_s / m.expected_gain for m in measured), default=1.0)
    return base.tok_s * setting.expected_gain * max(1.0, off) * 1.1 >= best


def best_rate(done: Sequence[Measurement], asked: Setting) -> float:
    """The rate of the best that may be adopted, output tok/s; 0 where none is measured."""
    return max((m.tok_s for m in _sound(done, asked)), default=0.0)


def _sound(done: Sequence[Measurement], asked: Setting) -> list[Measurement]:
    """What leaves the answers as they are, and has no more of them rejected than the asked setting."""
    measured = [m for m in done if m.outcome == "measured"]
    base = next((m for m in measured if m.of(asked)), None)
    return [m for m in measured if not m.model and not _worse_answers(m, base)]


@dataclass(frozen=True)
class Decision:
    """Which setting to use, and why. ``proposals``: faster ones that change answers, never adopted unasked."""

    adopted: Measurement | None
    asked: Measurement | None
    reason: str
    proposals: tuple[str, ...] = ()


def decide(done: Sequence[Measurement], asked: Setting) -> Decision:
    """The best sound setting that leaves the answers as they are."""
    base = next((m for m in done if m.of(asked) and m.outcome == "measured"), None)
    measured = [m for m in done if m.outcome == "measured"]
    best = max(_sound(done, asked), key=lambda m: m.tok_s, default=None)
    if best is None:
        return Decision(None, base, "no setting could be measured; the asked flags stay")
    proposals = tuple(
        f"{m.name} ran at {m.tok_s:.0f} tok/s ({m.tok_s / best.tok_s:.2f}×) but changes the answers: set "
        + ", ".join(f"model.{key}: {value}" for key, value in m.model.items())
        for m in measured
        if m.model and m.tok_s > best.tok_s
    )
    if base is not None and best.tok_s < WORTH * base.tok_s:
        reason = f"the asked flags are as good as any: {base.tok_s:.0f} tok/s"
        return Decision(base, base, reason, proposals)
    against = "" if base is None else f", {best.tok_s / base.tok_s:.2f}× the asked flags' {base.tok_s:.0f}"
    return Decision(best, base, f"{best.name}: {best.tok_s:.0f} tok/s{against}", proposals)


def _worse_answers(measurement: Measurement, base: Measurement | None) -> bool:
    """Whether visibly more of its answers are rejected than of the asked setting's."""
    if base is None or not base.answers or not measurement.answers:
        return False
    share = measurement.rejected / measurement.answers
    before = base.rejected / base.answers
    noise = 3 * math.sqrt(max(before * (1 - before), 0.01) * (1 / base.answers + 1 / measurement.answers))
    return share > before + max(REJECTS_MORE, noise)


# --- the files


def read_measurements(results: Path, here: Circumstances | None = None) -> list[Measurement]:
    """Everything measured over these results, or under these circumstances only."""
    path = results / FOLDER / "measurements.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        value |= {"flags": tuple(value["flags"]), "circumstances": _circumstances(value["circumstances"])}
        found.append(Measurement(**value))
    return [m for m in found if here in (None, m.circumstances)]


def keep(results: Path, measurement: Measurement) -> None:
    """Adds a measurement to the file."""
    path = results / FOLDER / "measurements.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # The newline in front keeps it apart from a line that a kill has torn.
        file.write("\n" + json.dumps(asdict(measurement)) + "\n")


def adopt(results: Path, decision: Decision, asked: Setting, here: Circumstances) -> None:
    """Writes ``winner.json``: from now on servers that would start with the asked flags use the adopted ones
    (the asked ones themselves, where nothing could be measured)."""
    adopted = decision.adopted
    path = results / FOLDER / "winner.json"
    facts = {
        "flags": list(adopted.flags if adopted else asked.flags),
        "name": adopted.name if adopted else asked.name,
        "tok_s": adopted.tok_s if adopted else None,
        "asked_tok_s": decision.asked.tok_s if decision.asked else None,
        "circumstances": asdict(here),
        "reason": decision.reason,
        "proposals": list(decision.proposals),
    }
    write_aside(path, json.dumps(facts, indent=1))


def adopted_flags(
    config: settings.Config, results: Path, hardware: str | None, model_identity: str
) -> tuple[str, ...] | None:
    """The tuned flags that stand in for the configured ones; None where nothing was tuned for those flags,
    this hardware of a slot (None: any) and this model with its numerics. Another version of the engine and another
    load keep them: tune again after a change of those."""
    path = results / FOLDER / "winner.json"
    if not path.exists():
        return None
    winner = json.loads(path.read_text(encoding="utf-8"))
    there = _circumstances(winner["circumstances"])
    here = circumstances(config, there.engine, there.version, hardware or there.gpu, model_identity)
    return tuple(winner["flags"]) if replace(here, load=there.load) == there else None


def _circumstances(value: dict[str, Any]) -> Circumstances:
    return Circumstances(**{**value, "asked": tuple(value.get("asked", ()))})
