"""The strategy space: a tree of choices that can be counted without listing it.

    points = Σ over degrees, Σ over micro-batches: splits · orders · schedules · kept    `StrategySpace.counts`

What is legal is what HyperShard needs (its axes, tensor2d, context and experts), and pipelines' published schedules:

* replicate · shard · context · tensor_x · tensor_y · pipeline = devices, and `expert` divides both the experts and
  shard · context · tensor;
* tensor_x · tensor_y divides the query heads, and one of it and the key-value heads divides the other; with
  tensor_y above 1, tensor_x is above 1 and divides the hidden size, and their product divides the sequence;
* replicate · shard · micro divides the batch; context divides the sequence, a ring twice (causal balance: each rank
  has a piece from either end), and Ulysses also divides the heads that tensor leaves to a rank;
* stages may be uneven: pipeline · virtual is at most the number of layers. Interleaving takes micro-batches in whole
  rounds of `pipeline` (Narayanan et al., arXiv 2104.04473, section 2.2); ZB-V and DualPipe give a rank two parts, and
  DualPipe feeds an even number of stages from both ends with at least 2 · pipeline micro-batches (2412.19437).

* other token mixers than attention (`workload.mixers`): tensor divides the groups of heads that share keys, and context
  is Ulysses with as many ranks as divide the heads that tensor leaves; mixers without heads are split over neither
  axis, nor is any that `train` is to run (`mixer_axes`).

Two names of one strategy are one point: without ranks that share a copy there is no ZeRO level, without ranks of
`context` no method, and an order counts only where it lays the axes differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.columns import (
    CONTEXT_METHODS,
    ORDERS,
    RECOMPUTE,
    SCHEDULES,
    Array,
    Columns,
    Counts,
    Mask,
    code,
    full_like,
    taken,
    unique,
)
from hyper_parallel.planner.query import Question
from hyper_parallel.workload.mixers import Mixer

ON_HOST = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the optimizer's state, and of activations, that may lie in the host's memory."""

DEGREES = ("pipeline", "tensor_x", "tensor_y", "context", "replicate", "shard", "expert")
TWO_PARTS = (code("schedule", "zb-v"),)
"""Schedules that give a rank two parts of the model, joined at the far end like the letter V."""
NONE, SELECTIVE, FULL = range(len(RECOMPUTE))
_INTERLEAVED, _DUAL = code("schedule", "interleaved"), code("schedule", "dualpipe")
_RING, _ULYSSES, _HYBRID = range(len(CONTEXT_METHODS))


@dataclass(frozen=True)
class Level:
    """One level of the tree: columns that are chosen together, and the values that they may have."""

    columns: tuple[str, ...]
    options: Array
    """[options, columns]."""
    legal: Callable[[Columns], Mask]
    """Whether rows may have the values that they have; broadcast."""

    def counts(self, rows: Columns) -> Counts:
        """How many options each row has."""
        found: Counts = self._legal(rows).sum(axis=1)
        return found

    def expand(self, rows: Columns) -> tuple[Columns, npt.NDArray[np.intp]]:
        """Each row with each of its options; and which row each came from."""
        parent, option = np.nonzero(self._legal(rows))
        found = {name: column[parent] for name, column in rows.items()}
        for index, name in enumerate(self.columns):
            found[name] = self.options[option, index]
        return found, parent

    def _legal(self, rows: Columns) -> Mask:
        n = next(iter(rows.values())).size
        columns = {name: column[:, None] for name, column in rows.items()}
        columns |= {name: self.options[None, :, index] for index, name in enumerate(self.columns)}
        return np.broadcast_to(self.legal(columns), (n, len(self.options)))


class StrategySpace:
    """All strategies of a question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.shape = question.workload.shape
        self.batch, self.sequence = float(question.workload.batch), float(question.workload.sequence)
        self.devices = question.devices
        most = self.shape.layers // 2
        self.micro = self._level(("micro",), [divisors(int(self.batch))], self._micro)
        self.dual = self._level(("dual",), [range(2)], self._dual)
        self.splits = self._level(
            ("zero", "sequence_parallel", "method", "paired"),
            [range(4), range(2), range(len(CONTEXT_METHODS)), range(2)],
            self._splits,
        )
        self.orders = self._level(("order",), [range(len(ORDERS))], self._orders)
        self.schedules = self._level(
            ("schedule", "virtual"), [range(len(SCHEDULES)), range(1, max(1, most) + 1)], self._schedules
        )
        self.again = self._again()
        """Ways to compute again: a code of RECOMPUTE, and the share of the layers; None: any number of a stage's."""
        shares = ON_HOST if "host" in question.cluster.links else (0.0,)
        self.on_host = {
            column: np.sort(np.array(question.allowed(column) or shares))
            for column in ("state_on_host", "activations_on_host")
        }
        pages = shares[:: len(shares) // 2 or 1] if question.runnable else (0.0,)
        self.on_host["weights_on_host"] = np.sort(np.array(question.allowed("weights_on_host") or pages))
        states, weights = self.on_host["state_on_host"], self.on_host["weights_on_host"]
        self.levels = [(float(s), float(w)) for s in states for w in weights if w == 0 or s == 1]
        """Shares of the state and of the weights on the host, each pair with no less of either than the one before."""
        if not self.levels:
            raise ConfigError(
                "weights_on_host above 0 needs state_on_host of 1: weights go when all state has gone"
            )

    def _again(self) -> list[tuple[int, float | None]]:
        shares = self.question.allowed("recomputed")
        found: list[tuple[int, float | None]] = []
        for mode in range(len(RECOMPUTE)):
            if self._allows("recompute", mode):
                found += [(mode, share) for share in shares or (None,)] if mode == FULL else [(mode, 1.0)]
        return found

    # What is legal.

    def _allows(self, column: str, value: float) -> bool:
        """Whether the question leaves a column this value."""
        allowed = self.question.allowed(column)
        runs = not self.question.runnable or RUNS.get(column, lambda value: True)(value)
        return runs and (allowed is None or value in allowed)

    def _level(
        self,
        columns: tuple[str, ...],
        values: list[range] | list[list[int]],
        legal: Callable[[Columns], Mask],
    ) -> Level:
        kept = [
            [float(value) for value in some if self._allows(column, value)]
            for column, some in zip(columns, values, strict=True)
        ]
        grid = np.meshgrid(*kept, indexing="ij")
        options = np.stack([axis.ravel() for axis in grid], axis=1)
        return Level(columns, options, legal)

    def _micro(self, c: Columns) -> Mask:
        found: Mask = self.batch % (c["replicate"] * c["shard"] * c["micro"]) == 0
        return found

    def _splits(self, c: Columns) -> Mask:
        tensor = c["tensor_x"] * c["tensor_y"]
        shared = c["shard"] * c["context"] > 1
        zero = np.where(shared, c["zero"] >= 1, c["zero"] == 0)
        tokens = self.sequence / c["context"]
        split = c["sequence_parallel"] == 1
        whole = (tensor > 1) & (tokens % tensor == 0)
        sequence = np.where(split, whole, c["tensor_y"] == 1)
        found: Mask = (
            zero & sequence & self._method(c, tensor) & ((c["paired"] == 1) | self._pairs(c, tensor))
        )
        return found

    def _pairs(self, c: Columns, tensor: Array) -> Mask:
        """Whether micro-batches may run in pairs (`cost_model.pipeline.in_pairs`), so that not to is another choice."""
        rounds = self.batch / (c["replicate"] * c["shard"] * c["micro"])
        sends = (tensor > 1) | (c["expert"] > 1)
        found: Mask = sends & (c["pipeline"] == 1) & (rounds % 2 == 0)
        return found & bool(self.question.profile.ordered)

    def _method(self, c: Columns, tensor: Array) -> Mask:
        context, method = c["context"], c["method"]
        ring = self.sequence % (2 * context) == 0
        heads = self.shape.heads / tensor
        ulysses = (heads % context == 0) | (self.shape.attention_layers == 0)
        # A hybrid's inner degree is the largest that sends no head twice, and is neither none nor all of the axis.
        inner = np.gcd(
            context.astype(np.int64), np.maximum(1, self.shape.kv_heads // tensor).astype(np.int64)
        )
        hybrid = (inner > 1) & (inner < context) & (self.sequence % (2 * context) == 0)
        if self.shape.mixer is not None:
            ring, hybrid = ring & False, hybrid & False
        chosen: Mask = np.select([method == _RING, method == _ULYSSES], [ring, ulysses], hybrid)
        return np.where(context > 1, chosen, method == (self.question.allowed("method") or (0.0,))[0])

    def _dual(self, c: Columns) -> Mask:
        """Whether experts' exchanges hide in DualPipe, which is then chosen before all else."""
        schedules = set(self.schedules.options[:, 0])
        apart = bool(self.shape.experts) & self._feeds_both_ends(c) & (_DUAL in schedules)
        return np.where(c["dual"] == 1, apart, bool(schedules - {_DUAL}) | (not self.shape.experts))

    def _feeds_both_ends(self, c: Columns) -> Mask:
        rounds = self.batch / (c["replicate"] * c["shard"] * c["micro"])
        p = c["pipeline"]
        found: Mask = (p % 2 == 0) & (rounds >= 2 * p) & (2 * p <= self.shape.layers)
        return found

    def _orders(self, c: Columns) -> Mask:
        """An order counts where no earlier one lays the axes above 1 in the same way."""
        axes = {**c, "data": c["replicate"] * c["shard"]}
        names = ORDERS[0]
        above = [axes[name] > 1 for name in names]
        # Which axes are above 1, as a number.
        present = sum((mask.astype(np.int64) << index for index, mask in enumerate(above)), np.int64(0))
        found: Mask = self._laid_anew[present, c["order"].astype(np.int64)]
        return found

    @cached_property
    def _laid_anew(self) -> Mask:
        """Whether an order lays axes as none before it does: [which axes are above 1, order]."""
        names = ORDERS[0]
        found = np.zeros((1 << len(names), len(ORDERS)), dtype=np.bool_)
        for which in range(1 << len(names)):
            seen: set[tuple[str, ...]] = set()
            for code_ in self.orders.options[:, 0].astype(int):
                laid = tuple(name for name in ORDERS[code_] if which >> names.index(name) & 1)
                found[which, code_] = laid not in seen
                seen.add(laid)
        return found

    def _schedules(self, c: Columns) -> Mask:
        pipeline, schedule, virtual = c["pipeline"], c["schedule"], c["virtual"]
        rounds = self.batch / (c["replicate"] * c["shard"] * c["micro"])
        two = np.isin(schedule, TWO_PARTS)
        interleaved = (virtual >= 2) & (rounds % pipeline == 0)
        dual = self._feeds_both_ends(c) & (virtual == 1)
        kinds = [schedule == _INTERLEAVED, two, schedule == _DUAL]
        several = np.select(kinds, [interleaved, virtual == 2, dual], virtual == 1)
        several = several & (pipeline * virtual <= self.shape.layers)
        if self.question.runnable:
            # As many micro-batches as `hyper_parallel.schedule` needs for a schedule without gaps.
            several = several & (rounds >= np.where(two, 2 * pipeline - 1, pipeline))
        first = self.schedules.options[0, 0] if len(self.schedules.options) else 0.0
        # Without a pipeline there is one schedule, by whatever name.
        found: Mask = np.where(pipeline == 1, (schedule == first) & (virtual == 1), several)
        # In the tree, DualPipe is a separate branch for models with experts.
        if self.shape.experts and "dual" in c:
            found = found & ((schedule == _DUAL) == (c["dual"] == 1))
        return found

    # The tree.

    def degrees(self) -> Columns:
        """All legal degrees, one row each."""
        shape, allows = self.shape, self._allows
        left = divisors(self.devices)
        rows: Columns = {"left": np.array([float(self.devices)])}

        def join(column: str, legal: Callable[[Columns], Mask], values: list[int]) -> None:
            nonlocal rows
            some = [value for value in values if allows(column, value)]
            level = Level((column,), np.array(some, dtype=np.float64).reshape(-1, 1), legal)
            rows, _ = level.expand(rows)

        def takes(column: str, legal: Callable[[Columns], Mask]) -> None:
            join(column, lambda c: (c["left"] % c[column] == 0) & legal(c), left)
            rows["left"] = rows["left"] / rows[column]

        takes("pipeline", lambda c: c["pipeline"] <= shape.layers)
        takes("tensor_x", lambda c: self._tensor(c["tensor_x"]))
        takes("tensor_y", self._second)
        takes("context", self._context)
        # What is left sees other data.
        rows = {name: column[self.batch % rows["left"] == 0] for name, column in rows.items()}
        takes("shard", lambda c: c["shard"] > 0)
        join("replicate", lambda c: c["replicate"] == c["left"], left)
        del rows["left"]
        experts = divisors(shape.experts) if shape.experts else [1]
        join(
            "expert",
            lambda c: c["shard"] * c["context"] * c["tensor_x"] * c["tensor_y"] % c["expert"] == 0,
            experts,
        )
        return rows

    def _tensor(self, tensor: Array) -> Mask:
        heads, keys = self.shape.heads, self.shape.kv_heads
        found: Mask = (heads % tensor == 0) & ((keys % tensor == 0) | (tensor % keys == 0))
        mixer = self.shape.mixer
        if mixer is None:
            return found
        alone = self.shape.attention_layers == 0
        return (found | alone) & tensor_divides(mixer, tensor, self.question.runnable)

    def _context(self, c: Columns) -> Mask:
        found: Mask = self.sequence % c["context"] == 0
        if self.shape.mixer is None:
            return found
        tensor = c["tensor_x"] * c["tensor_y"]
        return found & context_divides(self.shape.mixer, c["context"], tensor, self.question.runnable)

    def _second(self, c: Columns) -> Mask:
        tensor = c["tensor_x"] * c["tensor_y"]
        two = (c["tensor_x"] > 1) & (self.shape.hidden % c["tensor_x"] == 0) & (self.sequence % tensor == 0)
        found: Mask = (c["tensor_y"] == 1) | (two & self._tensor(tensor))
        return found

    def stage(self, rows: Columns) -> Array:
        """Layers of the longest stage of each row."""
        return np.ceil(self.shape.layers / rows["pipeline"])

    def may_move(self, rows: Columns) -> Mask:
        """Whether a row may have anything on the host. What `train` runs and `simulate` predicts: no pipeline."""
        found: Mask = (rows["pipeline"] == 1) | (not self.question.runnable)
        return found

    def may_place(self, rows: Columns, *shares: float) -> Mask:
        """Whether a row may have these shares on the host: none may be anywhere."""
        return self.may_move(rows) | (not any(shares))

    def kept_counts(self, rows: Columns) -> Counts:
        """How many ways each row has to keep, compute again or move what the backward pass and the update need."""
        moved = self.on_host["activations_on_host"]
        shares = [(*level, share) for level in self.levels for share in moved]
        places = sum((self.may_place(rows, *some).astype(np.int64) for some in shares), np.int64(0))
        again = sum(share is not None for _, share in self.again) + self.stage(rows) * (
            (FULL, None) in self.again
        )
        return (again * places).astype(np.int64)

    def counts(self, rows: Columns) -> Counts:
        """How many points each row of degrees and micro-batch stands for."""
        # What a level allows depends on few columns, and these have few distinct values.
        points = self.kept_counts(rows)
        names = ("shard", "replicate", "context", "tensor_x", "tensor_y", "pipeline")
        for level, of in (
            (self.splits, (*names, "expert", "micro")),
            (self.orders, names),
            (self.schedules, ("pipeline", "data", "dual")),
        ):
            some = {**rows, "data": rows["replicate"] * rows["shard"] * rows["micro"]}
            first, which = unique({name: some[name] for name in of})
            few = {name: rows[name][first] for name in rows}
            points = points * level.counts(few)[which]
        return points

    def kept(self, rows: Columns) -> Iterator[Columns]:
        """All ways to keep, compute again or move, for each of the rows in turn: what the search does not list."""
        for state, weights in self.levels:
            for moved in self.on_host["activations_on_host"]:
                some = taken(rows, self.may_place(rows, state, weights, moved))
                places = full_like(
                    some, state_on_host=state, weights_on_host=weights, activations_on_host=float(moved)
                )
                for mode, share in self.again:
                    found = {
                        **some,
                        **full_like(some, recompute=float(mode), recomputed=1.0 if share is None else share),
                        **places,
                    }
                    yield from [found] if share is not None else self._by_layers(found)

    def _by_layers(self, rows: Columns) -> Iterator[Columns]:
        stage = self.stage(rows)
        for layers in range(1, int(stage.max()) + 1):
            some = stage >= layers
            yield {**taken(rows, some), "recomputed": layers / stage[some]}


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


RUNS: dict[str, Callable[[float], bool]] = {
    "schedule": lambda value: value != _DUAL,
}
"""What `train` can run, by column; the rest is for plans alone."""


# Axes that may split token mixers beside attention, and what a search leaves out because of them.
#
# Megatron-Core splits the heads of Mamba-2 and of delta rules over tensor ranks, where these divide the groups that
# share keys, and exchanges heads for positions over context ranks (`megatron/core/ssm`). A ring does not serve: a
# recurrence hands its state from position to position. `train` splits none of them.


def tensor_divides(mixer: Mixer, tensor: Array, runnable: bool) -> Mask:
    """Whether the tensor degrees split a mixer."""
    if runnable or not mixer.splits:
        return np.asarray(tensor == 1, dtype=np.bool_)
    return np.asarray(mixer.splits % tensor == 0, dtype=np.bool_)


def context_divides(mixer: Mixer, context: Array, tensor: Array, runnable: bool) -> Mask:
    """Whether the context degrees split the heads that tensor leaves to a rank, by Ulysses."""
    if runnable or not mixer.splits:
        return np.asarray(context == 1, dtype=np.bool_)
    return np.asarray(mixer.heads / tensor % context == 0, dtype=np.bool_)


def left_out(mixer: Mixer | None, runnable: bool) -> list[str]:
    """The parts of a space that it leaves out because of the model's mixer, each with the reason."""
    if mixer is None:
        return []
    name = mixer.kind.replace("_", " ")
    if runnable:
        return [f"tensor and context axes: train splits no {name} layers"]
    if not mixer.splits:
        return [f"tensor and context axes: no framework splits {name} layers, whose channels a product mixes"]
    return [
        f"tensor degrees that do not divide the {mixer.splits} groups of a {name} layer",
        f"context by a ring: a {name} layer hands its state from position to position; Ulysses is searched",
    ]
