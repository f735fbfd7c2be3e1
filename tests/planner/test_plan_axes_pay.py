"""The planner's first answer: each of its axes pays for itself, and it is told in ten lines.

The best strategy without an axis is 2% slower, or does not fit.

Removing an axis gives its ranks to data (replicate or shard) and to the axes that the answer has beside it. All 24
questions are marked `matrix`; some of them run with every test.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from html import escape

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.framework_profiles import GENERIC, HYPER_PARALLEL
from hyper_parallel.planner.page import page_of
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import within
from hyper_parallel.planner.solve import AXES, PARTS, TIE, simplest, solve
from hyper_parallel.planner.training import answer_of
from hyper_parallel.units import format_duration
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload

MODELS = ("llama-3-8b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b")
BATCH = {8: 128, 64: 512, 512: 2048}
"""Sequences of 8,192 tokens a step, by devices."""
ALWAYS = {
    ("llama-3-8b", 64, False),
    ("llama-3-70b", 64, True),
    ("mixtral-8x7b", 8, False),
    ("qwen3-30b-a3b", 64, True),
}
"""Asked with every test."""
CASES = [
    pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.matrix])
    for case in itertools.product(MODELS, BATCH, (False, True))
]


def _question(model: str, devices: int, runnable: bool) -> Question:
    return Question(
        workload=Workload(shape(model), BATCH[devices], 8192),
        cluster=Cluster.named(f"h100x{devices}"),
        profile=HYPER_PARALLEL if runnable else GENERIC,
        runnable=runnable,
        tie=TIE,
    )


@pytest.mark.parametrize(("model", "devices", "runnable"), CASES)
def test_the_answer_is_ten_lines_that_begin_with_the_verdict(
    model: str, devices: int, runnable: bool
) -> None:
    one = solve(_question(model, devices, runnable))
    answer = answer_of(one)
    lines = answer.short().splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 80
    assert lines[0].startswith(f"estimated: run {one.question.workload.shape.name} on h100x{devices} with ")
    told = " ".join(answer.short().split())
    assert f"{format_duration(one.best[0].seconds)} a step; it fits." in told
    for name in ("settings", "step", "memory", "ties", "limit", "next"):
        assert sum(line.startswith(f"{name} ") for line in lines) == 1, name
    # The same verdict leads the page, and the details keep to the terminal's width.
    assert escape(answer.verdict.removeprefix("estimated: ")) in page_of(answer, one, []).html()
    assert max(map(len, answer.text(80).splitlines())) <= 80


@pytest.mark.parametrize(("model", "devices", "runnable"), CASES)
def test_each_axis_of_the_first_answer_pays_for_itself(model: str, devices: int, runnable: bool) -> None:
    asked = _question(model, devices, runnable)
    constants = constants_for(asked.profile, asked.cluster)
    found = simplest(asked, constants)
    first = found.best[0]
    degrees = {axis: float(getattr(first.row, axis)[0]) for axis in AXES}
    absent = {axis: 1 for axis, degree in degrees.items() if degree == 1}
    for axis, degree in degrees.items():
        if degree > 1:
            # A second tensor axis needs a first one.
            fix = {**absent, axis: 1, **({"tensor_y": 1} if axis == "tensor_x" else {})}
            without = within(replace(asked, tie=0.0, fix=fix), constants, first.seconds * (1 + TIE))
            assert without is None, f"{axis} saves {without.seconds / first.seconds - 1:.2%} only"
    assert found.quickest is not None
    # Axes that are given up cost at most a tie each.
    assert first.seconds <= found.quickest.seconds * (1 + TIE) ** (1 + len(AXES))
    kinds = [tuple(getattr(one.row, axis)[0] > 1 for axis in AXES) for one in found.best]
    different = len(set(kinds))
    assert len(set(kinds[:different])) == different, (
        "a second strategy with the same axes comes after all others"
    )


def test_the_plainest_schedule_of_a_pipeline_comes_first() -> None:
    """Fewer parts of the model on a stage, where that ties."""
    asked = Question(
        workload=Workload(shape("llama-3-8b"), 256, 8192),
        cluster=Cluster.named("h100x64"),
        fix={"pipeline": 2, "tensor_x": 1, "context": 1, "schedule": "interleaved"},
        tie=TIE,
    )
    constants = constants_for(asked.profile, asked.cluster)
    quickest = simplest(replace(asked, tie=0.0), constants).best[0]
    plain = simplest(asked, constants).best[0]
    parts, chosen = int(plain.row.virtual[0]), plain.strategy
    assert parts < quickest.row.virtual[0]
    kept = {name: chosen[name] for name in ("recompute", "state_on_host", "activations_on_host")}
    for most in (one for one in PARTS if 1 < one < parts):
        fewer = replace(asked, tie=0.0, fix={**asked.fix, **kept, "virtual": tuple(range(1, most + 1))})
        assert within(fewer, constants, quickest.seconds * (1 + TIE)) is None
