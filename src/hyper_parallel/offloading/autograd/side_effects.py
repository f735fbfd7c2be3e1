"""Side effects of a forward pass on Python state: found by a capture, undone, and done again at each call.

A graph computes tensors and runs no Python. What the model's own forward pass leaves in attributes, lists, dicts and
closures is found by comparing them before and after (`Transaction`). A tensor that it leaves there (an activation for a
probe, an auxiliary loss) becomes a further output of the graph; anything else is the same each time under the state for
which the graph was captured, which is guarded. `Effect.replay` puts both in their places when the graph has run.
"""

from __future__ import annotations

import collections
import dis
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hyper_parallel.compat.dispatch import flatten, unflatten
from hyper_parallel.errors import CaptureError
from hyper_parallel.offloading.autograd.state_snapshot import MISSING, Place, Snapshot, slots, state_token

_TENSOR = object()


@dataclass(frozen=True, eq=False)
class Items(Place):
    """All items of a list, deque or set; `key` is None."""

    def get(self) -> Any:
        return list(self.container)

    def set(self, value: Any) -> None:
        """Have these items and no others."""
        self.container.clear()
        (self.container.update if isinstance(self.container, set) else self.container.extend)(value)


@dataclass(frozen=True, eq=False)
class _Attribute(Place):
    """An attribute of a class, or of an object without a `__dict__`; `key` is its name."""

    def get(self) -> Any:
        return getattr(self.container, self.key, MISSING)

    def set(self, value: Any) -> None:
        if value is MISSING:
            delattr(self.container, self.key)
        else:
            setattr(self.container, self.key, value)


@dataclass(frozen=True)
class Change:
    """The values of a place before and now."""

    place: Place
    before: Any
    after: Any


class Transaction:
    """Python state as it was, to find changes and undo them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._random = _random_states()
        self._copies = [(path, value, _copy(value)) for path, value in snapshot.containers.items()]

    def changes(self) -> list[Change]:
        """The places that differ now. Raises CaptureError for an object whose state changed and cannot be set."""
        if _random_states() != self._random:
            raise CaptureError(
                "the forward pass draws random numbers of Python's or NumPy's, which a graph of it would not draw "
                "again; draw with PyTorch (torch.rand), or give the number to the model as an argument"
            )
        for path, value in self.snapshot.changing:
            if state_token(value) != self.snapshot.entries[path]:
                raise CaptureError(
                    f"the forward pass uses {path}, a {type(value).__name__} of Python's, which gives something "
                    "else each time and which a graph would not ask again; draw with PyTorch's generator, or give "
                    "the value to the model as an argument"
                )
        return [change for path, value, copy in self._copies for change in _compared(path, value, copy)]

    def undo(self) -> None:
        """Have everything as it was before, but for objects whose state cannot be set."""
        for name, state in self._random.items():
            _SET_STATE[name](state)
        for path, value, copy in self._copies:
            for change in _compared(path, value, copy):
                change.place.set(change.before)


def _set_numpy(state: tuple[Any, ...]) -> None:
    numpy = sys.modules["numpy"]
    name, words, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(words, dtype=numpy.uint32), *rest))


_SET_STATE: dict[str, Callable[[Any], None]] = {"random": random.setstate, "numpy": _set_numpy}


def _random_states() -> dict[str, Any]:
    """States of the generators that Python and NumPy have for everybody."""
    found: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        found["numpy"] = (name, words.tobytes(), *rest)
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, types.CellType):
        return Place(value, None, "").get()
    if isinstance(value, type):
        return dict(vars(value))
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list | collections.deque | set):
        return list(value)
    return {name: getattr(value, name) for name in slots(value) if hasattr(value, name)}


def _compared(path: str, value: Any, copy: Any) -> Iterator[Change]:
    if isinstance(value, types.CellType):
        place = Place(value, None, path, path)
        if place.get() is not copy:
            yield Change(place, copy, place.get())
    elif isinstance(value, list | collections.deque | set):
        if len(value) != len(copy) or not all(a is b for a, b in zip(value, copy, strict=True)):
            yield Change(Items(value, None, path, path), copy, list(value))
    else:
        has_items = isinstance(value, dict)
        now = _copy(value)
        for key in [*copy, *(key for key in now if key not in copy)]:
            before, after = copy.get(key, MISSING), now.get(key, MISSING)
            if before is not after:
                name = f"{path}{key}" if path.endswith(".") else f"{path}[{key!r}]"
                yield Change((Place if has_items else _Attribute)(value, key, name, path), before, after)


@dataclass(frozen=True)
class Effect:
    """The effect of each call on one place."""

    place: Place
    mode: str
    """`set`; `extend`, of a list; `add`, to a number that the forward pass counts and never reads."""
    leaves: tuple[Any, ...]
    shape: Any

    @property
    def tensors(self) -> int:
        """How many of the leaves are outputs of the graph."""
        return sum(leaf is _TENSOR for leaf in self.leaves)

    def replay(self, outputs: Iterator[Tensor], state: Snapshot) -> None:
        """Do it again, with the next of these outputs, to the place that is there now."""
        place = self._place(state)
        value = unflatten([next(outputs) if leaf is _TENSOR else leaf for leaf in self.leaves], self.shape)
        if self.mode == "add":
            place.set(place.get() + value)
        elif self.mode == "extend":
            place.container.extend(value)
        else:
            place.set(value)

    def left(self, state: Snapshot) -> list[Tensor]:
        """The tensors that the model's own code has left there."""
        value = self._place(state).get()
        if self.mode == "extend":
            value = value[-len(self.leaves) :]
        return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]

    def _place(self, state: Snapshot) -> Place:
        return replace(self.place, container=state.containers[self.place.within])


def same_changes(one: Sequence[Change], other: Sequence[Change]) -> bool:
    """Whether two lists of changes are of the same places, and to the same objects."""
    return len(one) == len(other) and all(
        a.place.container is b.place.container and a.place.key == b.place.key and _same(a.after, b.after)
        for a, b in zip(one, other, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and _begins_with(one, other)
    return one is other


def effects_of(
    changes: Sequence[Change], snapshot: Snapshot, weights: Mapping[int, str]
) -> tuple[list[Effect], list[Tensor], list[str]]:
    """The effects that these changes are, the tensors among them, and the names of those tensors.

    `weights`: the model's parameters and buffers in the capture, by their addresses.
    Raises CaptureError for what cannot be done again from a graph.
    """
    effects, tensors, names = [], [], []
    for change in changes:
        mode, value = _mode(change, snapshot)
        leaves, shape = flatten(value)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if id(leaf) in weights:
                    raise CaptureError(
                        f"the forward pass sets {change.place.path} to the model's {weights[id(leaf)]}, which a graph "
                        "of it would not do again; set it outside of forward"
                    )
                if leaf.retains_grad:
                    raise CaptureError(
                        f"the forward pass keeps {change.place.path} for its gradient (retain_grad), and a model under "
                        "hp.offload computes those of its parameters and inputs alone; call "
                        "hyper_parallel.release(model) first to compute it"
                    )
                tensors.append(leaf)
                names.append(change.place.path)
        kept = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        effects.append(Effect(change.place, mode, kept, shape))
    return effects, tensors, names


def _mode(change: Change, snapshot: Snapshot) -> tuple[str, Any]:
    before, after, place = change.before, change.after, change.place
    if after is MISSING:
        raise CaptureError(
            f"the forward pass deletes {place.path}, which a graph of it would not do again; delete it "
            "outside of forward"
        )
    if isinstance(place, Items):
        if isinstance(place.container, list) and len(after) > len(before) and _begins_with(after, before):
            return "extend", after[len(before) :]
        return "set", after
    numbers = type(before) is type(after) and type(after) in (int, float)
    if numbers and isinstance(place.key, str) and _counts_only(place.key, snapshot.codes):
        return "add", after - before
    return "set", after


def _begins_with(items: Sequence[Any], first: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(items, first, strict=False))


def _counts_only(name: str, codes: Sequence[types.CodeType]) -> bool:
    """Whether code reads an attribute only to add a constant to it: ``self.calls += 1``."""
    counted = False
    for code in codes:
        if name in code.co_consts:  # getattr(self, "calls")
            return False
        if name not in code.co_names:
            continue
        instructions = [
            step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")
        ]
        for at, step in enumerate(instructions):
            if step.argval != name or step.opname in ("STORE_ATTR", "LOAD_CONST"):
                continue
            adds = [following.opname for following in instructions[at + 1 : at + 3]] == [
                "LOAD_CONST",
                "BINARY_OP",
            ]
            stored = any(
                following.opname == "STORE_ATTR" and following.argval == name
                for following in instructions[at + 3 : at + 6]
            )
            if step.opname != "LOAD_ATTR" or not adds or not stored:
                return False
            if instructions[at + 2].argrepr not in ("+", "+=", "-", "-="):
                return False
            counted = True
    return counted
