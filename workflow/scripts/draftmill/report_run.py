"""What the report's pages are made from: the finished files of a run, and how their values read.

Knows the files under results/ that are there when the dataset is. Must never know a page.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl

from draftmill import plots
from draftmill.records import read_state, text

Table = Mapping[str, object]
Page = tuple[str, list[str]]
"""The sentence under a page's title, and the HTML below it."""


@dataclass(frozen=True)
class Run:
    """What the pages are made from; each table is read when a page first asks for it."""

    results: Path
    config: Table

    @cached_property
    def rates(self) -> Table:
        return read_state(self.results / "throughput.json")

    @cached_property
    def accounts(self) -> Table:
        return read_state(self.results / "validation.json")

    @cached_property
    def prompts(self) -> Table:
        return read_state(self.results / "prompts.json")

    @cached_property
    def model(self) -> Table:
        return read_state(self.results / "model" / "model.json")

    @cached_property
    def buckets(self) -> pl.DataFrame:
        """results/throughput.parquet."""
        return pl.read_parquet(self.results / "throughput.parquet")

    @cached_property
    def accepted(self) -> pl.DataFrame:
        """id, source, finish_reason, prompt_len, completion_len, seq_len, truncated, flags of accepted rows."""
        columns = "id", "source", "finish_reason", "prompt_len", "completion_len", "seq_len", "truncated"
        return pl.scan_parquet(self.results / "merged.parquet").select(columns).collect()

    @cached_property
    def rejected(self) -> pl.DataFrame:
        """id, reason, finish_reason, detail and length (characters) of rejected rows."""
        columns = ("id", "reason", "finish_reason", "detail", pl.col("text").str.len_chars().alias("length"))
        return pl.scan_parquet(self.results / "rejected.parquet").select(columns).collect()

    @cached_property
    def sampling(self) -> Table:
        """Every sampling parameter of the first generated row."""
        for path in sorted((self.results / "generated").glob("*.parquet")):
            rows = pl.scan_parquet(path).select("sampling").head(1).collect()
            if rows.height:
                return mapping(json.loads(rows.item()))
        return {}

    @property
    def servers(self) -> list[Table]:
        return tables(self.rates.get("servers"))


def mapping(value: object) -> Table:
    """A JSON object, or an empty one where there is none."""
    return value if isinstance(value, Mapping) else {}


def tables(value: object) -> list[Table]:
    """The JSON objects in a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def counts(value: object) -> dict[str, int]:
    """Name → whole number."""
    return {str(name): int(count) for name, count in mapping(value).items() if isinstance(count, int)}


def share_of(part: float, whole: float) -> str:
    """A part of a whole as per cent."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def known(value: float | None, unit: str = "") -> str:
    """A number as people read it, or that it is not known."""
    return "unknown" if value is None else f"{plots.number(value)}{unit}"


def times(count: int) -> str:
    """How often: never, once, 194 times."""
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def in_words(kind: str) -> str:
    """The name of a reason or a phase as words."""
    return kind.replace("_", " ")


ENGINES = {"sglang": "SGLang", "llamacpp": "llama.cpp's server"}


def engine_of(server: Table) -> str:
    """The engine of a server and its version, as people call them; empty where it is not known."""
    name, version = text(server, "engine"), text(server, "version")
    shown = f"({version})" if version[:1].isalpha() else version
    return f"{ENGINES.get(name, name)} {shown}".strip()


def flags_of(server: Table) -> str:
    """The flags of a server, a setting or a winner as one text."""
    flags = server.get("flags")
    return " ".join(str(flag) for flag in flags) if isinstance(flags, list) else ""
