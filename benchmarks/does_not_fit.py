"""A model that does not fit: python benchmarks/does_not_fit.py

One run file, a Llama whose parameters, gradients and optimizer state are three times what the process may take. Each
run is a process of its own, whose private memory is limited (`RLIMIT_DATA`) to what it holds after its imports, which a
step of a tiny model on the same data makes, and `HEADROOM` more; but for the runs that are called unlimited:

- eager and graph, limited: they must die for want of memory;
- with a budget and flash, limited: it trains;
- with a budget and flash, unlimited, and graph, unlimited: what the time is compared with.

All that train must come to the same losses and the same final values. Seconds are of a step, the median of those after
the first two; the flash is a folder on this machine's disk, read and written past the system's cache.

Every run computes with one thread, so that on two cores copies have one to themselves, as on an accelerator they have
engines of their own. Every run asks PyTorch for large pages (THP_MEM_ALLOC_ENABLE): under a budget memory goes back to
the system and comes from it again, page by page.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from commandline import run
from pages import Benchmark
from processes import limit_memory, scratch, survived
from shapes import llama

HEADROOM = 256 << 20
BUDGET = "150MiB"
MODEL = llama(1024, 4, 16, inner=2752)
MODEL.pop("vocab_size")  # the tokenizer's
FILE: dict[str, Any] = {
    "version": 1,
    "seed": 0,
    "model": {"config": MODEL},
    "data": {"train": "python-stdlib", "tokenizer": {"vocab_size": 4096}, "sequence": 512},
    "train": {
        "steps": 6,
        "batch": 8,
        "micro_batch": 2,
        "log_every": 1,
        "eval": {"batches": 1},
        "sample": {"tokens": 0},
        "loss": {"chunk": 256},
    },
    "trackers": [],
}
RUNS: dict[str, tuple[bool, bool, str]] = {
    "graph, unlimited": (False, False, "graph"),
    "budget and flash, limited": (True, True, "graph"),
    "eager, limited": (True, False, "eager"),
    "graph, limited": (True, False, "graph"),
    "budget and flash, unlimited": (False, True, "graph"),
}
"""Name to whether the process is limited, whether it has a budget, and its engine."""
STATE_BYTES = 16
"""Of each parameter: itself, its gradient and two moments in float32."""
BENCHMARK = Benchmark("does_not_fit")


def trained(name: str, folder: Path) -> dict[str, Any]:
    import hyper_parallel.train.trainer as trainer
    from hyper_parallel.config import from_dict

    limited, budgeted, engine = RUNS[name]
    file = {
        **FILE,
        "out": f"{folder}/{name.replace(' ', '-').replace(',', '')}",
        "data": {**FILE["data"], "cache": f"{folder}/cache"},
        "train": {**FILE["train"], "engine": engine},
        "strategy": {"memory": {"device": BUDGET, "flash": f"{folder}/spill"} if budgeted else {}},
    }
    # A run of a tiny model imports everything, starts the threads and makes the tokenizer.
    tiny = {**MODEL, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    first = {"steps": 1, "batch": 2, "eval": {"batches": 1}, "sample": {"tokens": 0}}
    warm = {"model": {"config": tiny}, "train": first, "out": f"{file['out']}-warm"}
    with contextlib.redirect_stdout(sys.stderr):
        trainer.Trainer(from_dict({**file, "strategy": {}, **warm})).run()
        base = limit_memory(HEADROOM if limited else None)
        summary = trainer.Trainer(from_dict(file)).run()
    lines = [json.loads(line) for line in (Path(file["out"]) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    digest = hashlib.sha256()
    assert summary.checkpoint is not None
    for part in sorted(Path(summary.checkpoint).glob("*.safetensors")):
        with part.open("rb") as file_of_a_rank:
            digest.update(hashlib.file_digest(file_of_a_rank, "sha256").digest())
    return {
        "losses": [step["loss"] for step in steps],
        "eval": [summary.eval_before, summary.eval_after],
        "seconds": [step["seconds"] for step in steps],
        "stall": [step.get("memory_stall") for step in steps],
        "checkpoint": digest.hexdigest(),
        "parameters": summary.parameters,
        "base": base,
    }


def main() -> bool:
    """Run all, print, keep; whether something that should train does not, or the other way round."""
    found: dict[str, dict[str, Any]] = {}
    with scratch(on_disk=True) as folder:
        for name in RUNS:
            found[name] = survived(trained, name, folder, THP_MEM_ALLOC_ENABLE="1")
            print(f"{name}: {found[name]}", flush=True)
    ran = {name: one for name, one in found.items() if "died" not in one}
    plain, ours = ran["graph, unlimited"], ran["budget and flash, limited"]
    seconds = {name: statistics.median(one["seconds"][2:]) for name, one in ran.items()}
    stall = statistics.median(ours["stall"][2:])
    compared = ("losses", "eval", "checkpoint")
    summary = {
        "state_of_headroom": STATE_BYTES * ours["parameters"] / HEADROOM,
        "same": all(one[key] == plain[key] for one in ran.values() for key in compared),
        "died": sorted(found.keys() - ran.keys()),
        "seconds": seconds,
        "of_unlimited": seconds["budget and flash, limited"] / seconds["graph, unlimited"],
        "stall_share": stall / seconds["budget and flash, limited"],
    }
    print(json.dumps(summary, indent=1))
    BENCHMARK.keep({"threads": 1, "summary": summary, "runs": found})
    return not summary["same"] or summary["died"] != ["eager, limited", "graph, limited"]


if __name__ == "__main__":
    run(main)
