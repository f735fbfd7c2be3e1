"""Steps on rows with skewed numbers of images, dealt and as given: python benchmarks/balanced_rows.py [--steps 60]

A small vision-language model (LLaVA, new weights) on two workers of one thread each, `axes: {shard: 2}`; rows have 0 to
16 images, drawn from a log-normal law, as in real sets. Every step is computed from the same weights with its rows
dealt to ranks and micro-batches (`data.balance`) and as given, in turns; then the weights move on. Losses and gradients
are compared; times are medians over the steps, with the quartiles of the ratio of each step.

Writes benchmarks/results/balanced_rows.json and the table of docs/multimodal.md.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from commandline import run
from pages import Benchmark, table
from processes import scratch
from torch import Tensor

from harness.ranks import run_ranks
from harness.vision_folders import run_file, write_llava, write_rows
from hyper_parallel.config import RunConfig
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import build, fill
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import accumulate

ROWS, BATCH, MOST, MEAN, SKEW = 256, 16, 16, 4, 1.2
Way = Callable[[int], tuple[dict[str, float], dict[str, Tensor]]]
"""A step by its number: its figures, with the loss, and this rank's gradients by name."""


def make(place: Path) -> dict[str, Any]:
    """The model's folder and the rows; the run file."""
    draw = random.Random(0)
    counts = [min(MOST, round(draw.lognormvariate(MEAN**0.5 / 3, SKEW))) for _ in range(ROWS)]
    (place / "llava").mkdir()
    write_llava(place / "llava", size=32)
    write_rows(place / "image.jsonl", counts=counts)
    train = {"batch": BATCH, "micro_batch": 1, "steps": 10**6}
    strategy = {"version": 1, "axes": {"shard": 2}}
    file = run_file(place, "llava", data={"sequence": 512}, train=train, strategy=strategy)
    wide = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    file["model"]["config"]["vision_config"].update(wide)
    text = wide | {"num_key_value_heads": 4, "max_position_embeddings": 512}
    file["model"]["config"]["text_config"].update(text)
    return file


def _worker(rank: int, world: int, file: dict[str, Any], steps: int) -> list[dict[str, float]]:
    config = RunConfig.model_validate(file)
    built = build(config)
    fill(built, config, torch.device("cpu"))
    model, handle, recipe = built.model.train(), sharded(built.model), Recipe.of(config, built.model)
    device, optimizer = torch.device("cpu"), torch.optim.SGD(model.parameters(), lr=0.02)
    text, micro = built.text, config.micro_batch

    def way(*, balance: bool) -> Any:
        batches = Batches(text.train, text.order, BATCH, micro, handle, device, balance=balance)

        def step(number: int) -> tuple[dict[str, float], dict[str, Tensor]]:
            batch = batches.load(number, number * BATCH)
            tokens = recipe.tokens(batch)
            dist.barrier()
            began = time.perf_counter()
            loss = accumulate(model, handle, batch, tokens, config.seed)
            dist.barrier()
            seconds = time.perf_counter() - began
            figures = {"seconds": seconds, "loss": float(handle.all_reduce(loss, ("replicate", "shard")))}
            return figures, {own.name: own.grad for own in handle.parameters() if own.grad is not None}

        return step

    return steps_both_ways(way(balance=False), way(balance=True), optimizer, steps)


def steps_both_ways(
    given: Way, dealt: Way, optimizer: torch.optim.Optimizer, steps: int
) -> list[dict[str, float]]:
    """The figures of each step as ``name, way``, and the largest difference of gradients over the largest gradient as
    given. The way that goes first alternates; weights move by the gradients of the last."""
    ways = {"given": given, "dealt": dealt}
    found = []
    for step in range(steps):
        row: dict[str, float] = {}
        gradients: dict[str, dict[str, Tensor]] = {}
        for name in ("given", "dealt") if step % 2 else ("dealt", "given"):
            optimizer.zero_grad()
            figures, of_step = ways[name](step)
            row |= {f"{figure}, {name}": value for figure, value in figures.items()}
            gradients[name] = {key: value.clone() for key, value in of_step.items() if value.numel()}
        largest = max(float(value.abs().max()) for value in gradients["given"].values())
        row["gradients"] = max(
            float((value - gradients["dealt"][key]).abs().max()) / largest
            for key, value in gradients["given"].items()
        )
        optimizer.step()
        found.append(row)
    return found


def measured(steps: int) -> dict[str, Any]:
    """All steps, the first two left out of what is compared."""
    with scratch() as place:
        file = make(place)
        ranks: Sequence[Sequence[Mapping[str, float]]] = run_ranks(
            _worker, 2, file, steps, timeout=120 + 6.0 * steps
        )
    rows = ranks[0][2:]
    given, dealt = ([row[f"seconds, {name}"] for row in rows] for name in ("given", "dealt"))
    ratios = sorted(b / a for a, b in zip(given, dealt, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    losses = [(row["loss, given"], row["loss, dealt"]) for row in rows]
    return {
        "steps": steps,
        "given": statistics.median(given),
        "dealt": statistics.median(dealt),
        "whole": sum(dealt) / sum(given),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "loss_difference": max(abs(a - b) / a for a, b in losses),
        "gradient_difference": max(row["gradients"] for rank in ranks for row in rank),
        "first_loss": losses[0][0],
        "last_loss": losses[-1][0],
    }


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/multimodal.md."""
    low, high = found["quartiles"]
    row = (
        *(found["steps"], f"{found['given']:.3f} s", f"{found['dealt']:.3f} s"),
        *(f"{found['ratio']:.2f} ({low:.2f}–{high:.2f})", f"{found['loss_difference']:.1e}"),
        f"{found['gradient_difference']:.1e} of the largest",
    )
    columns = "Steps | As given | Dealt | Of the time, median (quartiles) | Losses differ by | Gradients by"
    yield from table(columns, [row])


BENCHMARK = Benchmark("balanced_rows", {"multimodal.md": page})


def main(steps: int = 60) -> None:
    """Measure, keep."""
    BENCHMARK.keep(measured(steps))


if __name__ == "__main__":
    run(main)
