"""Reports of a Timeline: a table for the terminal, a trace for Perfetto, and a page that works offline.

Each says whether it shows a prediction or a measurement.
"""

from hyper_parallel.report.page import page
from hyper_parallel.report.perfetto import perfetto
from hyper_parallel.report.table import table

__all__ = ["page", "perfetto", "table"]
