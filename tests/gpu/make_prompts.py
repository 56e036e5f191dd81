"""Prompts of about 150 tokens from the standard library's text, for measuring on a GPU.

usage: make_prompts.py OUT COUNT
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = 62


def main() -> None:
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    library = sorted(Path(json.__file__).parents[1].glob("*.py"))[:80]
    words = " ".join(path.read_text(encoding="utf-8", errors="ignore") for path in library).split()
    draw = random.Random(1)
    with out.open("w", encoding="utf-8") as file:
        for i in range(count):
            at = draw.randrange(len(words) - WORDS)
            file.write(json.dumps({"id": f"p{i}", "prompt": " ".join(words[at : at + WORDS])}) + "\n")


if __name__ == "__main__":
    main()
