"""The machine as data: devices, memory tiers, links by level, and their cost models.

No torch. `Cluster.of(strategy)` has the levels of a Strategy's placement and of the launcher;
`Cluster.named("h100x2048")` is a published machine; `Cluster.load(path)` is a measured or hand-written one.
"""

from hyper_parallel.cluster.cluster import Cluster, misplaced
from hyper_parallel.cluster.collective_cost import Leg
from hyper_parallel.cluster.device import MEASURED, CollectiveTable, CopyTable, Device, Link, Shared, Tier
from hyper_parallel.cluster.efficiency import Efficiency, MemoryTable, ShapeTable

__all__ = [
    "MEASURED",
    "Cluster",
    "CollectiveTable",
    "CopyTable",
    "Device",
    "Efficiency",
    "Leg",
    "Link",
    "MemoryTable",
    "ShapeTable",
    "Shared",
    "Tier",
    "misplaced",
]
