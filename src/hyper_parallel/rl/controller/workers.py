"""Groups of workers of a run: their roles and devices, calls with a deadline, and weights from actor to rollouts.

Roles with the same devices share a group; copies of the rollout have one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import WeightsError
from hyper_parallel.launch.roles.engine import Engine, Group
from hyper_parallel.launch.roles.local import LocalEngine
from hyper_parallel.launch.roles.protocol import Future, Instruction
from hyper_parallel.proc import cores
from hyper_parallel.strategy import Strategy

Role = Literal["actor", "rollout", "reference", "critic", "reward"]
HOST = "hyper_parallel.rl.roles.host:RoleHost"


@dataclass(frozen=True)
class GroupPlan:
    """One group."""

    name: str
    roles: tuple[Role, ...]
    devices: tuple[int, ...]
    strategy: Strategy
    """Whose axes multiply to the number of its workers."""
    threads: int | None


def groups_of(config: RLConfig) -> list[GroupPlan]:
    """The groups, the actor's first."""
    roles, rollout = config.roles, config.roles.rollouts
    shared: list[Role] = ["actor"]
    if config.rl.algorithm == "ppo":
        shared.append("critic")
    apart: list[GroupPlan] = []
    if rollout.placed == roles.actors.placed:
        shared.append("rollout")
    else:
        size = rollout.spread.world
        copies = [rollout.placed[at : at + size] for at in range(0, len(rollout.placed), size)]
        # The axes alone, for the launch: a rollout's memory is the role's own to keep to.
        axes = Strategy(axes=rollout.spread.axes)
        apart += [
            GroupPlan(f"rollout-{number}", ("rollout",), devices, axes, rollout.threads)
            for number, devices in enumerate(copies)
        ]
    if config.rl.kl:
        reference = roles.references
        if reference.placed == roles.actors.placed:
            shared.append("reference")
        else:
            apart.append(
                GroupPlan(
                    "reference", ("reference",), reference.placed, reference.strategy, reference.threads
                )
            )
    if (reward := roles.rewards) is not None:
        if reward.placed == roles.actors.placed:
            shared.append("reward")
        else:
            apart.append(GroupPlan("reward", ("reward",), reward.placed, reward.spread, reward.threads))
    actor = GroupPlan("actor", tuple(shared), roles.actors.placed, roles.actor.strategy, roles.actor.threads)
    return [actor, *apart]


def launch_of(config: RLConfig, plan: GroupPlan, workers: int, host: str = HOST) -> RoleLaunch:
    """How a group is started. `workers`: of all groups, which share this machine's cores. `host`: of its operations."""
    threads = plan.threads or config.launch.threads or max(1, cores() // workers)
    settings: dict[str, Any] = {"run": config.model_dump(mode="json"), "roles": list(plan.roles)}
    return RoleLaunch(
        name=plan.name,
        out=config.out,
        host=host,
        settings=settings,
        launch=config.launch.model_copy(update={"threads": threads, "workers": None}),
        strategy=plan.strategy,
        # Ray chooses the devices of a group.
        devices=plan.devices if config.launch.device != "cpu" and config.roles.engine == "local" else (),
        model_type=str(config.model.config["model_type"]) if config.model.config is not None else None,
    )


START_S = 600.0
"""Seconds in which the workers of a group must have their models."""
CALL_S = 600.0
"""Seconds in which a list must be executed, if `launch.timeout` is not set."""


def do(operation: str, **arguments: Any) -> Instruction:
    """One instruction."""
    return Instruction(operation, arguments)


def engine_of(config: RLConfig) -> Engine:
    """Who starts the workers. Raises LaunchError where Ray is not there."""
    if config.roles.engine == "ray":
        from hyper_parallel.launch.roles.ray_engine import RayEngine

        return RayEngine(config.roles.address)
    return LocalEngine()


class RoleGroup:
    """One group, and what it is doing."""

    def __init__(
        self, engine: Engine, config: RLConfig, plan: GroupPlan, workers: int, host: str = HOST
    ) -> None:
        """`workers`, `host`: as of `launch_of`."""
        self.plan = plan
        self.version = 0
        """Of the rollout's weights."""
        self.timeout_s = config.launch.timeout or CALL_S
        self.busy_s = 0.0
        """Seconds for which it has executed lists."""
        self.restarts = 0
        self.step = 0
        """Of its last list."""
        self._group: Group = engine.start(launch_of(config, plan, workers, host), timeout_s=START_S)
        self._ready: Future = self._group.ready

    @property
    def name(self) -> str:
        """Of its workers."""
        return self.plan.name

    def has(self, role: Role) -> bool:
        """Whether its workers have a role."""
        return role in self.plan.roles

    def wait_ready(self) -> None:
        """Until its models are built. Raises what building them raised."""
        self._ready.result()

    def call(self, instructions: Sequence[Instruction], step: int) -> Future:
        """Send a list; its result has for each rank the results of the instructions."""
        self.step = step
        return self._group.call(instructions, timeout_s=self.timeout_s, what=f"step {step}")

    def ask(self, step: int, operation: str, **arguments: Any) -> Any:
        """Execute one operation now; what the first rank gives."""
        return self.call([do(operation, **arguments)], step).result()[0][0]

    def restart(self) -> None:
        """Kill what is left of it, and start it anew. Returns when its models are built."""
        self.restarts += 1
        self._ready = self._group.restart(timeout_s=START_S)
        self._ready.result()


# Weight synchronization as the controller orders it: which group sends to which, and when.
#
# After each batch the actor's list ends with the sends, for which it copies its weights and trains on. A rollout begins
# to receive between two lists, generates on, and installs what has arrived before a later list.

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
