"""Things that people do around a model, each under `hp.offload` beside the same loop without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import at_the_floor
from torch import Tensor, nn

import hyper_parallel as hp
from harness.observer import Observer
from harness.user_loops import GROUPS, built, drawn, values
from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.errors import BudgetError, HyperParallelError

REFUSED = {
    ("side effect", "backward hook keeps"): "the backward pass changes Python state",
    ("side effect", "auxiliary losses"): r"through=\('loss', 'model.auxiliary',\)",
    ("side effect", "random number"): "draws random numbers of Python's",
    ("wrapper", "sparse embedding"): "makes a sparse tensor",
    ("wrapper", "TorchScript"): "model.extra is TorchScript",
}
QUICK = [
    ("setting", "list"),
    ("setting", "getattr"),
    ("side effect", "hook keeps"),
    ("side effect", "running average"),
    ("cache", "lru"),
    ("cache", "dict of an object"),
    ("input", "expanded, with gradient"),
    ("dtype", "bfloat16"),
    ("dtype", "float64"),
    ("dtype", "complex"),
    ("wrapper", "LSTM"),
    ("wrapper", "functional_call"),
    ("memory", "data made one"),
    ("memory", "shared"),
    ("memory", "numpy view"),
    ("models", "teacher"),
    *REFUSED,
]
TIGHT = [
    ("memory", "shared"),
    ("input", "view of a weight"),
    ("memory", "data replaced"),
    ("side effect", "attribute"),
]
Part = tuple[str, str]
every = [
    pytest.param((group, name), marks=[] if (group, name) in QUICK else pytest.mark.matrix)
    for group, parts in GROUPS.items()
    for name in parts
]


def _same(found: list[Tensor], own: list[Tensor]) -> bool:
    return len(found) == len(own) and all(map(torch.equal, found, own))


@pytest.mark.parametrize("part", every, ids=lambda part: f"{part[0]}, {part[1]}")
def test_a_loop_comes_to_the_same_or_is_refused(part: Part) -> None:
    own = values(built([part]))
    model = hp.offload(built([part]), budget="8MiB", host="8MiB")
    if part in REFUSED:
        with pytest.raises(HyperParallelError, match=REFUSED[part]) as refusal:
            values(model)
        assert "\n" not in str(refusal.value)
    else:
        assert _same(values(model), own)


@pytest.mark.parametrize("part", TIGHT, ids=lambda part: f"{part[0]}, {part[1]}")
def test_the_least_budget_comes_to_the_same(part: Part) -> None:
    moved, _ = at_the_floor(lambda: built([part]), values, host="8MiB")
    assert _same(moved, values(built([part])))


def test_the_workspace_of_an_lstm_is_within_the_budget() -> None:
    peaks: list[Observer] = []

    def watch(net: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Observer:
        peaks.append(Observer([*net.parameters(), *batch.values()]))
        return peaks[-1]

    part = ("wrapper", "LSTM")
    moved, budget = at_the_floor(lambda: built([part]), lambda net: values(net, watch), host="8MiB")
    assert _same(moved, values(built([part])))
    assert (
        peaks[-1].peak <= budget
    )  # an observer takes the tensors of a capture, in the first step, for real ones


def test_patterns_are_drawn_from_all_groups() -> None:
    patterns = [drawn(seed) for seed in range(150)]
    assert patterns == [drawn(seed) for seed in range(150)]
    assert {part for pattern in patterns for part in pattern} == {
        (group, name) for group, parts in GROUPS.items() for name in parts
    }


@pytest.mark.parametrize("where", ["lru", "dict of an object", "global"])
def test_caches_hold_no_tensors_of_a_capture(where: str) -> None:
    from harness import user_loops

    model: Any = hp.offload(built([("cache", where)]), budget="8MiB", host="8MiB")
    values(model)
    hp.release(model)
    tables = [
        *user_loops._TABLES.values(),
        *model.parts[0].tables.values(),
        user_loops._table(user_loops.ROWS),
    ]
    assert not any(map(is_fake, tables))
    values(model)


@pytest.mark.parametrize(
    ("part", "around"), [("torch.func.grad", r"torch\.func"), ("FlopCounterMode", "FlopCounterMode")]
)
def test_calls_inside_other_tools_run_uncaptured_with_one_line(
    part: str, around: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = hp.offload(built([("wrapper", part)]), budget="8MiB", host="8MiB")
    values(model)
    said = [line for line in caplog.messages if "run uncaptured" in line]
    assert len(said) == 1
    assert len(model.forward.notes) == (part == "torch.func.grad")
    caplog.clear()


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (nn.DataParallel, "the model is a DataParallel"),
        (lambda model: nn.Sequential(nn.DataParallel(model)), "0 is a DataParallel"),
    ],
)
def test_wrappers_are_refused_by_name(wrap: Callable[[nn.Module], nn.Module], match: str) -> None:
    with pytest.raises(BudgetError, match=match):
        hp.offload(wrap(nn.Linear(4, 4)), budget="1MiB", host="1MiB")


def test_a_soft_prompt_of_a_frozen_model_keeps_within_the_budget() -> None:
    def run(model: Any) -> list[Tensor]:
        prompt = torch.ones(4, 8, requires_grad=True)
        model.requires_grad_(False)
        model(prompt).square().sum().backward()
        return [prompt.grad]  # type: ignore[list-item]

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    own = run(model)
    assert _same(run(hp.offload(model, budget="1MiB", host="1MiB")), own)
    assert len(model.forward.notes) == 1


def test_a_model_inside_an_offloaded_model_has_no_plan_of_its_own() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    own = model(torch.ones(2, 8)).sum()
    inner = hp.offload(model[1], budget="1MiB", host="1MiB")
    moved = hp.offload(model, budget="1MiB", host="1MiB")(torch.ones(2, 8)).sum()
    assert torch.equal(moved, own)
    moved.backward()
    assert (len(model.forward.notes), len(inner.forward.notes)) == (1, 0)
