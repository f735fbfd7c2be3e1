"""The engines on one accelerator: eager, the step's graph, and the graph compiled. Part of `gpu.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from measure import paired_ratio, timed_on

from hyper_parallel import shard
from hyper_parallel.compat import Backend
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import Stepper
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.matrix import build_model

ENGINES = ("eager", "graph", "compiled")
STEPS = 4
Step = Callable[[], float]


def recipe_of(fields: dict[str, Any], strategy: Strategy, device: torch.device | None) -> Recipe:
    """A model and its optimizer; on the meta device without a `device`."""
    model = build_model(fields)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "grouped_mm"  # a loop over experts is no graph
    shard.parallelize(model, strategy, lowering="traceable", alone=True)
    if device is not None:
        shard.init_weights(model, 0, device)
    return Recipe(
        model,
        shard.sharded(model),
        build_optimizer(model, AdamWConfig(lr=1e-3)),
        schedule(ScheduleConfig(name="constant"), 10**6),
        seed=0,
        clip=1.0,
    )


def batch_of(vocabulary: int, rows: int, length: int, device: torch.device) -> StepBatch:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (rows, length + 1), generator=draw).to(device)
    positions = torch.arange(length, device=device).expand(rows, -1).contiguous()
    micro = MicroBatch(
        ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, torch.arange(rows, device=device), False
    )
    return StepBatch(0, [*range(rows)], [micro], torch.tensor(float(rows * length), device=device))


def step_of(
    engine: str, recipe: Recipe, shadow: Callable[[], Recipe], batch: StepBatch, folder: Path
) -> Step:
    """One step of an engine on `recipe`'s model. Raises RuntimeError with the reason where there is no graph."""
    stepper: Stepper | GraphStepper = Stepper(recipe)
    if engine != "eager":
        device = batch.micro[0].input_ids.device
        graphs = Graphs(shadow(), device, folder if engine == "compiled" else None)
        if not graphs.ready(BatchShape.of(batch.micro)) or graphs.uncompiled:
            raise RuntimeError(f"{engine}: {graphs.refused or graphs.uncompiled}")
        stepper = GraphStepper(recipe, graphs)
    stepper.begin(batch)
    return lambda: stepper.run(load_next=lambda: batch, memory=0.0).loss


def check_engines(
    device: torch.device, families: dict[str, dict[str, Any]], names: Iterable[str]
) -> list[tuple[str, bool, str]]:
    """Steps of the graph, and of the graph compiled, beside eager ones from the same values.

    The graph runs the same kernels: it may differ from eager steps as far as these differ when they are run again,
    which is not at all where kernels are deterministic. A compiled one takes sums in other orders, and AdamW's first
    steps turn the sign of a tiny gradient into a step of the learning rate, so that its losses are compared.
    """
    checks = []
    for name in names:
        fields = families[name]
        losses, values = _ran("eager", fields, device)
        repeated, repeated_values = _ran("eager", fields, device)
        again = max(_relative(repeated, losses), _distance(repeated_values, values))
        for engine in ENGINES[1:]:
            try:
                found, moved_to = _ran(engine, fields, device)
            except RuntimeError as error:
                checks.append((f"{name}: {engine}", False, str(error).splitlines()[0][:200]))
                continue
            apart, moved = _relative(found, losses), _distance(moved_to, values)
            right = max(apart, moved) <= 10 * again if engine == "graph" else apart < 1e-4
            note = f"loss {apart:.1e}, values {moved:.1e}; eager again {again:.1e}"
            checks.append((f"{name}: {engine} against eager, {STEPS} steps", right, note))
    return checks


def _ran(engine: str, fields: dict[str, Any], device: torch.device) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of some steps, and the parameters after them."""
    batch = batch_of(int(fields["vocab_size"]), 4, 64, device)
    recipe = recipe_of(fields, Strategy(), device)
    with tempfile.TemporaryDirectory() as folder:
        step = step_of(engine, recipe, lambda: recipe_of(fields, Strategy(), None), batch, Path(folder))
        return [step() for _ in range(STEPS)], [p.local for p in recipe.handle.parameters()]


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def _distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def measure_engines(
    backend: Backend, device: torch.device, fields: dict[str, Any], pairs: int, rows: int, length: int
) -> dict[str, Any]:
    """Steps of the three engines in turn, on one model in bf16 mixed precision."""
    strategy = Strategy(precision={"compute": "bfloat16"})
    batch = batch_of(int(fields["vocab_size"]), rows, length, device)
    recipe = recipe_of(fields, strategy, device)
    with tempfile.TemporaryDirectory() as folder:
        steps = {}
        for engine in ENGINES:
            steps[engine] = step_of(
                engine, recipe, lambda: recipe_of(fields, strategy, None), batch, Path(folder)
            )
        for step in steps.values():
            for _ in range(3):
                step()
        times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for turn in range(pairs):
            for engine in [*ENGINES][turn % 3 :] + [*ENGINES][: turn % 3]:
                times[engine].append(timed_on(backend, steps[engine]))
    return {engine: paired_ratio(times[engine], times["eager"]) for engine in ENGINES[1:]}
