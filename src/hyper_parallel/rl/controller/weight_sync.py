"""Weight synchronization as the controller orders it: which group sends to which, and when.

After each batch the actor's list ends with the sends, for which it copies its weights and trains on. A rollout begins
to receive between two lists, generates on, and installs what has arrived before a later list.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.errors import WeightsError
from hyper_parallel.launch.roles.interface import Instruction
from hyper_parallel.rl.controller.workers import RoleGroup, do

CONNECT_S = 60.0


@dataclass
class _Link:
    sending: int | None = None
    """The version that the actor sends and has not finished."""
    receiving: int | None = None
    """The version that the rollout receives and has not installed."""


class WeightSync:
    """From the actor's group to each rollout's."""

    def __init__(self, config: RLConfig, actor: RoleGroup, rollouts: list[RoleGroup]) -> None:
        self._actor, self._rollouts = actor, rollouts
        self._shared = config.shares_model
        """Whether the rollout in the actor's group generates with the actor's own model."""
        self._options = config.roles.weights.model_dump()
        self._links: dict[str, _Link] = {}
        self._epochs = 0

    def connect(self, rollout: RoleGroup, step: int) -> None:
        """Let both groups meet. Both are idle. Raises GroupError, WeightsError."""
        if self._shared:
            return
        actor, name = self._actor, rollout.name
        self._epochs += 1
        # A link of before is closed in the same call by both.
        source = actor.ask(step, "describe", role="actor")
        target = rollout.ask(step, "describe", role="rollout")
        own, other = actor.ask(step, "address"), rollout.ask(step, "address")
        host, port = actor.ask(step, "serve", host="127.0.0.1" if own == other else own)
        meeting = {"host": host, "port": port, "link": name, "epoch": self._epochs}
        instruction = do(
            "connect",
            link=name,
            source=source,
            target=target,
            meeting=meeting,
            options=self._options,
            seconds=min(CONNECT_S, actor.timeout_s),
        )
        calls = [group.call([instruction], step) for group in {id(g): g for g in (actor, rollout)}.values()]
        for one in calls:
            one.result()
        self._links[name] = _Link()

    def before_training(self) -> list[Instruction]:
        """What ends before the actor's weights change: the sends of the version before."""
        return [
            do("finish_send", link=name) for name, link in self._links.items() if link.sending is not None
        ]

    def sends_ended(self, told: list[str | None]) -> list[RoleGroup]:
        """`before_training` has told this; rollouts whose link has failed."""
        names = [name for name, link in self._links.items() if link.sending is not None]
        for name in names:
            self._links[name].sending = None
        failed = {name for name, problem in zip(names, told, strict=True) if problem is not None}
        return [one for one in self._rollouts if one.name in failed]

    def after_training(self, version: int) -> list[Instruction]:
        """What the actor's list ends with once its weights are those of `version`."""
        found: list[Instruction] = []
        for rollout in self._rollouts:
            if rollout is not self._actor:
                found.append(do("begin_send", link=rollout.name, version=version))
            elif self._shared:
                found.append(do("renewed", version=version))
            else:
                found.append(do("exchange", link=rollout.name, version=version))
        return found

    def sent(self, version: int, told: list[str | None]) -> list[RoleGroup]:
        """The actor's list has ended, and with it `after_training`, which told this; rollouts whose link has failed."""
        broken = []
        for rollout, problem in zip(self._rollouts, told, strict=True):
            if rollout is self._actor:
                rollout.version = version
            elif problem is not None:
                broken.append(rollout)
            else:
                self._links[rollout.name].sending = version
        return broken

    def before_generating(self, rollout: RoleGroup, *, arrived: bool, idle: bool) -> list[Instruction]:
        """What a rollout's list begins with. `arrived`: its last list said that weights are there; `idle`: it has
        nothing else to do than to wait for them."""
        link = self._links.get(rollout.name)
        if link is None or rollout is self._actor:
            return []
        found: list[Instruction] = []
        if link.receiving is None and link.sending is not None and link.sending > rollout.version:
            link.receiving = link.sending
            found.append(do("begin_receive", link=rollout.name, version=link.sending))
            arrived = False
        if link.receiving is not None and (arrived or idle):
            found.append(do("install", link=rollout.name, version=link.receiving))
            rollout.version, link.receiving = link.receiving, None
        return found

    def receiving(self, rollout: RoleGroup) -> bool:
        """Whether weights are on their way to a rollout."""
        link = self._links.get(rollout.name)
        return link is not None and link.receiving is not None

    def now(self, rollout: RoleGroup, version: int, step: int) -> None:
        """Bring the weights over and wait for it. Both are idle, and the link is new."""
        actor, name = self._actor, rollout.name
        if rollout is actor:
            own = "renewed" if self._shared else "exchange"
            given = {} if self._shared else {"link": name}
            actor.call([do(own, version=version, **given)], step).result()
        else:
            calls = [
                actor.call(
                    [do("begin_send", link=name, version=version), do("finish_send", link=name)], step
                ),
                rollout.call(
                    [
                        do("begin_receive", link=name, version=version),
                        do("install", link=name, version=version),
                    ],
                    step,
                ),
            ]
            for one in calls:
                for rank in one.result():
                    if problem := next(filter(None, rank), None):
                        raise WeightsError(problem)
            self._links[name] = _Link()
        rollout.version = version
