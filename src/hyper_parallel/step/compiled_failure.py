"""Compiled code that fails when it runs: the step begins again uncompiled where that gives the step's results.

Compiled code is made for inputs of certain shapes, strides and devices, and checks them; it may also choose and build
kernels in its first run. Such an error arises in the node that calls it, in the middle of a step.
"""

from __future__ import annotations

from hyper_parallel.errors import CompileError
from hyper_parallel.graph.compiled import is_compiled
from hyper_parallel.graph.regions import region_of
from hyper_parallel.graph.rerun import changed_input
from hyper_parallel.step.graph_cache import Captured

_ADVICE = "train.compile=false runs the same steps uncompiled"


def why_uncompiled(graph: Captured, error: BaseException, step: int, world: int) -> str | None:
    """Why `step`, counted from 0, has to begin again uncompiled; None where `error` did not arise in compiled code.

    Raises CompileError where it cannot begin again: other workers are past its first collectives, or it has changed
    what it was given, such as a buffer that counts forward passes.
    """
    node = graph.executable.node_of(error)
    if node is None or not is_compiled(node):
        return None
    region = region_of(node)
    place = f"{region.layer or 'the model'} ({region.phase})"
    reason = (str(error).strip().splitlines() or [""])[0]
    why = f"compiled code of {place} failed in step {step + 1}: {type(error).__name__}: {reason}"
    if world > 1:
        raise CompileError(f"{why}. {_ADVICE}") from error
    if (changed := changed_input(graph.step, {node}, graph.loop)) is not None:
        raise CompileError(
            f"{why}. The step has changed {changed} by then and cannot begin again; {_ADVICE}"
        ) from error
    return why
