"""Steps on one accelerator: the engines beside each other, and within memory budgets. Part of `gpu.py`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from measure import in_turns, paired_ratio, timed_on
from processes import scratch
from torch import Tensor
from training import ENGINES, build, engine_step, largest_difference, recipe_of, step_batch

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import Backend
from hyper_parallel.compat import memory as paged_out_parameters
from hyper_parallel.graph import balanced_sizes
from hyper_parallel.offloading import build_problem
from hyper_parallel.step.capture_train_step import BatchShape, state
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Strategy

Fields = dict[str, Any]
Check = tuple[str, bool, str]
STEPS = 4
SHARES = (0.8, 0.2)
"""Where budgets lie between what single operators use and what the step holds without a budget."""


def recipe(fields: Fields, device: torch.device | None, strategy: Strategy | None = None) -> Recipe:
    """A model and its optimizer; on the meta device without a `device`."""
    return recipe_of(build(fields, strategy, values=device, alone=True))


def check_engines(device: torch.device, families: dict[str, Fields], names: Iterable[str]) -> list[Check]:
    """Steps of the graph, and of the graph compiled, beside eager ones from the same values.

    The graph runs the same kernels: it may differ from eager steps as far as these differ when they are run again,
    which is not at all where kernels are deterministic. A compiled one takes sums in other orders, and AdamW's first
    steps turn the sign of a tiny gradient into a step of the learning rate, so that its losses are compared.
    """
    checks = []
    for name in names:
        fields = families[name]
        losses, values = _steps_of("eager", fields, device)
        repeated, repeated_values = _steps_of("eager", fields, device)
        again = max(_relative(repeated, losses), largest_difference(repeated_values, values))
        for engine in ENGINES[1:]:
            try:
                found, moved_to = _steps_of(engine, fields, device)
            except RuntimeError as error:
                checks.append((f"{name}: {engine}", False, str(error).splitlines()[0][:200]))
                continue
            apart, moved = _relative(found, losses), largest_difference(moved_to, values)
            right = max(apart, moved) <= 10 * again if engine == "graph" else apart < 1e-4
            note = f"loss {apart:.1e}, values {moved:.1e}; eager again {again:.1e}"
            checks.append((f"{name}: {engine} against eager, {STEPS} steps", right, note))
    return checks


def _steps_of(engine: str, fields: Fields, device: torch.device) -> tuple[list[float], list[Tensor]]:
    """The losses of some steps, and the parameters after them."""
    own = recipe(fields, device)
    batch = step_batch(own, 4, 64, int(fields["vocab_size"]), device=device)
    with scratch() as folder:
        step = engine_step(engine, own, lambda: recipe(fields, None), batch, folder)
        return [step() for _ in range(STEPS)], [p.local for p in own.handle.parameters()]


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def measure_engines(
    backend: Backend, device: torch.device, fields: Fields, pairs: int, rows: int, length: int
) -> dict[str, Any]:
    """Steps of the three engines in turn, on one model in bf16 mixed precision."""
    strategy = Strategy(precision={"compute": "bfloat16"})
    own = recipe(fields, device, strategy)
    batch = step_batch(own, rows, length, int(fields["vocab_size"]), device=device)
    with scratch() as folder:
        steps = {
            engine: engine_step(engine, own, lambda: recipe(fields, None, strategy), batch, folder)
            for engine in ENGINES
        }
        times = in_turns(steps, pairs, partial(timed_on, backend), warm=3)
    return {engine: paired_ratio(times[engine], times["eager"]) for engine in ENGINES[1:]}


def check_budgets(
    backend: Backend, device: torch.device, families: dict[str, Fields], names: Iterable[str]
) -> list[Check]:
    """Steps within budgets beside the same graph without: the same bits where kernels repeat them, and no more memory.

    The device's own count of what tensors hold (`Backend.memory_peak`) is compared with the budget, over what was held
    before the model had values.
    """
    checks = []
    for name in names:
        bounds, losses, values, _ = _within(backend, families[name], device, None)
        _, repeated, repeated_values, _ = _within(backend, families[name], device, None)
        again = max(largest_difference(repeated_values, values), abs(repeated[-1] - losses[-1]))
        for share in SHARES:
            budget = int(bounds[0] + share * (bounds[1] - bounds[0]))
            _, found, moved_to, held = _within(backend, families[name], device, budget)
            apart = max(largest_difference(moved_to, values), abs(found[-1] - losses[-1]))
            right = apart <= 10 * again and (device.type == "cpu" or held <= 1.02 * budget)
            note = f"apart {apart:.1e}, again {again:.1e}; {held / 2**20:.1f} MiB of {budget / 2**20:.1f}"
            checks.append((f"{name}: within a budget of {share:.0%}, {STEPS} steps", right, note))
    return checks


def _within(
    backend: Backend, fields: Fields, device: torch.device, budget: int | None
) -> tuple[tuple[int, int], list[float], list[Tensor], int]:
    """Working set, and peak without moves; the losses of some steps, the parameters then, the most that was held."""
    captured = recipe(fields, None)
    batch = step_batch(captured, 4, 64, int(fields["vocab_size"]), device=device)
    # The host's kernel of the update has other bits than the device's.
    memory = {} if budget is None else {"device": budget, "host": 2**32, "update": "device"}
    before = backend.memory_allocated()
    backend.reset_memory_peak()
    tier = None if budget is None else Budget(Strategy(memory=memory), device)
    graphs = Graphs(captured, device, budget=tier)
    shape = BatchShape.of(batch.micro)
    assert graphs.ready(shape), graphs.refused
    graph = graphs[shape]
    own = recipe(fields, device)
    if tier is not None:
        assert graph.runtime is not None
        tier.begin(graph.runtime)
        known = state(own.handle, own.optimizer)
        tier.settle_others({name: tensor.detach() for name, (_, tensor) in known.items()})
        backend.synchronize()
        backend.reset_memory_peak()
    stepper = GraphStepper(own, graphs)
    stepper.begin(batch)
    losses = [stepper.run(load_next=lambda: batch, memory=0.0).loss for _ in range(STEPS)]
    backend.synchronize()
    held = backend.memory_peak() - before
    values = []
    for parameter in own.handle.parameters():
        with paged_out_parameters.present(parameter.local):
            values.append(parameter.local.detach().clone())
    if tier is not None:
        tier.close()
    bounds = build_problem(graph.plain, Cluster.named("h100"), 0, (), balanced_sizes(graph.plain))
    return (bounds.working_set, max(bounds.profile())), losses, values, held
