"""How a step's rows are cut into micro-batches, and these into the shares of data ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.compat.process_groups import gather_objects
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.shard.forward import several_documents
from hyper_parallel.shard.loss import IGNORED
from hyper_parallel.shard.process_mesh import DATA_AXES
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import fields_of
from hyper_parallel.step.stage_plan import StagePlan
from hyper_parallel.workload.submodels import with_partners

Rows = Mapping[str, Tensor]
"""Tensors by name, whose first dim is rows."""
Inputs = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""Rows to keyword arguments of the model."""
_Sizes = tuple[int, list[tuple[str, int]]]
"""Elements of all that a row has, and of each tensor."""


@dataclass(frozen=True)
class StepRows:
    """All rows of a step in the order in which they are computed."""

    batch: Rows
    numbers: Tensor
    """int64 [rows]: the place of each in the order in which they were given; random numbers are a function of it."""
    copies: int = 0
    """Rows that are computed once more, without loss."""

    @classmethod
    def as_given(cls, batch: Rows) -> StepRows:
        """In the order in which they were given."""
        return cls(batch, torch.arange(batch["input_ids"].size(0)))

    def part(self, first: int, count: int) -> StepRows:
        """Some of them."""
        there = slice(first, first + count)
        return StepRows({name: one[there] for name, one in self.batch.items()}, self.numbers[there])

    def twice(self) -> StepRows:
        """Each a second time."""
        batch = {name: torch.cat([one, one]) for name, one in self.batch.items()}
        return StepRows(batch, torch.cat([self.numbers, self.numbers]))


class SubmodelRows:
    """The rows of one rank."""

    def __init__(
        self,
        like: Rows,
        micro_batches: int,
        inputs: Inputs,
        groups: Sequence[DeviceGroup],
        index: int,
        device: torch.device,
    ) -> None:
        """`like`: the rows of a step; `index`: of this rank's group. Raises StrategyError."""
        self.copies = True
        """Whether rows may be computed once more without loss, so that all data ranks have as much."""
        for name in ("input_ids", "labels"):
            if name not in like or like[name].dim() != 2:
                raise StrategyError(f"hp.submodels: batch has no {name!r}, int64 [B, S]")
        self._shapes = {name: tuple(one.shape) for name, one in like.items()}
        self._inputs, self._device = inputs, device
        rows = like["input_ids"].size(0)
        other = next((name for name, shape in self._shapes.items() if shape[:1] != (rows,)), None)
        if other is not None:
            raise StrategyError(
                f"hp.submodels: batch has {rows} rows, and {other!r} is {list(self._shapes[other])}; its first dim "
                "must be rows (inputs=... makes what the model takes from them)"
            )
        if not rows or rows % micro_batches:
            raise StrategyError(
                f"hp.submodels: {rows} rows are no {micro_batches} micro-batches; give a multiple of as many rows"
            )
        self._count = rows // micro_batches
        for group in groups:
            data = group.mesh.size(DATA_AXES)
            if self._count % data:
                raise StrategyError(
                    f"submodels.{group.name}: a micro-batch of {self._count} rows is not divided by replicate · shard "
                    f"= {data}; give micro-batches of a multiple of it"
                )
        self._most_data = math.lcm(*(group.mesh.size(DATA_AXES) for group in groups))
        own = groups[index]
        self._data, self._index = own.mesh.size(DATA_AXES), own.index(DATA_AXES, dist.get_rank())

    @property
    def of_micro_batch(self) -> int:
        """Rows of a micro-batch, over all data ranks."""
        return self._count

    def problem(self, batch: Rows, *, lengths: bool = True) -> str | None:
        """Why a step's rows cannot be computed, in words. `lengths`: rows must be as long as those of training."""
        wanted = self._shapes
        given = {name: tuple(one.shape) for name, one in batch.items()}
        if not lengths:
            wanted, given = ({name: one[:1] for name, one in shapes.items()} for shapes in (wanted, given))
        if given == wanted:
            return None
        name = next(name for name in {**wanted, **given} if given.get(name) != wanted.get(name))
        return (
            f"{name} is {list(given[name]) if name in given else 'missing'} and must be "
            f"{list(wanted[name]) if name in wanted else 'left out'}: the names and shapes that hp.submodels was given"
        )

    def arranged(self, batch: Rows) -> StepRows:
        """Rows for which `inputs` makes tensors of the same sizes in the same micro-batches, as far as they go, those
        with most first, and each data rank's part of a micro-batch as large as the others': where rows with as much are
        no multiple of the data ranks, copies without loss fill them up. The same on every rank."""
        given = StepRows.as_given(batch)
        sizes = [self._sizes(given.part(row, 1)) for row in range(len(given.numbers))]
        if all(one == sizes[0] for one in sizes):
            return given
        ranks = self._most_data if self.copies else 1
        filled = with_partners(range(len(sizes)), sizes.__getitem__, ranks, self._count)
        dealt = [
            one
            for first in range(0, len(filled), self._count)
            for data in range(self._most_data)
            for one in filled[first : first + self._count][data :: self._most_data]
        ]
        places = torch.tensor([row for row, _ in dealt])
        arranged = {name: one[places.to(one.device)] for name, one in batch.items()}
        without = torch.tensor([not bears_loss for _, bears_loss in dealt])
        arranged["labels"][without.to(arranged["labels"].device)] = IGNORED
        return StepRows(arranged, places, int(without.sum()))

    def _sizes(self, row: StepRows) -> _Sizes:
        made = self._inputs({name: one for name, one in row.batch.items() if name != "labels"})
        found = sorted((name, one.numel()) for name, one in made.items())
        return sum(count for _, count in found), found

    def shares(self, rows: StepRows) -> list[MicroBatch]:
        """This rank's rows of all micro-batches."""
        return [self.share(rows, at) for at in range(len(rows.numbers) // self._count)]

    def share(self, rows: StepRows, micro_batch: int) -> MicroBatch:
        """This rank's rows of a micro-batch."""
        return self._micro(self._mine(rows, micro_batch))

    def doubled(self, rows: StepRows, micro_batch: int) -> MicroBatch:
        """Twice this rank's rows of a micro-batch."""
        return self._micro(self._mine(rows, micro_batch).twice())

    def _mine(self, rows: StepRows, micro_batch: int) -> StepRows:
        size = self._count // self._data
        return rows.part(micro_batch * self._count + self._index * size, size)

    def _micro(self, rows: StepRows) -> MicroBatch:
        given = {name: one.to(self._device) for name, one in rows.batch.items()}
        labels = given.pop("labels")
        made = dict(self._inputs(given))
        ids = made.pop("input_ids")
        positions = made.pop("position_ids", None)
        if positions is None:
            positions = torch.arange(ids.size(1), device=self._device).repeat(ids.size(0), 1)
        numbers = rows.numbers.to(self._device)
        return MicroBatch(ids, labels, positions, numbers, several=_several(positions), extra=made)


def _several(positions: Tensor) -> bool:
    """Whether rows hold several documents, as Transformers finds it: by positions of text, of which there are none
    where each token has three positions."""
    if positions.dim() == 3:
        return positions.size(0) == 4 and several_documents(positions[0])
    return several_documents(positions)


# Sorts the micro-batches of submodels by kind: of the same shapes, and with the same answers to what the model asks of
# their values. Micro-batches of a kind have one plan.

log = logging.getLogger(__name__)

MOST_KINDS = 16
"""Kinds of micro-batches whose plans are kept."""


class Kind:
    """Micro-batches that are alike."""

    def __init__(self, plan: StagePlan, like: MicroBatch) -> None:
        self.plan = plan
        self._shapes = _shapes_of(like)

    def fits(self, micro: MicroBatch) -> bool:
        """Whether this rank's rows are of this kind."""
        known = self.plan.documents or not micro.several
        return (
            known
            and _shapes_of(micro) == self._shapes
            and all(one.holds(fields_of(micro)) for one in self.plan.questions)
        )


class Kinds:
    """The kinds of micro-batches so far; equal on all ranks."""

    def __init__(
        self,
        plan: Callable[[StepRows, MicroBatch, int], StagePlan],
        forget: Callable[[list[StagePlan]], None],
        warn: bool,
    ) -> None:
        """`plan`: of rows of a step, and this rank's part of the micro-batch with a number, which is new; a collective.
        `forget`: is told which plans are no longer kept. `warn`: where more kinds come than are kept."""
        self._plan, self._forget, self._warn = plan, forget, warn
        self._kinds: list[Kind] = []

    def add(self, plan: StagePlan, like: MicroBatch) -> None:
        """Keep a plan that was made otherwise."""
        self._kinds.append(Kind(plan, like))

    def sorted(self, rows: StepRows, micro: list[MicroBatch]) -> dict[StagePlan, list[int]]:
        """The plans of a step's micro-batches, and the places of those of each. A collective."""
        while True:
            mine = [{at for at, kind in enumerate(self._kinds) if kind.fits(one)} for one in micro]
            fitting = gather_objects(mine)
            common = [set.intersection(*(kinds[at] for kinds in fitting)) for at in range(len(micro))]
            new = next((at for at, kinds in enumerate(common) if not kinds), None)
            if new is None:
                break
            self.add(self._plan(rows, micro[new], new), micro[new])
        places: dict[int, list[int]] = {}
        for at, kinds in enumerate(common):
            places.setdefault(min(kinds), []).append(at)
        # In one order, so that as many of each make the same step.
        needed = sorted(places)
        found = {self._kinds[kind].plan: places[kind] for kind in needed}
        self._shorten({self._kinds[kind] for kind in needed})
        return found

    def _shorten(self, needed: set[Kind]) -> None:
        """Let go of the oldest that are not needed now."""
        more = len(self._kinds) - MOST_KINDS
        if more <= 0:
            return
        if self._warn:
            log.warning(
                "micro-batches of more than %d kinds so far, and each is planned: pad what they have to few sizes",
                MOST_KINDS,
            )
            self._warn = False
        gone = [one for one in self._kinds if one not in needed][:more]
        self._forget([one.plan for one in gone])
        self._kinds = [one for one in self._kinds if one not in gone]


def _shapes_of(micro: MicroBatch) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(one.shape), one.dtype) for name, one in fields_of(micro).items()}
