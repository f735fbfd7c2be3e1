"""The step that `simulate` prices is the one that `train` runs, node by node, for the same source of costs."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from harness.examples import EXAMPLES, captured_examples
from hyper_parallel import config
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import build_trace, cluster_of, predict_run
from hyper_parallel.estimate.prediction import count_micro_batches, micro_batch, model_of
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.ir import values_of
from hyper_parallel.overlap.collective_order import order_digest
from hyper_parallel.shard import parallelize, process_mesh
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.recipe import Recipe

# Collectives of a pipeline's stages stay in the order of the model's code.
PLAIN = [str(path.relative_to(EXAMPLES)) for path in captured_examples()]
LAYERS = {"deepseek-v3.yaml": 4}
"""Layers of an example in which others than two are the fewest with all kinds."""


class _Device:
    """A back end of which only the device's name matters."""

    def device_name(self) -> str:
        return "NVIDIA H100 80GB HBM3"


def _small(example: str, *overrides: str) -> RunConfig:
    """The example with few layers, and two micro-batches where it has more."""
    given = [f"model.config.num_hidden_layers={LAYERS.get(example, 2)}", *overrides]
    run = config.load(EXAMPLES / example, given)
    rows = run.effective_strategy.axes.data * micro_batch(run)
    return config.load(EXAMPLES / example, [*given, f"train.batch={rows * min(2, count_micro_batches(run))}"])


def _trained(run: RunConfig) -> StepGraph:
    """The graph of a run's step, as a worker of it has it."""
    strategy, count = run.effective_strategy, count_micro_batches(run)
    with fake_ranks(strategy.axes.world, 0):
        shadow = model_of(run, [])
        parallelize(shadow, strategy, lowering="traceable")
        graphs = Graphs(Recipe.of(run, shadow), "cpu", whole=True)
        shape = BatchShape(((micro_batch(run), run.data.sequence),) * count, (False,) * count)
        assert graphs.ready(shape), graphs.refused
        return graphs[shape].plain


def _digest(step: StepGraph) -> str:
    """Of all nodes in order: what they are called, compute, are given and give."""
    digest = hashlib.blake2b()
    for node in step.nodes:
        values = [(str(value.dtype), tuple(map(str, value.shape))) for value in values_of(node)]
        digest.update(f"{node.name} {node.target} {node.args} {node.kwargs} {values}\n".encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            name, marks=() if name in ("quickstart.yaml", "simulate/llama-8b.yaml") else pytest.mark.matrix
        )
        for name in PLAIN
    ],
)
def test_simulate_prices_the_nodes_that_train_runs_in_their_order(
    example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_mesh, "backend", lambda kind: _Device())
    # A prediction takes the rows of experts as known and even; a step of training reads them.
    monkeypatch.setattr(build_trace, "load_of", lambda strategy: None)
    priced: list[StepGraph] = []
    captured = build_trace.captured_step

    def recorded(*given: Any, **named: Any) -> StepGraph:
        priced.append(captured(*given, **named))
        return priced[-1]

    monkeypatch.setattr(build_trace, "captured_step", recorded)
    run = _small(example)
    cluster = cluster_of("h100", run)
    trained = _trained(run)
    if run.strategy.axes.expert > 1:
        from hyper_parallel.offloading.pass_pipeline import passes

        strategy = run.effective_strategy
        recorded(model_of(run, []), run, strategy, count_micro_batches(run), passes(strategy, cluster))
    else:
        predict_run(run, cluster)
    assert _digest(priced[-1]) == _digest(trained)
    assert order_digest(priced[-1]) == order_digest(trained)


def test_another_order_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_mesh, "backend", lambda kind: _Device())
    run, other = _small("quickstart.yaml"), _small("quickstart.yaml", "strategy.overlap.schedule=none")
    assert _digest(_trained(run)) != _digest(_trained(other))
