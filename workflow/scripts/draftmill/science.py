"""The science of the last run over these results, to say what has changed since, and to read them later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftmill import config as settings
from draftmill.aside import write_aside
from draftmill.errors import UserError

FILE = "config.json"


def record(config: settings.Config, results: Path) -> list[str]:
    """Keeps the whole configuration in ``results/config.json``; says which scientific values are new in it
    ("sampling.temperature: 1.0 -> 0.7")."""
    path = results / FILE
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # none yet, or torn by a power cut
        before = None
    if before != config:
        write_aside(path, json.dumps(config, indent=1, ensure_ascii=False))
    if before is None:
        return []
    return list(_differences(settings.science(before), settings.science(config)))


def recorded(results: Path) -> settings.Config:
    """The configuration of the last run over ``results``."""
    path = results / FILE
    if not path.exists():
        raise UserError(f"{path} does not exist; {results} holds no run that has begun to generate.")
    try:
        found: settings.Config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise UserError(f"{path} is damaged ({fault}); the next run writes it anew.") from fault
    return found


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict) and (before or now):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
    elif before != now:
        yield f"{path}: {json.dumps(before, ensure_ascii=False)} -> {json.dumps(now, ensure_ascii=False)}"
