"""What is predicted is what runs: the nodes that a training step executes are the operations of its predicted Trace.

A run of one step notes each node as its compiled function comes to it; `simulate` of the same file prices the
operations. Both are told that they compute on the same machine: the order of collectives, and the moves of a budget,
are chosen by its costs.

What differs, and why:

- Rows of several documents have a mask that is made of their positions. A prediction has no rows, and takes each for
  one document. Here rows are not packed.
- What takes no time is no operation: memory that is not written to yet, and elements of what an operator gives.
- A loop over micro-batches adds the first one's gradients to zeros, since its body is written once. A prediction, as a
  step under a budget, keeps what the first one computed, or a copy of it where that shares its memory.
- A prefetch is two operations, since memory is taken before the copy has its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from harness.executed_nodes import SILENT, executed, name_of
from harness.ranks import run_ranks
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import predict, predict_run
from hyper_parallel.offloading.pass_pipeline import spaces_of
from hyper_parallel.overlap import collective_order
from hyper_parallel.step import memory_budget
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.recipe import StepResult
from hyper_parallel.trace import Op
from train.tiny_run import run, run_config

FIRST_SUM = "sum of the first micro-batch"


def _cluster(world: int) -> Cluster:
    return Cluster.named(f"h100x{world}") if world > 1 else Cluster.preset("h100")


@contextmanager
def _on(cluster: Cluster, config: RunConfig) -> Iterator[None]:
    """Inside, a run takes itself to be on this machine."""
    strategy = config.effective_strategy
    described = {
        (collective_order, "planning_cluster"): lambda *_: cluster,
        (memory_budget, "cluster_for"): lambda *_: cluster,
        (memory_budget, "measured"): lambda *_, **__: spaces_of(
            strategy.memory, cluster, strategy.axes.world
        ),
        (predict, "prices_views"): lambda _: True,
    }
    with ExitStack() as stack:
        for (module, name), stands_in in described.items():
            stack.enter_context(mock.patch.object(module, name, stands_in))
        yield


def _executed(config: RunConfig, world: int) -> list[str]:
    """The nodes of the one step of a run, in the order in which this rank comes to them."""
    came_to: list[fx.Node] = []
    names: list[str] = []
    steps = GraphStepper.run

    def stepped(self: GraphStepper, **given: Any) -> StepResult:
        # The loss before the first step, and how the graph compares with eager steps, are runs of the same graph.
        came_to.clear()
        result = steps(self, **given)
        sums = {node for node in came_to if _adds_to_zeros(node)}
        for node in came_to:
            names.append(FIRST_SUM if node in sums else name_of(node))
            sums.discard(node)
        return result

    with (
        executed(came_to.append),
        _on(_cluster(world), config),
        mock.patch.object(GraphStepper, "run", stepped),
    ):
        run(config)
    return [name for name in names if name not in SILENT]


def _adds_to_zeros(node: fx.Node) -> bool:
    """Whether a node of a loop's body adds to what the micro-batches before came to."""
    total = node.args[0] if node.target is torch.ops.aten.add_.Tensor else None
    return isinstance(total, fx.Node) and total.op == "placeholder" and total.name.startswith("total_")


def _with_sums_kept(executed: list[str], predicted: list[str]) -> list[str]:
    """What is executed, with the first sums as they are predicted: nothing, a copy, or a sum with zeros."""
    found: list[str] = []
    for at, name in enumerate(executed):
        if name != FIRST_SUM:
            found.append(name)
        elif (here := predicted[len(found) : len(found) + 1]) in (["copy"], ["add"]):
            behind = next((one for one in executed[at + 1 :] if one != FIRST_SUM), "")
            # One of the step itself may follow.
            found += here * ([behind] != here or predicted[len(found) + 1 : len(found) + 2] == here)
    return found


def _executed_on(rank: int, world: int, config: RunConfig) -> list[str]:
    return _executed(config, world)


def _predicted(config: RunConfig, world: int) -> list[str]:
    cluster = _cluster(world)
    with _on(cluster, config):
        found = predict_run(config, cluster)
    return [op.name for op in found.timeline.trace.ops["all"] if _shown(op)]


def _shown(op: Op) -> bool:
    if op.name == "prefetch":
        return op.work is not None
    return op.name not in SILENT


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (1, {}, {}),
    "recomputed layers": (1, {"memory": {"recompute": "layer"}}, {}),
    "a budget": (1, {"memory": {"device": "600KiB", "host": "64MiB"}}, {}),
    "accumulation": (1, {}, {"batch": 6, "micro_batch": 2}),
    "many micro-batches": (1, {}, {"batch": 9, "micro_batch": 1}),
    "tensor": (2, {"axes": {"tensor": 2}}, {}),
    "copies": (2, {"axes": {"replicate": 2}}, {}),
    "shards": (2, {"axes": {"shard": 2}}, {}),
    "shards, accumulation": (2, {"axes": {"shard": 2}}, {"batch": 8, "micro_batch": 1}),
    "shards, at the end": (2, {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}}, {"batch": 8}),
}  # fmt: skip


def _config(folder: Path, case: str) -> RunConfig:
    world, strategy, train = CASES[case]
    data = 1 if "tensor" in strategy.get("axes", {}) else world
    given = {"batch": 4, "micro_batch": 4 // data, **train}
    return run_config(
        folder,
        case.replace(" ", "-"),
        strategy={"version": 1, **strategy},
        train={"steps": 1, "sample": False, "engine": "graph", "schedule": {"warmup": 0}, **given},
        data={"pack": False},
    )


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_executes_the_operations_that_are_predicted(case: str, tmp_path: Path) -> None:
    world = CASES[case][0]
    config = _config(tmp_path, case)
    executed = _executed(config, 1) if world == 1 else run_ranks(_executed_on, world, config)[0]
    predicted = _predicted(config, world)
    executed = _with_sums_kept(executed, predicted)
    for at, (one, other) in enumerate(zip(executed, predicted, strict=False)):
        assert one == other, (at, executed[at - 4 : at + 4], predicted[at - 4 : at + 4])
    assert len(executed) == len(predicted) > 300
