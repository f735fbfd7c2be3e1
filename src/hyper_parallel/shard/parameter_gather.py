"""Parameter access: from the stored shard to the tensor that is computed with.

A layer's parameters are exchanged for what `Access` makes of them while the layer's forward runs, and put back after
it: the model's code sees plain local tensors, everybody else sees the parameters. A whole layer at once, because some
modules compute with the weights of those below them (Mamba's mixer with its convolution's).

In the traceable lowering the chain is: cast to the compute dtype, gather over the storage axes (gradient: sum and
scatter), over `replicate` (gradient: sum), over axes whose ranks contribute different terms (gradient: sum), and the
choice of the rows that this rank's heads need. FSDP2 does the first two itself. What is gathered or summed once for
several micro-batches, the step's context says (`StepContext.gathers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.compat.local_tensor import per_rank, per_rank_int
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.compat.uneven_gradients import local_for_compute
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.mesh_axis import Axis, _Moved
from hyper_parallel.shard.plan.types import ParameterPlan


@dataclass(frozen=True)
class Dtypes:
    """How a parameter is computed with and its gradient reduced."""

    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class Access:
    """What is made of one stored parameter before its module computes with it."""

    plan: ParameterPlan
    axes: Mapping[str, Axis]
    dtypes: Dtypes
    gathers: bool
    """The traceable lowering: gather over the storage axes and sum gradients over the data axes here."""

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        x = local_for_compute(stored) if isinstance(stored, DTensor) else stored
        if self.gathers:
            over = self.over_data()
            x = _Moved.apply(x, over.forward, over.backward)
        else:
            x = x.to(self.dtypes.compute)
        return self.after_data(x)

    def after_data(self, x: torch.Tensor) -> torch.Tensor:
        """What is computed with, of what `over_data` or FSDP2 makes."""
        for axis in self.plan.summed:
            x = self.axes[axis].copy(x)
        if self.plan.chosen is not None:
            dim, intervals = self.plan.chosen
            x = torch.index_select(x, dim, self._rows(x.device, intervals))
        return x

    def _rows(self, device: torch.device, intervals: tuple[tuple[tuple[int, int], ...], ...]) -> torch.Tensor:
        tensor = self.axes[self.plan.layout.mesh.tensor]
        return per_rank(
            lambda rank: torch.cat(
                [torch.arange(a, b, device=device) for a, b in intervals[tensor.index(rank)]]
            )
        )

    def over_data(self) -> OverData:
        """How a stored parameter becomes whole over the data axes, in the step that is installed now."""
        storage, replicate = self.axes[self.plan.storage], self.axes["replicate"]
        whole, found = self.plan.computed, self.plan.storage_dim
        splits, dim = found is not None and storage.size > 1, found or 0
        length = (
            per_rank_int(lambda rank: whole.local_shape(storage.devices.coordinate(rank))[dim])
            if splits
            else 0
        )

        # Read here: the backward pass may run in another thread.
        between, key = current_step().gathers, id(self)
        stored: list[torch.dtype] = []

        def made(x: torch.Tensor) -> torch.Tensor:
            x = x.to(self.dtypes.compute)
            return storage._gather(x, dim, length) if splits else x.view_as(x)

        def forward(x: torch.Tensor) -> torch.Tensor:
            stored.append(x.dtype)
            return made(x) if between is None else between.weight(key, lambda: made(x))

        def backward(gradient: torch.Tensor) -> torch.Tensor | None:
            found: torch.Tensor | None = gradient.to(self.dtypes.reduce)
            if found is not None and storage.size > 1:
                found = found if between is None else between.whole(key, found)
                if found is not None:
                    found = storage._reduce_scatter(found, dim) if splits else storage._reduce(found)
            if found is not None and replicate.size > 1:
                found = found if between is None else between.shards(key, found)
                found = None if found is None else replicate._reduce(found)
            return None if found is None else found.to(stored[0])

        return OverData(forward, backward, lambda: between is not None and between.keeps(key))


class OverData(NamedTuple):
    """A parameter's way over the data axes, and its gradient's way back."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], torch.Tensor | None]
    waits: Callable[[], bool]
    """Whether a gradient of earlier micro-batches is kept to be reduced with this one's."""


class AccessedParameter(NamedTuple):
    """A parameter where its owner has it, and what is made of it."""

    owner: nn.Module
    own: str
    """Its name in the owner."""
    access: Access


def apply_access(module: nn.Module, accesses: Sequence[AccessedParameter]) -> None:
    """Exchange the parameters named in `accesses`, of the module or of any below it, while its forward runs.

    One that several modules share is made ready once.
    """

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        # Inside of a module that made them ready, there is nothing to do for those below it.
        here = [one for one in accesses if isinstance(one.owner._parameters[one.own], nn.Parameter)]
        stored = [owner._parameters[own] for owner, own, _ in here]
        made: dict[int, torch.Tensor] = {}
        try:
            with present(*stored):
                for (owner, own, access), parameter in zip(here, stored, strict=True):
                    assert parameter is not None
                    if id(parameter) not in made:
                        made[id(parameter)] = access(parameter)
                    put(owner, own, made[id(parameter)])
                given = [made[id(parameter)] for parameter in stored]
                memory = [_memory(x) for x in given]
                output = forward(*args, **kwargs)
            same = [_memory(x) == before for x, before in zip(given, memory, strict=True)]
            refuse_exchanged(here, given, same)
            return output
        finally:
            for (owner, own, _), parameter in zip(here, stored, strict=True):
                put(owner, own, parameter)

    wrap(module, wrapper)


def put(owner: nn.Module, own: str, tensor: torch.Tensor | None) -> None:
    """Put a tensor in a parameter's place, past the checks of `nn.Module`; recurrent modules keep a list, too."""
    owner._parameters[own] = tensor  # type: ignore[assignment]
    if isinstance(owner, nn.RNNBase) and own in owner._flat_weights_names:
        owner._flat_weights[owner._flat_weights_names.index(own)] = tensor


def _memory(tensor: torch.Tensor) -> int:
    """Where a plain tensor's values lie; setting its `.data` changes that."""
    return tensor.data_ptr() if type(tensor) is torch.Tensor else 0


def refuse_exchanged(
    accesses: Sequence[AccessedParameter], made: Sequence[torch.Tensor], same: Sequence[bool]
) -> None:
    """Raise StrategyError where the forward pass put another tensor in a parameter's place. `same`: whether each still
    has the memory that it had."""
    for (owner, own, access), tensor, kept in zip(accesses, made, same, strict=True):
        if owner._parameters.get(own) is not tensor or not kept:
            raise StrategyError(
                f"the forward pass puts another tensor in the place of the parameter {access.plan.name!r}, and an "
                "optimizer would update the one that was there; write its values instead: parameter.copy_(values)"
            )
