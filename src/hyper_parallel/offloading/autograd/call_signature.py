"""Call signature: tensors of a call apart from everything that selects its graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.compat.dispatch import global_state
from hyper_parallel.compat.pytree import flatten, unflatten
from hyper_parallel.errors import CaptureError
from hyper_parallel.offloading.autograd.state_tokens import is_opaque


@dataclass(frozen=True)
class TensorSlot:
    """Stands for the tensor with this number."""

    number: int


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a call."""

    tensors: tuple[torch.Tensor, ...]
    """Each once, however often it was given."""
    leaves: tuple[Any, ...]
    """All leaves of the arguments, a `TensorSlot` for each tensor."""
    shape: Any
    """Of the tree."""

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallSignature:
        """Raises CaptureError for an argument that cannot be compared between calls."""
        leaves, shape = flatten((tuple(args), dict(kwargs)))
        tensors: dict[int, torch.Tensor] = {}
        numbers: dict[int, int] = {}
        found: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.layout != torch.strided:
                    raise CaptureError(
                        "the model is called with a sparse tensor, for which no plan has memory; give it to_dense()"
                    )
                number = numbers.setdefault(id(leaf), len(numbers))
                tensors[number] = leaf
                found.append(TensorSlot(number))
                continue
            if is_plain(leaf) and not isinstance(leaf, Hashable):
                raise CaptureError(
                    f"the model is called with a {type(leaf).__name__}, which hp.offload cannot compare between calls; "
                    "give it tensors, numbers and strings, in lists, tuples and dicts"
                )
            found.append(leaf)
        return cls(tuple(tensors.values()), tuple(found), shape)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, as inputs of a step."""
        return tuple(f"input.{number}" for number in range(len(self.tensors)))

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by their names."""
        return dict(zip(self.names, self.tensors, strict=True))

    def run(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The call, on other tensors."""
        leaves = [tensors[leaf.number] if isinstance(leaf, TensorSlot) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.shape)
        return function(*args, **kwargs)

    def key(self, state: Collection[torch.Tensor], staying: frozenset[str]) -> Hashable:
        """The key of a call's graph: tensors by their metadata, other arguments by value, PyTorch's settings.

        `state`: the model's. `staying`: what of it keeps its memory during the call. What objects among the arguments
        hold, and the model's attributes, are Python state (`python_state`)."""
        return (
            tuple((type(leaf), leaf if is_plain(leaf) else None) for leaf in self.leaves),
            self.shape,
            tuple(_kind(tensor) for tensor in self.tensors),
            tuple(_kind(tensor) for tensor in state),
            staying,
            global_state(next(iter(state)).device.type),
        )

    @property
    def objects(self) -> list[Any]:
        """Arguments that are neither tensors nor plain values: their attributes may change."""
        return [leaf for leaf in self.leaves if not is_plain(leaf)]

    def __str__(self) -> str:
        """What is said of its shape."""
        return ", ".join(" × ".join(map(str, tensor.shape)) or "1" for tensor in self.tensors)


def is_plain(leaf: Any) -> bool:
    """Whether an argument is compared by its own equality: numbers, strings, and what Python and PyTorch define."""
    return is_opaque(leaf) and not callable(leaf)


def _kind(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
