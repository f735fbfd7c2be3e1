"""Costs of a layer as `train` runs it, read off the captured step of the model that is asked for.

The closed forms count the operators of a decoder that nobody has captured. What `train` runs is known better: its step
is captured with few layers, with data parallelism alone and without recomputation, at two lengths of a sequence, and
its operators are priced on the cluster as `simulate` prices them. Ratios to the closed forms of the same step are
columns of the profile (`Profile.products_ratio` and those below it), by which the search prices every other strategy:

| ratio | of |
|---|---|
| products, attention | seconds of the layers' operators of that kind |
| elementwise | how the seconds of the layers' other operators grow with the tokens |
| unsplit | the share of these that remains on each rank when a tensor axis of two is captured too |
| kernel seconds | what the number of these operators costs, whatever their size |
| weight traffic | what they take besides at no tokens: casts and copies of gathered weights and of gradients |
| head | seconds of everything in the loss |
| head squared | the share of these that falls with the square of the tensor axes: fewer, smaller chunks of logits |
| saved | how the bytes grow with the tokens that the forward pass leaves for the backward pass |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate.build_trace import trace_of
from hyper_parallel.estimate.predict import prices_views
from hyper_parallel.estimate.prediction import model_of
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.planner.columns import Profile
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.cost_model.dims import held
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import planned_run_file
from hyper_parallel.planner.table import Table
from hyper_parallel.trace import Op

RANKS = (8, 512)
"""Of the captured step: all devices, or where these spread experts what holds one of them, but within these bounds. Of
Llama-3-8B each gathered weight is copied once more on 64 ranks, and none on 8."""
MICRO_BATCHES = 2
"""Of the captured step, so that gradients are added up."""
SHORTEST = 256
"""Tokens of the shorter sequence, at least; below twice as many one length is captured, and taken to have no
traffic."""


@dataclass(frozen=True)
class _Measured:
    """One captured step."""

    products: float
    """Seconds, of layers."""
    attention: float
    other: float
    head: float
    """Seconds of the loss."""
    launches: float
    """Of `other`: what kernels cost whatever their size."""
    activations: float
    """Bytes that the forward pass leaves for the backward pass."""


def engine_profile(
    question: Question, model: Mapping[str, Any] | None, say: Callable[[str], None]
) -> Profile:
    """The question's profile with the ratios of its model. Raises as `predict_run`."""
    long = question.workload.sequence
    short = long // 2
    ranks = _ranks(question)
    say("capturing a few layers, to price them as train runs them")
    at_long, plain = _measured(question, model, long, ranks)
    other, head, traffic = at_long.other - at_long.launches, at_long.head, 0.0
    counted, saved = plain.parts, 1.0
    if short >= SHORTEST:
        at_short, plain_short = _measured(question, model, short, ranks)
        # What does not grow with the tokens is of the weights, or of the number of kernels.
        other, head = (2 * (getattr(at_long, one) - getattr(at_short, one)) for one in ("other", "head"))
        traffic = max(at_long.other + at_long.head - other - head - at_long.launches, 0.0)
        counted = {name: 2 * (counted[name] - plain_short.parts[name]) for name in counted}
        grown = plain.memory["activations"] - plain_short.memory["activations"]
        saved = _ratio(at_long.activations - at_short.activations, grown)
    row, weights = plain.row, held(plain.row)
    elements = row.layers * weights.all() + weights.embedding
    bandwidth = row.hbm * constants_for(question.profile, question.cluster).memory
    unsplit, squared = _split(question, model, ranks, other, traffic, at_long.head)
    return replace(
        question.profile,
        products_ratio=at_long.products / plain.parts["products"],
        attention_ratio=_ratio(at_long.attention, plain.parts["attention"]),
        elementwise_ratio=_ratio(other, counted["elementwise"]),
        kernel_seconds=at_long.launches / (question.workload.shape.layers * MICRO_BATCHES),
        head_ratio=_ratio(head, counted["head"]),
        saved_ratio=saved,
        weight_traffic=float((traffic * bandwidth / elements)[0]) / MICRO_BATCHES,
        unsplit=unsplit,
        head_squared=squared,
    )


def _ranks(question: Question) -> int:
    """Of the captured step."""
    few, most = RANKS
    each = question.devices // max(int(question.workload.shape.experts), 1)
    return min(max(each, few), most, question.devices)


def _split(
    question: Question, model: Mapping[str, Any] | None, ranks: int, other: float, traffic: float, head: float
) -> tuple[float, float]:
    """`Profile.unsplit` and `Profile.head_squared`, of the layers' operators, their traffic and the head without a
    tensor axis; 0 where the model cannot be split over one of two, or the question has none.

    Of two ranks each has (1 + unsplit) / 2 of `other`, and (1 - squared) / 2 + squared / 4 of `head`.
    """
    if ranks < 2 or min(other, head) <= 0:
        return 0.0, 0.0
    if all(question.fix.get(axis) == 1 for axis in ("tensor_x", "tensor_y")):
        return 0.0, 0.0
    try:
        split, _ = _measured(question, model, question.workload.sequence, ranks, tensor=2)
    except HyperParallelError:
        return 0.0, 0.0
    unsplit = 2 * (split.other - split.launches - traffic / 2) / other - 1
    squared = 2 - 4 * split.head / head
    return min(max(unsplit, 0.0), 1.0), min(max(squared, 0.0), 1.0)


def _ratio(captured: float, counted: float) -> float:
    """1 where the model has no such operators."""
    return captured / counted if captured > 0 and counted > 0 else 1.0


def _measured(
    question: Question, model: Mapping[str, Any] | None, sequence: int, ranks: int, tensor: int = 1
) -> tuple[_Measured, Figures]:
    """A step with one sequence in a micro-batch, captured and priced; and the closed forms of it."""
    shards = ranks // tensor
    work = replace(
        question.workload,
        batch=shards * MICRO_BATCHES,
        sequence=sequence,
        # Of what `train` has: fewer bits, and modules of more tokens, are counted by the closed forms alone.
        precision="fp32" if question.workload.precision == "fp32" else "bf16",
        prediction_modules=0,
    )
    asked = replace(question, workload=work, devices=ranks, fix={}, top=1)
    table = Table.of(work, question.cluster, question.profile, devices=float(ranks)).replaced(
        shard=float(shards),
        tensor_x=float(tensor),
        sequence_parallel=float(tensor > 1),
        zero=3.0 if shards > 1 else 0.0,
        recomputed=1.0,
    )
    plain = figures(table, estimate(table, constants_for(question.profile, question.cluster)))[0]
    run = config.from_dict(planned_run_file(plain, asked, model).data, source="the planned file")
    return _priced(run, question.cluster.for_workers(ranks)), plain


def _priced(run: RunConfig, cluster: Cluster) -> _Measured:
    """The operators of a run's step on a cluster, in the order of the model's code."""
    assert cluster.device is not None
    world = run.effective_strategy.axes.world
    views = prices_views(cluster)
    with replace(current_step(), pads_values=not views).installed():
        trace = trace_of(
            model_of(run, []),
            run,
            dict.fromkeys(range(world), "all"),
            views=views,
            passes_of=lambda strategy: passes(strategy, cluster, ordered=False),
        )
    seconds: defaultdict[str, float] = defaultdict(float)
    launches = 0.0
    for op in trace.ops["all"]:
        if op.work is None or op.phase not in ("forward", "loss", "backward"):
            continue
        kind = op.work.kind if op.work.kind in ("matmul", "attention") else "other"
        seconds["head" if op.phase == "loss" else kind] += cluster.device.seconds(op.work)
        if kind == "other" and op.phase != "loss":
            launches += cluster.device.launch_seconds(op.work)
    return _Measured(
        seconds["matmul"],
        seconds["attention"],
        seconds["other"],
        seconds["head"],
        launches,
        _saved(trace.ops["all"]),
    )


def _saved(ops: Sequence[Op]) -> float:
    """Bytes that the layers' forward pass of the first micro-batch leaves for its backward pass."""
    alive: dict[int, int] = {}
    for op in ops:
        if op.phase == "backward":
            break
        if op.phase == "forward":
            alive |= {held.storage: held.bytes for held in op.allocates if held.kind == "activation"}
        for storage in op.frees:
            alive.pop(storage, None)
    return float(sum(alive.values()))
