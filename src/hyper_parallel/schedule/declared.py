"""Checks of a declared pipeline: its schedule, micro-batches, stages and layers, before any model is built."""

from __future__ import annotations

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule.names import named_schedule, stages_per_rank
from hyper_parallel.schedule.pairs import with_steady_pairs
from hyper_parallel.strategy import Strategy, recomputed_layers
from hyper_parallel.strategy.axes import AUTO
from hyper_parallel.strategy.pipeline import Pipeline
from hyper_parallel.strategy.schedule_name import ScheduleName


def stages_of(pipeline: Pipeline, ranks: int) -> int:
    """The number of stages of a pipeline over so many ranks."""
    known = 1 if pipeline.schedule == AUTO else stages_per_rank(pipeline.schedule)
    return ranks * (pipeline.virtual or known)


def check_pipeline(strategy: Strategy, micro_batches: int, layers: int | None = None) -> None:
    """Raise StrategyError for a pipeline that no model could have, or none of so many layers.

    `micro_batches`: of a step, on each rank; `layers`: of the model, where they are known.
    """
    asked, ranks = strategy.pipeline, strategy.axes.pipeline
    _check_schedule(strategy, micro_batches)
    stages = stages_of(asked, ranks)
    where = f"axes.pipeline {ranks} · {stages // ranks} on each rank"
    # Embedding and head may be stages without layers.
    if layers is not None and stages > layers + 2:
        raise StrategyError(
            f"pipeline: {stages} stages ({where}), and the model has {layers} layers; make axes.pipeline or "
            f"pipeline.virtual smaller, so that there are at most {layers} stages"
        )
    _check_recompute(strategy, stages)
    if asked.layers is None:
        return
    if len(asked.layers) != stages:
        raise StrategyError(
            f"pipeline.layers has {len(asked.layers)} numbers, and there are {stages} stages ({where}); give one "
            "number for each stage, or leave pipeline.layers out"
        )
    if 0 in asked.layers[1:-1]:
        raise StrategyError(
            f"pipeline.layers: {asked.layers} leaves stage {asked.layers.index(0, 1)} without layers, and nothing else "
            "is there to compute; give each stage but the first and the last at least one"
        )
    if layers is not None and sum(asked.layers) != layers:
        raise StrategyError(
            f"pipeline.layers: {asked.layers} places {sum(asked.layers)} layers, and the model has {layers}; change "
            f"the counts to sum to {layers}, or leave pipeline.layers out"
        )


def _check_recompute(strategy: Strategy, stages: int) -> None:
    """Raise StrategyError for a list of another length than there are stages, and for more layers than one has."""
    asked, counts = strategy.memory.recompute_layers, strategy.pipeline.layers
    if isinstance(asked, list) and len(asked) != stages:
        raise StrategyError(
            f"memory.recompute_layers has {len(asked)} numbers, and there are {stages} stages; give one number for "
            "each stage, or a single number for all of them"
        )
    if counts is not None and len(counts) == stages:
        recomputed_layers(strategy.memory, counts)


def _check_schedule(strategy: Strategy, micro_batches: int) -> None:
    asked, ranks = strategy.pipeline, strategy.axes.pipeline
    if asked.schedule != AUTO:
        try:
            named_schedule(asked.schedule, ranks, micro_batches, asked.virtual)
        except StrategyError as error:
            raise StrategyError(f"pipeline: {error}") from error
        if asked.overlap_forward_backward and not _has_pairs(asked.schedule, ranks, asked.virtual):
            found = [
                name
                for name in (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED, ScheduleName.DUAL_PIPE_V)
                if _has_pairs(name, ranks, None)
            ]
            raise StrategyError(
                f"pipeline.overlap_forward_backward: {asked.schedule} has no forward pass beside a backward pass of "
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
