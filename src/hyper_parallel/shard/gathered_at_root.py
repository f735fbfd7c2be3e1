"""Weights of a user's own module in the traceable lowering: all are made ready when the model is called.

Code that branches uses other weights on other ranks, or none, and code that reaches across modules uses them outside of
their own. Under FSDP2 ranks agree on each collective (`agreed_collectives`); a graph has its collectives in one order.
So every rank gathers all weights, in one order, when the model is called, and reduces all gradients, in one order, once
the backward pass has them all. A graph then moves each gather to its first use (`graph.collectives_in_place`).

A rank that has no gradient for a weight adds zeros where another has one. What the forward pass writes into gathered
weights would be lost, and is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from hyper_parallel.compat.fake_process_group import is_fake
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.compat.uneven_gradients import local_for_compute
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.parameter_gather import AccessedParameter, OverData, put, refuse_exchanged
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.written_buffers import WrittenBuffers

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
            made = self._ready(stored)
            with self._in_place(made), _NoWrites(self._name, self._names(made)):
                output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._made = made
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
    def _in_place(self, made: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the model's code finds these."""
        stored = [owner._parameters[own] for owner, own, _ in self._accesses]
        memory = [x.untyped_storage()._cdata for x in made]
        self._inside = True
        try:
            for (owner, own, _), x in zip(self._accesses, made, strict=True):
                put(owner, own, x)
            yield
            same = [x.untyped_storage()._cdata == before for x, before in zip(made, memory, strict=True)]
            refuse_exchanged(self._accesses, made, same)
        finally:
            self._inside = False
            for (owner, own, _), parameter in zip(self._accesses, stored, strict=True):
                put(owner, own, parameter)

    def _ready(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """What is computed with, in the order of the accesses; of a parameter that modules share, once."""
        first = {id(x): at for at, x in reversed([*enumerate(stored)])}
        places = sorted(first.values())
        moves = [self._accesses[at].access.over_data() for at in places]
        local = [local_for_compute(x) if isinstance(x, DTensor) else x for x in (stored[at] for at in places)]
        whole = _Together.apply(_Moves(moves, self._any_of(local), self._forget), *local)
        made = {at: self._accesses[at].access.after_data(x) for at, x in zip(places, whole, strict=True)}
        return [made[first[id(x)]] for x in stored]

    def _any_of(self, stored: Sequence[Tensor]) -> Callable[[list[bool]], list[bool]]:
        """Of each flag whether it is set on some rank; in a graph, which has no values, on this one."""
        return (lambda flags: flags) if any(map(is_fake, stored)) else self._axes.any

    def _forget(self) -> None:
        if not keeps_graph():
            self._made = []

    def _names(self, made: Sequence[Tensor]) -> dict[int, str]:
        """The parameter in each memory."""
        return {
            x.untyped_storage()._cdata: one.access.plan.name
            for x, one in zip(made, self._accesses, strict=True)
        }


class _Moves:
    """How the stored parameters become whole, and their gradients parts again."""

    def __init__(
        self,
        moves: Sequence[OverData],
        any_of: Callable[[list[bool]], list[bool]],
        over: Callable[[], None],
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
