"""Calibration: measures this machine and writes it as a cluster file, which predictions use.

`calibrate` starts the workers, measures and returns a `Cluster`; `render` shows it as tables.
"""

from hyper_parallel.calibrate.report import render
from hyper_parallel.calibrate.run import Settings, calibrate

__all__ = ["Settings", "calibrate", "render"]
