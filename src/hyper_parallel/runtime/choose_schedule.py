"""The schedule of a strategy's pipeline: a named one, or one that is made for the stages at hand.

`train` and `simulate` take it from here, so that what is predicted is what runs. `auto` may hold as many bytes of saved
activations on each rank as the fullest rank of 1F1B does, since the device's memory is the same on all ranks.

With `overlap_forward_backward`, 1F1B is the one that begins with the forward passes that pairs need. A named schedule
has the pairs of equal stages, and `auto` those that make the step shortest at the given costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule import (
    Costs,
    Schedule,
    ScheduleName,
    auto_schedule,
    named_schedule,
    time_schedule,
    with_pairs,
    with_steady_pairs,
)
from hyper_parallel.strategy import Pipeline
from hyper_parallel.strategy.axes import AUTO


def choose_schedule(pipeline: Pipeline, ranks: int, micro_batches: int, costs: Costs) -> Schedule:
    """The schedule of `costs.stages` stages on `ranks` device groups.

    Raises StrategyError, which names the keys to change, where the schedule cannot have these sizes.
    """
    paired = pipeline.overlap_forward_backward
    if pipeline.schedule == AUTO:
        caps = caps_of_1f1b(costs, ranks, micro_batches, paired=paired)
        found = auto_schedule(costs, ranks, micro_batches, caps).schedule
        if not paired:
            return found
        candidates = (with_pairs(one, costs) for one in (found, *_named(costs, ranks, micro_batches, caps)))
        return min(candidates, key=lambda one: time_schedule(one, costs).makespan)
    try:
        plain = named_schedule(pipeline.schedule, ranks, micro_batches, pipeline.virtual)
        if not paired:
            return plain
        ahead = named_schedule(pipeline.schedule, ranks, micro_batches, pipeline.virtual, paired=True)
        found = with_steady_pairs(ahead)
        # Without collectives in a stage, or with few micro-batches, the passes ahead would only take memory.
        return found if found.pairs and any(map(any, costs.hidden)) else plain
    except StrategyError as error:
        raise StrategyError(
            f"strategy.pipeline: {error}. (axes.pipeline: {ranks}; micro-batches of a step: {micro_batches}, of which "
            "a smaller train.micro_batch or a larger train.batch makes more)"
        ) from None


def _named(costs: Costs, ranks: int, micro_batches: int, caps: Sequence[float]) -> Iterator[Schedule]:
    """The named schedules of so many stages that meet the caps."""
    for name in ScheduleName:
        try:
            found = named_schedule(name, ranks, micro_batches, costs.stages // ranks, paired=True)
        except StrategyError:
            continue
        peaks = time_schedule(found, costs).peaks
        if found.stages == costs.stages and all(
            held <= cap * (1 + 1e-9) for held, cap in zip(peaks, caps, strict=True)
        ):
            yield found


def caps_of_1f1b(costs: Costs, ranks: int, micro_batches: int, *, paired: bool = False) -> tuple[float, ...]:
    """What each rank may hold: what 1F1B holds on its fullest rank, were neighbouring stages on one rank.

    `paired`: of the 1F1B that begins with the forward passes that pairs need.
    """
    parts = costs.stages // ranks
    merged = costs.merged(parts) if parts > 1 else costs
    in_flight = (min((1 + paired) * (ranks - rank), micro_batches) for rank in range(ranks))
    # One of them may be at its backward pass, which brings back what was recomputed.
    fullest = max(
        count * saved + max(0.0, -released)
        for count, saved, released in zip(in_flight, merged.saved, merged.released, strict=True)
    )
    return (fullest,) * ranks
