"""HyperMPMD's first level: compute beside communication in one device.

`overlap` rewrites a step's graph so that collectives run while kernels do, as far as the simulation says that it pays.
"""

from hyper_parallel.overlap.fsdp_baseline_schedule import FsdpBaseline, layered
from hyper_parallel.overlap.order_search import Overlap, Overlapped, Tried, overlap

__all__ = ["FsdpBaseline", "Overlap", "Overlapped", "Tried", "layered", "overlap"]
