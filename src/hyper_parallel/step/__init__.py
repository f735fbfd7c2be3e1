"""The training step: recipe, optimizers, capture as a graph, pass pipeline, executors, memory budget.

The package is callable, since it has the name of the public function: `hp.step(...)` is `integration.own_step.step`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Late: it is above this package, and brings PyTorch.
        return import_module("hyper_parallel.integration.own_step").step(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
