"""The machine as data: link levels and how many devices each joins, and what a collective sends across them.

No torch here. `Cluster.of(strategy)` reads what a Strategy places and what a launcher says.
"""

from hyper_parallel.cluster.cluster import Cluster
from hyper_parallel.cluster.report import misplaced
from hyper_parallel.cluster.traffic import Call, Crossing, crossing

__all__ = ["Call", "Cluster", "Crossing", "crossing", "misplaced"]
