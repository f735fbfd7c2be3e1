"""Steps within memory budgets on one accelerator, with pinned copies on streams of their own. Part of `gpu.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpu_engines import STEPS, batch_of, recipe_of

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import Backend, paged_out_parameters
from hyper_parallel.graph import balanced_sizes
from hyper_parallel.offloading import build_problem
from hyper_parallel.step.capture_train_step import BatchShape, state
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.strategy import Strategy

SHARES = (0.8, 0.2)
"""Where budgets lie between what single operators use and what the step holds without a budget."""


def check_budgets(
    backend: Backend, device: torch.device, families: dict[str, dict[str, Any]], names: Iterable[str]
) -> list[tuple[str, bool, str]]:
    """Steps within budgets beside the same graph without: the same bits where kernels repeat them, and no more memory.

    The device's own count of what tensors hold (`Backend.memory_peak`) is compared with the budget, over what was held
    before the model had values.
    """
    checks = []
    for name in names:
        bounds, losses, values, _ = _ran(backend, families[name], device, None)
        _, repeated, repeated_values, _ = _ran(backend, families[name], device, None)
        again = max(_distance(repeated_values, values), abs(repeated[-1] - losses[-1]))
        for share in SHARES:
            budget = int(bounds[0] + share * (bounds[1] - bounds[0]))
            _, found, moved_to, held = _ran(backend, families[name], device, budget)
            apart = max(_distance(moved_to, values), abs(found[-1] - losses[-1]))
            right = apart <= 10 * again and (device.type == "cpu" or held <= 1.02 * budget)
            note = f"apart {apart:.1e}, again {again:.1e}; {held / 2**20:.1f} MiB of {budget / 2**20:.1f}"
            checks.append((f"{name}: within a budget of {share:.0%}, {STEPS} steps", right, note))
    return checks


def _ran(
    backend: Backend, fields: dict[str, Any], device: torch.device, budget: int | None
) -> tuple[tuple[int, int], list[float], list[torch.Tensor], int]:
    """Working set, and peak without moves; the losses of some steps, the parameters then, the most that was held."""
    batch = batch_of(int(fields["vocab_size"]), 4, 64, device)
    # The host's kernel of the update has other bits than the device's.
    memory = {} if budget is None else {"device": budget, "host": 2**32, "update": "device"}
    before = backend.memory_allocated()
    backend.reset_memory_peak()
    tier = None if budget is None else Budget(Strategy(memory=memory), device)
    graphs = Graphs(recipe_of(fields, Strategy(), None), device, budget=tier)
    shape = BatchShape.of(batch.micro)
    assert graphs.ready(shape), graphs.refused
    graph = graphs[shape]
    recipe = recipe_of(fields, Strategy(), device)
    if tier is not None:
        assert graph.runtime is not None
        tier.begin(graph.runtime)
        known = state(recipe.handle, recipe.optimizer)
        tier.settle_others({name: tensor.detach() for name, (_, tensor) in known.items()})
        backend.synchronize()
        backend.reset_memory_peak()
    stepper = GraphStepper(recipe, graphs)
    stepper.begin(batch)
    losses = [stepper.run(load_next=lambda: batch, memory=0.0).loss for _ in range(STEPS)]
    backend.synchronize()
    held = backend.memory_peak() - before
    values = []
    for parameter in recipe.handle.parameters():
        with paged_out_parameters.present(parameter.local):
            values.append(parameter.local.detach().clone())
    if tier is not None:
        tier.close()
    bounds = build_problem(graph.plain, Cluster.named("h100"), 0, (), balanced_sizes(graph.plain))
    return (bounds.working_set, max(bounds.profile())), losses, values, held


def _distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
