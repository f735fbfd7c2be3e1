"""What a strategy costs one rank, told without the ranks: bytes kept, and the collectives of a step.

`inspect_run(config)` gives an `Inspection`, which prints itself as a table or as JSON.
"""

from hyper_parallel.inspect.report import CollectiveRow, Inspection, Row
from hyper_parallel.inspect.run import inspect_run

__all__ = ["CollectiveRow", "Inspection", "Row", "inspect_run"]
