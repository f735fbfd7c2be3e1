"""Slices of traced tensors are those of the results, and read no more of the sources than they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel.compat.traced_tensors import SliceReader, is_sliced, sources_of, traced

Made = Callable[[list[torch.Tensor]], torch.Tensor]


class Counted:
    """A tensor that counts the elements that are read."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.read = values, 0

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor:
        piece = self.values[slices]
        self.read += piece.numel()
        return piece


SLICED: dict[str, Made] = {
    "experts": lambda t: torch.cat([torch.stack(t[:2]), torch.stack(t[2:])], dim=1),
    "cut": lambda t: t[0].chunk(2, dim=1)[1].contiguous(),
    "cut unevenly": lambda t: torch.split(t[1], [1, 3], dim=0)[1],
    "transposed": lambda t: torch.cat([t[0].transpose(0, 1), t[1].mT.contiguous()], dim=-1),
}
WHOLE: dict[str, Made] = {
    "interleaved": lambda t: t[0].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
    "viewed after a transposition": lambda t: t[0].mT.contiguous().view(3, 8).chunk(2, dim=1)[1],
    "computed": lambda t: t[0] * 2 + t[1],
}


def sources() -> list[Counted]:
    draw = torch.Generator().manual_seed(0)
    return [Counted(torch.randn(4, 6, generator=draw)) for _ in range(4)]


@pytest.mark.parametrize("name", [*SLICED, *WHOLE])
def test_every_slice_is_that_of_the_result(name: str) -> None:
    make = {**SLICED, **WHOLE}[name]
    inputs = sources()
    expected = make([source.values for source in inputs])
    tensor: Any = make([traced(source, (4, 6), torch.float32) for source in inputs])
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    assert is_sliced(tensor) == (name in SLICED)
    read = SliceReader().of(tensor)
    assert torch.equal(read[()], expected)
    for dim, size in enumerate(expected.shape):
        for first in range(size):
            for last in range(first, size + 1):
                box = tuple(slice(first, last) if at == dim else slice(None) for at in range(expected.dim()))
                assert torch.equal(read[box], expected[box])


@pytest.mark.parametrize("name", SLICED)
def test_a_slice_reads_its_share(name: str) -> None:
    inputs = sources()
    tensor: Any = SLICED[name]([traced(source, (4, 6), torch.float32) for source in inputs])
    piece = SliceReader().of(tensor)[(slice(0, 1), slice(0, 1))]
    assert sum(source.read for source in inputs) == piece.numel()


def test_an_operation_that_needs_all_is_computed_once_for_the_slices_of_a_piece() -> None:
    inputs = sources()
    tensor: Any = WHOLE["computed"]([traced(source, (4, 6), torch.float32) for source in inputs])
    read = SliceReader().of(tensor)
    for row in range(4):
        assert read[(slice(row, row + 1),)].shape == (1, 6)
    assert [source.read for source in inputs] == [24, 24, 0, 0]
    assert {*sources_of(tensor)} == {*inputs[:2]}


def test_values_are_computed_in_the_type_that_they_were_converted_to() -> None:
    source = Counted(torch.tensor([1.0, 1 + 2**-12]))
    tensor: Any = traced(source, (2,), torch.float32).to(torch.bfloat16) * 3
    assert SliceReader().of(tensor)[()].tolist() == [3.0, 3.0]


def test_a_change_in_place_is_refused() -> None:
    tensor = traced(Counted(torch.ones(2)), (2,), torch.float32)
    with pytest.raises(NotImplementedError, match="in place"):
        tensor.mul_(2)
