"""What passes declare is checked before they run, and what they made afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import Rewrite, StepGraph, capture, run_passes


def _pass(
    name: str, does: Callable[[StepGraph], StepGraph] = StepGraph.copy, **declared: frozenset[str]
) -> Rewrite:
    return Rewrite(name, does, **declared)


def _step() -> StepGraph:
    with fake_mode_with_symbols():
        x = torch.empty(8, 8)

        def body() -> dict[str, torch.Tensor]:
            y = x * 2
            z = y + 1
            y.add_(5)
            return {"y": y, "z": z}

        return capture(body, {"x": ("input", x)})


def _never(step: StepGraph) -> StepGraph:
    raise AssertionError("ran")


def test_what_a_pass_conflicts_with_is_named() -> None:
    passes = [
        _pass("first", provides=frozenset({"frozen"}), does=_never),
        _pass("second", conflicts=frozenset({"frozen"})),
    ]
    with pytest.raises(GraphError, match="'second' conflicts with frozen, which pass 'first' provides"):
        run_passes(_step(), passes)


def _moves_the_read(step: StepGraph) -> StepGraph:
    made = step.copy()
    write = next(node for node in made.nodes if node.target is torch.ops.aten.add_.Tensor)
    read = next(node for node in made.nodes if node.target is torch.ops.aten.add.Tensor)
    write.append(read)
    return made


def _repeats_too_late(step: StepGraph) -> StepGraph:
    made = step.copy()
    read = next(node for node in made.nodes if node.target is torch.ops.aten.add.Tensor)
    with made.graph.inserting_before(made.output):
        again = made.graph.node_copy(read)
    again.meta = {**read.meta, "recomputed": True, "origin": read.name}
    return made


def _loses_an_output(step: StepGraph) -> StepGraph:
    made = step.copy()
    made.outputs.pop()
    return made


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (_moves_the_read, "pass 'bad': .* now runs before"),
        (_repeats_too_late, "now reads memory as add__tensor left it, and not as the step found it"),
        (_loses_an_output, "the outputs are"),
    ],
)
def test_a_pass_that_changes_the_step_is_refused(
    does: Callable[[StepGraph], StepGraph], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        run_passes(_step(), [_pass("bad", does=does)])
