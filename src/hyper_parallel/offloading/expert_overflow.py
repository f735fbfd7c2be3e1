"""Expert overflow: a step whose experts get more rows than its plan has memory for is planned again, or refused.

    load = rows that come to a rank / its even share, the largest of all ranks

The host is shown it before each exchange of rows (`step.capture_train_step`), the same number on every rank, so that
all stop there or none does. Nothing was updated then, and the same batch can run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, host
from hyper_parallel.graph.accumulate import changed_input
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.shard import ShardedModel

ELSEWHERE_FULL = "another worker's step has no such plan; its log says why"

MARGIN = 1.1
"""What comes next is likely to be as uneven, and a little more."""


class TooUneven(Exception):
    """Ends the run of a graph before there is memory for rows that are more than planned for."""

    def __init__(self, load: float) -> None:
        super().__init__(f"a load of {load:.3g}")
        self.load = load


def check_load(shown: float, planned: float | None) -> None:
    """Raise TooUneven where the load that the host was `shown` is above what was planned for."""
    if planned is not None and shown > planned:
        raise TooUneven(shown)


def wanted(load: float) -> tuple[float, ...]:
    """The loads to plan for, one after the other, when `load` was too much: with a margin, else just enough."""
    # In hundredths, for messages; what was shown is fp32, so that nothing is lost by the rounding.
    return tuple(math.ceil(round(100 * factor * load, 6)) / 100 for factor in (MARGIN, 1.0))


def changed_before(step: StepGraph) -> str | None:
    """Why the step cannot be run again from where the host was shown a load; None if it can."""
    shown = {node for node in step.nodes if node.target is HOST and node.args[0] == HostPoint.ROWS}
    changed = changed_input(step, shown)
    return None if changed is None else f"it has changed {changed} by then, and cannot be run again"


def planned_anew(step: int, load: float, before: float, now: float) -> str:
    """The line that is shown when `step`, counted from 0, was planned anew."""
    return (
        f"step {step + 1}: a rank's experts were to get {load:.3g} times their even share of the rows, and memory was "
        f"kept for {before:g} times; the step was planned anew for {now:g} and begun again. "
        f"strategy.memory.expert_load={now:g} plans for it from the start"
    )


def refused(step: int, load: float, planned: float, why: str) -> BudgetError:
    """The error for `step`, counted from 0, whose experts were to get `load` times their even share."""
    enough = wanted(load)[-1]
    return BudgetError(
        f"step {step + 1}: a rank's experts were to get {load:.3g} times their even share of the rows, memory is kept "
        f"for {planned:g} times (strategy.memory.expert_load), and the step cannot be planned for more: {why}. Nothing "
        f"was updated: resume from the last checkpoint with strategy.memory.expert_load={enough:g} and a larger "
        "strategy.memory.device, or with smaller micro-batches; train.router_bias_rate and a router's auxiliary loss "
        "make loads more even"
    )


def load_shown(handle: ShardedModel) -> Callable[[Tensor], None]:
    """A `StepContext.report_load` that shows the host at "rows" how uneven an exchange is: the largest load of all
    ranks."""

    def report(load: Tensor) -> None:
        # The same number on every rank, so that all go on or none does.
        host(HostPoint.ROWS, [handle.all_reduce(load, handle.mesh.names, "max")])

    return report
