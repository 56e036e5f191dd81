"""Degenerate repetition: an answer that has stopped saying anything.

Knows token ids and text. Pure; one answer of 8,192 tokens costs about a millisecond. Must never know
policies: it only says what it found, in words.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import numpy.typing as npt

NGRAM = 8
LOOP_TOKENS = 128  # a loop shorter than this is style
LOOP_ROUNDS = 4
REPEATED_SHARE = 0.6  # of all n-grams; prose stays under 0.1, tables and code under 0.4
WINDOW_TOKENS = 1024  # a late loop is sought in the last window, too
ONE_CHARACTER = 200
LIST_ITEMS = 30
DISTINCT_ITEMS = 0.2
MASK64 = np.uint64(0x9E3779B97F4A7C15)

_LIST_ITEM = re.compile(r"^\s*(?:\d+[.):]|[-*+•])\s+(\S.*)$")
_DIGITS = re.compile(r"\d+")


def find_loop(ids: npt.NDArray[np.int32], text: str, ended: bool) -> str | None:
    """What repeats without end, or None. ``ended``: the model stopped by itself."""
    return _one_character(text) or _token_loop(ids) or _growing_list(text, ended)


def _one_character(text: str) -> str | None:
    stripped = text.strip()
    if len(stripped) >= 20 and stripped.count(stripped[0]) == len(stripped):
        return f"nothing but {stripped[0]!r}"
    # a long run fills some hundred characters that begin at a multiple of a hundred
    half = ONE_CHARACTER // 2
    if not any(
        a == b == c
        for a, b, c in zip(text[::half], text[half // 2 :: half], text[half - 1 :: half], strict=False)
    ):
        return None
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    run, at = _longest_run(codes[1:] == codes[:-1], ONE_CHARACTER - 1)
    return f"{run + 1} times the character {text[at]!r}" if run else None


def _token_loop(ids: npt.NDArray[np.int32]) -> str | None:
    grams = _ngrams(ids)
    repeats = _repeats(grams)
    if repeats < LOOP_TOKENS // 2:
        return None
    order = np.argsort(grams, kind="stable")
    again = grams[order[1:]] == grams[order[:-1]]
    counts = np.bincount(
        (order[1:] - order[:-1])[again]
    )  # how often an n-gram came back after so many tokens
    for period in map(int, np.argsort(counts)[::-1][:4]):
        enough = max((LOOP_ROUNDS - 1) * period, LOOP_TOKENS - period)
        run, _ = _longest_run(ids[period:] == ids[:-period], enough) if counts[period] else (0, 0)
        if run:
            return f"{run // period + 1} rounds of the same {period} tokens"
    share = repeats / grams.size
    if grams.size > WINDOW_TOKENS:
        share = max(share, _repeats(grams[-WINDOW_TOKENS:]) / WINDOW_TOKENS)
    return f"{share:.0%} of the {NGRAM}-grams are repetitions" if share >= REPEATED_SHARE else None


def _growing_list(text: str, ended: bool) -> str | None:
    """A list that goes on for the sake of going on, in words.

    The same item under new numbers, lines that each hold the line before and a bit more, or numbered items
    that come round again. An enumeration that ended by itself was asked for, so it has to be far longer.
    """
    needed = LIST_ITEMS * (10 if ended else 1)
    items = _DIGITS.sub("0", text).replace(", ", "\n").replace("; ", "\n").split("\n")
    if len(items) < LIST_ITEMS:
        return None
    same, _ = _longest_run(
        np.array([item == before != "" for before, item in pairwise(items)]), LIST_ITEMS - 1
    )
    if same + 1 >= needed:
        return f"{same + 1} list items that differ in their numbers only"
    lines = [line for line in text.split("\n") if line.strip()]
    grown, _ = _longest_run(
        np.array([line != before and line.startswith(before) for before, line in pairwise(lines)]), LIST_ITEMS
    )
    if grown:
        return f"{grown} lines that each repeat the line before and grow"
    entries = [found.group(1) for line in lines if (found := _LIST_ITEM.match(line))]
    if len(entries) >= 2 * LIST_ITEMS and len(set(entries)) < DISTINCT_ITEMS * len(entries):
        return f"a list of {len(entries)} items of which {len(set(entries))} differ"
    return None


def _ngrams(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """One 64-bit hash for each NGRAM-gram of ``ids``."""
    size = ids.size - NGRAM + 1
    if size <= 0:
        return np.empty(0, dtype=np.uint64)
    values = ids.astype(np.uint64)
    hashes = np.zeros(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(NGRAM):
            hashes = (hashes ^ values[offset : offset + size]) * MASK64
            hashes ^= hashes >> np.uint64(29)
    return hashes


def _repeats(grams: npt.NDArray[np.uint64]) -> int:
    """How many of ``grams`` stand there more than once, not counting the first of each."""
    in_order = np.sort(grams)
    return int(np.count_nonzero(in_order[1:] == in_order[:-1]))


def _longest_run(equal: npt.NDArray[np.bool_], least: int) -> tuple[int, int]:
    """Length and start of the longest run of True; (0, 0) if it is shorter than ``least``."""
    places = np.flatnonzero(equal)
    if places.size < least or not np.any(
        places[least - 1 :] - places[: places.size - least + 1] == least - 1
    ):
        return 0, 0
    edges = np.concatenate(([-1], np.flatnonzero(~equal), [equal.size]))
    gaps = np.diff(edges) - 1
    longest = int(np.argmax(gaps))
    return int(gaps[longest]), int(edges[longest]) + 1
