"""Which groups of workers a run has: roles with the same devices share one, copies of the rollout have one each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.config.role_launch import RoleLaunch
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
        apart += [
            GroupPlan(f"rollout-{number}", ("rollout",), devices, _axes_of(rollout.spread), rollout.threads)
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
    threads = plan.threads or config.launch.threads or max(1, _cores() // workers)
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


def _axes_of(strategy: Strategy) -> Strategy:
    """The axes alone, as `Strategy` has them, for the launch; a rollout's memory is the role's own to keep to."""
    return Strategy(axes=strategy.axes)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
