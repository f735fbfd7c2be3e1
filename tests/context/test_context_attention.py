"""Ring, Ulysses and hybrid attention against attention on one device, in fp64, forward and backward."""

from __future__ import annotations

import functools

import pytest
import torch
from context_cases import Case, expected, simulated, spread, together
from torch import Tensor

from harness import run_ranks

# fp64 sums in another order.
TOLERANCE = 1e-12

CASES = {
    "grouped heads": Case(),
    "one key-value head": Case(pairs=1),
    "eight heads": Case(heads=8, pairs=8),
    "window": Case(window=7),
    "window of one": Case(window=1),
    "documents": Case(documents=((20, 5, 23), (48,))),
    "window and documents": Case(window=9, documents=((1, 40, 7), (16, 16, 16))),
    "sinks": Case(sinks=True),
    "sinks and window": Case(sinks=True, window=10),
    "softcap": Case(softcap=0.4),
    "all": Case(softcap=0.4, sinks=True, window=9, documents=((20, 28), (5, 43))),
    "values of another size": Case(value_size=4),
}

SPLITS = {"ring 2": (2, 1), "ring 3": (3, 1), "ring 4": (4, 1), "ring 8": (8, 1), "ulysses 2": (1, 2)}
SPLITS |= {"ulysses 4": (1, 4), "hybrid 2 x 2": (2, 2), "hybrid 4 x 2": (4, 2), "hybrid 2 x 4": (2, 4)}

one_device_answer = functools.cache(expected)


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


# Each case and each split at least once; the rest is the matrix.
SAMPLE = {
    ("grouped heads", "hybrid 2 x 4"),
    ("one key-value head", "ulysses 4"),
    ("eight heads", "ring 4"),
    ("window", "ring 3"),
    ("window of one", "ring 2"),
    ("documents", "ring 4"),
    ("window and documents", "hybrid 4 x 2"),
    ("sinks", "ulysses 2"),
    ("sinks and window", "hybrid 2 x 2"),
    ("softcap", "ring 2"),
    ("all", "ring 8"),
    ("all", "hybrid 2 x 2"),
    ("values of another size", "hybrid 2 x 2"),
}


@pytest.mark.parametrize(
    ("case", "split"),
    [
        pytest.param(case, split, marks=[] if (case, split) in SAMPLE else [pytest.mark.matrix])
        for case in CASES
        for split in SPLITS
    ],
)
def test_simulated_ranks_attend_as_one_device_does(case: str, split: str) -> None:
    assert_same(simulated(CASES[case], *SPLITS[split]), one_device_answer(CASES[case]))


ON_WORKERS = ("grouped heads", "all", "window of one", "window and documents")


def _rank(rank: int, world: int, ring: int, ulysses: int) -> list[dict[str, Tensor]]:
    return [spread(CASES[name], ring, ulysses) for name in ON_WORKERS]  # type: ignore[misc]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (2, 2)])
def test_workers_attend_as_one_device_does_and_skip_what_is_not_seen(ring: int, ulysses: int) -> None:
    by_rank = run_ranks(_rank, ring * ulysses, ring, ulysses)
    for case, *answers in zip(ON_WORKERS, *by_rank, strict=True):
        assert_same(together(CASES[case], ring, ulysses, answers), one_device_answer(CASES[case]))
