"""Steps of submodels with skewed rows: python benchmarks/dynamic_steps.py [--steps 200]

1. How long the choice of a step's order takes for 16 device groups, and to build and check its Program, which happens
   when a mixture of kinds comes for the first time.
2. A small vision-language model on three real gloo workers (encoder, and a pipeline of two), whose rows have 0 to 3
   images: every step is computed with rows as given and with rows arranged, from the same weights. Losses and gradients
   are compared; so are the times of both orders by the costs that the orders are made from, and measured seconds, which
   on few cores are those of all work together.

Writes benchmarks/results/dynamic_steps.json and the table of docs/submodels.md.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from both_ways import differences, steps_both_ways
from commandline import run
from pages import Benchmark, spaced, table
from torch import Tensor

from harness.ranks import run_ranks
from harness.step_programs import chain_kind
from harness.submodel_models import MODELS
from hyper_parallel.layout import DeviceGroup, Mesh
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.schedule import Costs, MicroBatchKind, step_schedule
from hyper_parallel.step.submodels import submodels

GROUPS = 16
MIXTURES = {
    "1 kind of 16 micro-batches": [16],
    "2 kinds of 8": [8, 8],
    "3 kinds of 4, 4 and 8": [4, 4, 8],
    "16 kinds of 1": [1] * 16,
    "4 kinds of 16": [16] * 4,
}
DECLARED: dict[str, dict[str, Any]] = {
    "vision": {"modules": ["model.vision_tower", "model.multi_modal_projector"]},
    "language": {"axes": {"pipeline": 2}},
}
IMAGES, PATCHES, TEXT, ROWS, MICRO_BATCHES = 3, 16, 8, 2, 4
SHARES = (0.4, 0.3, 0.2, 0.1)
"""Of rows with 0 to 3 images."""


def choices(repeats: int = 21) -> list[dict[str, Any]]:
    """Milliseconds of the choice and of the Program."""
    groups = [DeviceGroup(Mesh(("tensor_x", 1)), (rank,), f"group {rank}") for rank in range(GROUPS)]
    found = []
    for name, counts in MIXTURES.items():
        draw, kinds = random.Random(0), []
        for count in counts:
            forward = tuple(draw.uniform(0.5, 2.0) for _ in groups)
            backward = tuple(2 * seconds for seconds in forward)
            costs = Costs(forward=forward, backward=backward, input=forward, weight=forward)
            kinds.append(MicroBatchKind.chain(costs, range(GROUPS), count))
        parts = [chain_kind(number, groups, range(GROUPS), count) for number, count in enumerate(counts, 1)]
        chosen, built = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            schedule = step_schedule(kinds, GROUPS)
            ended = time.perf_counter()
            step_program(parts, schedule.schedule, groups)
            chosen.append(1e3 * (ended - began))
            built.append(1e3 * (time.perf_counter() - ended))
        found.append(
            {
                "mixture": name,
                "choice_ms": statistics.median(chosen),
                "choice_worst_ms": max(chosen),
                "program_ms": statistics.median(built),
                "of_bound": schedule.makespan / schedule.bound,
            }
        )
    return found


def drawn(seed: int) -> dict[str, Tensor]:
    """The rows of a step."""
    draws = torch.Generator().manual_seed(seed)
    rows = ROWS * MICRO_BATCHES
    counts = torch.multinomial(torch.tensor(SHARES), rows, replacement=True, generator=draws)
    length = IMAGES * PATCHES + TEXT
    ids = torch.randint(0, 100, (rows, length), generator=draws)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    for row, count in enumerate(counts.tolist()):
        ids[row, : count * PATCHES] = 119
        labels[row, : count * PATCHES] = -100
    images = torch.randn(rows, IMAGES, 3, 16, 16, generator=draws)
    return {"input_ids": ids, "labels": labels, "images": images, "counts": counts}


def inputs(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The images that there are, one after the other; none where there is none."""
    made = dict(rows)
    images, counts = made.pop("images"), made.pop("counts").tolist()
    if any(counts):
        made["pixel_values"] = torch.cat([one[:count] for one, count in zip(images, counts, strict=True)])
    return made


def _worker(rank: int, world: int, steps: int) -> list[dict[str, float]]:
    model: Any = MODELS["llava"].build()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    # One with images in some rows, so that both submodels are needed.
    parts = submodels(model, DECLARED, drawn(0), micro_batches=MICRO_BATCHES, inputs=inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def way(*, arrange: bool) -> Any:
        def step(number: int) -> tuple[dict[str, float], dict[str, Tensor]]:
            began = time.perf_counter()
            loss = float(parts.forward_backward(drawn(number), step=number, arrange=arrange))
            seconds = time.perf_counter() - began
            assert parts.schedule is not None
            figures = {"loss": loss, "seconds": seconds, "cost": parts.schedule.makespan}
            owned = parts.handle.owned()
            return figures, {own.name: grad for own in owned if (grad := own.grad) is not None}

        return step

    return steps_both_ways({"given": way(arrange=False), "arranged": way(arrange=True)}, optimizer, steps)


def compared(steps: int) -> dict[str, Any]:
    """Both orders of every step."""
    ranks: list[list[dict[str, float]]] = run_ranks(_worker, 3, steps, timeout=60.0 + 6.0 * steps)
    rows = ranks[0]
    seconds = [(row["seconds, given"], row["seconds, arranged"]) for row in rows]
    return {
        "steps": steps,
        **differences(ranks, "given", "arranged"),
        "cost_of_given": sum(row["cost, arranged"] for row in rows) / sum(row["cost, given"] for row in rows),
        # The first steps plan their kinds.
        "seconds_of_given": statistics.median(b / a for a, b in seconds if max(a, b) < 1.0),
    }


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/submodels.md."""
    steps = found["steps"]
    return spaced(
        table(
            "16 device groups | Choice of the order, median (worst) | Program, when new | Of the lower bound",
            (
                f"| {one['mixture']} | {one['choice_ms']:.1f} ({one['choice_worst_ms']:.1f}) ms | "
                f"{one['program_ms']:.0f} ms | {one['of_bound']:.2f} |"
                for one in found["choices"]
            ),
        ),
        f"{steps['steps']} steps of a small vision-language model with 0 to 3 images in a row, on three workers: "
        f"arranged and as given, losses differ by {steps['loss_difference']:.1e} at most, gradients by "
        f"{steps['gradient_difference']:.1e} of the largest. By the costs that orders are made from, arranged steps "
        f"take {steps['cost_of_given']:.2f} of the time.",
    )


BENCHMARK = Benchmark("dynamic_steps", {"submodels.md": page})


def main(steps: int = 200) -> None:
    """Run both, keep."""
    BENCHMARK.keep({"choices": choices(), "steps": compared(steps)})


if __name__ == "__main__":
    run(main)
