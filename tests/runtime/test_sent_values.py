"""What crosses between stages has the strides that were captured on the other side."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.ir import Value
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.runtime.stage_runner import flat, shaped


def _port(shape: tuple[int, ...], stride: tuple[int, ...]) -> Crossing:
    value = Value(shape, stride, torch.float32, torch.device("cpu"), 0)
    return Crossing("add", 0, 1, "forward", value, "add")


def test_the_stride_of_one_element_is_none() -> None:
    sent = torch.arange(8.0).as_strided((2, 1, 4), (4, 4, 1))
    port = _port((2, 1, 4), (4, 8, 1))
    assert flat(sent, port).data_ptr() == sent.data_ptr()
    assert torch.equal(shaped(flat(sent, port), port), sent)


def test_a_value_of_other_strides_is_copied() -> None:
    sent = torch.arange(6.0).view(3, 2).t()
    port = _port((2, 3), (3, 1))
    received = shaped(flat(sent, port).clone(), port)
    assert torch.equal(received, sent)
    assert received.stride() == (3, 1)


def test_a_value_of_another_shape_is_refused() -> None:
    with pytest.raises(
        HyperParallelError, match=r"port forward.add.0-1: \(3, 2\) is to be sent, and \(2, 3\) was"
    ):
        flat(torch.zeros(3, 2), _port((2, 3), (3, 1)))
