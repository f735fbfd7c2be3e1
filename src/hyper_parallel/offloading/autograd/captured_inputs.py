"""Inputs of captured passes: the tensors of a call, and those from outside that the forward pass finds."""

from __future__ import annotations

import collections
import contextlib
import gc
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import flatten, global_state, unflatten
from hyper_parallel.compat.fake_tensors import fake_of
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.guards import Questions
from hyper_parallel.graph.ir import state_tensors
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.offloading.autograd.python_state import ARGUMENTS
from hyper_parallel.offloading.autograd.state_snapshot import Place, Snapshot, is_opaque, tensor_token


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
        """Names of the tensors, as inputs of a step."""
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
        """Its shape in words."""
        return ", ".join(" × ".join(map(str, tensor.shape)) or "1" for tensor in self.tensors)


def is_plain(leaf: Any) -> bool:
    """Whether an argument is compared by its own equality: numbers, strings, and what Python and PyTorch define."""
    return is_opaque(leaf) and not callable(leaf)


def _kind(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


# Tensors from outside of a captured step: those that the forward pass finds, and those of the capture that it keeps.
#
# A tensor in an attribute, a container, a closure or a cache becomes an input of the graph, found again at its place at
# each call. A tensor of the capture that somebody still holds afterwards has no values and is taken away again.


@dataclass(frozen=True)
class OutsideTensor:
    """A tensor that the forward pass reads, and that is neither the model's state nor an argument of the call."""

    name: str
    """As an input of the step."""
    path: str | None
    """Where each call finds it; None where nobody knows."""
    tensor: Tensor | None
    """The tensor itself where there is no path, for example one in a cache of `functools.lru_cache`."""
    token: Hashable
    """Its metadata."""

    def now(self, state: Snapshot) -> Tensor | None:
        """The tensor for a call; None where there is none of the same kind."""
        found = self.tensor
        if self.path is not None:
            found = state.tensors[self.path].get() if self.path in state.tensors else None
        return found if tensor_token(found) == self.token else None


class OutsideTensors:
    """Makes inputs of the tensors that a forward pass finds in attributes, containers, closures and caches."""

    def __init__(self, mode: Any, questions: Questions, state: Snapshot, inside: Sequence[Tensor]) -> None:
        """`inside`: tensors that are inputs anyway."""
        self._mode, self._questions = mode, questions
        self._state, self._caches = list(state.state.values()), state.caches
        self._places = {id(place.get()): replace(place, path=path) for path, place in state.tensors.items()}
        self._inside = {tensor.untyped_storage().data_ptr() for tensor in inside} - {0}
        self.found: list[OutsideTensor] = []

    def lift(self, tensor: Tensor) -> tuple[str, Tensor]:
        """The name of a tensor as an input, and a fake one in its place."""
        place = self._places.get(id(tensor))
        what = f"a tensor of {tuple(tensor.shape)} that comes from outside of the step"
        what += f" ({place.path})" if place is not None else ""
        if any(tensor is own for own in self._state):
            raise CaptureError(
                f"the forward pass computes with a parameter or buffer of the model that it finds in {what}; read it "
                "from its module"
            )
        holder = None if place is not None else _holder_of(tensor, self._caches)
        if holder is not None:
            raise CaptureError(
                f"the forward pass reads {what}, in a {holder} that hp.offload does not follow, so that nobody could "
                "say when it is another one; keep it in an attribute, a list or a dict of the model"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"the forward pass computes with {what} and has a gradient; register it as a parameter of a module "
                "(register_parameter), or give it to the model as an argument"
            )
        if tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in self._inside:
            raise CaptureError(
                f"the forward pass reads {what} and shares its memory with a parameter, a buffer or an input; "
                "read the parameter itself"
            )
        if place is not None and place.path.startswith(ARGUMENTS):
            raise CaptureError(
                f"an object among the model's arguments holds {what}; give tensors to the model as arguments, or in "
                "lists, tuples and dicts"
            )
        name = f"outside.{len(self.found)}"
        path, kept = (None, tensor) if place is None else (place.path, None)
        self.found.append(OutsideTensor(name, path, kept, tensor_token(tensor)))
        self._questions.know(name, tensor)
        return name, fake_of(tensor, self._mode)


def _holder_of(tensor: Tensor, caches: Sequence[Any]) -> str | None:
    """What keeps a tensor that no path leads to; None for a tensor that is just made (`torch.from_numpy`), and for one
    in a cache of a function, which gives the same one each time."""
    cached: list[Any] = list(caches)
    for _ in range(3):  # the function, its dict, the links of a bounded one
        cached = [item for item in gc.get_referents(*cached) if not isinstance(item, type | types.ModuleType)]
        if any(item is tensor for item in cached):
            return None
    kinds = (dict, set, collections.deque)
    return next((type(item).__name__ for item in gc.get_referrers(tensor) if isinstance(item, kinds)), None)


@contextlib.contextmanager
def following(model: nn.Module, state: Snapshot) -> Iterator[None]:
    """Inside, attributes, containers and closures that hold a parameter or a buffer of the model hold what its module
    has in the place of it."""
    names = {id(tensor): name for name, tensor in state.state.items()}
    now = state_tensors(model)
    held: list[tuple[Place, Any, Any]] = []
    for place in state.tensors.values():
        tensor = place.get()
        if id(tensor) in names:
            held.append((place, tensor, now[names[id(tensor)]]))
    for place in state.references:
        reference = place.get()
        tensor = reference() if isinstance(reference, weakref.ref) else None
        if id(tensor) in names:
            held.append((place, reference, weakref.ref(now[names[id(tensor)]])))
    held = [entry for entry in held if not isinstance(entry[0].container, tuple)]
    for place, _, there in held:
        place.set(there)
    try:
        yield
    finally:
        for place, before, _ in held:
            place.set(before)


def check_written(step: StepGraph, state: Snapshot, call: CallSignature) -> None:
    """Raises CaptureError for a graph that writes to an input which shares its memory with other tensors."""
    written = {step.outside[at].name for node in step.nodes for at in writes(node) if at in step.outside}
    owners = Counter(x.untyped_storage().data_ptr() for x in (*state.state.values(), *call.tensors))
    for name, tensor in call.named.items():
        if name in written and owners[tensor.untyped_storage().data_ptr()] > 1:
            raise CaptureError(
                f"the forward pass writes to {name}, which shares its memory with another input or with a parameter; "
                "give it a clone"
            )


def check_released(tensors: weakref.WeakValueDictionary[int, Tensor], state: Snapshot) -> None:
    """Raises CaptureError where somebody still holds a tensor of the capture, which has no values."""
    torch.clear_autocast_cache()
    if not len(tensors):
        return
    state.clear_caches()
    gc.collect()
    remaining = list(tensors.values())
    if not remaining:
        return
    # It comes after what it was computed from, which autograd keeps with it.
    shape, kinds = tuple(remaining[-1].shape), set()
    for tensor in remaining:
        for holder in gc.get_referrers(tensor):
            if holder is not remaining and not isinstance(holder, types.FrameType):
                kinds.add(type(holder).__name__)
                _take_out(tensor, holder)
    raise CaptureError(
        f"the forward pass keeps a tensor of {shape} where hp.offload does not see it (in a "
        f"{', '.join(sorted(kinds)) or 'C object'}), and a graph would not put it there again; keep it in an "
        "attribute, a list or a dict of the model or of the hook, or return it"
    )


def _take_out(tensor: Tensor, holder: Any) -> None:
    """Remove a tensor without values from a container of the user's, as if the forward pass had not run."""
    if isinstance(holder, dict):
        for key in [key for key, value in holder.items() if value is tensor]:
            del holder[key]
    elif isinstance(holder, list | collections.deque):
        others = [value for value in holder if value is not tensor]
        holder.clear()
        holder.extend(others)
