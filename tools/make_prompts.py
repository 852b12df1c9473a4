"""Write the workshop's prompts: python tools/make_prompts.py [--file data/prompts.jsonl]

Each prompt is the beginning of a sentence of the corpus's grammar, cut after a number of words that is drawn from a log-normal
distribution: most prompts are short, a few are very long. A sentence becomes long by clauses within clauses ("… says that …").
As in many logs the prompts stand in the order of their sources: notes first, then letters, then reports. Seeds are fixed: the
file is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

from helpers import corpus

COUNT = 256
MEDIAN, SIGMA, LONGEST = 16, 1.4, 600  # words of a prompt: median and spread of the log-normal, and where it is cut off
SOURCES = {"note": 0.55, "letter": 0.85, "report": 1.0}  # share of the prompts that are at most as long as this source's
NESTING = "CLAUSE"  # the symbol that a long sentence is made of
USUAL = 12  # words: what is longer than this is nested


def beginning(length: int, generator: random.Random) -> str:
    """The first `length` words of a sentence of the grammar that is drawn to have at least that many."""
    rules, words = corpus.rules(), []
    start = [next(iter(rules))]
    stack = list(start)
    while len(words) < length:
        if not stack:  # too short a sentence: draw another
            stack, words = list(start), []
        symbol = stack.pop()
        if symbol not in rules:
            words.append(symbol)
            continue
        nesting = [rule for rule in rules[symbol] if NESTING in rule.expansion and len(words) < length - USUAL]
        row = nesting or rules[symbol]
        chosen = generator.choices(row, [rule.probability for rule in row])[0]
        stack.extend(reversed(chosen.expansion))
    return " ".join(words)


def prompts() -> list[dict[str, str | int]]:
    """All prompts as rows: id, source, number of words, prompt."""
    generator = random.Random(0)
    lengths = [min(LONGEST, max(3, round(MEDIAN * math.exp(generator.gauss(0, SIGMA))))) for _ in range(COUNT)]
    bounds = {source: sorted(lengths)[math.ceil(share * COUNT) - 1] for source, share in SOURCES.items()}
    rows = []
    for source in SOURCES:
        shorter = [bound for bound in bounds.values() if bound < bounds[source]]
        for length in (length for length in lengths if max(shorter, default=0) < length <= bounds[source]):
            rows.append({"id": len(rows), "source": source, "words": length, "prompt": beginning(length, generator)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl")
    file = parser.parse_args().file
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts()), encoding="utf-8")
    print(f"{COUNT} prompts, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
