"""A process that ends while threads of its own compute ends as it was to."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
from hyper_parallel.compat.cpu import CpuStream

streams, x = [CpuStream() for _ in range(4)], torch.ones(2**12)
for _ in range(2**14):
    for stream in streams:
        stream.run(lambda: x.mul(2))
streams[0].run(print)
raise SystemExit(3)
"""


def test_a_process_ends_while_its_streams_compute() -> None:
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr, ended.stdout) == (3, "", ""), ended
