"""Recovery after a non-finite loss or gradient norm (`train.on_nonfinite`).

The step has updated nothing on any rank, and every rank has raised the same error, so all ranks make the same decision.

    stop       raise the error, and say whether the batch or the weights are to blame
    skip       the step counts and its batch is consumed, without an update; refused where the weights are ruined
    rollback   load the newest healthy checkpoint and leave a batch out from then on: that of the step or, where the
               weights are ruined, the one before, whose update has ruined them

`IN_A_ROW` limits both: the run ends after that number of consecutive skipped steps, or of rollbacks between which it
got no further than before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hyper_parallel.checkpoint.verify import LARGEST_WEIGHT, unusable, usable
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import CheckpointError, NonFiniteError
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import Batches, StepBatch
from hyper_parallel.step.recipe import StepResult
from hyper_parallel.step.submodel_run import SubmodelBatches
from hyper_parallel.train.checkpoint_state import RunCheckpoints, RunState

IN_A_ROW = {"skip": 8, "rollback": 3}
_ADVICE = (
    "Resume from the last healthy checkpoint with, for example, a smaller train.optimizer.lr, a longer "
    "train.schedule.warmup or a smaller train.clip; or see train.on_nonfinite"
)


class Recovery:
    """Recovery of one run."""

    def __init__(self, how: str, health: Health, checkpoints: RunCheckpoints, batch: int) -> None:
        """`how`: `train.on_nonfinite`. `batch`: rows of a step."""
        self._how, self._health, self._checkpoints, self._batch = how, health, checkpoints, batch
        self._times, self._reached = 0, -1

    def after(self, error: NonFiniteError, state: RunState) -> tuple[RunState, list[str]]:
        """The state to go on from, and what to say. A collective.

        `state` is that before the step. Raises NonFiniteError where the run ends.
        """
        why = state.ruined or self._health.ruined(state)
        state.ruined = why
        notes = []
        if why is not None and (note := self._checkpoints.ruined(state.step, why)) is not None:
            notes.append(note)
        if self._how == "stop":
            raise NonFiniteError(f"{error}. {self._blame(state, why)}. {_ADVICE}") from error
        if self._how == "skip" and why is not None:
            raise NonFiniteError(
                f"{error}. {self._blame(state, why)}, so that skipping the batch does not help: "
                "train.on_nonfinite=rollback goes back to a healthy checkpoint"
            ) from error
        self._count(error, state)
        if self._how == "skip":
            state.skipped += 1
            state.step += 1
            state.consumed = state.leave_out(state.consumed + self._batch, self._batch)
            return state, [
                *notes,
                f"{error}. Skipped, as train.on_nonfinite says; {state.skipped} skipped so far",
            ]
        return self._back(error, state, notes)

    def _back(self, error: NonFiniteError, state: RunState, notes: list[str]) -> tuple[RunState, list[str]]:
        at = state.consumed if state.ruined is None or state.healthy_batch is None else state.healthy_batch
        left_out = [*state.left_out, [at, at + self._batch]]
        try:
            back, more = self._checkpoints.go_back()
        except CheckpointError as problem:
            raise NonFiniteError(f"{error}. No rollback: {problem}") from error
        back.left_out = left_out
        back.skipped = state.skipped + 1
        back.consumed = back.leave_out(back.consumed, self._batch)
        reason = (
            f"as train.on_nonfinite says; rows {at} to {at + self._batch} of the data's order are left out"
        )
        return back, [*notes, *more, f"{error}. Back at step {back.step}, {reason}"]

    def _count(self, error: NonFiniteError, state: RunState) -> None:
        """Raises NonFiniteError where the run does not get further."""
        further = state.step > self._reached + (1 if self._how == "skip" else 0)
        self._times = 1 if further else self._times + 1
        self._reached = state.step if self._how == "skip" else max(self._reached, state.step)
        if self._times > IN_A_ROW[self._how]:
            raise NonFiniteError(
                f"{error}. It is the {self._times}th time in a row, and the run ends although train.on_nonfinite is "
                f"{self._how}"
            ) from error

    @staticmethod
    def _blame(state: RunState, why: str | None) -> str:
        if why is not None:
            return f"The weights are ruined ({why})"
        if state.healthy_batch is None:
            return "No healthy step came before, so that nothing tells whether the batch or the weights are to blame"
        return "The weights are healthy, as the batch before shows"


class WeightWatch:
    """Judges the weights by each step's loss, and marks checkpoints of ruined ones."""

    def __init__(
        self, health: Health, checkpoints: RunCheckpoints, note: Callable[[str], None], *, rollback: bool
    ) -> None:
        """`rollback`: ruined weights raise NonFiniteError, which goes back to a healthy checkpoint."""
        self._health, self._checkpoints, self._note, self._rollback = health, checkpoints, note, rollback

    def after_step(self, state: RunState, result: StepResult, consumed: int) -> None:
        """Judge the weights before the step, and so the checkpoint that holds them.

        Raises NonFiniteError where they are ruined and the run is to go back.
        """
        before = state.ruined
        self._health.judge(state, result, consumed)
        if before is not None and state.ruined is None:
            self._note(
                f"step {state.step}: the loss is as before its weights were ruined; checkpoints count again"
            )
        elif before is None and state.ruined is not None:
            self._mark(state, state.step - 1, state.ruined)

    def after_last_step(self, state: RunState) -> None:
        """Judge the last checkpoint, after which no step follows that would tell. Raises as `after_step` does."""
        if state.ruined is None and (why := self._health.ruined(state)) is not None:
            state.ruined = why
            self._mark(state, state.step, why)

    def _mark(self, state: RunState, step: int, why: str) -> None:
        """The weights after `step` updates are ruined."""
        note = self._checkpoints.ruined(step, why)
        self._note(note or f"the weights are ruined ({why}); checkpoints are passed over from here on")
        if self._rollback:
            raise NonFiniteError(f"step {state.step}: the weights are ruined")


# The health of a run's weights, judged by its loss: for its checkpoints, and for whether skipping a batch helps.
#
# Losses of the last RECENT healthy steps say what is usual. A step is suspicious when its loss or gradient norm is not
# finite, or its loss larger than
#
#     FACTOR · max(recent losses) + MARGIN nats
#
# which a batch of other text does not reach and ruined weights exceed at once (a uniform guess costs ln V, ruined ones
# far more). That is the fault of the batch or of the weights. So the batch of the last healthy step is computed once
# more, gradients included, since normalisation may hide from the loss what is wrong: where that is suspicious too, the
# weights are ruined, by the update of that step or the one after. So they are where one is not finite, or so large that
# no step can compute with it.

RECENT = 32
"""Steps."""
FACTOR = 2.0
MARGIN = 1.0
"""Nats."""


class Health:
    """Health of one run: every rank asks the same and gets the same answers. What it remembers is in the run's
    state."""

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
