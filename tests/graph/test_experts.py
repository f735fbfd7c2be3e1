"""Steps whose sizes depend on the routing: exact graphs run for any, balanced ones are for costs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import run_ranks
from harness.captured import inputs_of, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch, family_config
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, executable, lifetimes
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.step_context import StepContext
from hyper_parallel.launch.stop import Requests
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.capture_train_step import capture_step
from hyper_parallel.step.train_step import Stepper, control_values_of

STEPS = 2


def graph_beside_eager(rank: int, world: int, family: str, degree: int, one_sided: bool = False) -> list[str]:
    """Names of what differs after two steps of the graph and two eager ones; bits, not tolerances."""
    fields, strategy = FAMILIES[family], {"axes": {"shard": world, "expert": degree}}
    config = family_config(fields, strategy if world > 1 else {"axes": {}})
    whole = draw_batch(fields)
    eager, graphed = recipe_of(fields, config), recipe_of(fields, config)
    if one_sided:
        for recipe in (eager, graphed):
            for p in recipe.handle.parameters():
                if p.name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                    p.local.zero_()  # equal scores: every token goes to the first experts, and most get none
    micro = micro_batches(eager.handle, config, whole)
    mine = float(sum(valid_tokens(batch.labels) for batch in micro))
    stepper = Stepper(eager)
    step = capture_step(graphed, shape_of(micro, True))
    run = executable(step)
    batches = [StepBatch(at, list(range(8)), micro, torch.tensor(mine)) for at in range(STEPS)]
    stepper.begin(batches[0])
    tokens = float(graphed.tokens(batches[0]))
    found = []
    for at, batch in enumerate(batches):
        following = batches[at + 1] if at + 1 < STEPS else None
        loss = stepper.run(
            load_next=None if following is None else functools.partial(batches.__getitem__, at + 1),
            memory=0.0,
        ).loss

        def host(
            point: str, shown: Any, following: Any = following, seen: list[Any] = found
        ) -> Tensor | None:
            if point == "load":
                return control_values_of(following, Requests(), 0.0, torch.device("cpu"))
            seen.append(shown[0][0].item())
            return None

        run.run(inputs_of(graphed, micro, tokens, batch.step, graphed.schedule(at)), host)
        if found.pop() != loss:
            found = ["loss"]
            break
    pairs = zip(eager.handle.parameters(), graphed.handle.parameters(), strict=True)
    return found + [p.name for p, q in pairs if not torch.equal(p.local, q.local)]


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_one_device_is_eager_bit_for_bit(family: str) -> None:
    assert graph_beside_eager(0, 1, family, 1) == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_over_two_ranks_are_eager_bit_for_bit(family: str) -> None:
    assert run_ranks(graph_beside_eager, 2, family, 2, timeout=120) == [[], []]


@pytest.mark.parametrize("degree", [1, 2])
def test_experts_without_rows_are_eager_bit_for_bit(degree: int) -> None:
    assert run_ranks(graph_beside_eager, 2, "mixtral", degree, True, timeout=120) == [[]] * 2


@functools.cache
def _captured(balanced: bool) -> StepGraph:
    fields = FAMILIES["mixtral"]
    config = family_config(fields, {"axes": {"shard": 2, "expert": 2}})
    with StepContext(even_load=1.0 if balanced else None).installed(), fake_ranks(2, 0):
        recipe = recipe_of(fields, config)
        return capture_step(recipe, shape_of(micro_batches(recipe.handle, config, draw_batch(fields)), False))


def test_a_balanced_graph_is_for_costs_and_is_not_run() -> None:
    balanced = _captured(True)
    assert not balanced.sizes
    with pytest.raises(CaptureError, match="spread evenly over the experts"):
        executable(balanced)


def test_the_sizes_of_an_exact_graph_have_the_values_of_a_balanced_one() -> None:
    balanced = sum(life.bytes for life in lifetimes(_captured(True)))
    exact = _captured(False)
    sizes = balanced_sizes(exact)
    assert sizes.keys() >= exact.sizes.keys()
    bytes_of = {load: sum(x.bytes for x in lifetimes(exact, balanced_sizes(exact, load))) for load in (1, 2)}
    # The numbers themselves, which only the exact graph reads, are a few bytes.
    assert balanced <= bytes_of[1] < 1.01 * balanced
    assert bytes_of[2] > 1.02 * bytes_of[1]
