"""Reduce-scatters of CPU workers, gloo's own way beside ours: python benchmarks/scatters.py

Four workers over loopback, both ways in turns; a time is the slowest worker's, the figures are medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from commandline import run
from measure import in_turns, timed
from pages import Benchmark
from processes import workers

from hyper_parallel.compat import collectives  # noqa: F401

BENCHMARK = Benchmark("scatters")
WORKERS, ROUNDS, WARM = 4, 21, 4
CASES = {"9.4 MB in one tensor": [2359296], "nine tensors of 16 KB": [4096] * 9}
"""Elements of float32."""
# `collectives` registers our kernels under these names.
_ops = torch.ops._c10d_functional


def ours(xs: Sequence[torch.Tensor], group: str) -> None:
    """Coalesced, by our kernel."""
    for part in _ops.reduce_scatter_tensor_coalesced(list(xs), "sum", WORKERS, group):
        _ops.wait_tensor(part)


def gloos(xs: Sequence[torch.Tensor], group: str) -> None:
    """Tensor after tensor, as gloo coalesces them."""
    parts = [x.new_empty(x.numel() // WORKERS) for x in xs]
    for x, part in zip(xs, parts, strict=True):
        _ops.reduce_scatter_tensor_out(x, "sum", WORKERS, group, out=part)
    for part in parts:
        _ops.wait_tensor(part)


def worker(rank: int, world: int) -> dict[str, dict[str, float]]:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    seconds = {}
    for name, sizes in CASES.items():
        xs = [torch.randn(size) for size in sizes]
        ways = {"ours": partial(ours, xs, group), "gloo": partial(gloos, xs, group)}
        times = in_turns(ways, ROUNDS, partial(timed, world=world), warm=WARM)
        seconds[name] = {way: statistics.median(values) for way, values in times.items()}
    return seconds


def main() -> None:
    seconds = workers(worker, WORKERS)[0]
    print(seconds)
    BENCHMARK.keep({"workers": WORKERS, "seconds": seconds})


if __name__ == "__main__":
    run(main)
