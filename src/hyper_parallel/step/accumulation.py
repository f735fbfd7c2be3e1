"""Steps of several micro-batches from the captured step of one: a loop that runs, or one graph that is planned over.

Passes rewrite the captured step, which stands for all micro-batches. Only the order of collectives that is simulated
(`overlap.order_search`) wants two of them, to put them side by side: it rewrites the body of a loop over pairs, where
the number of micro-batches is even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, fx

from hyper_parallel.graph import Pass, StepGraph, rewritten
from hyper_parallel.graph.accumulate import Accumulation, LoopExecutable, accumulation, loop_executable
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.dependencies import data_sources, seen_through
from hyper_parallel.graph.execute import Host
from hyper_parallel.graph.expand import Numbered, expanded, unrolled
from hyper_parallel.graph.gradients import GRADIENT, UNREDUCED, UNSUMMED, gradient_sums
from hyper_parallel.step.micro_batch import LOSS, ROWS, SUM, WEIGHT, micro_input
from hyper_parallel.strategy.memory import ShardLevel


def accumulating(step: StepGraph, level: ShardLevel) -> Accumulation:
    """The loop over the micro-batches of a step that was captured for one of several, in place of that graph. `level`:
    of `memory.shard`."""
    returned = step.returned
    needs = data_sources(step)
    parts = {name: [node] for name, node in returned.items() if name.startswith(GRADIENT)}
    cut_at = gradient_sums(returned, parts, needs, lambda _: level == "optimizer")
    each_time = {
        name: node
        for name, node in returned.items()
        if name == LOSS
        or name.startswith((ROWS, SUM))
        or (
            name.startswith(GRADIENT)
            and not name.startswith((UNREDUCED, UNSUMMED))
            and name.removeprefix(GRADIENT) not in cut_at.reduced
        )
    }
    weights = {name: seen_through(node) for name, node in returned.items() if name.startswith(WEIGHT)}
    sums = {name: seen_through(node) for name, node in each_time.items()}
    batch = {entry.name for entry in step.inputs if entry.name.startswith(micro_input(0, ""))}
    loop = accumulation(step, weights, {**cut_at.sums, **sums}, batch, needs)
    short = step.short
    # A copy, since the short step may be the same graph each time that it is asked for.
    return loop if short is None else replace(loop, short=lambda: accumulating(short().copy(), level))


def loop_width(passes: Sequence[Pass], micro_batches: int) -> int:
    """Micro-batches in the body of the loop that `rewritten_loop` gives."""
    return 2 if micro_batches % 2 == 0 and any("overlap" in one.provides for one in passes) else 1


def rewritten_loop(
    step: StepGraph, level: ShardLevel, micro_batches: int, passes: Sequence[Pass]
) -> Accumulation:
    """The loop over a step's micro-batches after these passes. Other arguments are as of `accumulating`."""
    if loop_width(passes, micro_batches) == 1:
        return accumulating(rewritten(step, passes), level)
    pairs = [one for one in passes if "overlap" in one.provides]
    alone = rewritten(step, [one for one in passes if one not in pairs])
    loop = loop_of(alone, level, 2)
    if loop.short is None:
        return loop.with_body(rewritten(loop.body, pairs))
    few = cache(loop.short)
    loop.body.short = lambda: few().body
    body = rewritten(loop.body, pairs)
    short = body.short
    return replace(loop.with_body(body), short=None if short is None else lambda: few().with_body(short()))


def loop_of(step: StepGraph, level: ShardLevel, width: int) -> Accumulation:
    """The loop whose body is so many micro-batches. Other arguments are as of `accumulating`."""
    loop = accumulating(step, level)
    return loop if width == 1 else _pairs(loop)


def _pairs(loop: Accumulation) -> Accumulation:
    """The loop over pairs of micro-batches."""
    short = loop.short
    pairs = unrolled(loop, 2, _numbered(1))
    return pairs if short is None else replace(pairs, short=lambda: _pairs(short()))


@uncollected()
def whole_step(loops: Sequence[Accumulation]) -> StepGraph:
    """The graph of a step whose i-th run of a loop's body is one of the i-th loop's."""
    step = expanded(loops, _numbered(loops[0].width))
    shorts = {loop: loop.short for loop in loops}
    if None not in shorts.values():
        step.short = lambda: _few_layers(loops, shorts)
    return step


def _few_layers(
    loops: Sequence[Accumulation], shorts: Mapping[Accumulation, Callable[[], Accumulation] | None]
) -> StepGraph:
    """The step of these loops with few of the model's layers."""
    few = {loop: short() for loop, short in shorts.items() if short is not None}
    return whole_step([few[loop] for loop in loops])


def repeated(loop: Accumulation, micro_batches: int) -> StepGraph:
    """The graph of a step of so many micro-batches."""
    return whole_step([loop] * (micro_batches // loop.width))


def _numbered(width: int) -> Numbered:
    """Names of the inputs of the n-th run of a body of so many micro-batches."""

    def name_of(name: str, number: int) -> str:
        _, at, field = name.split(".")
        return micro_input(number * width + int(at), field)

    return name_of


@dataclass(frozen=True)
class AccumulatedExecutable:
    """Runs a step of several micro-batches, as `Executable` runs one that is one graph."""

    loop: LoopExecutable
    micro_batches: int
    width: int
    """Micro-batches of one run of the loop's body."""

    @classmethod
    def of(
        cls, loop: Accumulation, micro_batches: int, body: StepGraph | None = None
    ) -> AccumulatedExecutable:
        """`body`: what the loop's body was compiled to."""
        return cls(loop_executable(loop, body), micro_batches, loop.width)

    def run(self, tensors: Mapping[str, Tensor], host: Host | None = None) -> dict[str, Tensor]:
        """Run the step on `tensors`: as of `Executable.run`, with the micro-batches as of `batch_inputs`."""
        name_of = _numbered(self.width)
        runs = [
            {name: tensors[name_of(name, number)] for name in self.loop.batch}
            for number in range(self.micro_batches // self.width)
        ]
        self.loop.run(tensors, runs, host)
        return {}

    def node_of(self, error: BaseException) -> fx.Node | None:
        """As of `Executable`."""
        return self.loop.node_of(error)
