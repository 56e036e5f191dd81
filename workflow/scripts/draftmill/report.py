"""The report's items: what a reader who was not there is told about a run, and in which words.

Knows every item, its caption and its place, and writes them all; the first page is made here, the others in
report_throughput.py, report_dataset.py and report_provenance.py. Must never know a server, a clock or Snakemake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftmill import pages, plots, report_dataset, report_provenance, report_throughput
from draftmill.aside import write_aside
from draftmill.records import number, optional, text
from draftmill.report_run import (
    Page,
    Run,
    Table,
    counts,
    in_words,
    known,
    mapping,
    share_of,
    tables,
)
from draftmill.statistics import duration


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


def write_report(results: Path, config: Table, folder: Path) -> None:
    """Writes <folder>/<item>.html for every item of `ITEMS`. `results`: the run's folder; `config`: resolved."""
    run = Run(results, config)
    for item in ITEMS:
        lead, body = CONTENT[item.name](run)
        write_aside(folder / f"{item.name}.html", pages.page(item.title, lead, body, item.caption))


def _hardware(run: Run) -> str:
    """8 × NVIDIA H200, or 2 CPU servers."""
    count = int(number(run.rates, "devices"))
    names = sorted({text(server, "gpu_name") for server in run.servers} - {""})
    if text(run.rates, "device") == "gpu":
        return f"{count} × {' and '.join(names) or 'GPU'}"
    return f"{count} CPU server{'s' if count != 1 else ''}"


def _asked(run: Run) -> str:
    """One sentence: who was asked what, how."""
    engines = sorted(
        {f"{text(server, 'engine')} {text(server, 'version')}".strip() for server in run.servers}
    )
    temperature, limit = run.sampling.get("temperature"), run.sampling.get("max_tokens")
    name = text(run.model, "name") or text(run.model, "path") or "The target model"
    return (
        f"{name} answered on {_hardware(run)} with {' and '.join(engines) or 'an unknown engine'}, "
        f"at temperature {temperature} and up to {limit} tokens an answer."
    )


def overview(run: Run) -> Page:
    """The first page."""
    accounts, rates, prompts = run.accounts, run.rates, run.prompts
    turns, accepted, rejected = (int(number(accounts, name)) for name in ("turns", "accepted", "rejected"))
    usable, rows_in = int(number(accounts, "usable")), int(number(accounts, "rows_in"))
    dropped = [
        f"{int(number(accounts, name)):,} {name}"
        for name in ("duplicates", "contaminated", "skipped")
        if accounts.get(name)
    ]
    tokens = number(rates, "output_tokens")
    steady = optional(mapping(rates.get("steady_state")), "output_tokens_per_s")
    overall = number(rates, "output_tokens_per_s")
    each = "GPU" if text(rates, "device") == "gpu" else "CPU server"
    cost = optional(rates, "cost_per_million_output_tokens")
    lengths = mapping(rates.get("tokens_per_answer"))
    flags = counts(accounts.get("flags"))
    reasons = counts(accounts.get("reasons"))
    worst = next(iter(reasons.items()), None)
    sources = len(mapping(prompts.get("sources"))) or 1
    figures = [
        (
            "asked",
            f"{plots.number(turns)} turns",
            f"from {usable:,} of {rows_in:,} rows in {sources} source{'s' if sources != 1 else ''}"
            + (f" ({', '.join(dropped)})" if dropped else ""),
        ),
        (
            "came out",
            f"{plots.number(accepted)} rows",
            f"{share_of(accepted, turns)} accepted, {rejected:,} rejected"
            + (f", most for {in_words(worst[0])}" if worst else "")
            + (f"; {flags['truncated']:,} truncated" if flags.get("truncated") else ""),
        ),
        (
            "tokens to train on",
            plots.number(int(run.accepted.get_column("completion_len").sum())),
            (
                f"of {plots.number(tokens)} generated; median {known(optional(lengths, 'p50'))} an answer, "
                f"95 % under {known(optional(lengths, 'p95'))}"
            ),
        ),
        (
            "speed",
            f"{plots.number(steady if steady is not None else overall)} tok/s",
            (
                f"{'in steady state; ' if steady is not None else ''}{plots.number(overall)} over all of "
                f"{duration(number(rates, 'wall_s'))}, {plots.number(number(rates, 'output_tokens_per_s_per_gpu'))} per {each}"
            ),
        ),
        (
            "per million tokens",
            f"{known(optional(rates, 'gpu_hours_per_million_output_tokens'))} {each.split(maxsplit=1)[0]}\u2011h",
            f"{duration(3600 * number(rates, 'gpu_hours'))} of {each} time in all"
            + (
                f"; {cost:,.2f} per million at {number(rates, 'price_per_gpu_hour'):g} an hour"
                if cost is not None
                else ""
            ),
        ),
    ]
    bound, change = verdict(run)
    body = [pages.figures(figures), pages.paragraph(bound, "verdict"), pages.paragraph(change, "verdict")]
    body += [pages.paragraph(note, "warn") for note in remarks(run)]
    return _asked(run), body


def verdict(run: Run) -> tuple[str, str]:
    """The two sentences: what bound the run, and what to change."""
    found = mapping(run.rates.get("bound_by"))
    if not found:
        return (
            "What bound the run is not known: no server recorded telemetry.",
            "Run with an engine that publishes metrics to learn what to change.",
        )
    advice = mapping(found.get("advice"))
    bound = f"The run was {text(found, 'verdict')}: {_sentence(text(found, 'evidence'))}"
    if found.get("expected"):
        bound += f" {_sentence(text(found, 'expected'))}"
    if not advice.get("flag"):
        return bound, _sentence(
            text(advice, "predicted_effect") or "no setting is known that would make it faster"
        )
    drop = advice.get("drop")
    instead = f" instead of {' '.join(map(str, drop))}" if isinstance(drop, list) and drop else ""
    return (
        bound,
        f"What to change: {text(advice, 'flag')}{instead}; {_sentence(text(advice, 'predicted_effect'))}",
    )


def _sentence(words: str) -> str:
    """The words with a full stop, each sentence once."""
    return words.strip().rstrip(".") + "."


def remarks(run: Run) -> list[str]:
    """What a reader has to know before believing the figures."""
    notes = []
    pauses = tables(run.rates.get("pauses"))
    if pauses:
        total = duration(sum(number(pause, "seconds") for pause in pauses))
        notes.append(
            f"The run went in {len(pauses) + 1} parts; {total} of pauses between them are left out of every rate."
        )
    restarts, retries = int(number(run.rates, "restarts")), int(number(run.rates, "retries"))
    if restarts or retries:
        notes.append(
            f"Servers were restarted {restarts:,} times and turns sent again {retries:,} times; no row was lost."
        )
    agreement = mapping(run.rates.get("token_agreement"))
    if agreement.get("agrees") is False:
        share = f"{100 * abs(number(agreement, 'difference')):.3g} %"
        more = "more" if number(agreement, "difference") > 0 else "fewer"
        notes.append(
            f"The servers count {share} {more} output tokens than the dataset holds: {text(agreement, 'reason')}."
        )
    return notes


CONTENT: Mapping[str, Callable[[Run], Page]] = {
    "overview": overview,
    "throughput": report_throughput.throughput,
    "occupancy": report_throughput.occupancy,
    "server-time": report_throughput.server_time,
    "shard-times": report_throughput.shard_times,
    "tuning": report_throughput.tuning,
    "token-lengths": report_dataset.token_lengths,
    "finish-reasons": report_dataset.finish_reasons,
    "rejects": report_dataset.rejects,
    "conversations": report_dataset.conversations,
    "provenance": report_provenance.provenance,
    "config": report_provenance.config,
}
