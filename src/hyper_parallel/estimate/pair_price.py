"""Prices of pairs of a pipeline's tasks on a cluster: the seconds that merging them hides.

hidden[f][b] = seconds of the forward pass of stage f + gradients of inputs of stage b (whole backward pass, if first)
             − seconds of both, merged                                          (`overlap.merge_tasks`)

with every collective alone on its link, and the least of all places of device groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.cluster import Algorithm
from hyper_parallel.estimate.stage_capture import CapturedStages
from hyper_parallel.estimate.stage_price import node_seconds
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.overlap.merge_tasks import MergedTasks
from hyper_parallel.step.pipeline_pairs import StagePair, hidden_matrix, merged_pairs, pairs_on_one_rank


def hidden_seconds(
    found: CapturedStages,
    cluster: Cluster,
    places: Sequence[DeviceGroup],
    ranks: int,
    algorithm: Algorithm = None,
) -> tuple[tuple[float, ...], ...]:
    """[forward stage][backward stage] of all stages, as `schedule.Costs` takes it. `places`: the device groups that lie
    differently on the links; `ranks`: of the schedule."""
    assert cluster.device is not None, "a cluster that prices has a device"
    slowdown = cluster.device.comm_slowdown
    wanted = pairs_on_one_rank(found.stages, ranks)
    different = sorted({(found.captured[one], found.captured[other]) for one, other in wanted})
    stages = found.partition.stages
    by_place = [
        merged_pairs(
            stages,
            [node_seconds(stage.step, cluster, group.ranks, algorithm) for stage in stages],
            different,
            slowdown,
        )
        for group in places
    ]
    least: dict[StagePair, MergedTasks] = {
        pair: min((one[pair] for one in by_place), key=lambda merged: merged.hidden) for pair in different
    }
    return hidden_matrix(
        found.stages, {(f, b): least[found.captured[f], found.captured[b]] for f, b in wanted}
    )
