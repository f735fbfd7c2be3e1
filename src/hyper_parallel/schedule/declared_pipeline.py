"""Checks of a declared pipeline: its schedule, micro-batches, stages and layers, before any model is built."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.errors import StrategyError
from hyper_parallel.program.build import Schedule
from hyper_parallel.schedule.forward_backward_pairs import with_steady_pairs
from hyper_parallel.schedule.one_f_one_b import (
    gpipe,
    interleaved,
    one_f_one_b,
    one_f_one_b_split,
    zb_h1,
    zb_h2,
)
from hyper_parallel.schedule.v_shaped import dual_pipe_v, v_half, v_min, zb_v
from hyper_parallel.strategy import Strategy, recomputed_layers
from hyper_parallel.strategy.axes import AUTO
from hyper_parallel.strategy.pipeline import Pipeline, ScheduleName


def stages_of(pipeline: Pipeline, ranks: int) -> int:
    """The number of stages of a pipeline over `ranks` ranks."""
    known = 1 if pipeline.schedule == AUTO else stages_per_rank(pipeline.schedule)
    return ranks * (pipeline.virtual or known)


def check_pipeline(strategy: Strategy, micro_batches: int, layers: int | None = None) -> None:
    """Raise StrategyError for a pipeline that no model could have, or none of this number of layers.

    `micro_batches`: of a step, on each rank; `layers`: of the model, where they are known.
    """
    pipeline, ranks = strategy.pipeline, strategy.axes.pipeline
    _check_schedule(strategy, micro_batches)
    stages = stages_of(pipeline, ranks)
    where = f"axes.pipeline {ranks} · {stages // ranks} on each rank"
    # Embedding and head may be stages without layers.
    if layers is not None and stages > layers + 2:
        raise StrategyError(
            f"pipeline: {stages} stages ({where}), and the model has {layers} layers; make axes.pipeline or "
            f"pipeline.virtual smaller, so that there are at most {layers} stages"
        )
    _check_recompute(strategy, stages)
    if pipeline.layers is None:
        return
    if len(pipeline.layers) != stages:
        raise StrategyError(
            f"pipeline.layers has {len(pipeline.layers)} numbers, and there are {stages} stages ({where}); give one "
            "number for each stage, or leave pipeline.layers out"
        )
    if 0 in pipeline.layers[1:-1]:
        raise StrategyError(
            f"pipeline.layers: {pipeline.layers} leaves stage {pipeline.layers.index(0, 1)} without layers, and "
            "nothing else is there to compute; give each stage but the first and the last at least one"
        )
    if layers is not None and sum(pipeline.layers) != layers:
        raise StrategyError(
            f"pipeline.layers: {pipeline.layers} places {sum(pipeline.layers)} layers, and the model has {layers}; "
            f"change the counts to sum to {layers}, or leave pipeline.layers out"
        )


def _check_recompute(strategy: Strategy, stages: int) -> None:
    """Raise StrategyError for a list of another length than there are stages, and for more layers than one has."""
    layers, counts = strategy.memory.recompute_layers, strategy.pipeline.layers
    if isinstance(layers, list) and len(layers) != stages:
        raise StrategyError(
            f"memory.recompute_layers has {len(layers)} numbers, and there are {stages} stages; give one number for "
            "each stage, or a single number for all of them"
        )
    if counts is not None and len(counts) == stages:
        recomputed_layers(strategy.memory, counts)


def _check_schedule(strategy: Strategy, micro_batches: int) -> None:
    pipeline, ranks = strategy.pipeline, strategy.axes.pipeline
    if pipeline.schedule != AUTO:
        try:
            named_schedule(pipeline.schedule, ranks, micro_batches, pipeline.virtual)
        except StrategyError as error:
            raise StrategyError(f"pipeline: {error}") from error
        if pipeline.overlap_forward_backward and not _has_pairs(pipeline.schedule, ranks, pipeline.virtual):
            found = [
                name
                for name in (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED, ScheduleName.DUAL_PIPE_V)
                if _has_pairs(name, ranks, None)
            ]
            raise StrategyError(
                f"pipeline.overlap_forward_backward: {pipeline.schedule} has no forward pass beside a backward pass of "
                f"another micro-batch on every rank; set pipeline.schedule to {', '.join(found)} or auto, or leave "
                "overlap_forward_backward out"
            )
    elif micro_batches < ranks:
        raise StrategyError(
            f"pipeline: {micro_batches} micro-batches keep at most {micro_batches} of {ranks} ranks busy; make "
            "train.micro_batch smaller, train.batch larger, or axes.pipeline smaller"
        )


def _has_pairs(name: str, ranks: int, virtual: int | None) -> bool:
    """Whether every rank has pairs where micro-batches are many."""
    found = with_steady_pairs(named_schedule(name, ranks, 4 * ranks, virtual, paired=True))
    return all(found.pairs_of(rank) for rank in range(ranks))


_ONE_STAGE: dict[ScheduleName, Callable[[int, int], Schedule]] = {
    ScheduleName.GPIPE: gpipe,
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
    ScheduleName.ONE_F_ONE_B_SPLIT: one_f_one_b_split,
    ScheduleName.ZB_H1: zb_h1,
    ScheduleName.ZB_H2: zb_h2,
}
_TWO_STAGES: dict[ScheduleName, Callable[[int, int], Schedule]] = {
    ScheduleName.ZB_V: zb_v,
    ScheduleName.V_HALF: v_half,
    ScheduleName.V_MIN: v_min,
    ScheduleName.DUAL_PIPE_V: dual_pipe_v,
}
_BEGINS_EARLIER: dict[ScheduleName, Callable[..., Schedule]] = {
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
    ScheduleName.ONE_F_ONE_B_SPLIT: one_f_one_b_split,
}
"""Schedules with one stage on each rank that begin with more forward passes where these run in pairs."""
SPLITS_BACKWARD = frozenset(ScheduleName) - {
    ScheduleName.GPIPE,
    ScheduleName.ONE_F_ONE_B,
    ScheduleName.INTERLEAVED,
}
"""Schedules that compute input and weight gradients apart: under layer recomputation these hold more in between."""


def stages_per_rank(name: str) -> int:
    """Stages on each rank that a schedule has where nothing else is said. Raises StrategyError for an unknown name."""
    return 1 if ScheduleName.parse(name) in _ONE_STAGE else 2


def named_schedule(
    name: str, ranks: int, micro_batches: int, virtual: int | None = None, *, paired: bool = False
) -> Schedule:
    """The schedule of that name.

    `virtual`: stages on each rank; what the schedule has when left out. `paired`: 1F1B schedules begin with the forward
    passes that pairs need (`schedule.forward_backward_pairs` makes them); the others have these, or have no pairs.
    Raises StrategyError for sizes that the schedule cannot have.
    """
    known = ScheduleName.parse(name)
    if known is ScheduleName.INTERLEAVED:
        return interleaved(ranks, micro_batches, virtual or 2)
    fixed, build = (1, _ONE_STAGE[known]) if known in _ONE_STAGE else (2, _TWO_STAGES[known])
    if virtual not in (None, fixed):
        other = "choose interleaved-1f1b for more" if fixed == 1 else f"cut the model into {2 * ranks} stages"
        raise StrategyError(
            f"schedule {known} has {fixed} stage{'s' * (fixed > 1)} on each rank, and {virtual} were given; "
            f"{other}"
        )
    if paired and known in _BEGINS_EARLIER:
        return _BEGINS_EARLIER[known](ranks, micro_batches, paired=True)
    return build(ranks, micro_batches)
