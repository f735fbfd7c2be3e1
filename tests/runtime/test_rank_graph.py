"""A rank's instruction list written out as one graph has the bits of the interpreter, in every schedule."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.families import FAMILIES
from harness.pipelines import Captured, Tensors, interpreted, run_in_threads
from hyper_parallel.graph import StepGraph, executable, values_of
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.pass_manager import validate
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.offloading.open_tiers import GUESS
from hyper_parallel.offloading.schedule.build_problem import BEGINS, build_problem, transfer_ends
from hyper_parallel.program import Program
from hyper_parallel.program.build import Schedule
from hyper_parallel.runtime.graph_interpreter import GraphInterpreter, positions
from hyper_parallel.runtime.rank_graph import RankWriter, numbered
from hyper_parallel.runtime.rank_transfers import MemoryTransfers, RankTransfers, TransferError
from hyper_parallel.schedule import ScheduleName, named_schedule, with_steady_pairs

MICRO = 8
FAMILY = {
    "llama-tied": {"num_hidden_layers": 8},
    # With an auxiliary loss, so that experts' loads are summed over the layers of all stages.
    "mixtral": {"num_hidden_layers": 4, "output_router_logits": True},
}


@functools.cache
def _captured(name: str) -> Captured:
    return Captured({**FAMILIES[name], **FAMILY[name]}, count=MICRO)


@functools.cache
def _whole(name: str) -> Tensors:
    return _captured(name).whole()


def _graph(program: Program, cut: Partition, transfers: RankTransfers) -> StepGraph:
    writer = RankWriter(program, cut, transfers.group)
    graph = writer.finished(writer.schedule())
    validate(graph, graph)
    ends = dict(transfer_ends(graph.nodes))
    points = [node for node in graph.nodes if node.target is HOST]
    assert ends.keys() == {node for node in points if node.args[0] in BEGINS}
    begun = sum(node.args[0] == HostPoint.BEGIN for node in points)
    assert begun == len(positions(program, transfers.group.name))
    return graph


def _inputs(found: Captured) -> Tensors:
    batches = {
        numbered(name, at): value for at, batch in enumerate(found.batches) for name, value in batch.items()
    }
    return {**found.state, **batches}


def _written(
    program: Program, cut: Partition, found: Captured, rank: int, memory: MemoryTransfers
) -> Tensors:
    transfers = RankTransfers(program, cut, rank, memory, torch.device("cpu"))
    graph = _graph(program, cut, transfers)
    places: list[int] = []
    one = GraphInterpreter(program, executable(graph), transfers, places.append)
    made: Any = one.run(_inputs(found))
    assert places == list(range(len(one.positions)))
    return made


def _same(schedule: Schedule, name: str = "llama-tied") -> None:
    made, cut = run_in_threads(_captured(name), schedule, _written)
    whole = _whole(name)
    assert made.keys() == whole.keys()
    assert all(torch.equal(made[key], whole[key]) for key in whole if key not in cut.shared)
    if cut.shared:
        staged, _ = run_in_threads(_captured(name), schedule, interpreted)
        assert all(torch.equal(made[key], staged[key]) for key in cut.shared)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        one if one in ("1f1b", "interleaved-1f1b", "zb-v") else pytest.param(one, marks=pytest.mark.matrix)
        for one in ScheduleName
    ],
)
def test_every_schedule_has_the_bits_of_the_interpreter(name: ScheduleName, ranks: int) -> None:
    _same(named_schedule(name, ranks, MICRO))


def test_experts_with_an_auxiliary_loss_have_them_too() -> None:
    _same(named_schedule("zb-v", 2, MICRO), "mixtral")


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_pairs_have_them_too(name: str) -> None:
    _same(with_steady_pairs(named_schedule(name, 2, MICRO, paired=True)))


def _uses_of_transfers(
    program: Program, cut: Partition, found: Captured, rank: int, memory: MemoryTransfers
) -> Tensors:
    """Counts transfers by whether their memory is in use from their beginning to the wait for them."""
    graph = _graph(program, cut, RankTransfers(program, cut, rank, memory, torch.device("cpu")))
    nodes = list(graph.nodes)
    buffers = build_problem(graph, GUESS, 1, ()).by_storage
    counts: Counter[str] = Counter()
    for node, end in transfer_ends(nodes):
        begin = nodes.index(node)
        values = [*values_of(node)] if node.args[0] == HostPoint.POST else [*values_of(node.args[1][0])]
        for value in values:
            uses = buffers[value.storage].busy
            counts[str(any(one.first <= begin and end <= one.last for one in uses))] += 1
    return {name: torch.tensor(count) for name, count in counts.items()}


def test_what_is_sent_or_received_is_in_use_until_the_transfer_is_over() -> None:
    found, _ = run_in_threads(_captured("llama-tied"), named_schedule("1f1b", 2, MICRO), _uses_of_transfers)
    # On each rank a value for each micro-batch goes out and one comes in, at least.
    assert found.keys() == {"True"}
    assert int(found["True"]) >= 4 * MICRO


class _Gone:
    """Transfers where no other rank is left."""

    def post(self, *args: Any) -> Tensor:
        raise TransferError("the link is gone")

    send = wait = drain = post


def _alone(program: Program, cut: Partition, found: Captured, rank: int, memory: MemoryTransfers) -> Tensors:
    """What goes wrong on a rank, as a name: of the first rank a kernel, of the second one a receive."""
    transfers = RankTransfers(program, cut, rank, _Gone() if rank else memory, torch.device("cpu"))
    one = GraphInterpreter(program, executable(_graph(program, cut, transfers)), transfers)
    inputs = {
        name: value[:, :1] if "position_ids" in name else value for name, value in _inputs(found).items()
    }
    with pytest.raises((IndexError, TransferError)) as caught:
        one.run(inputs, name=lambda: "step 2")
    said = str(caught.value) if rank else " ".join(caught.value.__notes__)
    return {said: torch.zeros(())}


def test_errors_name_the_step_the_stage_the_micro_batch_and_the_instruction() -> None:
    said, _ = run_in_threads(_captured("llama-tied"), named_schedule("1f1b", 2, MICRO), _alone)
    first, second = sorted(said, key=len)
    assert first == "in step 2, stage 0, micro-batch 0, Run(forward 0)"
    assert second.startswith("step 2, stage 1, micro-batch 0, Recv(forward.")
    assert second.endswith(" from rank 0: the link is gone")
