"""Runs a Program's instruction list on one rank, and the graphs that run once a step before and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.errors import HyperParallelError, OutOfMemoryError
from hyper_parallel.graph import Executable, StepGraph, executable
from hyper_parallel.graph.ir import Value
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.shard import ShardedModel
from hyper_parallel.step.out_of_memory import describe, head_of
from hyper_parallel.step.pipeline_gradients import Arithmetic, reduced_gradients

T = TypeVar("T")


class OncePerStep:
    """What a rank's stages have before the first micro-batch and after the last one."""

    def __init__(self, gather: StepGraph | None, reduce: StepGraph | None) -> None:
        """`gather`, `reduce`: as `PipelineStages` makes them of this rank's stages."""
        self.gather, self.reduce = gather, reduce
        self._gathers, reduces = _ready(gather), _ready(reduce)
        self._arithmetic = Arithmetic[Tensor](
            lambda _, given: {} if reduces is None else reduces.run(given), torch.add, zeros
        )

    def weights(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those that are the same in all micro-batches, by the names of the stages' inputs."""
        return {} if self._gathers is None else self._gathers.run(state)

    def gradients(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter from the sums over the micro-batches."""
        return reduced_gradients(sums, self.reduce, self._arithmetic)


def located(
    handle: ShardedModel,
    interpreter: Interpreter,
    state: Mapping[str, Tensor],
    when: str,
    runs: Callable[[], T],
) -> T:
    """What `runs` gives, which runs the schedule of `interpreter`. Errors name `when`, the stage, the micro-batch and
    the instruction; that of memory says what filled it."""
    try:
        # Under a budget they may be elsewhere between steps, in which they are the graph's.
        with present(*state.values()), pulse.schedule(interpreter.positions):
            return runs()
    except HyperParallelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise _out_of_memory(handle, interpreter, when, error) from error
        raise


def _out_of_memory(
    handle: ShardedModel, interpreter: Interpreter, when: str, error: Exception
) -> OutOfMemoryError:
    at = f"{when}, {pulse.position()}"
    found = interpreter.failed_node(error)
    if found is None:
        return OutOfMemoryError(f"{at}: out of memory outside of the stage's graph: {error}")
    described = describe(*found, handle.strategy, head_of(handle.model))
    return OutOfMemoryError(
        f"{at}: out of memory {described}; these are of one micro-batch, and {interpreter.in_flight} were in "
        "flight on this rank, of each of which a part is kept"
    )


def _ready(step: StepGraph | None) -> Executable | None:
    return None if step is None else executable(step)


def zeros(like: Value) -> Tensor:
    """A tensor of 0."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()
