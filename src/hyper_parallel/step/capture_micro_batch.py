"""Captures one micro-batch: forward pass, loss and backward pass as one graph, whatever number of them a step has."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hyper_parallel.compat.fake_tensors import faked
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.config.train import LossConfig
from hyper_parallel.graph import StepGraph, capture
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.gradients import UNREDUCED, UNSUMMED, owned
from hyper_parallel.graph.graph_writer import subgraph
from hyper_parallel.graph.guards import Question, Questions
from hyper_parallel.graph.ir import GivenTensor, module_state, values_of
from hyper_parallel.graph.likeness import difference, find_period, own_index
from hyper_parallel.graph.period_pattern import Pair, Unlike
from hyper_parallel.graph.periods import assembled
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.dropout import key_of
from hyper_parallel.shard.forward import documents_known, logits_of
from hyper_parallel.shard.layer_kinds import layer_kinds, layers_in, layers_skipped
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.memory import in_place
from hyper_parallel.shard.saved_gathers import GatherBoundaries
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.micro_batch import (
    LOGITS,
    LOSS,
    MICRO_FIELDS,
    PLACE,
    WEIGHT,
    blank_like,
    blank_micro_batch,
    boundary_values,
    gradients_to,
    loss_of,
    trained,
)
from hyper_parallel.step.recipe import GradientRecipe


def capture_micro_batch(
    recipe: GradientRecipe,
    rows: int,
    length: int,
    micro_batches: int,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> StepGraph:
    """The graph of one of a step's `micro_batches`, of [rows, length] tokens.

    Inputs: ``parameter.<name>``, ``buffer.<name>``, ``micro.<field>``, ``step`` and ``tokens``. Outputs: ``loss``,
    ``gradient.<name>`` of each parameter that has one, reduced over all ranks, ``rows.<experts module>``; and where the
    graph can be cut from what runs once a step: gathered weights ``weight.<n>``, gradients before their reduction over
    shards (``gradient.unreduced:<n>``) and over copies (``gradient.unsummed:<n>``). Who runs the graph adds up what
    it returns. The model was parallelized in the traceable lowering and may be on the meta device. Layers that the
    strategy recomputes are computed once: a pass has them computed again.

    Raises CaptureError where the micro-batch cannot be followed.
    """

    def captured() -> StepGraph:
        return _captured(
            recipe, lambda: blank_micro_batch(rows, length, device), micro_batches, documents, device
        )

    return captured_by_periods(recipe, captured)


def capture_micro_batch_like(
    recipe: GradientRecipe,
    micro: MicroBatch,
    micro_batches: int,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[StepGraph, list[Question]]:
    """As `capture_micro_batch`, with the shapes of `micro` and all that its model takes; and what the model asks of its
    values: the graph is right for inputs with the same answers."""
    questions = Questions(fields_of(micro))
    step = _captured(recipe, lambda: blank_like(micro, device), micro_batches, documents, device, questions)
    return step, questions.asked


def _captured(
    recipe: GradientRecipe,
    blank: Callable[[], MicroBatch],
    micro_batches: int,
    documents: bool,
    device: torch.device | str,
    questions: Questions | None = None,
) -> StepGraph:
    """Of the layers that run."""
    mode = fake_mode_with_symbols()
    boundaries = GatherBoundaries()
    recipe = replace(recipe, handle=replace(recipe.handle, gathers=boundaries), model=recipe.model.train())
    with faked(recipe.model, mode, device):
        with mode:
            micro = blank()
            step = torch.zeros((), dtype=torch.int64, device=device)
            tokens = torch.ones((), device=device)
        inputs = {name: GivenTensor("input", one) for name, one in batch_of(micro, step, tokens).items()}
        names = trained(recipe)
        taken: set[int] = set()
        gradients: dict[str, Tensor] = {}

        def keep(parameter: nn.Parameter, gradient: Tensor | None) -> None:
            if gradient is not None:
                with torch.no_grad():
                    gradients[names[parameter]] = owned(gradient, parameter, taken)

        def body() -> Mapping[str, Tensor]:
            with gradients_to(recipe, keep):
                loss = loss_of(
                    recipe, micro, step, tokens, documents=documents, micro_batches=micro_batches, last=True
                )
            return boundary_values(recipe.handle, boundaries, loss, gradients)

        context = replace(current_step(), recompute_in_graph=True, micro_batch=0)
        try:
            with mode, context.installed():
                found = capture(
                    body,
                    {**module_state(recipe.model), **inputs},
                    recipe.model,
                    lambda: gradients,
                    questions=questions,
                )
                found.groups = recipe.handle.axes.process_groups()
                found.balanced = context.even_load is not None and bool(recipe.handle.plan.experts)
        finally:
            # Let go of what the capture has computed.
            gradients.clear()
            if recipe.handle.routing is not None:
                recipe.handle.routing.counts.clear()
    return in_place(found, recipe.handle)


def without_boundaries(step: StepGraph) -> StepGraph:
    """A captured micro-batch that returns the loss, the gradients and the counts, and nothing to be cut at."""
    wanted = {
        name: node
        for name, node in step.returned.items()
        if not name.startswith((WEIGHT, UNREDUCED, UNSUMMED))
    }
    return subgraph(step, wanted, {}, "parameter", "backward", effects=True)


ForwardOutputs = Callable[[nn.Module, MicroBatch], dict[str, Tensor]]
"""What a forward pass without gradients computes of a micro-batch, by name."""


def summed_loss(loss: LossConfig | None) -> ForwardOutputs:
    """``loss``: the sum over the tokens of held-out rows."""
    return lambda model, micro: {
        LOSS: causal_lm_loss(
            model,
            micro.input_ids,
            micro.labels,
            micro.position_ids,
            1.0,
            loss,
            micro_batches=1,
            **micro.extra,
        )
    }


def next_logits(model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
    """``logits``, fp32 [V]: of the token behind ``extra["place"]``, int64 [1], of the first row."""
    extra = dict(micro.extra)
    place = extra.pop(PLACE)
    logits = logits_of(model, micro.input_ids, micro.position_ids, **extra)
    return {LOGITS: logits[0].index_select(0, place)[0].float()}


def capture_evaluation(
    recipe: GradientRecipe,
    blank: Callable[[], MicroBatch],
    outputs: ForwardOutputs,
    *,
    documents: bool = False,
    device: torch.device | str = "cpu",
    questions: Questions | None = None,
) -> StepGraph:
    """The graph of a forward pass without gradients or dropout. `blank`: makes rows of its shapes; `questions`: answers
    and keeps what the model asks of their values, which is refused when left out.

    Inputs as of `capture_micro_batch`, without ``step`` and ``tokens``; outputs: what `outputs` gives, and gathered
    weights. Raises CaptureError where the forward pass cannot be followed.
    """
    mode = fake_mode_with_symbols()
    boundaries = GatherBoundaries()
    model, handle = recipe.model, replace(recipe.handle, gathers=boundaries)
    training = model.training
    with faked(model, mode, device):
        with mode:
            micro = blank()

        def body() -> Mapping[str, Tensor]:
            with documents_known(documents), handle.micro_batch(), torch.no_grad():
                found = outputs(model, micro)
            return {**found, **{f"{WEIGHT}{n}": one for n, one in enumerate(boundaries.gathered)}}

        inputs = {name: GivenTensor("input", one) for name, one in fields_of(micro).items()}
        try:
            with mode, replace(current_step(), micro_batch=0).installed():
                found = capture(body, {**module_state(model.eval()), **inputs}, model, questions=questions)
                found.groups = handle.axes.process_groups()
        finally:
            model.train(training)
    return found


def fields_of(micro: MicroBatch) -> dict[str, Tensor]:
    """What the graph of an evaluation is given besides the model's state."""
    given = {**{key: getattr(micro, key) for key in MICRO_FIELDS}, **micro.extra}
    return {f"micro.{key}": value for key, value in given.items()}


def batch_of(micro: MicroBatch, step: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What a micro-batch's graph is given besides the model's state."""
    return {**fields_of(micro), "step": step, "tokens": tokens}


# Captures a step with a few of the model's layers, and assembles the graph of all (`graph.periods`).
#
# Two periods of layers are captured, and three; the graph that is assembled from the two for three must be the graph
# that was captured with three, node by node. Then, and if what all layers have is what the plan and the model say they
# have, the graph of all layers is assembled. Where any of it does not hold, all layers are captured, which is as right
# and slower:
#
#     layers      0 1 2 … 79       the period is one layer, 80 times
#     captured    0 79             A and B
#                 0 1 79           must be what is assembled from A and B
#     assembled   0 1 2 … 79
#
# Where the first or the last layer is unlike the others (one behind a frozen embedding has no gradient to hand on), the
# periods between them are taken for A and B. Under sequence parallelism they are: the first layer is handed what was
# split, and the last one hands on what is gathered; there the periods between them are tried first.

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
class FewLayers:
    """Graphs of a step with few of a model's layers, which are alike but for those in front."""

    total: int
    """Layers of the model."""
    first: int
    """Layers in front of those that are repeated, the first of these included."""
    least: int
    """Layers of the smallest graph."""
    prefix: str
    """Of the layers' names."""
    assemble: Callable[[Sequence[int]], StepGraph]

    def layers(self, count: int) -> list[int]:
        """The indices of the layers of the graph that has so many."""
        behind = self.least - self.first
        return [*range(count - behind), *range(self.total - behind, self.total)]

    def graph(self, count: int) -> StepGraph:
        """The graph with so many layers."""
        return self.assemble(self.layers(count)[self.first : self.first + count - self.least])


def captured_few(recipe: GradientRecipe, capture: Callable[[], StepGraph]) -> FewLayers | None:
    """The graphs that `capture` gives with few layers of a recipe's model; None where these do not follow each other
    alike. Errors are those of `capture`."""
    handle = recipe.handle
    for plan in _plans(handle):
        first, behind = plan.pair.a + plan.pair.length, plan.total - plan.pair.b
        if plan.pair.length == 1:
            try:
                found = plan.assembler(handle, capture, recipe.seed)
            except Unlike as error:
                log.debug("layers are not alike: %s", error)
            else:
                return FewLayers(plan.total, first, first + behind, plan.pair.prefix, found)
    return None


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
        assemble = self.assembler(handle, capture, seed)
        found = assemble(self.between)
        _check_state(found, handle.model)
        few = self.between[: math.ceil(SHORT / self.pair.length)]
        if 2 * len(few) <= len(self.between):
            found.short = partial(assemble, few)
        return found

    def assembler(
        self, handle: ShardedModel, capture: Callable[[], StepGraph], seed: int
    ) -> Callable[[Sequence[int]], StepGraph]:
        """What assembles the graph with these periods between A and B. Raises Unlike."""

        def numbers(module: str) -> list[int]:
            return [key_of(seed, module, call) for call in range(1, 1 + CALLS)]

        two = self._few(handle, capture, [])

        def assemble(between: Sequence[int]) -> StepGraph:
            return assembled(two, self.pair, between, _NUMBERED, numbers)

        one_more = self.between[:1]
        differs = difference(assemble(one_more), self._few(handle, capture, one_more))
        if differs is not None:
            raise Unlike(differs)
        return assemble

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
