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


def test_no_operation_of_pytorch_is_torn_apart() -> None:
    stop.reset()
    whole = False
    try:
        with pytest.raises(KeyboardInterrupt), stop.interruptible():
            with _Asking():
                whole = bool((torch.ones(2) + 1).sum() == 4)
            assert stop.must_interrupt()
            stop.interrupt(sys._getframe())
    finally:
        stop.reset()
    assert whole
