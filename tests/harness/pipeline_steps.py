"""Steps of pipelines on real gloo workers, beside the step of one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from harness.ranks import run_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.shard import parallelize
from hyper_parallel.step.pipeline_build import build_pipeline
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.families import FAMILIES
from hyper_parallel.verify.matrix import build_model, draw_batch, family_config
from hyper_parallel.verify.pipeline_step import run_pipeline_step
from hyper_parallel.verify.step import StepOutcome, Tensors, run_step

Settings = Mapping[str, Any]


def settings_of(family: str, layers: int | None = None) -> Settings:
    """A family's config, with another number of layers."""
    found = dict(FAMILIES[family])
    if layers is not None:
        found["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
    return found


def one_device(family: Settings, train: Settings) -> StepOutcome:
    """The step of the whole model on one device."""
    config = family_config(family, {}, train)
    model = build_model(family, "cpu")
    parallelize(model, Strategy(), alone=True)
    return run_step(model, config, draw_batch(family))


def _worker(
    rank: int, world: int, family: Settings, strategies: list[Settings], train: Settings, same: Tensors
) -> Any:
    found = []
    for strategy in strategies:
        config: RunConfig = family_config(family, {"check": False, **strategy}, train)
        model = build_model(family, "cpu")
        built = build_pipeline(config, model, True, "cpu")
        outcome = run_pipeline_step(model, built, config, draw_batch(family), same)
        found.append((outcome, built.plan.described()))
        dist.barrier()
    return found


def worst(one: Tensors, other: Tensors) -> float:
    """The largest error of any tensor over its largest element, and inf where one is missing."""
    if one.keys() != other.keys():
        return float("inf")
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-12))
        for name in one
    )


def against_one_device(
    family: Settings, world: int, strategies: list[Settings], train: Settings, timeout: float = 240.0
) -> list[tuple[float, float, float, str]]:
    """Of each strategy on `world` workers: the worst error of loss and norm, of gradients, of updated values, and the
    plan. Holders of one tensor have equal bits."""
    torch.manual_seed(0)
    alone = one_device(family, train)
    ranks = run_ranks(_worker, world, family, strategies, train, alone.gradients, timeout=timeout)
    told = []
    for at in range(len(strategies)):
        outcomes: list[StepOutcome] = [found[at][0] for found in ranks]
        gradients: Tensors = {}
        values: Tensors = {}
        for outcome in outcomes:
            for whole, part in ((gradients, outcome.gradients), (values, outcome.values)):
                for name, tensor in part.items():
                    assert torch.equal(whole.setdefault(name, tensor), tensor), f"holders of {name} differ"
        scalars = max(
            abs(getattr(outcome, name) / getattr(alone, name) - 1)
            for outcome in outcomes
            for name in ("loss", "grad_norm")
        )
        told.append(
            (scalars, worst(gradients, alone.gradients), worst(values, alone.values), ranks[0][at][1])
        )
    return told
