"""Estimates from a run file, without the cluster: step time (simulated), memory of a rank, communication of a step.

`predict_run(config, cluster)` gives a `Prediction`: a Timeline with the collectives in the order in which training runs
them, whether the step fits the devices' memory, and what was assumed. `inspect_run(config)` gives an `Inspection`: the
bytes that a rank keeps, and the collectives of a step.
"""

from hyper_parallel.estimate.inspect import inspect_run
from hyper_parallel.estimate.inspect_report import CollectiveRow, Inspection, ModuleRow
from hyper_parallel.estimate.predict import cluster_of, predict_run
from hyper_parallel.estimate.prediction import Prediction

__all__ = [
    "CollectiveRow",
    "Inspection",
    "ModuleRow",
    "Prediction",
    "cluster_of",
    "inspect_run",
    "predict_run",
]
