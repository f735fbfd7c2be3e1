"""Captures a step with a few of the model's layers, and assembles the graph of all (`graph.periods`).

Two periods of layers are captured, and three; the graph that is assembled from the two for three must be the graph that
was captured with three, node by node. Then, and if what all layers have is what the plan and the model say they have,
the graph of all layers is assembled. Where any of it does not hold, all layers are captured, which is as right and
slower:

    layers      0 1 2 … 79       the period is one layer, 80 times
    captured    0 79             A and B
                0 1 79           must be what is assembled from A and B
    assembled   0 1 2 … 79

Where the first or the last layer is unlike the others (one behind a frozen embedding has no gradient to hand on), the
periods between them are taken for A and B. Under sequence parallelism they are: the first layer is handed what was
split, and the last one hands on what is gathered; there the periods between them are tried first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.alike_layers import find_period, own_index
from hyper_parallel.graph.gradient_sums import UNREDUCED, UNSUMMED
from hyper_parallel.graph.ir import values_of
from hyper_parallel.graph.module_state import module_state
from hyper_parallel.graph.no_gc import uncollected
from hyper_parallel.graph.period_pattern import Pair, Unlike
from hyper_parallel.graph.periods import assembled
from hyper_parallel.graph.same_graph import difference
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.dropout import key_of
from hyper_parallel.shard.layer_kinds import layer_kinds, layers_in
from hyper_parallel.shard.skipped_layers import layers_skipped
from hyper_parallel.step.micro_batch import WEIGHT
from hyper_parallel.step.recipe import GradientRecipe

log = logging.getLogger(__name__)

GAIN = 0.6
"""At most so much of the layers is captured, in both captures together: else all are, once."""
SHORT = 4
"""Layers, in whole periods, between A and B in the short step for trials."""
CALLS = 8
"""Dropouts of one module whose keys are known."""
_NUMBERED = (WEIGHT, UNREDUCED, UNSUMMED)


def captured_by_periods(recipe: GradientRecipe, capture: Callable[[], StepGraph]) -> StepGraph:
    """What `capture` gives for a recipe's model, which it is called for with few of its layers or with all. Errors are
    those of `capture`."""
    handle = recipe.handle
    try:
        plans = _plans(handle)
        for plan in plans:
            try:
                return plan.captured(handle, capture, recipe.seed)
            except Unlike as error:
                log.debug("periods of layers are not alike: %s", error)
    # Whatever stops few layers is told by all of them, or was of the few alone.
    except Exception as error:
        log.debug("periods of layers could not be captured: %s", error.__cause__ or error, exc_info=True)
    return capture()


@dataclass(frozen=True)
class _Plan:
    """What to capture."""

    pair: Pair
    total: int
    """Layers of the model."""
    own_index: Sequence[Mapping[str, Sequence[str]]]

    @property
    def between(self) -> list[int]:
        """The first layers of the periods between A and B."""
        return list(range(self.pair.a + self.pair.length, self.pair.b, self.pair.length))

    @property
    def worthwhile(self) -> bool:
        """Whether little enough is captured, and something is assembled."""
        few = self.total - len(self.between) * self.pair.length
        return len(self.between) > 1 and 2 * few + self.pair.length <= GAIN * self.total

    @uncollected()
    def captured(self, handle: ShardedModel, capture: Callable[[], StepGraph], seed: int) -> StepGraph:
        """The graph of all layers. Raises Unlike."""

        def numbers(module: str) -> list[int]:
            return [key_of(seed, module, call) for call in range(1, 1 + CALLS)]

        two = self._few(handle, capture, [])
        one_more = self.between[:1]
        made = assembled(two, self.pair, one_more, _NUMBERED, numbers)
        three = self._few(handle, capture, one_more)
        differs = difference(made, three)
        if differs is not None:
            raise Unlike(differs)
        found = assembled(two, self.pair, self.between, _NUMBERED, numbers)
        _check_state(found, handle.model)
        few = self.between[: math.ceil(SHORT / self.pair.length)]
        if 2 * len(few) <= len(self.between):
            found.short = partial(assembled, two, self.pair, few, _NUMBERED, numbers)
        return found

    def _few(
        self, handle: ShardedModel, capture: Callable[[], StepGraph], between: Sequence[int]
    ) -> StepGraph:
        """The graph with A, B and these periods between them."""
        length = self.pair.length
        like = {
            first + at: self.pair.a + at
            for first in self.between
            if first not in between
            for at in range(length)
        }
        layers = layers_in(handle.model, handle.plan)
        assert layers is not None
        with layers_skipped(layers, self.pair.prefix, like, self.own_index):
            return capture()


def _plans(handle: ShardedModel) -> list[_Plan]:
    """What may be captured, the likeliest to hold first; nothing for a model whose layers do not repeat, or are few."""
    model = handle.skeleton
    layers = layers_in(handle.model, handle.plan)
    if model is None or layers is None or _shared(layers):
        return []
    period = find_period(_kinds(model, layers, handle), 2)
    if period is None:
        return []
    original = layers_in(model, handle.plan)
    assert original is not None
    assert handle.plan.layers is not None
    indices = own_index(list(original))
    # How many periods in front of A and behind B are captured too.
    ends = [(1, 1), (0, 0)] if handle.strategy.sequence else [(0, 0), (1, 1)]
    pairs = [
        Pair(
            handle.plan.layers,
            period.length,
            period.before + front * period.length,
            period.behind - (1 + behind) * period.length,
        )
        for front, behind in ends
    ]
    plans = [_Plan(pair, period.total, indices) for pair in pairs]
    return [plan for plan in plans if plan.worthwhile]


def _kinds(model: nn.Module, layers: nn.ModuleList, handle: ShardedModel) -> list[list[int]]:
    """Indices of the layers by kind: in the model as it was, and in what it was made."""
    now = [
        [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
        for layer in layers
    ]
    # Layers are recomputed in the graph of all.
    once = handle.strategy.memory.model_copy(update={"recompute": "none", "recompute_layers": None})
    strategy = handle.strategy.model_copy(update={"memory": once})
    found: list[list[int]] = []
    for kind in layer_kinds(model, handle.plan, strategy):
        groups: dict[str, list[int]] = {}
        for index in kind:
            groups.setdefault(repr(now[index]), []).append(index)
        found += groups.values()
    return found


def _shared(layers: nn.ModuleList) -> bool:
    """Whether layers have a module, a parameter or a buffer in common."""
    seen: set[int] = set()
    for layer in layers:
        own = {id(one) for one in (*layer.modules(), *layer.parameters(), *layer.buffers())}
        if own & seen:
            return True
        seen |= own
    return False


def _check_state(step: StepGraph, model: nn.Module) -> None:
    """Raise Unlike where the parameters and buffers that a graph reads are not those of the model."""
    expected = {
        name: (kind, tuple(one.shape), one.stride(), one.dtype)
        for name, (kind, one) in module_state(model).items()
    }
    found = {}
    for entry, node in zip(step.inputs, step.placeholders, strict=True):
        if entry.kind in ("parameter", "buffer"):
            (value,) = values_of(node)
            found[entry.name] = (entry.kind, value.shape, value.stride, value.dtype)
    if list(found.items()) != list(expected.items()):
        raise Unlike("the layers' parameters are not alike")
