"""Random budgets for loops of one's own on 1, 2 and 4 workers, with the C library's allocator as the witness.

    python benchmarks/budget_allocator.py

Each case draws a model, rows, a strategy, an optimizer, tiers and a budget from the least that there is to 1.8 times
that. From each call of the model until `backward` has returned, bytes that the allocator has given to tensors are
counted (`allocations.c`, loaded before the C library), beside those that were there before and are none of the step's:
after each operator, and at any moment, memory that kernels take and give back inside themselves included. The first is
what a budget promises. Calls in which plans are made and checked count as well. Results:
benchmarks/results/budget_allocator.json.
"""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocations import Allocations, compiled
from commandline import run
from pages import Benchmark
from processes import fresh, scratch, workers
from shapes import NO_ENDS, gpt2, llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.errors import BudgetError, FollowsError
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import causal_lm_loss

BENCHMARK = Benchmark("budget_allocator")
WORLDS = (1, 2, 4)
PER_PROCESS = 8
STEPS, MICRO = 2, 2
VOCABULARY = 128
STRATEGIES: dict[int, list[dict[str, Any]]] = {
    1: [],
    2: [
        {"axes": {"shard": 2}},
        {"axes": {"shard": 2}, "memory": {"shard": "gradients"}},
        {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}},
        {"axes": {"shard": 2}, "memory": {"recompute": "layer"}},
        {"axes": {"tensor": 2}},
        {"axes": {"tensor": 2}, "sequence": True},
        {"axes": {"context": 2}},
        {"axes": {"replicate": 2}},
    ],
    4: [
        {"axes": {"shard": 4}},
        {"axes": {"shard": 2, "tensor": 2}, "sequence": True},
        {"axes": {"replicate": 2, "shard": 2}},
        {"axes": {"shard": 2, "context": 2}},
    ],
}


def draw(seed: int, world: int) -> dict[str, Any]:
    drawn = random.Random(f"{seed} {world}")
    return {
        "seed": seed,
        "world": world,
        "family": drawn.choice(["llama", "llama", "gpt2"]),
        "hidden": drawn.choice([32, 64, 128]),
        "layers": drawn.randint(1, 3),
        "rows": drawn.randint(1, 4),
        "length": 8 * drawn.randint(2, 8),
        "strategy": drawn.choice(STRATEGIES[world]) if world > 1 else None,
        "adam": drawn.random() < 0.6,
        "autocast": world == 1 and drawn.random() < 0.3,
        "tiers": drawn.choice([["host"], ["flash"], ["host", "flash"]]),
        "share": 1 + 0.8 * drawn.random() ** 2,
    }


def model_of(case: Mapping[str, Any]) -> nn.Module:
    """The model of a case with its first values, parallelized where there is a strategy."""
    hidden, layers = case["hidden"], case["layers"]
    fields = llama(hidden, layers, 4, inner=2 * hidden, kv=4, vocabulary=VOCABULARY, positions=2048)
    if case["family"] == "gpt2":
        fields = gpt2(hidden, layers, 4, vocabulary=VOCABULARY, positions=64, **NO_ENDS)
        if case["strategy"] is not None and "context" in case["strategy"]["axes"]:
            fields["attn_pdrop"] = 0.0  # attention that is spread over ranks drops no weights
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).train()
    if case["strategy"] is not None:
        strategy = hp.Strategy.model_validate({"version": 1, **case["strategy"]})
        hp.parallelize(model, strategy, lowering="traceable")
    return model


def trained(model: nn.Module, case: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """(peak after operators, peak at any moment, where the first was) of each call and its backward pass."""
    handle = sharded(model) if case["strategy"] is not None else None
    kind = torch.optim.AdamW if case["adam"] else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-2)
    index = 0 if handle is None else handle.data_index
    rows = torch.arange(case["rows"]) + case["rows"] * index
    found = []
    for step in range(STEPS):
        for micro in range(MICRO):
            drawn = torch.Generator().manual_seed(100 * step + 10 * micro + index)
            ids = torch.randint(VOCABULARY, (case["rows"], case["length"]), generator=drawn)
            labels = ids.roll(-1, 1)
            there = [ids, labels, *model.parameters(), *model.buffers()]
            there += [p.grad for p in model.parameters() if p.grad is not None]
            there += [x for state in optimizer.state.values() for x in state.values()]
            if handle is not None:
                there += [x for x in handle.gathers.contents.values() if isinstance(x, torch.Tensor)]
            gc.collect()
            with Allocations(there) as seen:
                if handle is None:
                    with torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"]):
                        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
                    loss.backward()
                else:
                    with handle.micro_batch(seed=1, step=step, rows=rows, last=micro == MICRO - 1):
                        tokens = float(labels.numel() * MICRO)
                        loss = causal_lm_loss(model, ids, labels, None, tokens, micro_batches=MICRO)
                        loss.backward()
            found.append((seen.peak, seen.most, seen.where))
            del loss, there
        optimizer.step()
        optimizer.zero_grad()
    return found


def run_case(case: Mapping[str, Any]) -> dict[str, Any]:
    budget = 1
    for _ in range(8):
        with scratch() as folder:
            tiers: dict[str, Any] = {"host": "64MiB"} if "host" in case["tiers"] else {}
            tiers |= {"flash": folder} if "flash" in case["tiers"] else {}
            model = hp.offload(model_of(case), budget=budget, **tiers)
            floor = 0
            try:
                peaks = trained(model, case)
            except BudgetError as error:
                floor = error.floor or 0
            except FollowsError:
                floor = 1
            finally:
                hp.release(model)
        if not floor:
            call, (peak, _, where) = max(enumerate(peaks), key=lambda one: one[1])
            most = max(most for _, most, _ in peaks)
            return {"budget": budget, "peak": peak, "call": call, "where": where, "most": most}
        if dist.is_initialized():
            told = torch.tensor(floor)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            floor = int(told)
        # As floors of several plans, each a few bytes off for what is held beside it.
        budget = max(budget + 1, int(case["share"] * floor))
    raise RuntimeError(f"each budget that was said to do was refused: {case}")


def worker(rank: int, world: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """All cases of a process, one after the other."""
    for module, name, value in (("solve", "WORK", 0), ("graph_search", "PLANS", 1)):  # quick plans, as exact
        setattr(importlib.import_module(f"hyper_parallel.offloading.schedule.{module}"), name, value)
    return [run_case(draw(seed, world)) for seed in seeds]


def rows_of(world: int, seeds: Sequence[int], library: Path) -> list[dict[str, Any]]:
    """Cases on so many workers; one process for each worker."""
    if world == 1:  # without a group
        ranks = [fresh(worker, 0, 1, seeds, LD_PRELOAD=str(library))]
    else:
        ranks = workers(worker, world, seeds, LD_PRELOAD=str(library))
    each = zip(seeds, zip(*ranks, strict=True), strict=True)
    return [{**draw(seed, world), "workers": list(of_ranks)} for seed, of_ranks in each]


def _parts(cases: int) -> Iterator[tuple[int, Sequence[int]]]:
    """How many workers, and which cases, of the processes: each case's workers by its seed, and all in turns."""
    step = len(WORLDS) * PER_PROCESS
    for first in range(0, cases, step):
        for place, world in enumerate(WORLDS):
            if seeds := range(first + place, min(first + step, cases), len(WORLDS)):
                yield world, seeds


def above(row: Mapping[str, Any]) -> int:
    """Bytes above the budget on the worker that is furthest above it; negative below."""
    return max(int(one["peak"] - one["budget"]) for one in row["workers"])


def summarized(rows: Sequence[Mapping[str, Any]], of: int) -> dict[str, Any]:
    by_world = {}
    for world in WORLDS:
        ran = [row for row in rows if row["world"] == world]
        workers = [one for row in ran for one in row["workers"]]
        if ran:
            over = max(one["most"] - one["budget"] for one in workers)
            by_world[str(world)] = {
                "cases": len(ran),
                "above": [row["seed"] for row in ran if above(row) > 0],
                "peak_of_budget_at_most": max(one["peak"] / one["budget"] for one in workers),
                "within_kernels_of_budget_at_most": max(one["most"] / one["budget"] for one in workers),
                "within_kernels_over_budget_bytes_at_most": over,
            }
    return {"cases": len(rows), "of": of, "workers": by_world}


def main(cases: int = 100) -> bool:
    """Run the cases, keep the result as processes end; whether one was above its budget."""
    rows: list[dict[str, Any]] = []
    with scratch() as folder:
        library = compiled(folder)
        for world, seeds in _parts(cases):
            for row in rows_of(world, seeds, library):
                rows.append(row)
                print(row["seed"], row["world"], row["strategy"], above(row), row["workers"][0], flush=True)
            BENCHMARK.keep({"summary": summarized(rows, cases), "cases": rows})
    return any(above(row) > 0 for row in rows)


if __name__ == "__main__":
    run(main)
