"""Are generated tokens those of Transformers? python benchmarks/verify_generate.py [--only TEXT] [--again] [--more]

A cell is a family × axes × memory tier: 256 greedy float32 tokens for each of four prompts in one batch, from a saved
folder, on real gloo workers. Every token is that of Transformers' `generate`, one prompt at a time, or within 1e-4 of
the top logit (a tie, which rounding decides; at most 1 in 1,000 tokens). With a tier, the budget is the smallest that
suffices with four pages of the KV cache on the device.

A cell is right, refused (with the reason), or wrong. Writes benchmarks/results/verify_generate.json after each cell;
cells that it has are left out unless `--again` is given. `--more`: 24 tokens of forty families besides, of those that
benchmarks/attack_generate.py found identical, with fewer axes and tiers. Ends with 1 when a cell is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import product
from typing import Annotated, Any

import torch
import transformers
from campaigns import Rows
from commandline import Again, Only, run
from measure import kept, quiet
from pages import Benchmark

from harness.generation_cells import EXPERTS, Reference, run_cell
from harness.small_models import shrunken
from hyper_parallel.verify.step import has_experts

BENCHMARK = Benchmark("verify_generate", key="cells")
TOKENS = 256
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-oss"),
    *("mixtral", "qwen3-moe", "deepseek-v3"),
)
AXES: dict[str, dict[str, int]] = {
    "1 worker": {},
    "tensor 2": {"tensor": 2},
    "tensor 2 × 2": {"tensor_x": 2, "tensor_y": 2},
    "expert 2": {"shard": 2, "expert": 2},
    "context 2": {"context": 2},
}
MEMORY = (None, "host", "flash", "pool")
CELLS = {
    f"{family} · {axes} · {memory or 'no tier'}": (family, axes, memory)
    for memory, family, axes in product(MEMORY, FAMILIES, AXES)
    if axes != "expert 2" or family in EXPERTS
}
"""Those without a tier first."""


MORE, MORE_TOKENS, POSITIONS = 40, 24, 256
MORE_CELLS = (("1 worker", None), ("1 worker", "host"), ("tensor 2", None), ("expert 2", None))


def more_families() -> list[str]:
    """Forty families that `FAMILIES` does not have, evenly from all that generate."""
    found = kept("attack_generate")["families"]
    known = {name.replace("-", "_") for name in FAMILIES} | {"gemma3_text", "deepseek_v3"}
    others = [
        name for name, of in sorted(found.items()) if of["outcome"] == "identical" and name not in known
    ]
    return [others[place * len(others) // MORE] for place in range(MORE)]


def small_model(family: str) -> Any:
    """The default model of a family with its sizes cut, which never ends an answer."""
    torch.manual_seed(0)
    fields = shrunken(transformers.CONFIG_MAPPING[family]())
    fields["max_position_embeddings"] = POSITIONS
    config = transformers.CONFIG_MAPPING[family](**fields)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of cells by outcome, of tokens and of ties."""
    tokens, ties = (sum(cell[key] for cell in cells.values()) for key in ("tokens", "ties"))
    return {"counts": Counter(cell["outcome"] for cell in cells.values()), "tokens": tokens, "ties": ties}


def main(
    only: Only = "", again: Again = False, more: Annotated[bool, "forty families besides"] = False
) -> bool:
    """Run what is missing; whether a cell is wrong."""
    quiet()
    rows = Rows(BENCHMARK, summary=summary)
    wanted = (
        CELLS
        if not more
        else {
            f"{family} · {axes} · {memory or 'no tier'}": (family, axes, memory)
            for family in more_families()
            for axes, memory in MORE_CELLS
            if axes != "expert 2" or has_experts(transformers.CONFIG_MAPPING[family]())
        }
    )
    reference = cache(
        lambda family: Reference(small_model(family), MORE_TOKENS) if more else Reference(family, TOKENS)
    )
    for name in rows.missing(wanted, only, again):
        family, axes, memory = wanted[name]
        outcome = run_cell(reference(family), AXES[axes], memory)
        print(f"{name}: {outcome.outcome} {outcome.detail}", flush=True)
        rows.add(name, asdict(outcome))
    return any(cell["outcome"] == "wrong" for cell in rows.rows.values())


if __name__ == "__main__":
    run(main)
