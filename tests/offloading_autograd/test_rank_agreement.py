"""What one worker cannot plan, none runs, and each says what it knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.told_ranks import among
from hyper_parallel.errors import BudgetError, CaptureError, FollowsError
from hyper_parallel.offloading.autograd.parallel_context import agreed


def refuses(floor: int | None) -> Any:
    def make() -> None:
        raise BudgetError("too small", floor=floor)

    return make


def test_all_succeed() -> None:
    assert agreed(among((0, 0)), lambda: 7) == 7


def test_the_least_budget_is_enough_for_every_rank() -> None:
    with pytest.raises(BudgetError, match=r"too small; another worker needs more: 3.0 KiB") as found:
        agreed(among((0, 0), (1, 3072)), refuses(1024))
    assert found.value.floor == 3072
    with pytest.raises(BudgetError, match=r"^too small$") as found:
        agreed(among((1, 512)), refuses(1024))
    assert found.value.floor == 1024


def test_another_error_is_the_ranks_own() -> None:
    def make() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        agreed(among((1, 512)), make)
    with pytest.raises(FollowsError, match="no plan on another worker"):
        agreed(among((1, 0)), lambda: 7)


def test_a_result_that_differs_from_another_ranks_is_none() -> None:
    mine, other = bytes([1, 2, 3, 4, 5, 6, 7, 8]), [1, 2, 3, 4, 5, 6, 7, 9]
    handle = among((0, 0, *mine, *(-byte for byte in mine)))
    assert agreed(handle, lambda: 7, lambda made: mine) == 7
    handle = among((0, 0, *other, *(-byte for byte in other)))
    handle.model = SimpleNamespace()
    with pytest.raises(CaptureError, match="the code of SimpleNamespace computes with other weights"):
        agreed(handle, lambda: 7, lambda made: mine)
