"""A family's step, captured once, and run with or without storages that move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.captured import inputs_of, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch, family_config
from harness.families import FAMILIES
from hyper_parallel.config import RunConfig
from hyper_parallel.graph import StepGraph, executable
from hyper_parallel.offloading.runtime import Runtime
from hyper_parallel.step.capture_train_step import capture_step, state
from hyper_parallel.step.recipe import CONTROL_VECTOR

TOKENS = 100.0
"""By which losses are divided."""


def config_of(family: str, strategy: Mapping[str, Any] | None = None) -> RunConfig:
    """A run of the family; on one device where no strategy is given."""
    return family_config(FAMILIES[family], strategy or {}, None)


def captured_step(family: str, config: RunConfig | None = None) -> StepGraph:
    """The step of this rank."""
    config = config or config_of(family)
    recipe = recipe_of(FAMILIES[family], config)
    micro = micro_batches(recipe.handle, config, draw_batch(FAMILIES[family]))
    return capture_step(recipe, shape_of(micro, True))


class Running:
    """Steps of a model with the same first values and batch each time, and its state. With a runtime, all state rests
    where the runtime wants it before the first step."""

    def __init__(
        self, family: str, step: StepGraph, runtime: Runtime | None = None, config: RunConfig | None = None
    ) -> None:
        config = config or config_of(family)
        recipe = recipe_of(FAMILIES[family], config)
        micro = micro_batches(recipe.handle, config, draw_batch(FAMILIES[family]))
        self.tensors = inputs_of(recipe, micro, TOKENS)
        self.names = sorted(state(recipe.handle, recipe.optimizer))
        self.runtime = runtime
        self.shown: list[Tensor] = []
        """The loss, and whatever else the host was shown first at a point of a step."""
        for name in self.names if runtime is not None else ():
            runtime.rest(name, self.tensors[name])
        self._run = executable(step, cache=runtime)

    def step(self, check: Callable[[], None] | None = None) -> None:
        """One more; `check` is called where the host looks at the loss and the norm."""

        def host(point: str, values: Sequence[Tensor]) -> Tensor | None:
            if point == "load":
                return torch.zeros(CONTROL_VECTOR)
            self.shown.append(values[0].clone())
            if point == "check" and check is not None:
                check()
            return None

        self._run.run(self.tensors, host)

    def values(self) -> dict[str, Tensor]:
        """Copies of the state, wherever it rests."""
        found = {}
        for name in self.names:
            if self.runtime is None:
                found[name] = self.tensors[name].clone()
                continue
            with self.runtime.present(name, self.tensors[name]):
                found[name] = self.tensors[name].clone()
        return found

    def after(self, steps: int) -> dict[str, Tensor]:
        """Losses of so many more steps, and the state after them."""
        before = len(self.shown)
        for _ in range(steps):
            self.step()
        return {**self.values(), "losses": torch.stack(self.shown[before:])}
