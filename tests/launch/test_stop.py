"""Requests to stop: where they interrupt, and where they wait."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.launch import stop


class _Asking(TorchDispatchMode):
    """Asks for the end while an operation of PyTorch runs, as a signal may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stop.request_stop()
        stop.interrupt(sys._getframe())
        return func(*args, **(kwargs or {}))


def _work(found: list[float]) -> None:
    with stop.interruptible():
        with _Asking():
            found.append(float((torch.ones(2) + 1).sum()))
        assert stop.must_interrupt()
        stop.interrupt(sys._getframe())


def test_no_operation_of_pytorch_is_torn_apart() -> None:
    stop.reset()
    found: list[float] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            _work(found)
    finally:
        stop.reset()
    assert found == [4.0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        stop.request_stop()
        stop.interrupt(sys._getframe())
        return x + 1


def test_no_function_of_autograd_is_torn_apart() -> None:
    def work() -> None:
        with stop.interruptible():
            found.append(float(_Function.apply(torch.ones(()))))
            stop.interrupt(sys._getframe())

    stop.reset()
    found: list[float] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        stop.reset()
    assert found == [2.0]


class _LetGo:
    def __del__(self) -> None:
        stop.request_stop()
        stop.interrupt(sys._getframe())


def _let_go() -> None:
    with stop.interruptible():
        _LetGo()
        stop.interrupt(sys._getframe())


def test_no_interrupt_is_lost_where_an_object_is_let_go_of() -> None:
    stop.reset()
    try:
        with pytest.raises(KeyboardInterrupt):
            _let_go()
    finally:
        stop.reset()
