"""Per-step costs outside micro-batches: gradient reduction, weight gathers, optimizer.

**Gradients** of N parameters on n ranks that see other tokens are reduced and, where the optimizer's state is split
(ZeRO-1, 2; Rajbhandari et al., arXiv 1910.02054), new parameters gathered:

    gather((gradient bytes + e) N)      as `RankGroup.gather`; an all-reduce of gradients costs as much or more

e are the bytes that a weight is computed in: 2, in float32 4.
`hidden_data` of it goes beside the backward pass where a framework does so, as far as that lasts; some do not where
the optimizer's state is split (`overlap_split`). Experts are reduced
over the ranks that share them.

**Gathered weights** (ZeRO-3): each layer's, before each of its passes; gradients are scattered as they come. What takes
longer than the pass shows, and the rest slows the pass it runs beside by `beside` (13% on NVLink: Galvatron, arXiv
2211.13878; Calculon has 15% there and 2% on InfiniBand). Where it slows the pass by its whole time, as workers do whose
cores move what they send, the two take turns. Exchanges of experts that go beside the same pass (`Profile.ordered`) use
the same links: a pass takes at least what gathers and exchanges take one after the other (`overlapped_pass`).

**The optimizer** reads and writes 28 bytes a parameter of Adam in mixed precision: gradient, master value, two moments,
and the parameter. State that lies in the host's memory is fetched and stored beside the passes, activations too; what
does not fit there shows (HyperOffload, arXiv 2602.00748).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import element_bytes
from hyper_parallel.planner.cost_model.memory import by_stage, handed
from hyper_parallel.planner.cost_model.parameters import ParameterCounts
from hyper_parallel.planner.cost_model.rank_groups import Ranks
from hyper_parallel.planner.table import Array, Table

UPDATE_BYTES = 28.0
"""Read and written a parameter: gradient 4, master 8, moments 16; the parameter's 2 are within what is rounded here."""


@dataclass(frozen=True)
class Gathered:
    """Seconds of a layer's gathers over `shard`, in each pass; 0 below ZeRO-3."""

    forward: Array
    backward: Array


def gathered(t: Table, ranks: Ranks, held: ParameterCounts, trained: ParameterCounts) -> Gathered:
    """Weights of a mean layer: gathered forward, and backward with gradients of what is trained scattered."""
    if not np.any(t.zero >= 3):
        return Gathered(np.zeros(1), np.zeros(1))
    group = ranks.gathering
    # Experts that nothing spreads are split and gathered as the rest of a layer is.
    alike = ranks.of_experts <= 1
    size = np.where(t.frozen > 0, np.minimum(t.frozen_bytes, element_bytes(t)), element_bytes(t))

    def once(size: Array, counts: ParameterCounts) -> Array:
        spread = ranks.reducing_experts.gather(size * counts.experts)
        experts = np.where(alike, group.gather(size * counts.experts), spread)
        # Of models of few layers, embedding and head are a good part of what is gathered.
        ends = t.ordered * (2 - t.tied) * counts.embedding / t.layers
        seconds = group.gather(size * (counts.layer + ends)) + np.where(counts.experts > 0, experts, 0.0)
        return np.where((t.zero >= 3) & (group.ranks > 1), seconds, 0.0)

    forward = once(size, held)
    narrow = trained is held and not np.any(t.scatter_bytes > element_bytes(t))
    scattered = forward if narrow else once(np.maximum(t.scatter_bytes, element_bytes(t)), trained)
    if np.any(t.ordered * t.replicate > 1):
        # Copies of the parameters add up what was scattered.
        parts = np.maximum(t.scatter_bytes, element_bytes(t)) * trained.layer / group.ranks
        added = np.where((t.zero >= 3) & (t.replicate > 1), t.ordered * ranks.copies.reduce(parts), 0.0)
        scattered = scattered + added
    return Gathered(forward, forward + scattered)


def overlapped_pass(
    k: Constants, busy: Array, collective: Array, sent: Array | float = 0.0, hidden: Array | float = 0.0
) -> Array:
    """Seconds of a pass with a collective beside it.

    `sent`: exchanges that take turns with it on the links, of which `hidden` seconds also go beside the pass; what is
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
    bytes = t.gradient_bytes + element_bytes(t)
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

    A product that adds into the sum reads and writes it; where none does, the gradient is written and read besides.
    """
    elements = stage_layers * (held.layer + held.experts) + held.embedding
    bytes = 2 * t.gradient_bytes + np.where(t.fused >= 1, 0.0, 4.0)
    # Whole gradients do not outlive a layer where parameters are split for good.
    return np.where(t.zero >= 3, 0.0, bytes * elements / (t.hbm * k.memory))


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
