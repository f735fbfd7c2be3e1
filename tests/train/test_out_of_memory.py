"""A step that runs out of memory says where, what filled it, and which key of the run file would help."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from harness import run_ranks
from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
from hyper_parallel.errors import OutOfMemoryError
from hyper_parallel.shard import init_weights, parallelize, sharded
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.out_of_memory import describe, head_of
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Strategy

ROWS, LENGTH = 64, 64


def _recipe(model: torch.nn.Module) -> Recipe:
    return Recipe(
        model,
        sharded(model),
        build_optimizer(model, AdamWConfig()),
        schedule(ScheduleConfig(name="constant"), 1),
        loss=LossConfig(chunk="none"),
    )


def _graphs(**settings: Any) -> tuple[LlamaForCausalLM, Graphs]:
    shape = {**LLAMA, "vocab_size": 300, **settings}
    config = LlamaConfig(**{key: value for key, value in shape.items() if key != "model_type"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shadow = parallelize(without_values(model), Strategy(), lowering="traceable")
    return model, Graphs(_recipe(shadow), "cpu")


def _batch() -> StepBatch:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    micro = MicroBatch(ids, ids, positions, torch.arange(ROWS), several=False)
    return StepBatch(0, list(range(ROWS)), [micro], torch.tensor(float(ids.numel())))


def _data() -> int:
    """Bytes that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])


def _starved(rank: int, world: int) -> tuple[str, bool]:
    model, graphs = _graphs(hidden_size=128, intermediate_size=512)
    parallelize(model, Strategy(), lowering="traceable")
    init_weights(model, 0)
    stepper = GraphStepper(_recipe(model), graphs)
    stepper.begin(_batch())
    before = [parameter.clone() for parameter in model.parameters()]
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + 48 * 2**20, hard))
    with pytest.raises(OutOfMemoryError) as caught:
        stepper.run(load_next=None, memory=0.0)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value), same and is_out_of_memory(caught.value.__cause__)


def test_a_real_shortage_is_explained_and_nothing_is_updated() -> None:
    [(said, same)] = run_ranks(_starved, 1)
    first, *lines, last = said.splitlines()
    assert same
    assert first.startswith("step 1: out of memory in aten.") and " of model.layers." in first
    assert "(forward), with " in first and "activation " in first
    assert len(lines) == 11 and "activation of model.layers." in lines[0] and lines[-1].endswith(" more")
    assert last.startswith("what would help: strategy.memory.recompute=layer: ")


def _described(phase: str, strategy: Strategy, **settings: Any) -> str:
    """At the first node of a phase."""
    _, graphs = _graphs(**settings)
    shape = BatchShape.of(_batch().micro)
    assert graphs.ready(shape), graphs.refused
    step = graphs[shape].step
    node = next(node for node in step.nodes if node.meta["region"].phase == phase)
    return describe(step, node, strategy, head_of(graphs.shadow.model))


def test_what_would_help_goes_by_what_fills_the_memory() -> None:
    logits = _described("backward", Strategy(), vocab_size=4096, hidden_size=16, intermediate_size=16)
    assert "what would help: train.loss.chunk, smaller" in logits
    state = _described(
        "optimizer",
        Strategy.model_validate({"axes": {"shard": 2}, "memory": {"shard": "optimizer"}}),
        hidden_size=512,
        intermediate_size=2048,
    )
    assert "  optimizer exp_avg.model.layers." in state
    assert (
        "what would help: strategy.memory.shard=parameters: nothing is kept whole; strategy.axes.shard"
        in state
    )
    assert "recompute" not in state
