"""Modules of users, whose code branches, writes, hooks or reaches elsewhere: as on one device, or refused by name."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from harness import run_ranks
from harness.own_modules import RULES, STRATEGIES, all_compared, difference, made, on_one_device, rows_of
from hyper_parallel import shard
from hyper_parallel.compat.collectives import counting
from hyper_parallel.errors import StrategyError
from hyper_parallel.integration.streamed_sharding import parallelize_streamed
from hyper_parallel.shard.agreed_collectives import leaves_terms
from hyper_parallel.shard.model_structure import layers_of, without_values
from hyper_parallel.shard.weights_written_in_forward import refuse_sparse_gradients
from hyper_parallel.strategy import Strategy

RIGHT = {
    "shard 2": (
        "experts of some rows",
        "all heads run, one is used",
        "a weight of some rows in a layer",
        "layers that run three times",
        "weight that nothing uses",
        "clamp of a layer",
        "data set",
        "teacher after a while",
        "clip of a gradient",
        "two hooks",
        "penalty of all",
        "weight norm",
        "weight norm of hooks",
        "no elements",
    ),
    "shard 2 optimizer": ("rounds", "experts by popularity"),
    "replicate 2": ("experts of some rows", "teacher", "hook after accumulation", "early exit"),
    "tensor 2": ("attention", "penalty", "hook on a split weight", "orthogonal"),
    "shard 2 tensor 2": ("term left by a layer", "all heads run, one is used", "hook on a tied weight"),
}
RIGHT |= {
    "shard 2 traceable": (
        "experts of some rows",
        "early exit",
        "rounds",
        "checkpointed experts",
        "weight that nothing uses",
        "penalty of all",
        "weight norm of hooks",
        "two passes",
    ),
    "shard 2 optimizer traceable in 2": ("experts of some rows", "one head of a batch"),
    "shard 2 tensor 2 traceable": ("all heads run, one is used", "orthogonal"),
    "shard 2 offload": ("layers that run three times", "penalty of all", "weight of another layer"),
    "replicate 2 offload in 2": ("functional", "weight norm of hooks", "frozen layer"),
}
RIGHT["replicate 2 shard 2 in 2"] = ("layers by turns", "experts of some rows", "teacher", "a dict of terms")
REFUSED = {
    "shard 2": {
        "center after a while": "the forward pass of Own writes the buffer 'kept', and not the same on every rank",
        "weight of the rows after a while": "writes the weight 'teacher.bias', and not the same on every rank",
        "center replaced": "'kept'",
        "counter of rows": "the forward pass of Own writes 'kept', and what it writes depends on the rows",
        "teacher copied": "the forward pass of Own takes or loads the state dict of a Linear",
        "parameter exchanged": "puts another tensor in the place of the parameter 'student.weight'",
        "lazy": "'lazy.weight' of LazyLinear has no shape before its first call",
    },
    "tensor 2": {
        "clamp": "the forward pass of Own writes the weight 'out.weight'",
        "weight norm of a split weight": "splits a weight of 'up', which is computed from other parameters",
    },
    "shard 2 traceable": {
        "clamp of data": "the forward pass of Own writes the weight 'out.weight', which lowering='traceable' does not",
        "data set": "puts another tensor in the place of the parameter 'layers.0.weight'",
        "teacher copied": "the forward pass of Own loads weights into a Linear, which lowering='traceable' does not",
        "center after a while": "the forward pass of Own writes the buffer 'kept', and not the same on every rank",
        "two hooks": "the parameter 'out.weight' has a hook, and lowering='traceable'",
    },
    "shard 2 offload": {
        "teacher after a while": "the forward pass of Own writes the weight 'teacher.weight', which lowering=",
        "counter of rows": "the forward pass of Own writes 'kept', and what it writes depends on the rows",
        "weight of the rows": "the rows of a batch depend on each other in Own",
        "center after a while": "the forward pass of Own writes the buffer 'kept', and not the same on every rank",
    },
    "shard 2 tensor 2": {
        "teacher after a while": "the forward pass of Own writes the weight 'teacher.",
        "weight of another layer": "the forward pass of Own uses a weight outside of the layer that it belongs to",
    },
}


def _world(strategy: str) -> int:
    return math.prod(STRATEGIES[strategy]["axes"].values())


@pytest.mark.parametrize("strategy", RIGHT)
def test_what_is_trained_is_what_one_device_trains(strategy: str) -> None:
    world = _world(strategy)
    for found in run_ranks(all_compared, world, RIGHT[strategy], strategy):
        assert found == dict.fromkeys(RIGHT[strategy], ("right", ""))


@pytest.mark.parametrize("strategy", REFUSED)
def test_what_cannot_be_right_is_refused_by_every_rank_in_a_line(strategy: str) -> None:
    world = _world(strategy)
    for found in run_ranks(all_compared, world, tuple(REFUSED[strategy]), strategy):
        for name, reason in REFUSED[strategy].items():
            outcome, line = found[name]
            assert outcome == "refused" and reason in line, (name, outcome, line)


def test_the_judge_sees_a_weight_that_is_off_and_a_gradient_that_is_missing() -> None:
    right = on_one_device("experts of some rows", 2)
    off = [{name: value.clone() for name, value in step.items()} for step in right]
    off[1]["out.weight"][0, 0] += 0.1
    assert difference(right, off).startswith("step 1: out.weight is off by")
    del off[0]["gradient out.bias"]
    assert difference(right, off) == "step 0: only one device has gradient out.bias"


def _steps(rank: int, world: int, steps: int) -> list[int]:
    """How many collectives each step of a model without branches has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    model.forward = lambda x: model[1][2](model[1][1](model[1][0](model[0](x))))  # type: ignore[method-assign]
    shard.parallelize(model, Strategy(axes={"shard": 2}, check=False))
    found = []
    for _ in range(steps):
        with counting() as calls:
            model(torch.randn(2, 8)).sum().backward()
        found.append(sum(call.kind == "all_reduce" for call in calls))
    return found


def test_once_the_order_is_known_a_pass_ends_with_one_small_collective() -> None:
    for first, second, third in run_ranks(_steps, 2, 3):
        # Three units are gathered twice and reduced once, and the root is reduced.
        assert first > 10
        assert second == third == 2


def _twice(rank: int, world: int, name: str) -> float:
    """The largest difference of a gradient after two backward passes through one graph, with evaluations between."""
    one, model = made(name), made(name)
    shard.parallelize(model, Strategy(axes={"shard": 2}, check=False))
    handle = shard.sharded(model)
    rows = torch.arange(8).chunk(2)[rank]
    worst = 0.0
    for step in range(2):
        for module, x in ((one, rows_of(step)), (model, rows_of(step)[rows])):
            with torch.no_grad():
                module(x)
            # Of the module, not of an optimizer: of the parameters that it has now.
            module.zero_grad()
            output = module(x)
            output[:, :2].square().sum().backward(retain_graph=True)
            output[:, 2:].square().sum().backward()
        for ours, right in zip(handle.parameters(), one.parameters(), strict=True):
            assert (ours.grad is None) == (right.grad is None), ours.name
            if ours.grad is not None and right.grad is not None:
                off = handle.gather(ours.grad, ours.layout) - right.grad
                worst = max(worst, float(off.abs().max() / right.grad.abs().max()))
    return worst


@pytest.mark.parametrize("name", ["experts of some rows", "layers that run three times"])
def test_a_graph_may_have_two_backward_passes_and_steps_evaluations_between_them(name: str) -> None:
    for worst in run_ranks(_twice, 2, name):
        assert worst < 1e-5


def _warned(rank: int, world: int) -> list[str]:
    records: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hyper_parallel.shard.agreed_collectives").addHandler(handler)
    all_compared(rank, world, ("early exit", "layers that run three times"), "shard 2")
    return records


def test_the_memory_of_the_whole_model_is_announced_where_ranks_differ() -> None:
    for records in run_ranks(_warned, 2):
        (record,) = records
        assert (
            "does not run, or use the weights of, the same modules in the same order on every rank" in record
        )


class _Kept(nn.Linear):
    kept: Any = None
    keeps: Any = staticmethod(lambda x, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.kept = self.keeps(x, output)
        return output


def test_a_term_is_what_a_module_keeps_beside_its_inputs_and_outputs() -> None:
    x = torch.ones(1, 2, requires_grad=True) * 1
    for keeps, term in (
        (lambda x, output: output, False),
        (lambda x, output: [x, output], False),
        (lambda x, output: output.detach().sum(), False),
        (lambda x, output: output.sum(), True),
        (lambda x, output: {"loss": output.sum()}, True),
    ):
        module = _Kept(2, 2)
        module.keeps = keeps
        output = module(x)
        assert leaves_terms(module, (x,), [x, output]) == term
    collected: list[torch.Tensor] = [output.sum()]
    assert leaves_terms(nn.Linear(2, 2), (x, collected), [x])


def test_attributes_of_parameters_stay() -> None:
    model = nn.Linear(4, 4)
    model.weight.decay = 0.5  # type: ignore[attr-defined]
    shard.parallelize(model, Strategy(precision={"param": "bfloat16"}))
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.decay == 0.5  # type: ignore[attr-defined]


def _streamed(rank: int, world: int, name: str, axes: dict[str, int]) -> tuple[float, float]:
    one, model = made(name), made(name)
    model.out.weight.decay = 0.5  # type: ignore[attr-defined]
    rules = RULES if "tensor" in axes else {}
    handle = parallelize_streamed(model, Strategy(axes=axes, rules=rules, check=False), torch.device("cpu"))
    rows = torch.arange(8).chunk(handle.strategy.axes.data)[handle.data_index]
    # A hook sees the gradient of its own backward pass, and what was there stays.
    for x in (rows_of(0), rows_of(1)):
        one(x).square().sum().backward()
        model(x[rows]).square().sum().backward()
    whole = [handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None]
    right = [p.grad for p in one.parameters() if p.grad is not None]
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, right, strict=True))
    return off, model.out.weight.decay  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "axes"), [("clip of a gradient", {"shard": 2}), ("hook on a split weight", {"tensor": 2})]
)
def test_hooks_and_attributes_stay_where_weights_are_streamed(name: str, axes: dict[str, int]) -> None:
    for off, decay in run_ranks(_streamed, 2, name, axes):
        assert off < 1e-5 and decay == 0.5


def test_hooks_stay_on_one_device_where_parameters_are_exchanged_for_another_dtype() -> None:
    model = nn.Linear(4, 4, bias=False)
    seen: list[torch.dtype] = []
    model.weight.register_hook(lambda g: seen.append(g.dtype))
    shard.parallelize(model, Strategy(precision={"param": "bfloat16", "compute": "bfloat16"}))
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert seen == [torch.bfloat16]


def test_weights_computed_from_others_are_no_layers_and_are_copied_without_values() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    assert layers_of(model) is None
    assert all(p.is_meta for p in without_values(model).parameters())
    old = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    old.weight.sum().backward()
    copied = without_values(nn.Sequential(old))
    assert copied[0].weight.is_meta and not old.weight.is_meta


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(StrategyError, match="'0' is an Embedding with sparse=True"):
        refuse_sparse_gradients(nn.Sequential(nn.Embedding(3, 4, sparse=True)))


def test_a_lazy_module_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(StrategyError, match=r"'0\.weight' of LazyLinear has no shape"):
        shard.parallelize(nn.Sequential(nn.LazyLinear(3)), Strategy())
