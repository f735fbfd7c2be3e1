"""Steps on rows with skewed numbers of images, dealt and as given: python benchmarks/balanced_rows.py [--steps 60]

A small vision-language model (LLaVA, new weights) on two workers of one thread each, `axes: {shard: 2}`; rows have 0 to
16 images, drawn from a log-normal law, as in real sets. Every step is computed from the same weights with its rows
dealt to ranks and micro-batches (`data.balance`) and as given, in turns; then the weights move on. Losses and gradients
are compared; times are medians over the steps, with the quartiles of the ratio of each step.

Writes benchmarks/results/balanced_rows.json and the table of docs/multimodal.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine, write
from pages import DOCS, put

from hyper_parallel.config import RunConfig
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import build, fill
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import accumulate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.ranks import run_ranks
from harness.vision_folders import run_file, write_llava, write_rows

ROWS, BATCH, MOST, MEAN, SKEW = 256, 16, 16, 4, 1.2


def make(place: Path) -> dict[str, Any]:
    """The model's folder and the rows; the run file."""
    draw = random.Random(0)
    counts = [min(MOST, round(draw.lognormvariate(MEAN**0.5 / 3, SKEW))) for _ in range(ROWS)]
    (place / "llava").mkdir()
    write_llava(place / "llava", size=32)
    write_rows(place / "image.jsonl", counts=counts)
    file = run_file(
        place,
        "llava",
        data={"sequence": 512},
        train={"batch": BATCH, "micro_batch": 1, "steps": 10**6},
        strategy={"version": 1, "axes": {"shard": 2}},
    )
    wide = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    file["model"]["config"]["vision_config"].update(wide)
    file["model"]["config"]["text_config"].update(
        wide | {"num_key_value_heads": 4, "max_position_embeddings": 512}
    )
    return file


def _worker(rank: int, world: int, file: dict[str, Any], steps: int) -> list[dict[str, float]]:
    config = RunConfig.model_validate(file)
    built = build(config)
    fill(built, config, torch.device("cpu"))
    model, handle, recipe = built.model.train(), sharded(built.model), Recipe.of(config, built.model)
    batches = {
        name: Batches(
            built.text.train,
            built.text.order,
            BATCH,
            config.micro_batch,
            handle,
            torch.device("cpu"),
            balance=name == "dealt",
        )
        for name in ("given", "dealt")
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    found = []
    for step in range(steps):
        one: dict[str, float] = {}
        gradients: dict[str, list[torch.Tensor]] = {}
        for name in ("given", "dealt") if step % 2 else ("dealt", "given"):
            optimizer.zero_grad()
            batch = batches[name].load(step, step * BATCH)
            tokens = recipe.tokens(batch)
            dist.barrier()
            began = time.perf_counter()
            loss = accumulate(model, handle, batch, tokens, config.seed)
            dist.barrier()
            one[f"seconds, {name}"] = time.perf_counter() - began
            one[f"loss, {name}"] = float(handle.all_reduce(loss, ("replicate", "shard")))
            gradients[name] = [own.grad.clone() for own in handle.parameters() if own.grad is not None]
        largest = max(float(value.abs().max()) for value in gradients["given"] if value.numel())
        one["gradients"] = max(
            float((a - b).abs().max()) / largest
            for a, b in zip(gradients["given"], gradients["dealt"], strict=True)
            if a.numel()
        )
        optimizer.step()
        found.append(one)
    return found


def measured(steps: int) -> dict[str, Any]:
    """All steps."""
    with tempfile.TemporaryDirectory() as place:
        file = make(Path(place))
        ranks: list[list[dict[str, float]]] = run_ranks(_worker, 2, file, steps, timeout=120 + 6.0 * steps)
    told = ranks[0][2:]
    ratios = sorted(one["seconds, dealt"] / one["seconds, given"] for one in told)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "machine": machine(),
        "steps": steps,
        "given": statistics.median(one["seconds, given"] for one in told),
        "dealt": statistics.median(one["seconds, dealt"] for one in told),
        "whole": sum(one["seconds, dealt"] for one in told) / sum(one["seconds, given"] for one in told),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "loss_difference": max(
            abs(one["loss, given"] - one["loss, dealt"]) / one["loss, given"] for one in told
        ),
        "gradient_difference": max(one["gradients"] for rank in ranks for one in rank),
        "first_loss": told[0]["loss, given"],
        "last_loss": told[-1]["loss, given"],
    }


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The table of the page."""
    low, high = found["quartiles"]
    yield "| Steps | As given | Dealt | Of the time, median (quartiles) | Losses differ by | Gradients by |"
    yield "|---|---|---|---|---|---|"
    yield (
        f"| {found['steps']} | {found['given']:.3f} s | {found['dealt']:.3f} s | {found['ratio']:.2f} "
        f"({low:.2f}–{high:.2f}) | {found['loss_difference']:.1e} | {found['gradient_difference']:.1e} of the "
        "largest |"
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    found = measured(given.steps)
    print("\n".join(page(found)))
    print(write("balanced_rows", found))
    put(DOCS / "multimodal.md", "balanced_rows.py", page(found))


if __name__ == "__main__":
    main()
