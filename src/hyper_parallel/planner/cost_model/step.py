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

from hyper_parallel.planner.columns import UNKNOWN
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import (
    ParameterCounts,
    element_bytes,
    held,
    layer_matrices,
    module_matrices,
    trained,
)
from hyper_parallel.planner.cost_model.layer import Layer, layer
from hyper_parallel.planner.cost_model.memory import by_stage, fits, handed, memory
from hyper_parallel.planner.cost_model.operators import Products, Ranks, moved
from hyper_parallel.planner.cost_model.pipeline import bubble, micro_batches, pace
from hyper_parallel.planner.table import Array, Table, sum_of


@dataclass(frozen=True)
class Estimate:
    """The estimates of the closed forms for each row of a table."""

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
    # Collectives of a stage's own mesh are waited for where they begin (docs/pipelines.md).
    turns = (t.ordered > 0) & (t.pipeline > 1)
    forward = np.where(turns, one.forward + shared.forward, forward)
    backward = np.where(turns, one.backward + one.again + shared.backward, backward)
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


# The embedding, the head and the loss of a micro-batch, and modules that predict one token more.
#
#     head = 3 · [T, h] · [h, V / P] in 16 bits + T V / P · 22 bytes + T h · 12 bytes        `head`
#
# The vocabulary is split over the tensor axes (P ranks). A logit is written in 16 bits, read as 32, and its maximum,
# exponential, sum and gradient go through memory five times in 32; the loss is rarely fused. The embedding's lookup and
# its gradient's sums are T · h, moved. A frozen head has no gradient of its weight: two products.
#
#     module = layer · (its matrices / a mean's) + 3 · [T, 2 h] · [2 h, h] + head     `prediction_modules`
#
# A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) has its own layer, a projection
# of the last hidden state beside the next token's embedding, and the model's head again; it runs on the last stage.

LOGIT_BYTES = 22.0


def head(t: Table, k: Constants) -> Array:
    """Seconds of a micro-batch, forward and backward."""
    tokens = t.micro * t.sequence / t.context
    ranks = t.tensor_x * t.tensor_y
    columns = t.vocabulary / ranks
    products = (3 - t.frozen) * Products(t, k, linear=False)(tokens, columns, t.hidden)
    ratio = t.head_ratio * (1 - t.head_squared + t.head_squared / ranks)
    return ratio * (products + moved(t, k, tokens * (columns * LOGIT_BYTES + 12 * t.hidden)))


def prediction_modules(t: Table, k: Constants, layer: Array) -> Array:
    """Seconds of a micro-batch's modules, forward and backward; `layer`: of a layer's passes."""
    if not np.any(t.prediction_modules > 0):
        return np.zeros(1)
    tokens = t.micro * t.sequence / t.context
    projection = 3 * Products(t, k)(tokens, t.hidden / (t.tensor_x * t.tensor_y), 2 * t.hidden)
    # Where layers are blocks of either a mixer or an MLP, a module is not as a mean one of them.
    layer = layer * module_matrices(t) / layer_matrices(t)
    return t.prediction_modules * (layer + projection + head(t, k))


# Per-step costs outside micro-batches: gradient reduction, weight gathers, optimizer.
#
# **Gradients** of N parameters on n ranks that see other tokens are reduced and, where the optimizer's state is split
# (ZeRO-1, 2; Rajbhandari et al., arXiv 1910.02054), new parameters gathered:
#
#     gather((gradient bytes + e) N)      as `RankGroup.gather`; an all-reduce of gradients costs as much or more
#
# e are the bytes that a weight is computed in: 2, in float32 4.
# `hidden_data` of it goes beside the backward pass where a framework does so, as far as that lasts; some do not where
# the optimizer's state is split (`overlap_split`). Experts are reduced
# over the ranks that share them.
#
# **Gathered weights** (ZeRO-3): each layer's, before each of its passes; gradients are scattered as they come, by
# `train` with ZeRO-2 too (`scatters_early`). What takes longer than the pass shows, and the rest slows the pass it runs
# beside by `beside` (13% on NVLink: Galvatron, arXiv 2211.13878; Calculon has 15% there and 2% on InfiniBand). Where it
# slows the pass by its whole time, as workers do whose cores move what they send, the two take turns. Exchanges of
# experts that go beside the same pass (`Profile.ordered`) use the same links: a pass takes at least what gathers and
# exchanges take one after the other (`overlapped_pass`).
#
# **The optimizer** reads and writes 28 bytes a parameter of Adam in mixed precision: gradient, master value, two
# moments, and the parameter. State that lies in the host's memory is fetched and stored beside the passes, activations
# too; what does not fit there shows (HyperOffload, arXiv 2602.00748).

UPDATE_BYTES = 28.0
"""Read and written a parameter: gradient 4, master 8, moments 16; the parameter's 2 are within what is rounded here."""


@dataclass(frozen=True)
class Gathered:
    """Seconds of a layer's gathers over `shard` and of its gradients' scatters, in each pass of a micro-batch; 0 where
    it has none of its own."""

    forward: Array
    backward: Array


def gathered(t: Table, ranks: Ranks, held: ParameterCounts, trained: ParameterCounts) -> Gathered:
    """Weights of a mean layer: gathered forward, and backward with gradients of what is trained scattered."""
    whole, early = t.zero >= 3, scatters_early(t)
    if not np.any(whole | early):
        return Gathered(np.zeros(1), np.zeros(1))
    group = ranks.gathering
    # Experts that nothing spreads are split and gathered as the rest of a layer is.
    alike = ranks.of_experts <= 1
    size = np.where(t.frozen > 0, np.minimum(t.frozen_bytes, element_bytes(t)), element_bytes(t))

    def once(size: Array, counts: ParameterCounts, rows: npt.NDArray[np.bool_]) -> Array:
        spread = ranks.reducing_experts.gather(size * counts.experts)
        experts = np.where(alike, group.gather(size * counts.experts), spread)
        # Of models of few layers, embedding and head are a good part of what is gathered.
        ends = t.ordered * (2 - t.tied) * counts.embedding / t.layers
        seconds = group.gather(size * (counts.layer + ends)) + np.where(counts.experts > 0, experts, 0.0)
        return np.where(rows & (group.ranks > 1), seconds, 0.0)

    forward = once(size, held, whole)
    narrow = trained is held and not np.any(early | (t.scatter_bytes > element_bytes(t)))
    scattered = (
        forward if narrow else once(np.maximum(t.scatter_bytes, element_bytes(t)), trained, whole | early)
    )
    if np.any(t.ordered * t.replicate > 1):
        # Copies of the parameters add up what was scattered.
        parts = np.maximum(t.scatter_bytes, element_bytes(t)) * trained.layer / group.ranks
        added = np.where((t.zero >= 3) & (t.replicate > 1), t.ordered * ranks.copies.reduce(parts), 0.0)
        scattered = scattered + added
    return Gathered(forward, forward + scattered)


def scatters_early(t: Table) -> npt.NDArray[np.bool_]:
    """Where ZeRO-2 scatters the gradients of each micro-batch, so that ranks add up their parts of them."""
    return np.asarray((t.ordered > 0) & (t.zero == 2), dtype=np.bool_)


def overlapped_pass(
    k: Constants, busy: Array, collective: Array, sent: Array | float = 0.0, hidden: Array | float = 0.0
) -> Array:
    """Seconds of a pass with a collective beside it.

    `sent`: exchanges that take turns with it on the links; `hidden` seconds of them also go beside the pass; what is
    not hidden is a part of `busy`. A pass lasts at least as long as its links are in use.
    """
    if k.beside >= 1.0:
        return busy + collective
    share = np.minimum(1.0, (collective + hidden) / np.maximum(busy, 1e-12))
    return np.maximum(busy * (1 + k.beside * share), collective + sent)


def reduced(
    t: Table, k: Constants, ranks: Ranks, held: ParameterCounts, stage_layers: Array, stage: Array
) -> Array:
    """Seconds of the gradients' reduction that nothing hides; `stage` is a micro-batch's time on a stage."""
    elements = stage_layers * held.layer + held.embedding
    # Gradients that were scattered before are added up over copies of their parts alone.
    early = scatters_early(t) & (t.replicate <= 1)
    bytes = np.where(early, 0.0, t.gradient_bytes) + element_bytes(t)
    seconds = np.where(ranks.same > 1, ranks.reducing.gather(bytes * elements), 0.0)
    if np.any(t.experts > 0):
        experts = stage_layers * held.experts
        shared = ranks.same * ranks.tensor > ranks.of_experts
        seconds = seconds + np.where(
            (t.experts > 0) & shared, ranks.reducing_experts.gather(bytes * experts), 0.0
        )
    # Weights split for good are reduced layer by layer, which `gathered` counts.
    seconds = np.where(t.zero >= 3, 0.0, seconds)
    beside = t.overlap_data * np.where(t.zero >= 1, t.overlap_split, 1.0)
    hidden = np.minimum(k.hidden_data * seconds, 0.7 * stage) * beside
    return seconds - hidden


def summed(t: Table, k: Constants, held: ParameterCounts, stage_layers: Array) -> Array:
    """Seconds of adding a micro-batch's gradients of a rank to those before it.

    A product that adds into the sum reads and writes it; where none does, the gradient is written and read besides,
    and by `train` in the sum's dtype, to which it is cast.
    """
    elements = stage_layers * (held.layer + held.experts) + held.embedding
    cast = t.ordered * (2 * t.gradient_bytes - element_bytes(t))
    bytes = 2 * t.gradient_bytes + np.where(t.fused >= 1, 0.0, 4.0) + cast
    # Whole gradients do not outlive a layer where parameters are split for good.
    return np.where(t.zero >= 3, t.weight_traffic, bytes) * elements / (t.hbm * k.memory)


def updated(
    t: Table, k: Constants, ranks: Ranks, held: ParameterCounts, stage_layers: Array
) -> tuple[Array, Array]:
    """Seconds of the update, and bytes of state that it works on, on a rank."""
    sharded = np.where(t.zero >= 1, t.shard * t.context, 1.0)
    experts_sharded = np.where(t.zero >= 1, np.maximum(sharded * ranks.tensor / ranks.of_experts, 1.0), 1.0)
    elements = (
        stage_layers * held.layer + held.embedding
    ) / sharded + stage_layers * held.experts / experts_sharded
    return UPDATE_BYTES * elements / (t.hbm * k.memory), t.state_bytes * elements


def fetched(t: Table, state: Array, passes: tuple[Array, Array], times: Array) -> Array:
    """Seconds that copies to the host and back add to a step.

    `passes`: of a micro-batch on a stage, forward and backward; `times`: how many there are in a step. Activations go
    out beside the forward pass that makes them and come back beside the backward pass that needs them; state goes both
    ways at once, beside what is left of the passes. Parameters come for each pass of a micro-batch, and gradients come
    and go with each: a lower bound, which leaves out that a layer's wait for the layer before.
    """
    if not np.any((t.state_on_host > 0) | (t.activations_on_host > 0) | (t.weights_on_host > 0)):
        return np.zeros(1)
    rate = np.maximum(t.host_rate, 1.0)
    forward, backward = passes
    left = t.activations_on_host * handed(t) / rate
    late = times * (np.maximum(left - forward, 0.0) + np.maximum(left - backward, 0.0))
    free = times * np.maximum(np.minimum(forward, backward) - left, 0.0) * 2
    coming = t.state_on_host * state + t.weights_on_host * times * _weights_fetched(t)
    return np.asarray(late + np.maximum(coming / rate - free, 0.0))


def _weights_fetched(t: Table) -> Array:
    """Bytes that come from the host in a micro-batch where all weights lie there: parameters twice, gradients once."""
    if not np.any(t.weights_on_host > 0):
        return np.zeros(1)
    most: Array = np.zeros(1)
    for kinds in by_stage(t.replaced(weights_on_host=0.0)):
        most = np.maximum(most, 2 * kinds["parameters"] + kinds["gradients"])
    return most
