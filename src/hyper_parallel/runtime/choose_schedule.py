"""The schedule of a strategy's pipeline: a named one, or one that is made for the stages at hand.

`train` and `simulate` take it from here, so that what is predicted is what runs. `auto` may hold as many bytes of saved
activations on each rank as the fullest rank of 1F1B does, since the device's memory is the same on all ranks.
"""

from __future__ import annotations

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule import Costs, Schedule, auto_schedule, named_schedule
from hyper_parallel.strategy import Pipeline
from hyper_parallel.strategy.axes import AUTO


def choose_schedule(pipeline: Pipeline, ranks: int, micro_batches: int, costs: Costs) -> Schedule:
    """The schedule of `costs.stages` stages on `ranks` device groups.

    Raises StrategyError, which names the keys to change, where the schedule cannot have these sizes.
    """
    if pipeline.schedule == AUTO:
        return auto_schedule(costs, ranks, micro_batches, caps_of_1f1b(costs, ranks, micro_batches)).schedule
    try:
        return named_schedule(pipeline.schedule, ranks, micro_batches, pipeline.virtual)
    except StrategyError as error:
        raise StrategyError(
            f"strategy.pipeline: {error}. (axes.pipeline: {ranks}; micro-batches of a step: {micro_batches}, of which "
            "a smaller train.micro_batch or a larger train.batch makes more)"
        ) from None


def caps_of_1f1b(costs: Costs, ranks: int, micro_batches: int) -> tuple[float, ...]:
    """What each rank may hold: what 1F1B holds on its fullest rank, were neighbouring stages on one rank."""
    parts = costs.stages // ranks
    merged = costs.merged(parts) if parts > 1 else costs
    in_flight = (min(ranks - rank, micro_batches) for rank in range(ranks))
    # One of them may be at its backward pass, which brings back what was recomputed.
    fullest = max(
        count * saved + max(0.0, -released)
        for count, saved, released in zip(in_flight, merged.saved, merged.released, strict=True)
    )
    return (fullest,) * ranks
