"""What is predicted is what runs: the operators of each rank's expanded Program are those of its step, in order.

The step of a rank is its instruction list on nodes of a graph (`runtime.rank_graph`), which has the bits of the
interpreter (`tests/runtime/test_rank_graph.py`) and is what runs under a budget.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.equivalence import family_config
from harness.random_files import Case, draw_case
from hyper_parallel import config
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate import stage_capture
from hyper_parallel.estimate.prediction import count_micro_batches, model_of
from hyper_parallel.estimate.stage_capture import CapturedStages, capture_stages
from hyper_parallel.graph import balanced_sizes
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.overlap.merge_tasks import MergedTasks
from hyper_parallel.program import Program, RunPair, expand
from hyper_parallel.runtime.build_program import choose_schedule, pipeline_program
from hyper_parallel.runtime.rank_graph import RankWriter
from hyper_parallel.runtime.stage_costs import stage_costs, sum_bytes
from hyper_parallel.runtime.stage_ops import stage_ops
from hyper_parallel.schedule import pairs_of_stages
from hyper_parallel.step.pipeline_plan import hidden_matrix, merged_pairs, pairs_on_one_rank
from hyper_parallel.trace import Op

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = 10
"""Random files of one test."""
Turns = dict[tuple[int, int], tuple[int, ...]]


@pytest.fixture(autouse=True)
def _all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are alike are captured apart, as training captures them."""
    monkeypatch.setattr(stage_capture, "_alike", lambda counts, kinds, again: tuple(range(len(counts))))


def _planned(run: RunConfig) -> tuple[Program, Partition, Turns]:
    """The Program of a run with all of its layers, as training plans it."""
    strategy = run.effective_strategy
    found: CapturedStages = capture_stages(model_of(run, []), run, flops_cost, lambda said: None, [])
    partition = found.partition
    assert len(partition.stages) == found.stages
    costs = stage_costs(partition, flops_cost(found.update))
    merged: dict[tuple[int, int], MergedTasks] = {}
    if strategy.pipeline.overlap_forward_backward:
        pairs = pairs_on_one_rank(found.stages, strategy.axes.pipeline)
        merged = merged_pairs(partition.stages, [flops_cost(one.step) for one in partition.stages], pairs)
        costs = replace(costs, hidden=hidden_matrix(found.stages, merged))
    schedule = choose_schedule(strategy.pipeline, strategy.axes.pipeline, count_micro_batches(run), costs)
    turns = {pair: merged[pair].turns for pair in pairs_of_stages(schedule)}
    return pipeline_program(partition, schedule, DeviceGroup.of_pipeline(strategy)), partition, turns


def _shown(op: Op) -> tuple[str, int] | None:
    """An operator and the bytes that it gets; None for what takes no time and is neither a transfer nor a wait."""
    size = sum(held.bytes for held in op.allocates)
    if op.collective is not None:
        return (op.collective.kind, 0)
    name = {"host post": "recv", "host send": "send", "host wait": "wait"}.get(op.name, op.name)
    if op.name.startswith(("Wait(", "end of the schedule")):
        name = "wait"
    if op.work is None and name not in ("recv", "send", "wait", "wait_tensor"):
        return None
    # A copy writes to memory that an operator before it has got.
    return (name, 0 if name in ("recv", "copy") else size)


def _assert_same_operations(program: Program, partition: Partition, turns: Turns) -> int:
    """Of every rank class; how many there are."""
    stages = {stage.number: stage_ops(stage)[0] for stage in partition.stages}
    crossings = [one for stage in partition.stages for one in (*stage.sends, *stage.gradients_out)]
    sizes = {one.name: sum_bytes([one]) for one in crossings}
    trace = expand(program, stages, sizes=sizes, turns=turns)
    count = 0
    for name, group in program.groups.items():
        writer = RankWriter(program, partition, group, turns)
        step = writer.finished(writer.schedule())
        runs = lowered(step, sizes=balanced_sizes(step), views=False).ops
        ours, theirs = ([one for one in map(_shown, ops) if one] for ops in (trace.ops[name], runs))
        for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            assert one[0] == other[0], (
                f"{name}, operation {at}: {ours[at - 3 : at + 3]}, {theirs[at - 3 : at + 3]}"
            )
        assert len(ours) == len(theirs)
        count += len(ours)
    return count


def test_the_example_of_a_pipeline() -> None:
    run = config.load(EXAMPLES / "pipeline.yaml", ("train.batch=4", "train.micro_batch=1"))
    assert _assert_same_operations(*_planned(run)) > 1000


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipev"])
def test_pairs_of_passes_in_turns(schedule: str) -> None:
    changes = (
        "train.batch=8",
        "train.micro_batch=1",
        "model.config.num_hidden_layers=4",
        f"strategy.pipeline={{schedule: {schedule}, overlap_forward_backward: true, layers: "
        f"{[2, 2] if schedule == '1f1b' else [1, 1, 1, 1]}}}",
    )
    program, partition, turns = _planned(config.load(EXAMPLES / "pipeline.yaml", changes))
    assert any(isinstance(one, RunPair) for order in program.instructions.values() for one in order)
    assert turns and _assert_same_operations(program, partition, turns) > 1000


def _pipelines(first: int, count: int) -> list[Case]:
    """Random files with a pipeline, of those from number `first` on."""
    found: list[Case] = []
    number = first
    while len(found) < count:
        case = draw_case(number)
        found += [case] if "pipeline" in case.strategy["axes"] else []
        number += 1
    return found


def _check(case: Case) -> int:
    """The operations of a random file's ranks; 0 where it is refused."""
    settings: dict[str, Any] = {**case.train}
    run = family_config(case.family, {**case.strategy, "check": False}, settings, case.length)
    try:
        planned = _planned(run)
    except HyperParallelError:
        return 0
    return _assert_same_operations(*planned)


@pytest.mark.parametrize("block", range(20))
def test_random_files(block: int) -> None:
    found = [_check(case) for case in _pipelines(1000 * block, BLOCK)]
    assert any(found)
