"""Generation with a model that the process may not hold: python benchmarks/generate_beyond_memory.py

A Llama folder whose weights are more than twice what the process may take. Each run is a process of its own, whose
private memory is limited (`RLIMIT_DATA`) to what it holds after its imports and the answers of a tiny model, and
`HEADROOM` more, but for the run that is called unlimited:

- plain, unlimited: the tokens that the others are compared with, and its time;
- plain, limited: must die for want of memory;
- within a budget, limited: weights from flash, a folder beside this file, read and written past the system's cache.

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
from pathlib import Path
from typing import Any

from does_not_fit import private
from measure import write

HEADROOM = 112 << 20
BUDGET = "72MiB"
PROMPTS = [[(7 * row + place) % 4000 for place in range(20 + 30 * row)] for row in range(4)]
TOKENS = 12
CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TINY = {**CONFIG, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
RUNS: dict[str, tuple[bool, str | None]] = {
    "plain, unlimited": (False, None),
    "plain, limited": (True, None),
    "within a budget, limited": (True, BUDGET),
}
"""Name to whether the process is limited, and the budget."""


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


def child(name: str, folder: Path) -> None:
    """One run, in this process."""
    import torch

    from hyper_parallel import Generator
    from hyper_parallel.compat import backend

    torch.set_num_threads(1)
    backend().return_memory()
    limited, budget = RUNS[name]
    memory = None if budget is None else {"device": budget, "flash": str(folder / "spill")}
    # A tiny model imports everything, and starts the threads.
    with Generator(folder / "tiny", memory=memory, max_tokens=2) as generator:
        generator(PROMPTS[:1])
    gc.collect()
    base = private()
    if limited:
        resource.setrlimit(resource.RLIMIT_DATA, (base + HEADROOM,) * 2)
    began = time.perf_counter()
    with Generator(folder / "model", memory=memory, max_tokens=TOKENS) as generator:
        loaded = time.perf_counter()
        passes = generator.passes
        answers = [answer.tokens for answer in generator(PROMPTS)]
        seconds = time.perf_counter() - loaded
        plan = None if generator.memory is None else generator.memory.plan
        report = {
            "tokens": answers,
            "load_s": loaded - began,
            "generate_s": seconds,
            "passes": generator.passes - passes,
            "moved": generator.moved(),
            "base": base,
            "read_by_a_pass": None if plan is None else plan.read,
            "requests_at_once": None if plan is None else plan.requests,
        }
    print(json.dumps(report))


def main() -> int:
    """Run all, print, keep; 1 where a run that should answer does not, or the other way round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="beyond-memory-", dir=Path(__file__).parent))
    found: dict[str, Any] = {}
    try:
        make(folder / "model", CONFIG)
        make(folder / "tiny", TINY)
        weights = (folder / "model" / "model.safetensors").stat().st_size
        for name in RUNS:
            command = [sys.executable, __file__, "--child", name, str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                run = found[name] = json.loads(done.stdout.splitlines()[-1])
                shown = f"{run['load_s']:.1f} s to load, {run['generate_s']:.1f} s to answer; {run['moved']}"
            else:
                said = [line for line in done.stderr.splitlines() if line.strip()]
                found[name] = {"died": done.returncode, "said": said[-1] if said else ""}
                shown = f"died ({done.returncode}): {found[name]['said'][:160]}"
            print(f"{name}: {shown}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plain, ours = found["plain, unlimited"], found["within a budget, limited"]
    summary = {
        "weights_of_headroom": weights / HEADROOM,
        "same_tokens": "tokens" in ours and ours["tokens"] == plain["tokens"],
        "plain_dies": "died" in found["plain, limited"],
    }
    print(json.dumps(summary, indent=1))
    print(write("generate_beyond_memory", {"headroom": HEADROOM, "summary": summary, "runs": found}))
    return int(not (summary["same_tokens"] and summary["plain_dies"]))


if __name__ == "__main__":
    sys.exit(main())
