"""Sizes and texts that a step reads off its inputs are questions: the graph holds for inputs with the same answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, capture, executable
from hyper_parallel.graph.guards import Question, Questions
from hyper_parallel.graph.ir import GivenTensor

Step = Callable[[Tensor, Tensor], Tensor]


def _captured(step: Step, x: Tensor, counts: Tensor) -> tuple[StepGraph, list[Question]]:
    questions = Questions({"counts": counts})
    with fake_mode_with_symbols():
        given = torch.empty(x.shape), torch.empty(counts.shape, dtype=counts.dtype)
        named = {name: GivenTensor("input", one) for name, one in zip(("x", "counts"), given, strict=True)}
        found = capture(lambda: {"out": step(*given)}, named, questions=questions)
    return found, questions.asked


def _repeated(x: Tensor, counts: Tensor) -> Tensor:
    """Rows as often as is said; a size that `view` needs."""
    rows = torch.repeat_interleave(x, counts, 0)
    return rows.view(rows.size(0) // 2, 2, -1).sum(1)


def _of_several(x: Tensor, counts: Tensor) -> Tensor:
    """An operator with several results, of which one has such a size."""
    found, places = torch.unique_consecutive(counts, return_inverse=True)
    return x[: len(found)] * found[:, None] + places.sum()


@pytest.mark.parametrize("step", [_repeated, _of_several])
def test_a_size_is_a_question(step: Step) -> None:
    x, counts = torch.randn(4, 3), torch.tensor([1, 2, 2, 1])
    graph, asked = _captured(step, x, counts)
    same, other = torch.tensor([2, 1, 1, 2]), torch.tensor([1, 2, 4, 7])
    assert asked
    assert all(
        isinstance(size, int) for node in graph.nodes for size in getattr(node.meta["value"], "shape", ())
    )
    for given in (counts, same):
        assert all(one.holds({"counts": given}) for one in asked)
        out = executable(graph).run({"x": x, "counts": given})["out"]
        assert torch.equal(out, step(x, given))
    assert not all(one.holds({"counts": other}) for one in asked)


def test_a_number_in_a_text_is_one_too() -> None:
    def step(x: Tensor, counts: Tensor) -> Tensor:
        total = counts.sum()
        assert f"{total} rows" == "6 rows"
        return x * total

    graph, asked = _captured(step, torch.randn(4, 3), torch.tensor([1, 2, 2, 1]))
    assert [one.answer for one in asked] == [6]
    x, counts = torch.randn(4, 3), torch.tensor([3, 3, 0, 0])
    assert torch.equal(executable(graph).run({"x": x, "counts": counts})["out"], x * 6)


def test_sizes_that_no_given_input_decides_stay_unknown() -> None:
    graph, asked = _captured(lambda x, _: x[x[:, 0] > 0].sum(), torch.randn(4, 3), torch.tensor([1]))
    assert not asked
    x = torch.tensor([[1.0, 2, 3], [-1, 0, 0], [1, 1, 1], [-2, 0, 0]])
    assert executable(graph).run({"x": x, "counts": torch.tensor([1])})["out"] == 9


def test_a_text_of_what_nobody_knows_is_refused() -> None:
    def step(x: Tensor, _: Tensor) -> Tensor:
        assert f"{x.sum()} {x.argmax()}"
        return x

    with pytest.raises(CaptureError, match=r"Tensor\.__format__ shows a tensor's values"):
        _captured(step, torch.randn(4, 3), torch.tensor([1]))
