"""Refinement: simulates the planner's best strategies from their captured steps.

The estimate is of closed forms; the prediction is of every operator that `train` would run, with the collectives in the
order in which training runs them. Neither is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import predict_run
from hyper_parallel.planner.run_file import PlannedRunFile
from hyper_parallel.planner.solve import Refined


def refine(
    files: Sequence[PlannedRunFile], cluster: Cluster, progress: Callable[[str], None]
) -> list[Refined]:
    """The prediction of each planned run file, or the reason why there is none."""
    found = []
    for place, file in enumerate(files, 1):
        progress(f"simulating strategy {place} of {len(files)}")
        found.append(_refined(file, cluster, progress))
    return found


def _refined(file: PlannedRunFile, cluster: Cluster, progress: Callable[[str], None]) -> Refined:
    try:
        run = config.from_dict(file.data, source="the planned file")
        world = run.effective_strategy.axes.world
        found = predict_run(run, cluster.for_workers(world), progress=progress)
    except HyperParallelError as error:
        return Refined(None, None, f"cannot be simulated: {error}")
    return Refined(found.timeline.step, found.timeline.peak.bytes, fits=found.fits, parts=found.parts)
