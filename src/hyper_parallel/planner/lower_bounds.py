"""Lower bounds for partial strategies, by which the search prunes.

With m micro-batches, p stages, L layers, and a step as `cost_model.step` has it,

    step = (m · pace + m · sends + bubble + gradients + optimizer + host + fixed) · (1 + straggling)

each bound is the same sum with terms left out or made smaller. All terms are at least 0.

**`Bounds.alone`**, from tensor, context, expert and micro-batch alone: m · pace ≥ (m / p)(L · layer + head), since the
slowest stage is no faster than the mean one; and the update of what is trained, shared by all devices. It leaves out
gathers, recompute and whatever else is outside the passes, and prices a layer's collectives in the best order, in which
nothing else lies between their ranks. The proof needs inner links that are at least as fast as outer ones; on other
clusters all links count as the fastest one.

**`Bounds.splits`**, with the degrees, ZeRO level, method and order: the passes at the mean stage's pace, and everything
outside of them except bubble and sends. DualPipe hides exchanges of experts, so it has a separate bound (`dual`).

The share w of the layers that must be recomputed to fit at all (`floor`) lengthens a layer's passes by at least w times
the forward pass that `layer` counts, without launches and context's exchange, and without what need not be computed
again (`Profile.stops`). Gathers that take longer than (1 +
`beside`) times the backward pass hide the difference, which is subtracted (`_longer`).

**`Bounds.scheduled`**, with the schedule: pace, bubble and sends as in the estimate. The reduction of gradients hides
behind at most 0.7 of a stage's time (`cost_model.optimizer_step.reduced`), so a stage that is longer by d saves at most
0.7 d of it.

Where stages are cut by cost (`by_cost`), the bound takes the mean stage's pace: recompute may make the cut more even.

**Recompute and offload** never make a step shorter: they lengthen passes (m ≥ 1 of them, against 0.7 that may hide) and
add copies. So a bound without them also holds with them, except for stages that are cut by cost.

**`Bounds.floor`**, bytes: what lies on the host takes no device memory, up to the host's capacity. Each method of
recompute keeps the least where it applies to all layers. Of the schedules that give a rank one end of the model, 1F1B
has the fewest micro-batches in flight: interleaved has p - i + (p - 2 i - 1) / v + i, which is no less than p - i at
stages 0, 1 and p - 1 with v ≤ any and p ≥ 2, and GPipe has all (`cost_model.stages.waiting`). The floor is the least
over the methods, and over schedules that give a rank one end or both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.planner.columns import ORDERS, SCHEDULES, Array, Columns, chunks, full_like, unique
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import held, trained
from hyper_parallel.planner.cost_model.layer import sent
from hyper_parallel.planner.cost_model.memory import HOST_PART, by_stage
from hyper_parallel.planner.cost_model.operators import Ranks
from hyper_parallel.planner.cost_model.pipeline import bubble, micro_batches, pace
from hyper_parallel.planner.cost_model.step import UPDATE_BYTES, gathered, seconds_by_kind
from hyper_parallel.planner.space import NONE, SELECTIVE, StrategySpace
from hyper_parallel.planner.table import SPREAD, Table, sum_of

PASSES = ("products", "attention", "elementwise", "again", "tensor", "expert", "context", "launches")
"""Parts of a estimate that are a layer's passes, gathers of split weights apart."""
INTERLEAVED, ZB_V, DUALPIPE = (SCHEDULES.index(name) for name in ("interleaved", "zb-v", "dualpipe"))
_HIDING = 0.7
_CLOSE = 1 - 1e-9
"""A bound and the estimate that it bounds are sums in another order; they may differ by rounding."""


@dataclass(frozen=True)
class Splits:
    """Rows before their schedule, recompute and offload are known."""

    seconds: Array
    """At least; of a step."""
    rest: Array
    """Seconds beside the pipeline: gradients, optimizer, fixed."""
    layer: Array
    """Seconds of a layer's passes for a micro-batch."""
    head: Array
    weights: Array
    """Seconds of the products of a stage's layers, forward."""
    stage: Array
    """A stage's seconds that `rest` has been computed with."""
    send: Array
    """Seconds of sends for a micro-batch and one part of a rank."""

    def take(self, index: Any) -> Splits:
        """The rows of an index."""
        return Splits(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


class Bounds:
    """Bounds for one question's space."""

    def __init__(self, space: StrategySpace, base: Table, constants: Constants, bounded: bool = True) -> None:
        """`bounded`: by the host's memory."""
        self.space, self.base, self.constants = space, base, constants
        self.host = float(base.host_bytes[0]) * HOST_PART if bounded else np.inf
        """Bytes that may lie on the host."""
        self.slower = 1 + constants.straggling * np.log2(max(space.devices / 8, 1.0))

    def table(self, rows: Columns, **columns: Array | float) -> Table:
        """The rows as a table."""
        return self.base.replaced(**{**{name: rows[name] for name in rows if name in SPREAD}, **columns})

    def alone(self, rows: Columns) -> Array:
        """Seconds of a step at least, of rows of degrees and micro-batch. [n]"""
        names = ("tensor_x", "tensor_y", "context", "expert", "micro", "dual")
        first, which = unique({name: rows[name] for name in names})
        one = {name: rows[name][first] for name in names}
        one |= full_like(one, pipeline=1.0, replicate=1.0, shard=1.0)
        split, parent = self.space.splits.expand({**one, "shard": np.full(first.size, 2.0)})
        split["shard"] = np.ones(parent.size)
        least = np.full(first.size, np.inf)
        base, constants = self.base, self.constants
        pair = 2.0 if np.any(base.ordered > 0) else 1.0
        if not self._ordered():
            best = np.maximum(np.maximum(base.node_rate, base.supernode_rate), base.network_rate)
            base = base.replaced(node=np.inf, node_rate=best)
            share, hop = max(constants.inside, constants.across), min(constants.hop, constants.net_hop)
            # Dispatch uses the links of a node and the network at once: no single link's rate bounds it.
            share = np.inf if np.any(base.experts > 0) else share
            constants = replace(constants, inside=share, hop=hop)
        # Levels of ZeRO change nothing in the passes of a step without data ranks.
        some = split["zero"] == split["zero"].min() if parent.size else np.zeros(0, dtype=bool)
        split, parent = {name: column[some] for name, column in split.items()}, parent[some]
        for order in self._orders():
            for part in chunks(parent.size):
                spread = {name: split[name][part] for name in split if name in SPREAD}
                dual = split["dual"][part] * DUALPIPE
                spread |= {"zero": np.zeros(1), "order": np.full(1, float(order)), "schedule": dual}
                # Of a pair of micro-batches, where the other one hides what a single one would show.
                table = base.replaced(**spread, batch=spread["micro"] * pair)
                parts = seconds_by_kind(table, constants)
                passes = sum_of({name: parts[name] for name in (*PASSES, "head")})
                np.minimum.at(least, parent[part], np.broadcast_to(passes / pair, dual.size))
        times = self.space.batch / (rows["replicate"] * rows["shard"] * rows["micro"] * rows["pipeline"])
        found: Array = (times * least[which] + self.constants.fixed + self._update()) * self.slower * _CLOSE
        return found

    def _update(self) -> float:
        """Seconds of the optimizer's update at least: no rank has less than its share of what is trained."""
        whole = self.base.replaced(tensor_x=1.0, tensor_y=1.0, expert=1.0, expert_tensor=1.0, pipeline=1.0)
        own = trained(whole, held(whole))
        elements = whole.layers * own.all() + own.embedding
        rate = whole.hbm * self.constants.memory
        return float((UPDATE_BYTES * elements / (self.space.devices * rate)).min())

    def _orders(self) -> list[int]:
        """Orders that differ where nothing is split over data and stages."""
        found: dict[tuple[str, ...], int] = {}
        for index, order in enumerate(ORDERS):
            found.setdefault(tuple(name for name in order if name not in ("data", "pipeline")), index)
        return list(found.values())

    def _ordered(self) -> bool:
        """Whether inner links are at least as fast as outer ones; a supernode of one node has no links."""
        base, k = self.base, self.constants
        several = base.supernode > base.node
        inner = np.where(several, np.minimum(base.node_rate, base.supernode_rate), base.node_rate)
        rates = (~several | (base.node_rate >= base.supernode_rate)) & (
            inner * k.inside >= base.network_rate * k.across
        )
        return bool(np.all(rates)) and k.net_hop >= k.hop

    def splits(self, rows: Columns, again: Array | float = 0.0) -> Splits:
        """Bounds of rows whose schedule, recompute and offload are open; `again`: share of layers computed again."""
        # Two parts a rank: no schedule that shares out layers finer has a shorter slowest stage.
        two = (rows["pipeline"] > 1) & (rows["dual"] == 0)
        schedule = np.where(two, float(INTERLEAVED), rows["dual"] * DUALPIPE)
        table = self.table(rows, virtual=np.where(two, 2.0, 1.0), schedule=schedule)
        parts = seconds_by_kind(table, self.constants)
        m, each = micro_batches(table), table.layers / table.pipeline
        passes = sum_of({name: parts[name] for name in (*PASSES, "gathers")})
        layer, head = passes / (m * each), parts["head"] * table.pipeline / m
        rest = sum_of({name: parts[name] for name in ("sums", "gradients", "optimizer", "fixed")})
        mean = (passes + parts["head"]) / m
        stage = mean + parts["uneven"] / m
        longer = self._longer(table, parts, again)
        layer, mean = layer + longer, mean + each * longer
        hidden = _HIDING * np.maximum(mean - stage, 0.0)
        seconds = (m * mean + np.maximum(rest - hidden, 0.0)) * self.slower * _CLOSE
        weights = parts["products"] / (3 * m)
        found = (seconds, rest, layer, head, weights, stage, parts["sends"] / (m * table.virtual))
        return Splits(*(np.broadcast_to(column, two.size) for column in found))

    def _longer(self, table: Table, parts: Mapping[str, Array], again: Array | float) -> Array:
        """A lower bound of the seconds that recomputing the share `again` of the layers adds to a layer's passes."""
        times = micro_batches(table) * table.layers / table.pipeline
        exchanged = (parts["tensor"] + parts["expert"]) / 2
        # Of a frozen model's products the forward pass has a third to a half. What a layer that stops early leaves out
        # (`Profile.stops`) is at most half of its products, the last of an MLP, and half of the experts' exchange.
        needed = 1 - 0.5 * table.stops
        forward = needed * parts["products"] / 3 + parts["attention"] / 3.5 + parts["elementwise"] / 2.6
        forward = forward + (parts["tensor"] + needed * parts["expert"]) / 2
        share = np.where(table.frozen > 0, 1 / 2, 2 / 3)
        backward = share * parts["products"] + 2.5 * parts["attention"] / 3.5
        backward = backward + 1.6 * parts["elementwise"] / 2.6 + exchanged
        own = held(table)
        ranks = Ranks(table, self.constants)
        gathers = gathered(table, ranks, own, trained(table, own)).backward
        slower: Array = np.full(1, 1 + self.constants.beside)
        if np.any(table.ordered * table.expert > 1):
            # Exchanges take turns with gathers, and what they hide of a pass may be as long as the pass itself.
            gathers = gathers + sent(table, self.constants, ranks)
            slower = np.where(table.expert > 1, 1.0, slower)
        # Gathers that take longer than the backward pass hide what comes beside them.
        covered = np.maximum(gathers - slower * backward / times, 0.0)
        longer: Array = np.maximum(again * forward / times - covered, 0.0)
        return longer

    def scheduled(self, rows: Columns, known: Splits) -> Array:
        """Seconds of a step at least, of rows whose recompute and offload are open. [n]"""
        table = self.table(rows)
        m = micro_batches(table)
        mean = (table.layers * known.layer + known.head) / table.pipeline
        # Cut by cost, stages of longer layers may be cut more evenly, but not beyond the mean.
        stage = np.where(by_cost(table), mean, pace(table, known.layer, known.head))
        sends = known.send * table.virtual
        waits = bubble(table, stage + sends, known.weights)
        longer = np.maximum(stage - known.stage, 0.0)
        seconds = m * (stage + sends) + waits + np.maximum(known.rest - _HIDING * longer, 0.0)
        return np.broadcast_to(seconds * self.slower * _CLOSE, rows["micro"].size)

    def floor(self, rows: Columns) -> tuple[Array, Array]:
        """Bytes of the fullest rank, and share of layers computed again, at least, whatever else is open. [n]

        The share is that with which the device is not exceeded: 0 where some way without full recompute may fit.
        """
        space, k = self.space, self.constants
        device = k.usable(float(self.base.capacity[0]))
        n = rows["micro"].size
        state, weights = space.levels[-1]
        moved = float(space.on_host["activations_on_host"].max())
        moves = space.may_move(rows)
        most = np.where(moves, state, 0.0), np.where(moves, weights, 0.0), np.where(moves, moved, 0.0)
        least, again = np.full(n, np.inf), np.full(n, 1.0)
        # Where a rank has both ends of the model, its stages are others.
        ends = (
            [0.0, float(ZB_V)]
            if np.any(rows["pipeline"] > 1)
            and np.any((self.base.dense_layers > 0) | (self.base.prediction_modules > 0))
            else [0.0]
        )
        modes = {mode for mode, _ in space.again}
        # Where a kernel keeps the scores on the chip there is nothing that attention's core would forget.
        if NONE in modes and np.all(self.base.flash > 0):
            modes.discard(SELECTIVE)
        for schedule in ends:
            schedules = np.where(rows["dual"] > 0, float(DUALPIPE), schedule)
            nothing = self.table(rows, recompute=float(NONE), recomputed=0.0, schedule=schedules)
            all_kept = by_stage(nothing)
            for mode in modes:
                table = nothing.replaced(recompute=float(mode), recomputed=1.0)
                kept = all_kept if mode == NONE else by_stage(table)
                any_number = (mode, None) in space.again
                room = Room.of(all_kept, kept) if any_number else Room.of(kept)
                floor = room.floor(*most, self.host, float(any_number))
                least = np.minimum(least, floor)
                if any_number:
                    again = np.minimum(again, room.again(*most, device * (1 + ROUNDING), self.host))
                else:
                    again = np.where(floor <= device * (1 + ROUNDING), 0.0, again)
        return least * _CLOSE, again * _CLOSE


def by_cost(table: Table) -> npt.NDArray[np.bool_]:
    """Whether stages are cut by what their layers cost, so that the cut is another with recompute."""
    found: npt.NDArray[np.bool_] = (table.balanced > 0) & (table.pipeline > 1) & (table.virtual <= 1)
    return found


# Closed-form memory bounds over recomputation and offload choices.
#
# A rank has F fixed bytes, O of optimizer state and A of activations. With the share s of the state and the share a of
# the activations on the host, and with the share w of its layers recomputed, which saves w E bytes of activations,
#
#     device   F + (1 - s) O + (1 - p) P + (1 - a) (A - w E) ≤ (capacity - outside) / slack
#     host     s O + p P + a (A - w E) ≤ host                        (`cost_model.memory`, which is linear in each
# share)
#
# P are parameters and gradients; their share p lies on the host.
#
# Solved for w, these give the least w of each rank; the group needs the largest of them (`Room.least`).

Share = Array | float
Stages = list[dict[str, Array]]
"""Bytes by kind of a rank of each stage."""
ROUNDING = 1e-10
"""Of a limit: how far this sum and the model's, which adds in another order, may be apart."""


@dataclass(frozen=True)
class Room:
    """Bytes of the ranks that may be the fullest; columns are [ranks, n]."""

    fixed: Array
    state: Array
    weights: Array
    activations: Array
    fewer: Array
    """Activations that are not kept where all layers are computed again; zeros where how many is given."""

    @classmethod
    def of(cls, kept: Stages, again: Stages | None = None) -> Room:
        """Of what `cost_model.memory.by_stage` says of rows with nothing on the host.

        `again`: the same with all layers computed again, where any number may be.

        The fixed bytes are those of `again`: what a layer that is computed again needs does not depend on how many are.
        """
        last = again if again is not None else kept
        n = max(column.size for stage in (*kept, *last) for column in stage.values())

        def column(stages: Stages, *kinds: str) -> Array:
            return np.stack([sum((stage[kind] for kind in kinds), np.zeros(n)) for stage in stages])

        activations = column(kept, "activations")
        moving = ("optimizer", "parameters", "gradients", "activations")
        return cls(
            column(last, *(kind for kind in kept[0] if kind not in moving)),
            column(kept, "optimizer"),
            column(kept, "parameters", "gradients"),
            activations,
            activations - column(last, "activations"),
        )

    def take(self, index: Any) -> Room:
        """The rows of an index."""
        return Room(*(getattr(self, name)[:, index] for name in self.__dataclass_fields__))

    def peak(self, state: Share, weights: Share, moved: Share, share: Share = 0.0) -> Array:
        """Bytes of the fullest rank's device, with shares on the host and of layers computed again. [n]"""
        left = self.activations - share * self.fewer
        kept = (1 - state) * self.state + (1 - weights) * self.weights
        peak: Array = np.max(self.fixed + kept + (1 - moved) * left, axis=0)
        return peak

    def elsewhere(self, state: Share, weights: Share, moved: Share, share: Share = 0.0) -> Array:
        """Bytes on the host of the rank with most of them. [n]"""
        left = self.activations - share * self.fewer
        found: Array = np.max(state * self.state + weights * self.weights + moved * left, axis=0)
        return found

    def floor(self, state: Share, weights: Share, moved: Share, host: float, share: float = 0.0) -> Array:
        """Bytes of the fullest rank at least, with no more than these shares, and `host` bytes, on the host. [n]

        A byte on the host is one less on the device, so that the most there are what is left.
        """
        left = self.activations - share * self.fewer
        gone = np.minimum(state * self.state + weights * self.weights + moved * left, host)
        floor: Array = np.max(self.fixed + self.state + self.weights + left - gone, axis=0)
        return floor

    def least(self, state: Array, weights: Array, moved: Array, device: float, host: float) -> Array:
        """The least share of layers that has to be computed again to fit, with each set of shares; inf: more than all.

        [n, sets]
        """
        state, weights, moved = state[:, None, None], weights[:, None, None], moved[:, None, None]
        kept = self.fixed + (1 - state) * self.state + (1 - weights) * self.weights
        least = _share(kept + (1 - moved) * self.activations - device, (1 - moved) * self.fewer)
        over = state * self.state + weights * self.weights + moved * self.activations - host
        found: Array = np.maximum(least, _share(over, moved * self.fewer)).T
        return found

    def again(self, state: Share, weights: Share, moved: Share, device: float, host: float) -> Array:
        """Share of layers at least that have to be computed again with no more than these shares on the host. [n]

        Below the floor's two sides: all shares moved, and all of the host in use.
        """
        left = self.fixed + (1 - state) * self.state + (1 - weights) * self.weights
        left = left + (1 - moved) * self.activations
        kept = self.fixed + self.state + self.weights + self.activations
        return np.maximum(
            _share(left - device, (1 - moved) * self.fewer), _share(kept - device - host, self.fewer)
        )


def _share(over: Array, fewer: Array) -> Array:
    """How much of `fewer` the rank with most needs, not to be `over`. [..., ranks, n] to [..., n]"""
    needed = np.where(over > 0, np.inf, 0.0)
    share: Array = np.max(np.divide(over, fewer, out=needed, where=(over > 0) & (fewer > 0)), axis=-2)
    return np.where(share > 1, np.inf, share)
