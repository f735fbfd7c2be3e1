"""The step of a Llama of 8B's shape that several benchmarks plan memory for: bf16 arithmetic, fp32 parameters and
moments, on one device. Only captured: no value of it is ever made."""

from __future__ import annotations

from memory import build, recipe_of
from shapes import LLAMA_8B

import hyper_parallel as hp
from hyper_parallel.graph import StepGraph
from hyper_parallel.step.capture_train_step import BatchShape, capture_step

MODEL = LLAMA_8B
SEQUENCE = 4096
SHARES = (0.3, 0.5, 0.7)
"""Where the budgets that are looked at lie between the working set and the peak."""


def captured(layers: int | None = None, rows: int = 1) -> StepGraph:
    """The step of so many rows of `SEQUENCE` tokens; of all the model's layers where `layers` is left out."""
    fields = {**MODEL, "num_hidden_layers": layers or MODEL["num_hidden_layers"]}
    strategy = hp.Strategy.model_validate({"precision": {"compute": "bfloat16"}})
    recipe = recipe_of(build(fields, strategy))
    return capture_step(recipe, BatchShape(((rows, SEQUENCE),), (False,)))
