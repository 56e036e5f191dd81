"""The command line: `python -m draftmill COMMAND`, for everything beside the workflow itself."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from draftmill.errors import UserError

# name → (module with add_arguments(parser) and run(arguments) -> exit code, what it does)
COMMANDS = {
    "check-prompts": ("check_prompts", "what would come of a prompt file, before a run"),
    "capacity": ("capacity_command", "what a server with these flags can hold and do"),
    "diagnose": ("diagnose_command", "what bounds a server's throughput, from its telemetry"),
    "status": ("status", "how the run stands: servers, shards, rejects, disk"),
    "summary": ("summary", "where the results are and how fast it was, in three lines"),
    "partial": ("partial", "a dataset of what is finished so far, beside a running workflow"),
    "resume": ("resume", "go on after any end of a run"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command; a user's mistake becomes a sentence and exit code 1."""
    parser = argparse.ArgumentParser(prog="draftmill", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = list(sys.argv[1:] if words is None else words)
    for name, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name in given[:1]:  # import no more than what is asked for
            chosen = importlib.import_module(f"draftmill.{module}")
            chosen.add_arguments(command)
    arguments, rest = parser.parse_known_args(given)
    arguments.rest = rest
    if rest and arguments.command != "resume":  # which hands all that it does not know to Snakemake
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(chosen.run(arguments))
    except UserError as fault:
        print(f"draftmill: {fault}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone (… | head)
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
