"""HyperMPMD's first level: compute beside communication in one device.

`overlap` rewrites a step's graph so that collectives run while kernels do, as far as the simulation says that it pays.
"""

from hyper_parallel.overlap.choose import Overlap, Overlapped, Tried, overlap
from hyper_parallel.overlap.usual import Usual, layered

__all__ = ["Overlap", "Overlapped", "Tried", "Usual", "layered", "overlap"]
