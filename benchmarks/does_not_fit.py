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

import argparse
import gc
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import write

HEADROOM = 256 << 20
BUDGET = "150MiB"
STEPS = 6
FILE: dict[str, Any] = {
    "version": 1,
    "seed": 0,
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 1024,
            "intermediate_size": 2752,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 512,
        }
    },
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


def child(name: str, folder: str) -> None:
    """One run, in this process."""
    import torch

    import hyper_parallel.train.trainer as trainer
    from hyper_parallel.config import from_dict

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
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
    tiny = {**FILE["model"]["config"], "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    first = {"steps": 1, "batch": 2, "eval": {"batches": 1}, "sample": {"tokens": 0}}
    warm = {"model": {"config": tiny}, "train": first, "out": f"{file['out']}-warm"}
    trainer.Trainer(from_dict({**file, "strategy": {}, **warm})).run()
    gc.collect()
    base = private()
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
    print(
        json.dumps(
            {
                "losses": [step["loss"] for step in steps],
                "eval": [summary.eval_before, summary.eval_after],
                "seconds": [step["seconds"] for step in steps],
                "stall": [step.get("memory_stall") for step in steps],
                "checkpoint": digest.hexdigest(),
                "parameters": summary.parameters,
                "base": base,
            }
        )
    )


def private() -> int:
    """Bytes of private memory that this process has mapped, as the limit counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmData")


def main() -> int:
    """Run all, print, keep; 1 where something that should train does not, or the other way round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", help="runs whose name holds this")
    parser.add_argument("--threads", type=int, default=1, help="with which each run computes")
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return 0
    folder = tempfile.mkdtemp(prefix="does-not-fit-", dir=Path(__file__).parent)
    found: dict[str, Any] = {}
    try:
        for name in RUNS:
            if given.only and given.only not in name:
                continue
            command = [sys.executable, __file__, "--child", name, folder]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(given.threads),
                "THP_MEM_ALLOC_ENABLE": "1",
            }
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                run = found[name] = json.loads(done.stdout.splitlines()[-1])
                told = f"{statistics.median(run['seconds'][2:]):.2f} s a step, loss {run['losses'][-1]:.4f}"
            else:
                said = [line for line in done.stderr.splitlines() if line.strip()]
                found[name] = {"died": done.returncode, "said": said[-1] if said else ""}
                told = f"died ({done.returncode}): {found[name]['said'][:160]}"
            print(f"{name}: {told}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(found, given.threads)


def report(found: dict[str, Any], threads: int) -> int:
    """What the runs show."""
    plain, ours = found.get("graph, unlimited"), found.get("budget and flash, limited")
    if not plain or not ours or "died" in plain or "died" in ours:
        return 1
    seconds = {
        name: statistics.median(run["seconds"][2:]) for name, run in found.items() if "died" not in run
    }
    stall = statistics.median(ours["stall"][2:])
    summary = {
        "state_of_headroom": STATE_BYTES * ours["parameters"] / HEADROOM,
        "same": all(
            run["losses"] == plain["losses"]
            and run["eval"] == plain["eval"]
            and run["checkpoint"] == plain["checkpoint"]
            for run in found.values()
            if "died" not in run
        ),
        "died": sorted(name for name, run in found.items() if "died" in run),
        "seconds": seconds,
        "of_unlimited": seconds["budget and flash, limited"] / seconds["graph, unlimited"],
        "stall_share": stall / seconds["budget and flash, limited"],
    }
    print(json.dumps(summary, indent=1))
    name = "does_not_fit" if threads == 1 else f"does_not_fit_{threads}_threads"
    print(write(name, {"threads": threads, "summary": summary, "runs": found}))
    return int(not summary["same"] or summary["died"] != ["eager, limited", "graph, limited"])


if __name__ == "__main__":
    sys.exit(main())
