"""The subject of a budget: memory that counts beside the passes, and the least budget with activations away (`Swap`).

Nobody has to name an optimizer. Those that step tell of it (`torch.optim`); one that has state before its first step
here, since it was loaded or has stepped before, is looked for among all of Python's objects when a call begins and the
parameters are referred to from more places than before. It must be a `torch.optim.Optimizer`.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.graph import Input, Kind, StepGraph, Storage, values_of
from hyper_parallel.graph.ir import Value
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.step_context import Region, region_of
from hyper_parallel.offloading.schedule.problem import Buffer, Problem
from hyper_parallel.trace.live_bytes import profile

WHOLES = "what the inputs are parts of"
KINDS: Mapping[str, Kind] = {
    "the optimizer's state": "optimizer",
    "gradients of before": "gradient",
    "results of the call before": "input",
    WHOLES: "input",
}


class ResidentMemory:
    """Looks at what a model's owner holds."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._references = self._alive = 0
        """To the parameters, and optimizers that were known, when optimizers were last looked for."""
        self._results: list[Any] = []
        """Weak references to the storages of the last call's results."""
        watching = weakref.WeakMethod(self._stepped)
        self._hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: seen(optimizer) if (seen := watching()) else None
        )
        weakref.finalize(self, self._hook.remove)

    def close(self) -> None:
        """Look no longer."""
        self._hook.remove()

    def gave(self, results: Sequence[Tensor]) -> None:
        """The last call's results."""
        self._results = [weakref.ref(tensor.untyped_storage()) for tensor in results]

    def bytes(self, inputs: Sequence[Tensor], device: torch.device) -> dict[str, int]:
        """Bytes of each of `KINDS`, as a call with these inputs begins; no byte twice, nor any of the model's own
        state."""
        model = self._model()
        assert model is not None, "it is being called"
        self._look(model)
        counted = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
        gradients = [p.grad for p in model.parameters() if p.is_leaf and p.grad is not None]
        seen = {_address(tensor) for tensor in inputs}
        whole = sum({_address(tensor): tensor.untyped_storage().nbytes() for tensor in inputs}.values())
        results = [found for reference in self._results if (found := reference()) is not None]
        found = {
            "the optimizer's state": _new(self._state(), counted, device),
            "gradients of before": _new(gradients, counted, device),
            "results of the call before": sum(
                storage.nbytes() for storage in results if storage.data_ptr() not in counted | seen
            ),
            WHOLES: max(0, whole - sum(_extent(tensor) for tensor in inputs)),
        }
        assert found.keys() == KINDS.keys()
        return found

    def _look(self, model: nn.Module) -> None:
        """Find the model's optimizers that have not stepped yet."""
        references = sum(sys.getrefcount(parameter) for parameter in model.parameters())
        if references > self._references or len(self._optimizers) < self._alive:
            for found in gc.get_objects():
                # Not isinstance, for which some objects import things, and others are no longer there.
                if issubclass(type(found), torch.optim.Optimizer) and hasattr(found, "param_groups"):
                    self._stepped(found)
        self._references, self._alive = references, len(self._optimizers)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is None or optimizer in self._optimizers:
            return
        # By their memory, which others may have tensors of their own of.
        own = {_address(parameter) for parameter in model.parameters() if parameter.numel()}
        if any(_address(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizers.add(optimizer)

    def _state(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for leaf in leaves_of(list(optimizer.state.values())):
                if isinstance(leaf, Tensor):
                    yield leaf


def with_resident_inputs(step: StepGraph, held: Mapping[str, int]) -> StepGraph:
    """A copy of the step with an unused input for each name of `held`, of that many bytes, alive all the time."""
    copy = step.copy()
    last = copy.placeholders[-1]
    for name, count in held.items():
        if not count:
            continue
        with copy.graph.inserting_after(last):
            last = copy.graph.placeholder(f"in_{len(copy.inputs)}")
        device = copy.storages[0].device
        copy.inputs.append(Input(name, KINDS[name]))
        value = Value((count,), (1,), torch.uint8, device, len(copy.storages))
        copy.storages.append(Storage(value.storage, count, device, name))
        last.meta.update(value=value, region=Region("", None, "forward"), module="", recomputed=False)
    return copy


def _new(tensors: Iterable[Tensor], counted: set[int], device: torch.device) -> int:
    """Bytes of the storages that were not counted yet; they are from now on."""
    found = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device == device and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            found += storage.nbytes()
    return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last one: what a step counts for it."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# Activation swap: a budget just large enough when idle activations are offloaded.
#
#     without(k) = live bytes at node k − Σ bytes of activations that no node uses at k
#     budget = max_k without(k) + 2 · the activations of the layer that keeps most
#
# An activation is made in the forward pass and used in the backward pass. The last term is room for those of a layer
# that are on their way out, and for those of another that come back, so that copies run beside the computation.

AHEAD = 2
"""Layers whose activations are on their way."""


@dataclass(frozen=True)
class Swap:
    """In the place of a budget: as much as the passes need with their activations away."""

    inputs: bool = True
    """What layers are given may be away too; else there is room for it."""
    layers: str | None = None
    """Name of the module whose children are the layers; None where it is not known, and modules are taken for them."""

    def budget(self, step: StepGraph, problem: Problem) -> int:
        """Bytes of the device for a step whose memory `problem` tells."""
        activations = [held for held in problem.held if held.kind == "activation"]
        by_layer: dict[str, int] = defaultdict(int)
        for held in activations:
            by_layer[self._layer(held.name)] += held.bytes
        room = AHEAD * max((count for layer, count in by_layer.items() if layer), default=0)
        staying = frozenset[int]() if self.inputs else self._given(step)
        away = _away([held for held in activations if held.storage not in staying], problem.nodes)
        return room + max(
            (live - gone for live, gone in zip(problem.profile(), away, strict=True)), default=0
        )

    def _given(self, step: StepGraph) -> frozenset[int]:
        """The storages that one layer makes, or none, and another one uses in the forward pass."""
        layers: Mapping[int, set[str]] = defaultdict(set)
        for node in step.nodes:
            if region_of(node).phase != "backward":
                for storage in touched(node) | {value.storage for value in values_of(node)}:
                    layers[storage].add(self._layer(node.meta["module"]))
        return frozenset(storage for storage, of in layers.items() if len(of) > 1)

    def _layer(self, module: str) -> str:
        """The layer that a module is in, the module itself where layers are not known, else the empty string."""
        if self.layers is None:
            return module
        inside = f"{self.layers}."
        return inside + module[len(inside) :].partition(".")[0] if module.startswith(inside) else ""


def _away(leaving: list[Buffer], nodes: int) -> list[int]:
    """Bytes of these storages that are alive and in no use, at each node."""
    return profile(
        (
            (before.last + 1, after.first, held.bytes)
            for held in leaving
            for before, after in pairwise(held.busy)
        ),
        nodes,
    )
