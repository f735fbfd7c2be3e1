"""Each instruction of a Program has the stage that it belongs to on its rank."""

from __future__ import annotations

from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.program import (
    DeviceGroup,
    Port,
    Program,
    Recv,
    Run,
    RunPair,
    Send,
    Task,
    TaskKind,
    Wait,
)
from hyper_parallel.runtime.graph_interpreter import positions

MESH = Mesh(("shard", 1))


def test_transfers_have_the_stage_that_computes_or_takes_the_value() -> None:
    groups = {name: DeviceGroup(MESH, (rank,), name) for rank, name in enumerate(("first", "second"))}
    tasks = [
        Task("forward 2", TaskKind.FORWARD, "first", (), ("x",), stage=2),
        Task("forward 3", TaskKind.FORWARD, "second", ("x",), (), stage=3),
    ]
    port = Port("x", Layout.replicated(MESH, (2,)), "float32", "first")
    sends = (Run("forward 2", 0), Send("x", 0, "second"))
    takes = (Recv("x", 0, "first"), Wait("x", 0, "first"), Run("forward 3", 0))
    lists = {"first": sends, "second": takes}
    program = Program(groups, {one.name: one for one in tasks}, {"x": port}, lists, 1)
    assert [(one.text, one.waits) for one in positions(program, "first")[:-1]] == [
        ("stage 2, micro-batch 0, Run(forward 2)", False),
        ("stage 2, micro-batch 0, Send(x) to second", True),
    ]
    *found, end = positions(program, "second")
    assert [(one.text, one.waits) for one in found] == [
        ("stage 3, micro-batch 0, Recv(x) from first", False),
        ("stage 3, micro-batch 0, Wait(x) for first", True),
        ("stage 3, micro-batch 0, Run(forward 3)", False),
    ]
    assert end.waits


def test_a_pair_has_the_stages_and_micro_batches_of_both_tasks() -> None:
    groups = {"only": DeviceGroup(MESH, (0,), "only")}
    tasks = [
        Task("forward 1", TaskKind.FORWARD, "only", stage=1),
        Task("backward 3", TaskKind.BACKWARD, "only", stage=3),
    ]
    pair = RunPair(Run("forward 1", 5), Run("backward 3", 2))
    program = Program(groups, {one.name: one for one in tasks}, {}, {"only": (pair,)}, 6)
    found = positions(program, "only")[0]
    assert found.text == (
        "stage 1, micro-batch 5, Run(forward 1) beside stage 3, micro-batch 2, Run(backward 3)"
    )
    assert not found.waits
