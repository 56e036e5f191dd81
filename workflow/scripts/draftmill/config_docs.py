"""Writes config.yaml and docs/configuration.md from the schema: `python -m draftmill.config_docs`.

Knows the schema and the layout of the two files. Must never know what a key does.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftmill import config

REPOSITORY = Path(__file__).parents[3]

HEAD = """\
# What to generate, and how. Every key stands here with its meaning; one left out takes its default
# (docs/configuration.md lists them). Blocks up to `dataset` decide what the dataset is; `operation`
# decides only how the work is done, and may be changed at any time without redoing anything.
# Paths are relative to the folder snakemake runs in.
"""

INTRODUCTION = """\
# Configuration

Made from `workflow/schemas/config.schema.yaml` by `make docs`; a test keeps it, the schema and `config.yaml` in agreement.

Unknown keys are refused, with the nearest known one named. Everything but `operation` is science: it decides what the
dataset is. A change there asks for the answers it changes and for no others; old answers stay in the journal and count
again when the value goes back. A change in `operation` leaves finished work as it is.
"""


def config_yaml() -> str:
    """The shipped config.yaml: every key with its meaning and its default, or the demo's value where there is one."""
    return HEAD + "".join(_yaml_lines(config.schema(), 0))


def _yaml_lines(tree: config.Schema, depth: int) -> Iterator[str]:
    margin = "  " * depth
    for name, child in tree["properties"].items():
        comment = f"{margin}# "
        yield "\n" if depth < 2 or "properties" in child else ""
        yield textwrap.fill(
            child["description"],
            100,
            initial_indent=comment,
            subsequent_indent=comment,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if "properties" in child:
            yield f"\n{margin}{name}:\n"
            yield from _yaml_lines(child, depth + 1)
        else:
            yield f"\n{margin}{name}: {_yaml_value(shipped(child))}\n"


def shipped(tree: config.Schema) -> Any:
    """The value of a key in the shipped config.yaml."""
    return tree["examples"][0] if "examples" in tree else tree["default"]


def _yaml_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return f"[{', '.join(json.dumps(item) if ':' in str(item) else str(item) for item in value)}]"
    return json.dumps(value)


def configuration_md() -> str:
    """docs/configuration.md: a table a block."""
    blocks = [("", config.schema()), *((path, tree) for path, tree in config.paths() if "properties" in tree)]
    parts = [INTRODUCTION]
    for path, tree in blocks:
        keys = [(name, child) for name, child in tree["properties"].items() if "properties" not in child]
        parts.append(f"## {path or 'The run'}\n")
        if path:
            parts.append(tree["description"] + "\n")
        rows = [
            f"| `{name}` | {_cell(config.wanted(child))} | `{_default(child)}` | {_cell(child['description'])} |"
            for name, child in keys
        ]
        if rows:
            parts.append(
                "\n".join(["| key | takes | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"
            )
    return "\n".join(parts)


def _default(tree: config.Schema) -> str:
    return json.dumps(tree["default"]) if not isinstance(tree["default"], str) else str(tree["default"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    (REPOSITORY / "config.yaml").write_text(config_yaml(), encoding="utf-8")
    (REPOSITORY / "docs" / "configuration.md").write_text(configuration_md(), encoding="utf-8")


if __name__ == "__main__":
    main()
