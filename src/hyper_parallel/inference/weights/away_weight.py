"""A weight whose bytes are in a tier: shape, dtype and device can be read, values cannot.

It stands in a module in place of its parameter. Code that computes with it outside the forward pass of its module is
found at once (`ReadElsewhere`), instead of computing with whatever lies in the buffer then. Of an embedding's table
rows can be looked up (`torch.nn.functional.embedding`), which are gathered where the table lies. Of a stack of experts
one expert's matrix can be taken by its number (`weight[expert]`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from hyper_parallel.compat.pytree import leaves_of

Rows = Callable[[Tensor], Tensor]
"""Rows [U, D] of a table, on the device, for their numbers, int64 [U]."""


class ReadElsewhere(Exception):
    """The model's code reads the weight of a module outside of its forward pass. `module`: its name."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


class Experts(Protocol):
    """The experts of a module, which compute one at a time."""

    def choose(self, counts: Sequence[int], each: int) -> None:
        """How many tokens reach each expert, and how many experts each token chooses: before they compute."""

    def weight(self, number: int, expert: int) -> Tensor:
        """An expert's weight, of the module's stack with this number, until another expert's is taken."""


class AwayWeight(Tensor):
    """Stands for a weight of `module`, of which `rows` can be looked up, or which is stack `number` of `experts`."""

    module: str
    home: torch.device
    rows: Rows | None
    experts: Experts | None
    number: int

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        module: str,
        rows: Rows | None = None,
    ) -> AwayWeight:
        """For a weight like this, which belongs on `device`."""
        found = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        found.module, found.home, found.rows, found.experts, found.number = module, device, rows, None, 0
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE:
            return args[0].home
        if func in _FREE:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], AwayWeight) and args[0].experts is not None:
            expert = _number(args[1])
            if expert is not None and 0 <= expert < args[0].size(0):
                return args[0].experts.weight(args[0].number, expert)
        away = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, AwayWeight))
        if func is embedding and away.rows is not None:
            return _looked_up(away.rows, *args, **kwargs)
        raise ReadElsewhere(away.module)


def experts_of(module: nn.Module) -> Experts | None:
    """The experts of a module, where they are streamed one by one."""
    standing: Iterable[object] = module._parameters.values()
    return next((one.experts for one in standing if isinstance(one, AwayWeight) and one.experts), None)


def _number(key: object) -> int | None:
    """An index that is one number."""
    if isinstance(key, Tensor) and not key.dim() and not key.is_floating_point() and key.dtype != torch.bool:
        return int(key)
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def _looked_up(
    rows: Rows, ids: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Tensor:
    """As `torch.nn.functional.embedding`. `padding_idx` is for gradients."""
    assert max_norm is None, "such tables stay on the device"
    wanted, places = ids.unique(return_inverse=True)
    return rows(wanted)[places.reshape(-1)].view(*ids.shape, -1)


_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_FREE = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "is_meta", "is_sparse", "grad")
        ),
        *(
            getattr(Tensor, name)
            for name in (
                "size",
                "dim",
                "numel",
                "stride",
                "is_floating_point",
                "is_contiguous",
                "element_size",
            )
        ),
    ]
)
"""What reads no values."""
