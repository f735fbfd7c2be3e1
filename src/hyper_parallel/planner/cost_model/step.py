"""Estimate of a step: seconds and bytes by kind, and whether it fits.

    step = (m · pace + sends + bubble + gradients + optimizer + host + fixed) · (1 + s log₂(devices / 8))     `estimate`

m micro-batches at the pace of the slowest stage (`pipeline`), whose time is that of its layers (`layer`) and of the
head (`head`). s is `straggling`: the more devices, the slower the slowest of them (MegaScale, arXiv 2402.15627,
section 5). `parts` add up to the step; each is what it adds to the critical path:

| part | what |
|---|---|
| products, attention, elementwise | arithmetic of layers, forward and backward |
| again | what is computed once more |
| head | embedding, head and loss, and modules that predict one token more |
| tensor, expert, context | collectives of layers that are not hidden |
| gathers | weights that are split for good (ZeRO-3), and exchanges beside them, beyond what computation hides |
| launches | the host's, where the device waits for it |
| uneven | the slowest stage's time beyond the mean stage's |
| bubble, sends | the pipeline |
| sums | gradients of micro-batches added up |
| gradients | reduction that is not hidden |
| optimizer, host | update; copies from and to the host that are not hidden |
| fixed, straggling | |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.head import head, prediction_modules
from hyper_parallel.planner.cost_model.layer import Layer, layer
from hyper_parallel.planner.cost_model.memory import fits, memory
from hyper_parallel.planner.cost_model.optimizer_step import (
    fetched,
    gathered,
    overlapped_pass,
    reduced,
    summed,
    updated,
)
from hyper_parallel.planner.cost_model.parameters import held, trained
from hyper_parallel.planner.cost_model.pipeline import bubble, micro_batches, pace
from hyper_parallel.planner.cost_model.rank_groups import Ranks
from hyper_parallel.planner.profile import UNKNOWN
from hyper_parallel.planner.table import Array, Table, sum_of


@dataclass(frozen=True)
class Estimate:
    """What the closed forms say of each row of a table."""

    seconds: Array
    """Of a step."""
    fastest: Array
    """The same with every fact that the framework leaves open for it, and against it (`open_facts`)."""
    slowest: Array
    parts: dict[str, Array]
    """Seconds by kind; they add up to `seconds`."""
    memory: dict[str, Array]
    """Bytes by kind of the fullest rank; they add up to `peak`."""
    peak: Array
    fits: npt.NDArray[np.bool_]
    """Whether the peak, with what an allocator loses, is within the device's memory, and every stage has work."""


def estimate(t: Table, k: Constants) -> Estimate:
    """Time and memory of each row."""
    parts = seconds_by_kind(t, k)
    seconds = sum_of(parts)
    bytes = memory(t)
    peak = sum_of(bytes)
    return Estimate(seconds, *open_facts(t, k, seconds), parts, bytes, peak, fits(t, peak, k))


def open_facts(t: Table, k: Constants, seconds: Array) -> tuple[Array, Array]:
    """Seconds with every fact that is open for a step, and against it; both are `seconds` where none is open.

    Open is a column of UNKNOWN between 0 and 1, in a model with experts: whether routing is even, a token crosses the
    network once, exchanges run beside computation, kernels are recorded.
    """
    values = {name: getattr(t, name) for name in UNKNOWN}
    unsettled = {name: (value > 0) & (value < 1) & (t.experts > 0) for name, value in values.items()}
    if not any(np.any(rows) for rows in unsettled.values()):
        return seconds, seconds

    def settled(value: float) -> Array:
        facts = {name: np.where(rows, value, values[name]) for name, rows in unsettled.items()}
        return sum_of(seconds_by_kind(t.replaced(**facts), k))

    return np.minimum(settled(1.0), seconds), np.maximum(settled(0.0), seconds)


def seconds_by_kind(t: Table, k: Constants) -> dict[str, Array]:
    """Seconds of a step by kind; see the module's table."""
    ranks, own = Ranks(t, k), held(t)
    learning = trained(t, own)
    one = layer(t, k, ranks)
    shared = gathered(t, ranks, own, learning)
    # What is computed again sends its tokens again.
    twice = 1 + np.where(t.recompute == 2, t.recomputed, 0.0)
    forward = overlapped_pass(k, one.forward, shared.forward, one.sent, one.hidden)
    backward = overlapped_pass(
        k, one.backward + one.again, shared.backward, twice * one.sent, twice * one.hidden
    )
    passes = forward + backward
    top = head(t, k) + prediction_modules(t, k, passes)
    m = micro_batches(t)
    stage = pace(t, passes, top)
    even = (t.layers * passes + top) / t.pipeline
    boundary = 2 * t.micro * t.sequence / t.context * t.hidden
    # Each tensor rank sends its part to the next node, where it is gathered (arXiv 2104.04473, section 4.1). A stage
    # hands on what it computed and its gradient for each of its parts; overlapped where collectives are.
    one_way = ranks.stages.send(boundary / ranks.tensor)
    one_way = one_way + np.where(
        (t.sequence_parallel > 0) | (ranks.tensor <= 1), 0.0, ranks.x.gather(boundary)
    )
    sends = 2 * t.virtual * one_way * (1 - 0.7 * np.minimum(t.overlap_tensor, 1.0))
    sends = np.where(t.pipeline > 1, sends, 0.0)
    weights = t.layers / t.pipeline * one.weights
    stage_layers = t.layers / t.pipeline
    optimizer, state = updated(t, k, ranks, learning, stage_layers)
    # How many layers' passes the slowest stage makes: copies to the host hide beside them, not beside the head.
    share = stage / np.maximum(passes, 1e-12) * (t.layers * passes / (t.layers * passes + top))
    parts = {
        **_of_layers(one, m * stage_layers, passes),
        "head": m * top / t.pipeline,
        "uneven": m * np.maximum(stage - even, 0.0),
        "bubble": bubble(t, stage + sends, weights),
        "sends": m * sends,
        "sums": m * summed(t, k, learning, stage_layers),
        "gradients": reduced(t, k, ranks, learning, stage_layers, stage),
        "optimizer": optimizer,
        "host": fetched(t, state, (share * forward, share * backward), m),
        "fixed": np.full(1, k.fixed),
    }
    parts["straggling"] = sum_of(parts) * k.straggling * np.log2(np.maximum(t.devices / 8, 1.0))
    return parts


def _of_layers(one: Layer, times: Array, passes: Array) -> dict[str, Array]:
    """What the passes of layers consist of; `times` of them on a rank in a step."""
    kinds = {
        "products": one.products + one.products_backward,
        "attention": 3.5 * one.attention,
        "elementwise": 2.6 * one.elementwise,
        "again": one.again,
        "tensor": 2 * one.apart.tensor,
        "expert": 2 * one.apart.expert,
        "context": one.apart.context_forward + one.apart.context_backward,
    }
    busy = one.forward + one.backward + one.again
    kinds["launches"] = np.maximum(busy - sum_of(kinds), 0.0)
    kinds["gathers"] = passes - busy
    return {name: times * seconds for name, seconds in kinds.items()}
