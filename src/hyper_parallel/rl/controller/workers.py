"""The groups of workers of a run, as the controller calls them: one list of instructions at a time, with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.launch.roles.interface import Engine, Future, Group, Instruction
from hyper_parallel.launch.roles.local import LocalEngine
from hyper_parallel.rl.controller.placement import HOST, GroupPlan, Role, launch_of

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
