"""The machine as data: devices, memory tiers, links by level, and their cost models.

No torch. `Cluster.of(strategy)` has the levels of a Strategy's placement and of the launcher;
`Cluster.named("h100x2048")` is a published machine; `Cluster.load(path)` is a measured or hand-written one.
"""

from hyper_parallel.cluster.cluster import Cluster
from hyper_parallel.cluster.collective_cost import Leg
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.cluster.efficiency import Efficiency, MemoryTable, ShapeTable
from hyper_parallel.cluster.measured import MEASURED, CollectiveTable, CopyTable, Shared
from hyper_parallel.cluster.report import misplaced
from hyper_parallel.cluster.traffic import CollectiveCall, Crossing, crossing

__all__ = [
    "MEASURED",
    "Cluster",
    "CollectiveCall",
    "CollectiveTable",
    "CopyTable",
    "Crossing",
    "Device",
    "Efficiency",
    "Leg",
    "Link",
    "MemoryTable",
    "ShapeTable",
    "Shared",
    "Tier",
    "crossing",
    "misplaced",
]
