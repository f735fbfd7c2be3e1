"""CPU seconds and memory before the first step, by the number of micro-batches: capture, passes, the executables.

    python benchmarks/first_step.py            # the shape of Llama 3 70B, 80 layers, 8 devices; about ten minutes
    python benchmarks/first_step.py --layers 8 # quicker

Each number of micro-batches is measured in a process of its own, on one rank of a simulated process group, on the meta
device: what `train` does on every rank before its first step, but for the values. CPU seconds are those of the process;
memory is what its resident set has grown by at the most.
"""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "first_step.json"
