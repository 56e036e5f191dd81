"""The report's pages: what a reader who was not there is told about a run.

Writes every item of report_items.py; the first page is made here, the others in report_throughput.py,
report_dataset.py and report_provenance.py. Must never know a server, a clock or Snakemake.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from draftmill import pages, plots, report_dataset, report_provenance, report_throughput
from draftmill.aside import write_aside
from draftmill.records import number, optional, text
from draftmill.report_items import ITEMS
from draftmill.report_run import (
    Page,
    Run,
    Table,
    counts,
    engine_of,
    in_words,
    known,
    mapping,
    share_of,
    tables,
    times,
)
from draftmill.statistics import duration


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
    engines = sorted({engine_of(server) for server in run.servers} - {""})
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
                f"95 % up to {known(optional(lengths, 'p95'))}"
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
            f"Servers were restarted {times(restarts)}, and turns sent again {times(retries)}; no row was lost."
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
