"""Training steps of benchmarks: a parallelized model with its optimizer, a batch of random tokens, an engine's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import LLAMA_8B, with_layers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.compat import memory
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.graph import StepGraph
from hyper_parallel.offloading import Runtime
from hyper_parallel.offloading.schedule.offload_pass import Planned
from hyper_parallel.offloading.tiers import Tier
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_train_step import BatchShape, batch_inputs, capture_step, state
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe
from hyper_parallel.step.train_step import Stepper

ENGINES = ("eager", "graph", "compiled")
SEQUENCE, SHARES = 4096, (0.3, 0.5, 0.7)
"""Of `llama_8b_step`: tokens of a row, and where budgets lie between the working set and the peak."""
Step = Callable[[], float]
"""One step; its loss."""


def build(
    fields: Mapping[str, Any],
    strategy: hp.Strategy | None = None,
    *,
    lowering: Lowering = "traceable",
    values: torch.device | str | None = None,
    alone: bool = False,
) -> nn.Module:
    """A model of these fields, parallelized; on the meta device where it is given no device for `values`."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).train()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "grouped_mm"  # a loop over experts is no graph
    hp.parallelize(model, strategy or hp.Strategy(), lowering=lowering, alone=alone)
    if values is not None:
        hp.init_weights(model, 0, values)
    return model


def recipe_of(model: nn.Module, lr: float = 1e-3, **more: Any) -> Recipe:
    """The step that trains a model with AdamW, a constant rate and clipping at 1."""
    optimizer = build_optimizer(model, AdamWConfig(lr=lr))
    rate = schedule(ScheduleConfig(name="constant"), 1000)
    return Recipe(model, hp.sharded(model), optimizer, rate, **{"clip": 1.0, **more})


def captured(model: nn.Module, rows: int, length: int, micro_batches: int = 1) -> StepGraph:
    """The graph of a model's step."""
    return capture_step(recipe_of(model), shape_of(rows, length, micro_batches))


def llama_8b_step(layers: int | None = None, rows: int = 1) -> StepGraph:
    """The step of a Llama of 8B's shape on one device, bf16 arithmetic, fp32 parameters and moments: what several
    benchmarks plan memory for. Only captured: no value of it is ever made."""
    strategy = hp.Strategy.model_validate({"precision": {"compute": "bfloat16"}})
    return captured(build(with_layers(LLAMA_8B, layers), strategy), rows, SEQUENCE)


def shape_of(rows: int, length: int, micro_batches: int = 1) -> BatchShape:
    """A step of micro-batches of whole rows without a mask."""
    return BatchShape(((rows, length),) * micro_batches, (False,) * micro_batches)


def micro_batch(
    rows: int,
    length: int,
    vocabulary: int,
    *,
    share: int = 0,
    shares: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Rows of random tokens: of all `rows` those of one of the data ranks."""
    drawn = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    mine = torch.arange(rows).tensor_split(shares)[share]
    ids = drawn[mine].to(device)
    positions = torch.arange(length, device=device).expand(len(mine), -1).contiguous()
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, mine.to(device), False)


def step_batch(recipe: Recipe, rows: int, length: int, vocabulary: int, **drawn: Any) -> StepBatch:
    """A step of one micro-batch: this rank's of `rows` rows of random tokens."""
    handle = recipe.handle
    share = {"share": handle.data_index, "shares": handle.strategy.axes.data}
    micro = micro_batch(rows, length, vocabulary, **{**share, **drawn})
    tokens = torch.tensor(float(micro.labels.numel()), device=micro.labels.device)
    return StepBatch(0, list(range(rows)), [micro], tokens)


def engine_step(
    engine: str, recipe: Recipe, shadow: Callable[[], Recipe], batch: StepBatch, artifacts: Path | None = None
) -> Step:
    """A step of an engine on `recipe`'s model, the same batch each time. `shadow`: the same recipe on the meta device,
    which is captured. Raises RuntimeError with the reason where there is no graph."""
    stepper: Stepper | GraphStepper = Stepper(recipe)
    if engine != "eager":
        device = batch.micro[0].input_ids.device
        graphs = Graphs(shadow(), device, artifacts if engine == "compiled" else None)
        if not graphs.ready(BatchShape.of(batch.micro)) or graphs.uncompiled:
            raise RuntimeError(f"{engine}: {graphs.refused or graphs.uncompiled}")
        stepper = GraphStepper(recipe, graphs)
    stepper.begin(batch)
    return lambda: stepper.run(load_next=lambda: batch, memory=0.0).loss


def graph_inputs(recipe: Recipe, batch: StepBatch) -> dict[str, Tensor]:
    """What a captured step is run on: the state, and the first step's batch."""
    held = {name: tensor.detach() for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()}
    one = torch.ones((), dtype=torch.float64)
    return {**held, **batch_inputs(batch.micro, torch.tensor(0), batch.tokens, one)}


def runtime_of(found: Planned, tiers: Mapping[str, Tier]) -> Runtime:
    """What moves a planned step's storages, with their places in the tiers."""
    for name, tier in tiers.items():
        tier.reserve(found.places[name].sizes, found.places[name].offsets)
    return Runtime(found.step, tiers)


def settled(
    make: Callable[[], Recipe], batch: Callable[[Recipe], StepBatch], runtime: Runtime
) -> tuple[Recipe, dict[str, Tensor]]:
    """A recipe and what its planned step is run on: all state is where it rests from when it has values."""
    names = set()

    def settle(name: str, tensor: Tensor) -> None:
        names.add(name)
        runtime.rest(name, tensor)

    with memory.settling(settle):
        recipe = make()
    tensors = graph_inputs(recipe, batch(recipe))
    for name in state(recipe.handle, recipe.optimizer).keys() - names:
        runtime.rest(name, tensors[name])
    return recipe, tensors


def silent_host(point: str, values: Sequence[Tensor]) -> Tensor | None:
    """The host of a captured step: it has nothing to say and refuses nothing."""
    return torch.zeros(CONTROL_VECTOR) if point == "load" else None


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of elements of paired tensors."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
