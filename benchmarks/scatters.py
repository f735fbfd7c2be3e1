"""Reduce-scatters of CPU workers, gloo's own way beside ours: python benchmarks/scatters.py

Four workers over loopback, both ways in turns; a time is the slowest worker's, the figures are medians.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from measure import RESULTS, machine

from hyper_parallel.compat import collectives  # registers our kernels

WORKERS, ROUNDS, WARM = 4, 21, 4
CASES = {"9.4 MB in one tensor": [2359296], "nine tensors of 16 KB": [4096] * 9}
"""Elements of float32."""
_ops = torch.ops._c10d_functional


def _ours(xs: Sequence[torch.Tensor], group: str) -> None:
    for part in _ops.reduce_scatter_tensor_coalesced(list(xs), "sum", WORKERS, group):
        _ops.wait_tensor(part)


def _gloos(xs: Sequence[torch.Tensor], group: str) -> None:
    parts = [x.new_empty(x.numel() // WORKERS) for x in xs]
    for x, part in zip(xs, parts, strict=True):
        _ops.reduce_scatter_tensor_out(x, "sum", WORKERS, group, out=part)
    for part in parts:
        _ops.wait_tensor(part)


def _seconds(run: Callable[[], None]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    run()
    taken = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def _worker(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    assert collectives is not None
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    found = {}
    for name, sizes in CASES.items():
        xs = [torch.randn(size) for size in sizes]
        times: dict[str, list[float]] = {"ours": [], "gloo": []}
        for turn in range(WARM + ROUNDS):
            for way, run in (("ours", _ours), ("gloo", _gloos)):
                taken = _seconds(lambda run=run, xs=xs: run(xs, group))  # type: ignore[misc]
                if turn >= WARM:
                    times[way].append(taken)
        found[name] = {way: statistics.median(all_) for way, all_ in times.items()}
    if rank == 0:
        out.write_text(
            json.dumps({"machine": machine(), "workers": WORKERS, "seconds": found}, indent=1) + "\n"
        )
        for name, one in found.items():
            print(f"{name}: ours {one['ours'] * 1e3:.2f} ms, gloo's {one['gloo'] * 1e3:.2f} ms")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    workers = [
        context.Process(target=_worker, args=(rank, port, RESULTS / "scatters.json"))
        for rank in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    raise SystemExit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
