"""Generation beyond the memory of the process: python benchmarks/generate_beyond_memory.py [--cases weights,context]

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

import argparse
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import write
from pages import DOCS, put
from processes import private_bytes


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
        """A model of the same kind."""
        return {**self.config, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}

    @property
    def context_bytes(self) -> int:
        """Keys and values of the longest request."""
        one = self.config
        row = 2 * one["num_key_value_heads"] * one["head_dim"] * 4 * one["num_hidden_layers"]
        return row * (max(map(len, self.prompts)) + self.tokens - 1)


CASES = {
    "weights": Case(
        headroom=112 << 20,
        budget="72MiB",
        prompts=[[(7 * row + place) % 4000 for place in range(20 + 30 * row)] for row in range(4)],
        tokens=12,
        config={
            "hidden_size": 1024,
            "intermediate_size": 2752,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 4096,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        },
    ),
    "context": Case(
        headroom=95 << 20,
        budget="65MiB",
        prompts=[[(7 * place + place // 90) % 500 for place in range(4096)], list(range(40))],
        tokens=8,
        config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 512,
            "max_position_embeddings": 4224,
            "tie_word_embeddings": False,
        },
        settings={"page": 48},
    ),
}
RUNS = {
    "plain, unlimited": (False, False),
    "plain, limited": (True, False),
    "within a budget, limited": (True, True),
}
"""Name to whether the process is limited, and whether it has a budget."""


def make(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with new weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, eos_token_id=None, bos_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder)


def child(case: Case, name: str, folder: Path) -> None:
    """One run, in this process."""
    import torch

    from hyper_parallel import Generator
    from hyper_parallel.compat import backend

    torch.set_num_threads(1)
    backend().return_memory(least=1 << 14)
    limited, budgeted = RUNS[name]
    memory = {"device": case.budget, "flash": str(folder / "spill")} if budgeted else None
    # A tiny model imports everything, and starts the threads.
    with Generator(folder / "tiny", memory=memory, max_tokens=2, **case.settings) as generator:
        generator(case.prompts[-1:])
    gc.collect()
    base = private_bytes()
    if limited:
        resource.setrlimit(resource.RLIMIT_DATA, (base + case.headroom,) * 2)
    began = time.perf_counter()
    with Generator(folder / "model", memory=memory, max_tokens=case.tokens, **case.settings) as generator:
        loaded = time.perf_counter()
        passes = generator.passes
        answers = [answer.tokens for answer in generator(case.prompts)]
        seconds = time.perf_counter() - loaded
        plan = None if generator.memory is None else generator.memory.plan
        report = {
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
    print(json.dumps(report))


def measured(name: str, case: Case) -> dict[str, Any]:
    """All runs of a case."""
    folder = Path(tempfile.mkdtemp(prefix="beyond-memory-", dir=Path(__file__).parent))
    found: dict[str, Any] = {}
    try:
        make(folder / "model", case.config)
        make(folder / "tiny", case.tiny)
        weights = (folder / "model" / "model.safetensors").stat().st_size
        for run in RUNS:
            command = [sys.executable, __file__, "--child", name, run, str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                one = found[run] = json.loads(done.stdout.splitlines()[-1])
                shown = f"{one['load_s']:.1f} s to load, {one['generate_s']:.1f} s to answer; {one['moved']}"
            else:
                said = [line for line in done.stderr.splitlines() if line.strip()]
                found[run] = {"died": done.returncode, "said": said[-1] if said else ""}
                shown = f"died ({done.returncode}): {found[run]['said'][:160]}"
            print(f"{name}: {run}: {shown}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plain, ours = found["plain, unlimited"], found["within a budget, limited"]
    summary = {
        "weights_of_headroom": weights / case.headroom,
        "longest_context_of_headroom": case.context_bytes / case.headroom,
        "same_tokens": "tokens" in ours and ours["tokens"] == plain["tokens"],
        "plain_dies": "died" in found["plain, limited"],
    }
    print(json.dumps(summary, indent=1))
    return {"headroom": case.headroom, "summary": summary, "runs": found}


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The table of the page."""
    yield "| | Weights | Longest context | Unlimited | Limited | Limited, within a budget |"
    yield "|---|---|---|---|---|---|"
    for name, case in found.items():
        runs, summary = case["runs"], case["summary"]
        plain, dead, ours = (runs[run] for run in RUNS)
        died = "dies" if "died" in dead else f"{dead['generate_s']:.1f} s"
        answered = (
            f"{ours['generate_s']:.1f} s, the same tokens; {ours['moved']}"
            if summary["same_tokens"]
            else "fails"
        )
        yield (
            f"| {name}, headroom {case['headroom'] >> 20} MiB | {summary['weights_of_headroom']:.2f} of the headroom | "
            f"{summary['longest_context_of_headroom']:.2f} of it | {plain['generate_s']:.1f} s | {died} | {answered} |"
        )


def main() -> int:
    """Run all, print, keep; 1 where a run that should answer does not, or the other way round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, run, folder = given.child
        child(CASES[name], run, Path(folder))
        return 0
    found = {name: measured(name, CASES[name]) for name in given.cases.split(",")}
    if set(found) == set(CASES):
        print(write("generate_beyond_memory", found))
        put(DOCS / "inference-memory.md", "generate_beyond_memory.py", page(found))
    summaries = [one["summary"] for one in found.values()]
    return int(not all(one["same_tokens"] and one["plain_dies"] for one in summaries))


if __name__ == "__main__":
    sys.exit(main())
