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

from collections.abc import Callable

from hyper_parallel.errors import CheckpointError, NonFiniteError
from hyper_parallel.step.recipe import StepResult
from hyper_parallel.train.checkpoint_state import RunCheckpoints, RunState
from hyper_parallel.train.health import Health

IN_A_ROW = {"skip": 8, "rollback": 3}
_ADVICE = (
    "Resume from the last healthy checkpoint with, for example, a smaller train.optimizer.lr, a longer "
    "train.schedule.warmup or a smaller train.clip; or see train.on_nonfinite"
)


class Recovery:
    """Of one run."""

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
        said = f"as train.on_nonfinite says; rows {at} to {at + self._batch} of the data's order are left out"
        return back, [*notes, *more, f"{error}. Back at step {back.step}, {said}"]

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
