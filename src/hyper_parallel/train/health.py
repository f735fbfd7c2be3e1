"""The health of a run's weights, judged by its loss: for its checkpoints, and for whether skipping a batch helps.

Losses of the last RECENT healthy steps say what is usual. A step is suspicious when its loss or gradient norm is not
finite, or its loss larger than

    FACTOR · max(recent losses) + MARGIN nats

which a batch of other text does not reach and ruined weights exceed at once (a uniform guess costs ln V, ruined ones
far more). That is the fault of the batch or of the weights. So the batch of the last healthy step is computed once
more, gradients included, since normalisation may hide from the loss what is wrong: where that is suspicious too, the
weights are ruined, by the update of that step or the one after. So they are where one is not finite, or so large that
no step can compute with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hyper_parallel.checkpoint.health import LARGEST_WEIGHT, unusable, usable
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import Batches, StepBatch
from hyper_parallel.step.recipe import StepResult
from hyper_parallel.step.submodel_run import SubmodelBatches
from hyper_parallel.train.checkpoint_state import RunState

RECENT = 32
"""Steps."""
FACTOR = 2.0
MARGIN = 1.0
"""Nats."""


class Health:
    """Of one run: every rank asks the same and gets the same answers. What it remembers is in the run's state."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches | SubmodelBatches,
        probe: Callable[[StepBatch], StepResult | None],
    ) -> None:
        """`probe`: what a step on a batch would come to (`Stepper.probe`)."""
        self._model, self._batches, self._probe = model, batches, probe

    def judge(self, state: RunState, result: StepResult, consumed: int) -> None:
        """Take note of a step on the batch before which `consumed` rows were consumed. Collectives, rarely."""
        if not suspicious(state, result):
            state.recent_losses = [*state.recent_losses, result.loss][-RECENT:]
            state.healthy_batch = consumed
            state.ruined = None
        elif state.ruined is None:
            state.ruined = self.ruined(state)

    def ruined(self, state: RunState) -> str | None:
        """How the weights, as they are now, are ruined, in words; None if nothing says that they are. A collective."""
        if (names := self._unusable()) is not None:
            return names
        if state.healthy_batch is None:
            return None
        again = self._probe(self._batches.load(state.step, state.healthy_batch))
        if again is None or not suspicious(state, again):
            return None
        usual = f"{min(state.recent_losses):.4g} to {max(state.recent_losses):.4g}"
        return (
            f"a batch that was trained on before has a loss of {again.loss:.4g} and a gradient norm of "
            f"{again.grad_norm:.4g}, where losses were {usual}"
        )

    def _unusable(self) -> str | None:
        """The weights with elements that are not finite or too large, in words; None without such. A collective."""
        handle = sharded(self._model)
        trained = [p for p in handle.parameters() if p.parameter.requires_grad]
        flags = []
        for parameter in trained:
            if handle.pipeline is not None and not handle.pipeline.owns(parameter.name):
                flags.append(0.0)
                continue
            local = parameter.local
            with present(local), torch.no_grad():
                flags.append(float(not usable(local, LARGEST_WEIGHT)))
        found = torch.tensor(flags, device=handle.device)
        table = handle.over_all_ranks(found, "max").tolist()
        names = [parameter.name for parameter, bad in zip(trained, table, strict=True) if bad]
        return unusable(names) if names else None


def suspicious(state: RunState, result: StepResult) -> bool:
    """Whether a step is not what healthy weights give to text like the run's."""
    largest = FACTOR * max(state.recent_losses, default=math.inf) + MARGIN
    return not result.finite or result.loss > largest
