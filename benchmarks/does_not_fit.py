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
engines of their own; `--threads 2` says what it costs where they have not. Every run asks PyTorch for large pages
(THP_MEM_ALLOC_ENABLE): under a budget memory goes back to the system and comes from it again, page by page.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import resource
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

from commandline import Only, run
from pages import Benchmark
from processes import Died, fresh, private_bytes, scratch
from shapes import llama

HEADROOM = 256 << 20
BUDGET = "150MiB"
STEPS = 6
MODEL = llama(1024, 4, 16, inner=2752)
MODEL.pop("vocab_size")  # the tokenizer's
FILE: dict[str, Any] = {
    "version": 1,
    "seed": 0,
    "model": {"config": MODEL},
    "data": {"train": "python-stdlib", "tokenizer": {"vocab_size": 4096}, "sequence": 512},
    "train": {
        "steps": STEPS,
        "batch": 8,
        "micro_batch": 2,
        "log_every": 1,
        "eval": {"batches": 1},
        "sample": {"tokens": 0},
        "loss": {"chunk": 256},
    },
    "trackers": [],
}
RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "graph, unlimited": (False, {}),
    "budget and flash, limited": (True, {"device": BUDGET}),
    "eager, limited": (True, {"engine": "eager"}),
    "graph, limited": (True, {}),
    "budget and flash, unlimited": (False, {"device": BUDGET}),
}
"""Name to whether the process is limited, and what its file has besides."""
STATE_BYTES = 16
"""Of each parameter: itself, its gradient and two moments in float32."""


def trained(name: str, folder: Path) -> dict[str, Any]:
    """One run, in this process."""
    import hyper_parallel.train.trainer as trainer
    from hyper_parallel.config import from_dict

    limited, more = RUNS[name]
    memory = {"device": more["device"], "flash": f"{folder}/spill"} if "device" in more else {}
    file = {
        **FILE,
        "out": f"{folder}/{name.replace(' ', '-').replace(',', '')}",
        "data": {**FILE["data"], "cache": f"{folder}/cache"},
        "train": {**FILE["train"], "engine": more.get("engine", "graph")},
        "strategy": {"memory": memory},
    }
    # A run of a tiny model imports everything, starts the threads and makes the tokenizer.
    tiny = {**MODEL, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    first = {"steps": 1, "batch": 2, "eval": {"batches": 1}, "sample": {"tokens": 0}}
    warm = {"model": {"config": tiny}, "train": first, "out": f"{file['out']}-warm"}
    with contextlib.redirect_stdout(sys.stderr):
        trainer.Trainer(from_dict({**file, "strategy": {}, **warm})).run()
        gc.collect()
        base = private_bytes()
        if limited:
            resource.setrlimit(resource.RLIMIT_DATA, (base + HEADROOM,) * 2)
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


def main(only: Only = "", threads: Annotated[int, "with which each run computes"] = 1) -> bool:
    """Run all, print, keep; whether something that should train does not, or the other way round."""
    found: dict[str, Any] = {}
    with scratch(on_disk=True) as folder:
        for name in RUNS:
            if only not in name:
                continue
            try:
                one = fresh(trained, name, folder, threads=threads, THP_MEM_ALLOC_ENABLE="1")
                told = f"{statistics.median(one['seconds'][2:]):.2f} s a step, loss {one['losses'][-1]:.4f}"
            except Died as died:
                one = {"died": died.code, "said": died.said}
                told = f"died ({died.code}): {died.said[:160]}"
            found[name] = one
            print(f"{name}: {told}", flush=True)
    return report(found, threads)


def report(found: dict[str, Any], threads: int) -> bool:
    """What the runs show; whether it is not what they should."""
    ran = {name: one for name, one in found.items() if "died" not in one}
    if not {"graph, unlimited", "budget and flash, limited"} <= ran.keys():
        return True
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
    benchmark = Benchmark("does_not_fit" if threads == 1 else f"does_not_fit_{threads}_threads")
    benchmark.keep({"threads": threads, "summary": summary, "runs": found})
    return not summary["same"] or summary["died"] != ["eager, limited", "graph, limited"]


if __name__ == "__main__":
    run(main)
