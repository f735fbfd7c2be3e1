"""`strategy: auto`: the planner inside a run, for whatever workers the launcher gives.

Rank 0 looks at the machine, asks the planner, simulates the best few, and tells all ranks; then the run goes on as if
the file had said so.
"""

from hyper_parallel.planner.auto.choose import Choice, choose
from hyper_parallel.planner.auto.open_axes import resolved

__all__ = ["Choice", "choose", "resolved"]
