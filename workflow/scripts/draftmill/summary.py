"""`draftmill summary`: where the results are and how fast it was, in three lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftmill.statistics import summary_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=Path("results"), help="the run's results folder")


def run(arguments: argparse.Namespace) -> int:
    print("\n".join(summary_lines(arguments.results)))
    return 0
