"""Generation beyond the memory of the process: python benchmarks/generate_beyond_memory.py

Two cases, each a Llama folder:

- weights: of more than twice what the process may take;
- context: a prompt whose keys and values are more than four times that.

Each run is a process of its own, whose private memory is limited (`RLIMIT_DATA`) to what it holds after its imports and
the answers of a tiny model, and the case's headroom more, but for the run that is called unlimited:

- plain, unlimited: the tokens that the others are compared with, and its time;
- plain, limited: must die for want of memory;
- within a budget, limited: the rest in flash, a folder beside this file, read and written past the system's cache.

The tokens must be the same. Every run computes with one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commandline import run
from pages import Benchmark, table
from processes import limit_memory, scratch, survived
from shapes import llama, new_model


@dataclass(frozen=True)
class Case:
    """What generates. `headroom`: bytes that the process may take."""

    headroom: int
    budget: str
    prompts: list[list[int]]
    tokens: int
    config: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tiny(self) -> dict[str, Any]:
        return {**self.config, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}

    @property
    def context_bytes(self) -> int:
        """Keys and values of the longest request."""
        one = self.config
        row = 2 * one["num_key_value_heads"] * one["head_dim"] * 4 * one["num_hidden_layers"]
        return row * (max(map(len, self.prompts)) + self.tokens - 1)


SHAPE: dict[str, Any] = {"kv": 8, "head_dim": 64, "tie_word_embeddings": False}
CASES = {
    "weights": Case(
        headroom=112 << 20,
        budget="72MiB",
        prompts=[[(7 * row + place) % 4000 for place in range(20 + 30 * row)] for row in range(4)],
        tokens=12,
        config=llama(1024, 6, 16, inner=2752, vocabulary=4096, positions=512, **SHAPE),
    ),
    "context": Case(
        headroom=95 << 20,
        budget="65MiB",
        prompts=[[(7 * place + place // 90) % 500 for place in range(4096)], list(range(40))],
        tokens=8,
        config=llama(64, 24, 8, inner=128, vocabulary=512, positions=4224, **SHAPE),
        settings={"page": 48},
    ),
}
RUNS = {
    "plain, unlimited": (False, False),
    "plain, limited": (True, False),
    "within a budget, limited": (True, True),
}
"""Name to whether the process is limited, and whether it has a budget."""


def answered(case: Case, limited: bool, budgeted: bool, folder: Path) -> dict[str, Any]:
    import torch

    from hyper_parallel import Generator
    from hyper_parallel.compat import backend

    torch.set_num_threads(1)
    backend().return_memory(least=1 << 14)
    memory = {"device": case.budget, "flash": str(folder / "spill")} if budgeted else None
    # A tiny model imports everything, and starts the threads.
    with Generator(folder / "tiny", memory=memory, max_tokens=2, **case.settings) as generator:
        generator(case.prompts[-1:])
    base = limit_memory(case.headroom if limited else None)
    began = time.perf_counter()
    with Generator(folder / "model", memory=memory, max_tokens=case.tokens, **case.settings) as generator:
        loaded = time.perf_counter()
        passes = generator.passes
        answers = [answer.tokens for answer in generator(case.prompts)]
        seconds = time.perf_counter() - loaded
        plan = None if generator.memory is None else generator.memory.plan
        return {
            "tokens": answers,
            "load_s": loaded - began,
            "generate_s": seconds,
            "passes": generator.passes - passes,
            "moved": generator.moved(),
            "base": base,
            "planned": None if plan is None else plan.device,
            "read_by_a_pass": None if plan is None else plan.read + plan.cache.read,
            "requests_at_once": None if plan is None else plan.requests,
        }


def measured(name: str, case: Case) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    with scratch(on_disk=True) as folder:
        new_model(case.config, scale=2.0).save_pretrained(folder / "model")
        new_model(case.tiny, scale=2.0).save_pretrained(folder / "tiny")
        weights = (folder / "model" / "model.safetensors").stat().st_size
        for which, kind in RUNS.items():
            found[which] = survived(answered, case, *kind, folder, MALLOC_MMAP_THRESHOLD_="65536")
            print(f"{name}: {which}: {found[which]}", flush=True)
    plain, ours = found["plain, unlimited"], found["within a budget, limited"]
    summary = {
        "weights_of_headroom": weights / case.headroom,
        "longest_context_of_headroom": case.context_bytes / case.headroom,
        "same_tokens": "tokens" in ours and ours["tokens"] == plain["tokens"],
        "plain_dies": "died" in found["plain, limited"],
    }
    print(json.dumps(summary, indent=1))
    return {"headroom": case.headroom, "summary": summary, "runs": found}


def page(result: Mapping[str, Any]) -> Iterator[str]:
    def cells(name: str) -> Iterator[str]:
        runs, summary = result[name]["runs"], result[name]["summary"]
        plain, dead, ours = (runs[which] for which in RUNS)
        yield f"{name}, headroom {result[name]['headroom'] >> 20} MiB"
        yield f"{summary['weights_of_headroom']:.2f} of the headroom"
        yield f"{summary['longest_context_of_headroom']:.2f} of it"
        yield f"{plain['generate_s']:.1f} s"
        yield "dies" if "died" in dead else f"{dead['generate_s']:.1f} s"
        same = summary["same_tokens"]
        yield f"{ours['generate_s']:.1f} s, the same tokens; {ours['moved']}" if same else "fails"

    yield from table(
        " | Weights | Longest context | Unlimited | Limited | Limited, within a budget",
        (tuple(cells(name)) for name in CASES),
    )


BENCHMARK = Benchmark("generate_beyond_memory", {"inference-memory.md": page})


def main() -> bool:
    """Run all, print, keep; whether a run that should answer does not, or the other way round."""
    found = {name: measured(name, case) for name, case in CASES.items()}
    BENCHMARK.keep(found)
    summaries = [one["summary"] for one in found.values()]
    return not all(one["same_tokens"] and one["plain_dies"] for one in summaries)


if __name__ == "__main__":
    run(main)
