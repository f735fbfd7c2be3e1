"""A process may end while gloo's threads still hold the tensors of its last collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAIRS = 8
RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
import hyper_parallel.compat.gloo

folder, pairs = sys.argv[1], int(sys.argv[2])
for pair in range(pairs):
    children = []
    for rank in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        store = dist.FileStore(f"{folder}/{pair}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()
        # Rank 1 comes when rank 0 is about to be over.
        time.sleep(rank * 0.02 * pair)
        for _ in range(20):
            x = torch.ones(100_000)
            x.seen_by_python = True  # so that letting go of it needs the interpreter
            dist.all_reduce(x, async_op=True)
        time.sleep(rank)
        sys.exit(0)
    print(*(os.waitpid(child, 0)[1] for child in children), flush=True)  # or the next children print it again
"""


def test_no_process_aborts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path), str(PAIRS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split("\n") == ["0 0"] * PAIRS + [""], done.stderr[-2000:]
