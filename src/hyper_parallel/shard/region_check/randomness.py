"""Random numbers that no strategy can make the same: found by running a model twice, not by the names of attributes.

Two passes over equal copies, with other states of PyTorch's and Python's generators but the same (seed, step, rows),
give the same outputs exactly when every draw goes through `shard.dropout`. Where they differ, the operators that drew
numbers, which PyTorch tags, tell the module.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import TorchDispatchMode
from hyper_parallel.shard.region_check.outcome import Spread
from hyper_parallel.shard.region_check.sample_inputs import SampleCall
from hyper_parallel.shard.sharded_model import sharded
from hyper_parallel.strategy import Strategy

PASSES = 3


class _Draws(TorchDispatchMode):
    """Notes which modules call operators that draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        """Module to operator."""
        self._stack: list[str] = [""]
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enters(name)))
            self._hooks.append(module.register_forward_hook(self._leaves(), always_call=True))

    def _enters(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._stack.append(name)

        return hook

    def _leaves(self) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._stack.pop()

        return hook

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.found.setdefault(self._stack[-1], str(func.name()).removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator draws from a generator that others share; attention kernels take a rate, which
    may be 0."""
    if kwargs.get("generator") is not None:
        return False
    if "attention" not in func.name():
        return True
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0))


def unrepeatable(template: nn.Module, call: SampleCall, spread: Spread) -> str | None:
    """Which modules draw numbers that depend on the state of a generator, in words; None where nothing does."""
    found: dict[str, str] = {}
    values: list[float] = []
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for at in range(PASSES):
                model = copy.deepcopy(template).train()
                torch.manual_seed(at)
                random.seed(at)
                spread(model, Strategy(check=False))
                draws = _Draws(model)
                try:
                    handle = sharded(model)
                    with (
                        draws,
                        handle.micro_batch(seed=0, step=0, rows=call.rows(handle)),
                        torch.enable_grad(),
                    ):
                        value: Tensor = call.objective(model, handle)
                finally:
                    draws.remove()
                values.append(float(value.detach()))
                found |= draws.found
    finally:
        random.setstate(state)
    if all(value == values[0] or value != value for value in values):
        return None
    named = ", ".join(f"{name!r} ({operator})" for name, operator in sorted(found.items())[:3])
    return named or f"{type(template).__name__!r} (outside of PyTorch's operators)"
