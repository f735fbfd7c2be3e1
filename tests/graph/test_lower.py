"""A graph as a Trace: queues, waits, memory, on a cluster whose answers can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.cluster import Cluster, Device, Link, Tier
from hyper_parallel.compat import collectives
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.graph import CollectiveGroup, StepGraph, capture, lower, peak
from hyper_parallel.simulator import simulate
from hyper_parallel.step.capture_train_step import BatchShape, capture_step
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe

ONE = Cluster(
    device=Device("one", {"float32": 1e9}, {"float32": 1e12}, Tier("device", 1e12, 1e15, 1e15)),
    links={"node": Link("node", 1e6, 0.0)},
)
"""A second for 10⁹ FLOPs of products or 10⁶ bytes sent; all else is free."""


def _sum_beside_a_product() -> StepGraph:
    """A sum over the ranks is begun; a product runs; then the sum is used."""
    with fake_ranks(2, 0), fake_mode_with_symbols():
        group = torch.distributed.group.WORLD.group_name
        a, b = torch.empty(1000, 500), torch.empty(500, 1000)

        def step() -> dict[str, torch.Tensor]:
            begun = torch.ops._c10d_functional.all_reduce(a, "sum", group)
            product = a @ b
            return {"out": product[:, :500] + collectives.waited(begun)}

        return capture(
            step,
            {"a": ("input", a), "b": ("input", b)},
            groups={group: CollectiveGroup(group, "shard", (0, 1))},
        )


def test_a_collective_runs_beside_what_does_not_wait_for_it() -> None:
    trace = lower({"all": _sum_beside_a_product()}, {0: "all", 1: "all"})
    timeline = simulate(trace, ONE)
    sent, product = 2.0, 1.0  # 2 (n − 1) / n · 2·10⁶ bytes; 2 · 10⁹ · 0.5 FLOPs
    assert timeline.alone is not None
    assert timeline.alone.compute == pytest.approx(product, rel=1e-6)
    assert timeline.communicating == pytest.approx(sent, rel=1e-6)
    assert timeline.step == pytest.approx(max(sent, product), rel=1e-6)
    assert timeline.exposed == pytest.approx(sent - product, rel=1e-6)
    queues = [op.queue for op in trace.ops["all"] if op.name != "slice"]
    assert queues == ["comm:shard", "compute", "compute", "compute"]


def _llama_step() -> StepGraph:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    with fake_ranks(4, 0):
        with torch.device("meta"):
            model: nn.Module = LlamaForCausalLM(config)
        hp.parallelize(model, hp.Strategy(axes={"shard": 2, "tensor": 2}), lowering="traceable")
        optimizer = build_optimizer(model, AdamWConfig(lr=1e-3))
        recipe = Recipe(
            model, hp.sharded(model), optimizer, schedule(ScheduleConfig(name="constant"), 9), clip=1.0
        )
        return capture_step(recipe, BatchShape(((2, 16), (2, 16)), (False, False)))


def test_the_peak_of_a_timeline_is_the_peak_of_the_graph() -> None:
    step = _llama_step()
    trace = lower({"all": step}, dict.fromkeys(range(4), "all"), micro_batches=2)
    trace.check()
    predicted = simulate(trace, ONE).peak
    assert predicted.bytes == peak(step).bytes
    # Without views there are fewer ops, and as many bytes.
    small = lower({"all": step}, dict.fromkeys(range(4), "all"), views=False)
    assert len(small.ops["all"]) < len(trace.ops["all"])
    assert simulate(small, ONE).peak.bytes == predicted.bytes
    assert {op.queue for op in small.ops["all"]} >= {"comm:shard", "comm:tensor_x"}
    assert {op.phase for op in small.ops["all"]} == {"forward", "loss", "backward", "clip", "optimizer"}


def test_what_is_resident_is_what_comes_from_outside() -> None:
    step = _llama_step()
    trace = lower({"all": step}, dict.fromkeys(range(4), "all"))
    held = {one.name: one for one in trace.resident["all"]}
    weight = held["parameter.model.layers.0.self_attn.q_proj.weight"]
    assert (weight.kind, weight.bytes) == ("parameter", 4 * 32 * 32 // 4)
    assert {one.kind for one in held.values()} == {"parameter", "optimizer", "input"}
