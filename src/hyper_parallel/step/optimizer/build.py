"""From a section of the run file to an optimizer; others register their own under a name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.shard import ShardedParameter, sharded
from hyper_parallel.step.optimizer.adafactor import Adafactor
from hyper_parallel.step.optimizer.adamw import AdamW
from hyper_parallel.step.optimizer.adamw_8bit import AdamW8bit
from hyper_parallel.step.optimizer.interface import Optimizer
from hyper_parallel.step.optimizer.lion import Lion
from hyper_parallel.step.optimizer.muon import Muon

Factory = Callable[[nn.Module, list[ShardedParameter], Any], Optimizer]
"""(the sharded model, its trainable parameters, the optimizer's section) to an optimizer."""

GROUP = "hyper_parallel.optimizers"
"""The entry-point group in which other distributions name their factories."""

_factories: dict[str, Factory] = {}


def register_optimizer(name: str, factory: Factory) -> None:
    """Make `factory` the optimizer called `name`; a later registration replaces an earlier one."""
    _factories[name] = factory


def build_optimizer(model: nn.Module, config: Any) -> Optimizer:
    """The optimizer that ``config.name`` names, over the parameters of a parallelized model.

    Raises ConfigError when no optimizer of that name is registered.
    """
    factory = _factories.get(config.name)
    if factory is None:
        for entry in entry_points(group=GROUP, name=config.name):
            factory = entry.load()
    if factory is None:
        known = sorted({*_factories, *(entry.name for entry in entry_points(group=GROUP))})
        raise ConfigError(
            f"no optimizer is called {config.name!r}; there are {', '.join(known)}{nearest(config.name, known)}"
        )
    trainable = [p for p in sharded(model).owned() if p.parameter.requires_grad]
    return factory(model, trainable, config)


register_optimizer("adamw", lambda model, parameters, config: AdamW(parameters, config))
register_optimizer("adamw_8bit", AdamW8bit.of)
register_optimizer("lion", Lion.of)
register_optimizer("adafactor", Adafactor.of)
register_optimizer("muon", Muon.of)
