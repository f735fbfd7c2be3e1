"""A cell of the matrix by its graphs: every rank's step captured on fake ranks, all replayed beside one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.equivalence import build_model, draw_batch, family_config, one_device
from harness.replay import Values, gradients, replay
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.graph import StepGraph
from hyper_parallel.shard import ShardedModel, parallelize
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.shard.reshard import cut
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.build import fill_model
from hyper_parallel.step.capture_train_step import BatchShape, batch_inputs, capture_step, state
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe
from hyper_parallel.verify.report import Report, compare
from hyper_parallel.verify.run import describe
from hyper_parallel.verify.step import StepOutcome, Tensors

Settings = Mapping[str, Any]


def recipe_of(family: Settings, config: RunConfig) -> Recipe:
    """The step that a run of this file does, with values, on the ranks at hand."""
    model: Any = build_model(family)
    # What runs where nobody says another thing, and what is captured; one by one, experts are not.
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "grouped_mm"
    alone = config.strategy.axes.world == 1
    parallelize(model, config.strategy, lowering="traceable", alone=alone)
    fill_model(model, config, "cpu")
    return Recipe.of(config, model)


def text_batch(family: Settings) -> Tensors:
    """Rows of packed documents, of a family that sees images too: what training is given."""
    if "vision_config" not in family:
        return draw_batch(family)
    special = min(family[key] for key in family if key.endswith("token_id"))
    return draw_batch({"vocab_size": special})


def micro_batches(handle: ShardedModel, config: RunConfig, whole: Tensors) -> list[MicroBatch]:
    """This rank's share of a batch."""
    share = whole["input_ids"].size(0) // handle.strategy.axes.data
    count = config.train.micro_batch or share
    starts = range(handle.data_index * share, (handle.data_index + 1) * share, count)
    keys = ("input_ids", "labels", "position_ids")
    return [
        MicroBatch(*(whole[key][at : at + count].clone() for key in keys), torch.arange(at, at + count))
        for at in starts
    ]


def shape_of(micro: list[MicroBatch], several: bool) -> BatchShape:
    """What a graph for these micro-batches is captured for."""
    shapes = tuple((batch.input_ids.size(0), batch.input_ids.size(1)) for batch in micro)
    return BatchShape(shapes, (several,) * len(micro))


def inputs_of(
    recipe: Recipe, micro: list[MicroBatch], tokens: float, step: int = 0, lr_scale: float = 1.0
) -> dict[str, Tensor]:
    """What a captured step is run on."""
    scale = torch.tensor(lr_scale, dtype=torch.float64)
    return {
        **{name: tensor.detach() for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()},
        **batch_inputs(micro, torch.tensor(step), torch.tensor(tokens), scale),
    }


def replayed_cell(
    family: Settings, strategy: Settings, train: Settings | None = None, packed: bool = True
) -> Report:
    """One captured step on every rank, against one device."""
    batch = text_batch(family)
    if not packed:
        batch["position_ids"] = torch.arange(batch["input_ids"].size(1)).repeat(batch["input_ids"].size(0), 1)
    one = one_device(family, strategy, batch, train)
    config = family_config(family, strategy, train)
    many = replayed(family, config, batch, one, packed)
    return compare(one, many, describe(config.strategy), "captured graphs", config.strategy.precision.compute)


def replayed(
    family: Settings, config: RunConfig, batch: Tensors, one: StepOutcome, packed: bool
) -> StepOutcome:
    """The step of all ranks, run from their graphs. The update is computed from one device's gradients (see
    `verify.step.run_step`)."""
    world = config.strategy.axes.world
    tokens = float(valid_tokens(batch["labels"]))
    recipes: dict[int, Recipe] = {}
    steps: dict[int, StepGraph] = {}
    tensors: dict[int, dict[str, Tensor]] = {}
    for rank in range(world):
        with fake_ranks(world, rank):
            recipe = recipes[rank] = recipe_of(family, config)
            micro = micro_batches(recipe.handle, config, batch)
            steps[rank] = capture_step(recipe, shape_of(micro, packed))
            tensors[rank] = inputs_of(recipe, micro, tokens)
    seen: dict[int, dict[str, Tensor]] = {}
    told: dict[int, list[float]] = {}

    def host(rank: int, point: str, shown: list[Tensor], values: Values) -> Tensor | None:
        if point == "load":
            return torch.zeros(CONTROL_VECTOR)
        told[rank] = shown[0].tolist()
        shapes = {parameter.name: parameter.local.shape for parameter in recipes[rank].handle.parameters()}
        found = gradients(steps[rank], values, shapes)
        seen[rank] = {name: gradient.clone() for name, gradient in found.items()}
        for parameter in recipes[rank].handle.parameters():
            if parameter.name in found and parameter.name in one.gradients:
                found[parameter.name].copy_(
                    cut(
                        one.gradients[parameter.name],
                        parameter.layout,
                        parameter.layout.mesh.coordinate(rank),
                    )
                )
        return None

    replay(steps, tensors, host)
    handle = recipes[0].handle
    layouts = {parameter.name: parameter.layout for parameter in handle.parameters()}
    names = [name for name in layouts if name in seen[0]]
    return StepOutcome(
        told[0][0],
        told[0][1 + CONTROL_VECTOR],
        {name: _whole(name, handle, {r: seen[r][name] for r in seen}) for name in names},
        {
            name: _whole(name, handle, {r: tensors[r][f"parameter.{name}"] for r in tensors})
            for name in layouts
        },
        {name: str(layout) for name, layout in layouts.items()},
    )


def _whole(name: str, handle: ShardedModel, pieces: Mapping[int, Tensor]) -> Tensor:
    """The whole tensor of every rank's piece; NaN where copies of an element differ."""
    layout = handle.plan.layouts()[name]
    whole = torch.full(layout.shape, torch.nan)
    known = torch.zeros(layout.shape, dtype=torch.bool)
    for rank, piece in pieces.items():
        for box in layout.boxes(layout.mesh.coordinate(rank)):
            here, mine = whole[box.global_slices], piece[box.local_slices].to(whole.dtype)
            differs = known[box.global_slices] & (here != mine)
            here.copy_(torch.where(differs, torch.nan, mine))
            known[box.global_slices] = True
    return whole
