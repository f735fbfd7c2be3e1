"""Lazy tensors: operations on tensors without values are recorded, and slices of the results computed from slices.

Transformers converts weights by its own code between the names and shapes of a folder and those of a model. That
code runs once, on tensors of the meta device; the operations that reach PyTorch's dispatcher are kept as a graph. A
slice of a result is then read through the graph: through concatenations, stacks, splits and transpositions as slices of
their inputs, so that a rank reads no more than its piece; through any other operation from its inputs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Ranges = tuple[tuple[int, int], ...]
"""The first index and the one after the last, of each dim."""

_aten = torch.ops.aten


class Source(Protocol):
    """A tensor that is read in slices: one in memory, one in a file, or one computed from several."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> Tensor: ...


class Operation(NamedTuple):
    """The operation whose result a traced tensor is."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    place: int | None
    """Its place in the list of results; None where there is one result."""


class TracedTensor(torch.Tensor):
    """A tensor without values that knows its origin: a source of values, or an operation on other traced tensors."""

    meta: Tensor
    origin: Source | Operation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, origin: Source | Operation) -> TracedTensor:
        """`meta`: what it would be on the meta device."""
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=meta.device,
        )
        wrapper.meta, wrapper.origin = meta, origin
        tensor: TracedTensor = wrapper
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        if function._schema.is_mutable:
            raise NotImplementedError(f"{function} changes a weight in place, which cannot be read in slices")
        # Where values are computed follows from where they are read.
        named = {key: value for key, value in (keywords or {}).items() if key != "device"}
        bare = tree_map_only(TracedTensor, lambda traced: traced.meta, (arguments, named))
        results = function(*bare[0], **bare[1])
        if isinstance(results, Tensor):
            return TracedTensor(results, Operation(function, arguments, named, None))
        if isinstance(results, Sequence) and all(isinstance(result, Tensor) for result in results):
            return [
                TracedTensor(result, Operation(function, arguments, named, index))
                for index, result in enumerate(results)
            ]
        return results

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TracedTensor({list(self.shape)}, {self.dtype})"


def traced(source: Source, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
    """A source of values as a traced tensor."""
    return TracedTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), source)


def sources_of(tensor: TracedTensor) -> Iterator[Source]:
    """The sources that a tensor's values are computed from."""
    if not isinstance(tensor.origin, Operation):
        yield tensor.origin
        return
    for inner in tree_leaves((tensor.origin.arguments, tensor.origin.keywords)):
        if isinstance(inner, TracedTensor):
            yield from sources_of(inner)


def is_sliced(tensor: TracedTensor) -> bool:
    """Whether slices of a tensor are computed from slices of its sources, and from nothing more."""
    origin = tensor.origin
    if not isinstance(origin, Operation):
        return True
    inner = (value for value in tree_leaves(origin.arguments) if isinstance(value, TracedTensor))
    return origin.function in _SLICED and all(map(is_sliced, inner))


class SliceReader:
    """Reads traced tensors. The last result of an operation that needs its inputs as a whole is kept, since a rank's
    piece may be several slices."""

    def __init__(self) -> None:
        self._last: tuple[TracedTensor, Tensor] | None = None

    def of(self, tensor: TracedTensor) -> Source:
        """A source of the tensor's values."""
        return _Result(self, tensor)

    def read(self, tensor: TracedTensor, ranges: Ranges) -> Tensor:
        """The values of a box, in the type that the source has where the operations only move them."""
        origin = tensor.origin
        if not isinstance(origin, Operation):
            return origin[tuple(slice(first, last) for first, last in ranges)]
        if any(last <= first for first, last in ranges):
            return torch.empty([max(last - first, 0) for first, last in ranges], dtype=tensor.dtype)
        sliced = _SLICED.get(origin.function)
        if sliced is not None:
            return sliced(self, origin, ranges)
        return self._computed(tensor, origin)[tuple(slice(first, last) for first, last in ranges)]

    def whole(self, tensor: TracedTensor) -> Tensor:
        """All values, as they would lie in memory: operations that need them as a whole may ask for strides."""
        values = self.read(tensor, tuple((0, size) for size in tensor.shape)).to(tensor.dtype)
        if values.stride() == tensor.stride():
            return values
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype).copy_(values)

    def _computed(self, tensor: TracedTensor, origin: Operation) -> Tensor:
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # before memory is taken for the next
            arguments, keywords = tree_map_only(TracedTensor, self.whole, (origin.arguments, origin.keywords))
            with torch.no_grad():
                results = origin.function(*arguments, **keywords)
            self._last = (tensor, results if origin.place is None else results[origin.place])
        return self._last[1]


class _Result:
    def __init__(self, reader: SliceReader, tensor: TracedTensor) -> None:
        self._reader, self._tensor = reader, tensor

    def __getitem__(self, slices: tuple[slice, ...], /) -> Tensor:
        shape = self._tensor.shape
        selection = (*slices, *(slice(None),) * (len(shape) - len(slices)))
        bounds = [part.indices(size) for part, size in zip(selection, shape, strict=True)]
        return self._reader.read(self._tensor, tuple((first, last) for first, last, _ in bounds))


# Operations whose slices need slices of the inputs only.


def _same(reader: SliceReader, operation: Operation, ranges: Ranges) -> Tensor:
    return reader.read(operation.arguments[0], ranges)


def _cat(reader: SliceReader, operation: Operation, ranges: Ranges) -> Tensor:
    tensors = operation.arguments[0]
    dim = _dim(operation, 1, tensors[0].dim())
    first, last = ranges[dim]
    pieces, offset = [], 0
    for tensor in tensors:
        size = tensor.shape[dim]
        inside = (max(first - offset, 0), min(last - offset, size))
        if inside[0] < inside[1]:
            pieces.append(reader.read(tensor, _with(ranges, dim, inside)))
        offset += size
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _stack(reader: SliceReader, operation: Operation, ranges: Ranges) -> Tensor:
    tensors = operation.arguments[0]
    dim = _dim(operation, 1, tensors[0].dim() + 1)
    inner = ranges[:dim] + ranges[dim + 1 :]
    return torch.stack([reader.read(tensor, inner) for tensor in tensors[slice(*ranges[dim])]], dim)


def _split(reader: SliceReader, operation: Operation, ranges: Ranges) -> Tensor:
    tensor, sizes = operation.arguments[:2]
    dim = _dim(operation, 2, tensor.dim())
    index = operation.place or 0
    offset = index * sizes if isinstance(sizes, int) else sum(sizes[:index])
    first, last = ranges[dim]
    return reader.read(tensor, _with(ranges, dim, (first + offset, last + offset)))


def _transpose(reader: SliceReader, operation: Operation, ranges: Ranges) -> Tensor:
    tensor, *dims = operation.arguments
    a, b = (dim % tensor.dim() for dim in dims)
    swapped = list(ranges)
    swapped[a], swapped[b] = ranges[b], ranges[a]
    return reader.read(tensor, tuple(swapped)).transpose(a, b)


def _dim(operation: Operation, place: int, dims: int) -> int:
    arguments = operation.arguments
    dim: int = arguments[place] if len(arguments) > place else operation.keywords.get("dim", 0)
    return dim % dims


def _with(ranges: Ranges, dim: int, bounds: tuple[int, int]) -> Ranges:
    return (*ranges[:dim], bounds, *ranges[dim + 1 :])


_SLICED: dict[Any, Callable[[SliceReader, Operation, Ranges], Tensor]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten._to_copy.default: _same,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.transpose.int: _transpose,
}
