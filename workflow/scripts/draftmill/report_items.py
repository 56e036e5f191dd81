"""The report's items: what stands in its menu, and in which words each is captioned.

Knows names, places and captions alone. The rules read it each time the Snakefile is parsed, so it must never import
what makes the pages (report.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One entry of the report: its file, its place in the menu, and its caption (also workflow/report/<name>.rst).

    Snakemake sorts the menu by the categories' names, hence their numbers.
    """

    name: str
    title: str
    category: str
    labels: Mapping[str, str]
    caption: str


ITEMS = (
    Item(
        "overview",
        "What came of the run",
        "1. Summary",
        {"item": "Overview", "kind": "figures"},
        "What was asked, what came out, how fast, what bound it, and what to change. Counts are those of the merge's "
        "accounts, rates those of results/throughput.json, whose definitions are in docs/statistics.md. Read the five "
        "figures from left to right, then the two sentences.",
    ),
    Item(
        "throughput",
        "Throughput over time",
        "2. Throughput",
        {"item": "Output tokens per second", "kind": "plot"},
        "Output tokens per second of every server, stacked. Each answer's tokens are spread evenly over the time in "
        "which it was generated; the time axis counts time at work, with pauses cut out. Read the upper edge for the "
        "whole fleet and a band's height for one server; shaded are start-up, ramp and drain, red flags are restarts, "
        "ticks on the axis are ends of shards.",
    ),
    Item(
        "occupancy",
        "Running requests and memory",
        "2. Throughput",
        {"item": "Running, KV and state use", "kind": "plot"},
        "Running requests against what the servers can run, and the share of KV cache and state slots in use. Sampled "
        "by the supervisors once a second from the servers' own metrics. Running at capacity with free KV cache and "
        "full state slots means state-bound; below capacity with an empty queue, that the clients were too slow.",
    ),
    Item(
        "server-time",
        "How the servers spent their time",
        "2. Throughput",
        {"item": "Shares of server time", "kind": "plot"},
        "The share of each server's time in start-up, ramp, steady state, drain, idle and down. From the telemetry's "
        "states and running requests, second by second; the shares of one server add up to 100 %. Everything that is "
        "not steady state is time that a longer run or a fix could win back.",
    ),
    Item(
        "shard-times",
        "Shards over time",
        "2. Throughput",
        {"item": "Shard times", "kind": "plot"},
        "When each shard was worked on, from the start of its first turn to the end of its last, in order of start. "
        "Taken from the generated rows. Shards should overlap without a gap: the permits go to the oldest first.",
    ),
    Item(
        "tuning",
        "Tuning candidates",
        "2. Throughput",
        {"item": "Tuning", "kind": "plot"},
        "Output tokens per second of each candidate for the server's flags, measured in steady state on the run's own "
        "first turns, with the standard error. Expected is what the capacity model had promised against the asked "
        "flags. The longest bar whose answers stayed the same and sound was adopted.",
    ),
    Item(
        "token-lengths",
        "Token lengths",
        "3. Dataset",
        {"item": "Token lengths", "kind": "plot"},
        "How long prompts and answers of the accepted rows are, in tokens of the target model. Counted on the ids "
        "that were sent and sampled, never on text. A peak at the limit means truncated answers; the table says what "
        "a trainer with a shorter maximum would lose.",
    ),
    Item(
        "finish-reasons",
        "Finish reasons",
        "3. Dataset",
        {"item": "Finish reasons", "kind": "plot"},
        "Why the generations ended, as the engine said, for accepted and rejected rows. A high share of length means "
        "that max_tokens is too small for this model and these prompts.",
    ),
    Item(
        "rejects",
        "Rejected and flagged rows",
        "3. Dataset",
        {"item": "Rejects by reason", "kind": "plot"},
        "How many turns were rejected or flagged, by reason and by shard. From results/validation.json; every rejected "
        "row stands with its text in results/rejected.parquet. A shard that stands out points to a source of prompts "
        "or to a server.",
    ),
    Item(
        "conversations",
        "Conversations",
        "3. Dataset",
        {"item": "Sample rows", "kind": "text"},
        "One row from each finish reason and each reject reason, rendered as a conversation. Chosen for a length that "
        "is usual in its group. The green bar marks what was sampled and is trained on; all the rest is given.",
    ),
    Item(
        "provenance",
        "Provenance",
        "4. Provenance",
        {"item": "Provenance", "kind": "table"},
        "Which model, template, tokenizer, sampling, servers and versions made this dataset, and in which parts the "
        "run went. Recorded while it ran. Two datasets whose hashes here agree were asked for in the same way.",
    ),
    Item(
        "config",
        "Resolved configuration",
        "4. Provenance",
        {"item": "Config", "kind": "text"},
        "The configuration of the run with every default filled in. Secrets and environment values are blacked out. "
        "As a config file it asks for the same run again.",
    ),
)
