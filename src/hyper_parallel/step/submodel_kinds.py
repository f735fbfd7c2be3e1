"""Sorts the micro-batches of submodels by kind: of the same shapes, and with the same answers to what the model asks of
their values. Micro-batches of a kind have one plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import fields_of
from hyper_parallel.step.submodel_plan import SubmodelPlan
from hyper_parallel.step.submodel_rows import StepRows

log = logging.getLogger(__name__)

MOST_KINDS = 16
"""Kinds of micro-batches whose plans are kept."""


class Kind:
    """Micro-batches that are alike."""

    def __init__(self, plan: SubmodelPlan, like: MicroBatch) -> None:
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
        plan: Callable[[StepRows, MicroBatch, int], SubmodelPlan],
        told: Callable[[Any], list[Any]],
        forget: Callable[[list[SubmodelPlan]], None],
        warn: bool,
    ) -> None:
        """`plan`: of rows of a step, and this rank's part of the micro-batch with a number, which is new; a collective.
        `told`: as of `SubmodelPlanner`. `forget`: is told which plans are no longer kept. `warn`: where more kinds come
        than are kept."""
        self._plan, self._told, self._forget, self._warn = plan, told, forget, warn
        self._kinds: list[Kind] = []

    def add(self, plan: SubmodelPlan, like: MicroBatch) -> None:
        """Keep a plan that was made otherwise."""
        self._kinds.append(Kind(plan, like))

    def sorted(self, rows: StepRows, micro: list[MicroBatch]) -> dict[SubmodelPlan, list[int]]:
        """The plans of a step's micro-batches, and the places of those of each. A collective."""
        while True:
            mine = [{at for at, kind in enumerate(self._kinds) if kind.fits(one)} for one in micro]
            told: list[list[set[int]]] = self._told(mine)
            common = [set.intersection(*(one[at] for one in told)) for at in range(len(micro))]
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
