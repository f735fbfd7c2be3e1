"""Compiles subgraphs of a step: each becomes one node that calls Inductor's code.

Compiled arithmetic is not that of the operators one by one: sums are taken in another order, and several roundings to
bf16 become one. docs/compile.md says by how much results differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel._version import __version__
from hyper_parallel.compat import inductor
from hyper_parallel.errors import CompileError
from hyper_parallel.graph.compiled.artifacts import obtain, own
from hyper_parallel.graph.compiled.digest import digest
from hyper_parallel.graph.compiled.partition import Subgraph, partition
from hyper_parallel.graph.compiled.replace import replace
from hyper_parallel.graph.ir import StepGraph, values_of

LIMIT_SECONDS = 900.0
"""After which no further subgraph is compiled."""


@dataclass(frozen=True)
class Compiled:
    """What came of compiling a step."""

    step: StepGraph
    subgraphs: int
    """Nodes of `step` that call compiled code."""
    artifacts: int
    """Different ones among them."""
    made: int
    """Artifacts that this process compiled; the others were there, or other ranks compiled them."""
    share: float
    """Of the step's operators, how many are in subgraphs: 0 to 1."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"compiled {self.share:.0%} of the step's operators in {self.seconds:.1f} s "
            f"({self.subgraphs} subgraphs, {self.artifacts} different, {self.artifacts - self.made} from the cache)"
        )


def compiled(step: StepGraph, folder: Path, limit: float = LIMIT_SECONDS) -> Compiled:
    """Compile what can be; `step` stays as it is. Artifacts are kept in `folder` and taken from there.

    Every rank of a run may call it at the same time. Raises CompileError when it cannot be done on this machine, takes
    longer than `limit` seconds, or the compiler fails; `step` can run then as it is.
    """
    start = time.monotonic()
    result = step.copy()
    found = partition(result)
    try:
        if found and (lacking := inductor.missing()) is not None:
            raise CompileError(f"{lacking} is missing")
        folder = own(folder)
        environment = (
            {"hyper_parallel": __version__, **inductor.environment(folder / "probes")} if found else {}
        )
        names = [digest(subgraph, environment) for subgraph in found]
        ready, made = obtain(
            folder,
            {name: _maker(subgraph) for name, subgraph in zip(names, found, strict=True)},
            inductor.load,
            start + limit,
        )
    except CompileError:
        raise
    except TimeoutError as error:
        raise CompileError(f"{error} after {limit:.0f} s") from error
    except Exception as error:  # the compiler's own, of any kind
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CompileError(f"{type(error).__name__}: {reason}") from error
    share = sum(len(subgraph.nodes) for subgraph in found) / max(1, sum(1 for _ in step.nodes))
    replace(result, found, [(f"compiled_{name[:8]}", ready[name]) for name in names])
    return Compiled(result, len(found), len(ready), made, share, time.monotonic() - start)


def _maker(subgraph: Subgraph) -> Callable[[Path], None]:
    inputs = [
        (value.shape, value.stride, value.dtype, value.device)
        for node in subgraph.inputs
        for value in values_of(node)
    ]
    return lambda folder: inductor.compile_into(folder, subgraph.graph(), inputs)
