"""What a run's servers should hold and bring, before one starts: the capacity model put to the run's own files.

Knows the config, the frozen model, the prompts' account and the journal. Must never start or ask a server.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill import config as settings
from draftmill import engines, serving
from draftmill.architecture import read_architecture
from draftmill.candidates import Candidate, candidates
from draftmill.capacity import Workload
from draftmill.cures import Engine
from draftmill.engines.sglang import MAX_RUNNING_FLAG, slot_flags
from draftmill.fleet.slots import Slot
from draftmill.gpus import find_gpu
from draftmill.journal import Journal
from draftmill.model import Model
from draftmill.server_flags import read_flags

ANSWERS = 2000  # so many in the journal tell how long answers are


@dataclass(frozen=True)
class Expectations:
    """What is known of a slot's engine, and what to expect: of the asked flags first, then of alternatives."""

    engine: Engine
    found: Sequence[Candidate]


def given_flags(
    config: settings.Config, slot: Slot, model: Mapping[str, Any], asked: Sequence[str]
) -> tuple[str, ...]:
    """The flags that come with those ``asked``: from the model block, with ``model`` laid over it, from the slot's GPUs
    and from operation.server.capacity."""
    numerics = engines.load("sglang").numerics_flags({**config["model"], **model})
    return *numerics, *slot_flags(len(slot.gpus), config["operation"]["server"]["capacity"], asked)


def expect(
    config: settings.Config, results: Path, slot: Slot, flags: Sequence[str], version: str = ""
) -> Expectations | None:
    """What to expect of SGLang with ``flags`` on a slot; None where model or GPU are not known well enough.

    version: SGLang's, where it is known already; the flags are those that the installed one lists.
    """
    model = Model.load(results / "model")
    card = find_gpu(slot.gpu_name, slot.gpus[0].memory_bytes) if slot.gpus else None
    if card is None or model.config is None:
        return None
    engine = Engine(
        dialect=serving.dialect_of(version, config["operation"]["server"]),
        architecture=read_architecture(model.config),
        gpu=card,
        gpu_memory_bytes=slot.gpus[0].memory_bytes,
    )
    assert engine.architecture is not None
    given = given_flags(config, slot, {}, flags)
    found = candidates(
        engine.architecture,
        card,
        read_flags([*given, *flags]),
        _workload(config, results),
        engine.dialect,
        allow_state_dtype=config["operation"]["tune"]["allow_state_dtype"],
        gpu_memory_bytes=slot.gpus[0].memory_bytes,
    )
    if MAX_RUNNING_FLAG in given:  # operation.server.capacity holds whatever else is tried
        found = [one for one in found if one.flags.max_running == found[0].flags.max_running]
    return Expectations(engine, found)


def _workload(config: settings.Config, results: Path) -> Workload:
    """The run's mean lengths: prompts as sharded; answers as in the journal, else half of max_tokens."""
    prompts = json.loads((results / "prompts.json").read_text())
    mean_prompt = prompts["prompt_tokens"]["sum"] / max(1, prompts["usable"])
    most = config["sampling"]["max_tokens"]
    journal = Journal(results / "journal")
    first = itertools.islice(journal.records(), ANSWERS)
    lengths = [len(record["output_ids"]) for _, record in first if record.get("output_ids")]
    journal.close()
    output = sum(lengths) / len(lengths) if lengths else most / 2
    return Workload(mean_prompt, max(1.0, output), max_tokens=most)
