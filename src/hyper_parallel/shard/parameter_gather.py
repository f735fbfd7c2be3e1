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

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.compat.dispatch import (
    TorchDispatchMode,
    keeps_graph,
    mutated_arguments,
    running_backward,
    writes_nothing,
)
from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.compat.fsdp import local_for_compute
from hyper_parallel.compat.local_tensor import per_rank, per_rank_int
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.mesh_axis import Axis, _Moved
from hyper_parallel.shard.model_structure import parameter_of
from hyper_parallel.shard.plan.plan import ParameterPlan
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.weights_written_in_forward import WrittenBuffers


@dataclass(frozen=True)
class Dtypes:
    """How a parameter is computed with and its gradient reduced."""

    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class Access:
    """Makes the weight that a module computes with from one stored parameter."""

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
        """The weight to compute with, from what `over_data` or FSDP2 makes."""
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
        stored = [parameter_of(owner, own) for owner, own, _ in here]
        weights: dict[int, torch.Tensor] = {}
        with present(*stored):
            for (_, _, access), parameter in zip(here, stored, strict=True):
                if id(parameter) not in weights:
                    weights[id(parameter)] = access(parameter)
            with _exchanged(here, [weights[id(parameter)] for parameter in stored]):
                return forward(*args, **kwargs)

    wrap(module, wrapper)


@contextlib.contextmanager
def _exchanged(accesses: Sequence[AccessedParameter], weights: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the model's code finds these tensors in the place of the parameters.

    Raises StrategyError where the code puts another one there.
    """
    stored = [owner._parameters[own] for owner, own, _ in accesses]
    memory = [_memory(tensor) for tensor in weights]
    try:
        for (owner, own, _), tensor in zip(accesses, weights, strict=True):
            put(owner, own, tensor)
        yield
        for (owner, own, access), tensor, before in zip(accesses, weights, memory, strict=True):
            if owner._parameters.get(own) is not tensor or _memory(tensor) != before:
                raise StrategyError(
                    f"the forward pass puts another tensor in the place of the parameter {access.plan.name!r}, and an "
                    "optimizer would update the one that was there; write its values instead: parameter.copy_(values)"
                )
    finally:
        for (owner, own, _), parameter in zip(accesses, stored, strict=True):
            put(owner, own, parameter)


def put(owner: nn.Module, own: str, tensor: torch.Tensor | None) -> None:
    """Put a tensor in a parameter's place, past the checks of `nn.Module`; recurrent modules keep a list, too."""
    owner._parameters[own] = tensor  # type: ignore[assignment]
    if isinstance(owner, nn.RNNBase) and own in owner._flat_weights_names:
        owner._flat_weights[owner._flat_weights_names.index(own)] = tensor


def _memory(tensor: torch.Tensor) -> int:
    """Where a plain tensor's values lie, or a fake one's would; setting its `.data` changes that."""
    plain = type(tensor) is torch.Tensor or is_fake(tensor)
    return tensor.untyped_storage()._cdata if plain else 0


# Weights of a user's own module in the traceable lowering: all are made ready when the model is called.
#
# Code that branches uses other weights on other ranks, or none, and code that reaches across modules uses them outside
# of their own. Under FSDP2 ranks agree on each collective (`agreed_collectives`); a graph has its collectives in one
# order. So every rank gathers all weights, in one order, when the model is called, and reduces all gradients, in one
# order, once the backward pass has them all. A graph then moves each gather to its first use
# (`graph.reorder_for_memory`).
#
# A rank that has no gradient for a weight adds zeros where another has one. What the forward pass writes into gathered
# weights would be lost, and is refused.

NOT_KEPT = (
    "which lowering='traceable' does not keep; write it outside of the forward pass, or leave out `lowering` and "
    "hp.offload"
)


class GatheredAtRoot:
    """The parameters of one model, exchanged for whole ones while its forward pass runs."""

    def __init__(self, model: nn.Module, accesses: Sequence[AccessedParameter], axes: ProcessMesh) -> None:
        self._name, self._accesses, self._axes = type(model).__name__, accesses, axes
        self._buffers = WrittenBuffers(model, axes)
        self._inside = False
        self._made: list[Tensor] = []
        """What a checkpoint computes with again, until the backward pass is over."""
        for name, module in model.named_modules():
            module.register_load_state_dict_pre_hook(self._refuse_loading)
            if name and any(one.owner is module for one in accesses):
                wrap(module, functools.partial(self._part, name))
        wrap(model, self._call)

    def _call(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """A call of the model."""
        if self._inside:
            return forward(*args, **kwargs)
        self._made = []
        stored = [x for owner, own, _ in self._accesses if (x := owner._parameters[own]) is not None]
        with present(*stored), self._buffers.alike(any(map(is_fake, stored))):
            weights = self._ready(stored)
            with self._in_place(weights), _NoWrites(self._name, self._names(weights)):
                output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._made = weights
        return output

    def _refuse_loading(self, module: nn.Module, *_: Any) -> None:
        if self._inside:
            raise StrategyError(
                f"the forward pass of {self._name} loads weights into a {type(module).__name__}, {NOT_KEPT}"
            )

    def _part(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """A call of a module below it."""
        if self._inside:
            return forward(*args, **kwargs)
        if not self._made or running_backward() is None:
            raise StrategyError(
                f"{name!r} of {self._name} is called outside of the model's forward pass, where "
                "lowering='traceable' has not gathered its weights; call the model, or leave `lowering` out"
            )
        with self._in_place(self._made):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def _in_place(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the model's code finds these."""
        self._inside = True
        try:
            with _exchanged(self._accesses, weights):
                yield
        finally:
            self._inside = False

    def _ready(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """The weights to compute with, in the order of the accesses; of a parameter that modules share, once."""
        first = {id(x): at for at, x in reversed([*enumerate(stored)])}
        places = sorted(first.values())
        moves = [self._accesses[at].access.over_data() for at in places]
        local = [local_for_compute(x) if isinstance(x, DTensor) else x for x in (stored[at] for at in places)]
        # A graph has no values: what is set on this rank counts.
        fake = any(map(is_fake, local))
        any_of = (lambda flags: flags) if fake else self._axes.any
        whole = _Together.apply(_Moves(moves, any_of, self._forget), *local)
        ready = {at: self._accesses[at].access.after_data(x) for at, x in zip(places, whole, strict=True)}
        return [ready[first[id(x)]] for x in stored]

    def _forget(self) -> None:
        if not keeps_graph():
            self._made = []

    def _names(self, weights: Sequence[Tensor]) -> dict[int, str]:
        """The parameter in each memory."""
        return {
            x.untyped_storage()._cdata: one.access.plan.name
            for x, one in zip(weights, self._accesses, strict=True)
        }


class _Moves:
    """How the stored parameters become whole, and their gradients parts again."""

    def __init__(
        self, moves: Sequence[OverData], any_of: Callable[[list[bool]], list[bool]], over: Callable[[], None]
    ) -> None:
        self.moves, self._any, self._over = moves, any_of, over

    def back(self, gradients: Sequence[Tensor | None], like: Sequence[_Like]) -> list[Tensor | None]:
        """The gradients of what is stored; None where no rank has one. A collective."""
        has = self._any(
            [
                needed and (x is not None or move.waits())
                for x, move, (needed, *_) in zip(gradients, self.moves, like, strict=True)
            ]
        )
        self._over()
        return [
            move.backward(x if x is not None else torch.zeros(shape, dtype=dtype, device=device))
            if some
            else None
            for x, move, some, (_, shape, dtype, device) in zip(gradients, self.moves, has, like, strict=True)
        ]


_Like = tuple[bool, torch.Size, torch.dtype, torch.device]
"""Whether it is trained, and the shape, dtype and device of its gradient."""


class _Together(torch.autograd.Function):
    """All parameters at once: autograd comes back once, with the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, moves: _Moves, *stored: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        whole = tuple(move.forward(x) for move, x in zip(moves.moves, stored, strict=True))
        ctx.moves = moves
        ctx.like = [(x.requires_grad, y.shape, y.dtype, y.device) for x, y in zip(stored, whole, strict=True)]
        ctx.mark_non_differentiable(*(y for x, y in zip(stored, whole, strict=True) if not x.requires_grad))
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.moves.back(gradients, ctx.like)


class _NoWrites(TorchDispatchMode):
    """Raises StrategyError where an operator writes a gathered weight."""

    supports_higher_order_operators = True

    def __init__(self, model: str, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._names = model, names

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not writes_nothing(operator):
            for tensor in mutated_arguments(operator, args, kwargs):
                name = self._names.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    raise StrategyError(
                        f"the forward pass of {self._model} writes the weight {name!r}, {NOT_KEPT}"
                    )
        return operator(*args, **kwargs)
