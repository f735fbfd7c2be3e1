"""Are generated tokens those of Transformers? python benchmarks/verify_generate.py [--short] [--only TEXT] [--again]

A cell is a family × axes × memory tier: 256 greedy float32 tokens for each of four prompts in one batch, from a saved
folder, on real gloo workers. Every token is that of Transformers' `generate`, one prompt at a time, or within 1e-4 of
the top logit (a tie, which rounding decides; at most 1 in 1,000 tokens). With a tier, the budget is the smallest that
suffices with four pages of the KV cache on the device.

A cell is right, refused (with the reason), or wrong. Writes benchmarks/results/verify_generate.json after each cell;
cells that it has are left out unless `--again` is given. `--short`: 24 tokens and a sample, not written. Ends with 1
when a cell is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import RESULTS, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.generation_cells import EXPERTS, Reference, run_cell

NAME, TOKENS, SHORT_TOKENS = "verify_generate", 256, 24
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "gpt-oss",
    "mixtral",
    "qwen3-moe",
    "deepseek-v3",
)
AXES: dict[str, dict[str, int]] = {
    "1 worker": {},
    "tensor 2": {"tensor": 2},
    "tensor 2 × 2": {"tensor_x": 2, "tensor_y": 2},
    "expert 2": {"shard": 2, "expert": 2},
    "context 2": {"context": 2},
}
MEMORY = (None, "host", "flash", "pool")
SAMPLE = ("llama · tensor 2 · no tier", "gemma3 · context 2 · no tier", "qwen3 · 1 worker · host")
Cell = tuple[str, str, str | None]


def name_of(cell: Cell) -> str:
    """As the result file has it."""
    family, axes, memory = cell
    return f"{family} · {axes} · {memory or 'no tier'}"


def cells() -> Iterator[Cell]:
    """All of them, those without a tier first."""
    for memory in MEMORY:
        for family in FAMILIES:
            for axes in AXES:
                if axes != "expert 2" or family in EXPERTS:
                    yield family, axes, memory


def main() -> int:
    """Run what is missing; 1 when a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = {}
    if path.exists() and not given.again and not given.short:
        found = json.loads(path.read_text())["cells"]
    chosen = [cell for cell in cells() if given.only in name_of(cell)]
    if given.short:
        chosen = [cell for cell in chosen if name_of(cell) in SAMPLE]
    references: dict[str, Reference] = {}
    for cell in chosen:
        family, axes, memory = cell
        if name_of(cell) in found:
            continue
        if family not in references:
            references[family] = Reference(family, SHORT_TOKENS if given.short else TOKENS)
        outcome = run_cell(references[family], AXES[axes], memory)
        found[name_of(cell)] = asdict(outcome)
        sys.stdout.write(f"{name_of(cell)}: {outcome.outcome} {outcome.detail}\n")
        sys.stdout.flush()
        if not given.short:
            counts = Counter(one["outcome"] for one in found.values())
            tokens, ties = (sum(one[key] for one in found.values()) for key in ("tokens", "ties"))
            write(NAME, {"counts": counts, "tokens": tokens, "ties": ties, "cells": found})
    counts = Counter(one["outcome"] for one in found.values())
    sys.stdout.write(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + "\n")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
