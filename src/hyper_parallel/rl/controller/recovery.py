"""Recovery of lost workers: their groups are started again, and the run goes on from where it can.

    a rollout    its answers under way are asked for again, by the same random numbers; it gets the actor's weights
    a reference  is loaded again; the batch that it was scoring is scored again
    a reward     is loaded again; the answers that it was scoring are scored again
    the actor    resumes from the newest checkpoint, the queue and the place in the data with it; rollouts give up what
                 they have under way
    a link       a rollout and the actor, both alive, meet again

Workers may be lost while others are brought back: what is left to do is kept, and done until nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import GroupError, WeightsError
from hyper_parallel.rl.controller.controller import Controller, GroupLost, LinkLost, LoopState
from hyper_parallel.rl.controller.workers import RoleGroup, WeightSync

LOST = (GroupLost, LinkLost, GroupError, WeightsError)


class Resumable(Protocol):
    """The run."""

    @property
    def controller(self) -> Controller:
        """The loop as it is."""

    def resume(self) -> LoopState:
        """The actor's workers are new: another loop, from the newest checkpoint."""

    def load_reference(self) -> None:
        """The reference's workers are new."""


class Recovery:
    """Brings groups back."""

    def __init__(
        self,
        config: RLConfig,
        groups: list[RoleGroup],
        weights: WeightSync,
        run: Resumable,
        note: Callable[[str], None],
    ) -> None:
        self._limit, self._groups, self._weights, self._run, self._note = (
            config.roles.restarts,
            groups,
            weights,
            run,
            note,
        )
        self._actor = groups[0]
        self._dead: set[str] = set()
        """Groups to be started again."""
        self._blank: set[str] = set()
        """Groups with new workers, which have not taken up the run."""
        self._apart: set[str] = set()
        """Rollouts to be connected with the actor."""

    def recover(self, error: BaseException) -> None:
        """Returns when every group is idle and takes part again. Raises GroupError where one was lost too often."""
        self._lost(error)
        self._settle()
        while self._dead or self._blank or self._apart:
            try:
                self._mend()
            except LOST as another:
                self._lost(another)

    def _lost(self, error: BaseException) -> None:
        if isinstance(error, LinkLost):
            self._apart.add(error.rollout.name)
            self._note(f"{error}; connecting again")
            return
        if isinstance(error, WeightsError):
            self._apart.update(one.name for one in self._groups if one.has("rollout"))
            self._note(f"{error}; connecting again")
            return
        group = error.group if isinstance(error, GroupLost) else self._named(error)
        if group is None:
            raise error
        if group.name in self._dead:
            return
        if group.restarts >= self._limit:
            raise GroupError(
                f"{error}; started again {group.restarts} times before (roles.restarts), it is not started once more",
                group.name,
            ) from error
        self._note(f"{error}; starting {group.name} again")
        self._dead.add(group.name)
        if group is not self._actor:
            self._run.controller.forget(group)

    def _named(self, error: BaseException) -> RoleGroup | None:
        name = getattr(error, "group", "")
        return next((one for one in self._groups if one.name == name), None)

    def _settle(self) -> None:
        """Every group that is alive is idle."""
        while True:
            try:
                self._run.controller.settle()
                return
            except LOST as another:
                self._lost(another)

    def _mend(self) -> None:
        for group in self._groups:
            if group.name in self._dead:
                # A start that fails counts as one.
                self._dead.discard(group.name)
                self._blank.add(group.name)
                group.restart()
        step = self._run.controller.state.step
        rollouts = [one for one in self._groups if one.has("rollout")]
        if self._actor.name in self._blank:
            self._apart.update(one.name for one in rollouts)
            step = self._run.resume().step
            for one in rollouts:
                one.ask(step, "give_up")
            self._run.load_reference()
            self._blank.discard(self._actor.name)
        for group in self._groups:
            if group.name in self._blank:
                if group.has("reference"):
                    self._run.load_reference()
                if group.has("rollout"):
                    self._apart.add(group.name)
                self._blank.discard(group.name)
        for one in rollouts:
            if one.name in self._apart:
                self._weights.connect(one, step)
                self._weights.now(one, self._run.controller.state.version, step)
                self._apart.discard(one.name)
