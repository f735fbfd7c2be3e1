"""Calibration: this machine measured, as a cluster file that predictions are made with.

`calibrate` starts the workers, measures and returns a `Cluster`; `render` shows it as tables.
"""

from hyper_parallel.calibrate.report import render
from hyper_parallel.calibrate.run import Settings, calibrate

__all__ = ["Settings", "calibrate", "render"]
