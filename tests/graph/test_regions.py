"""The region of each node: layer instance, micro-batch and phase, as captured and after passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import hyper_parallel as hp
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, rewritten, values_of
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.ir import is_cache, is_collective
from hyper_parallel.graph.likeness import likeness
from hyper_parallel.graph.pass_manager import Rewrite
from hyper_parallel.graph.step_context import Region, layer_finder, layer_of, region_of
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.offload_pass import apply
from hyper_parallel.offloading.schedule.problem import Move, OffloadTier, Rate
from hyper_parallel.overlap import Overlap, overlap
from hyper_parallel.overlap.buckets import Buckets
from hyper_parallel.overlap.chunked_matmul import Chunked, Chunks
from hyper_parallel.overlap.jobs import excerpt, lanes_of
from hyper_parallel.step.capture_train_step import BatchShape, capture_step
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe

HOST = OffloadTier("host", 2**40, Rate(1e-5, 1e9), Rate(1e-5, 1e9))
LAYERS, MICRO, LENGTH = 4, 2, 16
SHARD: dict[str, Any] = {"axes": {"shard": 2, "tensor": 2}, "sequence": True}


def _model(experts: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    with torch.device("meta"):
        if experts:
            return MixtralForCausalLM(
                MixtralConfig(**sizes, num_local_experts=4, experts_implementation="grouped_mm")
            )
        return LlamaForCausalLM(LlamaConfig(**sizes))


def _step(experts: bool = False, **strategy: Any) -> StepGraph:
    """Rank 0's step of two micro-batches."""
    model = _model(experts)
    plan = hp.Strategy.model_validate({"version": 1, **(strategy or SHARD)})
    with fake_ranks(plan.axes.world, 0):
        hp.parallelize(model, plan, lowering="traceable")
        optimizer = build_optimizer(model, AdamWConfig(lr=1e-2))
        rates = schedule(ScheduleConfig(name="constant"), 10)
        recipe = Recipe(model, hp.sharded(model), optimizer, rates, clip=1.0)
        step = capture_step(recipe, BatchShape(((2, LENGTH),) * MICRO, (False,) * MICRO))
        return rewritten(step, passes(plan, ordered=False))


def _layer(index: int) -> str:
    return f"model.layers.{index}"


def _by_region(step: StepGraph) -> dict[Region, list[fx.Node]]:
    found: dict[Region, list[fx.Node]] = defaultdict(list)
    for node in step.nodes:
        found[region_of(node)].append(node)
    return found


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("experts", [False, True])
def test_every_node_of_a_captured_step_is_in_its_region(experts: bool, recompute: str) -> None:
    axes = {"axes": {"shard": 2, "expert": 2}} if experts else SHARD
    step = _step(experts, **axes, memory={"recompute": recompute})
    found = _by_region(step)
    names = ["", *map(_layer, range(LAYERS))]
    passes = [
        (layer, micro, phase)
        for layer in names
        for micro in range(MICRO)
        for phase in ("forward", "backward")
    ]
    once = [(layer, None, phase) for layer in names for phase in ("clip", "optimizer")]
    others = [("", micro, "loss") for micro in range(MICRO)]
    wanted = {Region(*one) for one in (*passes, *once, *others)}  # type: ignore[arg-type]
    assert found.keys() == wanted
    for region, nodes in found.items():
        for node in nodes:
            if node.meta["module"]:
                assert layer_of(node.meta["module"]) == region.layer
    _check_parameters(step)
    _check_order(step)
    again = {region for region, nodes in found.items() if any(node.meta["recomputed"] for node in nodes)}
    repeated = {Region(_layer(at), micro, "backward") for at in range(LAYERS) for micro in range(MICRO)}
    assert again - {Region("", micro, "backward") for micro in range(MICRO)} == repeated
    # The layers at the ends split and gather the sequence. Gradients, and loads of experts, are added to what the first
    # micro-batch gave: it is like no other.
    inner = range(1, LAYERS - 1)
    runs = [{likeness(found[Region(_layer(at), m, "forward")]) for at in inner} for m in range(MICRO)]
    assert all(len(layers) == 1 for layers in runs)
    assert (runs[0] == runs[1]) == (not experts)
    middle = [likeness(found[Region(_layer(1), micro, "backward")]) for micro in range(MICRO)]
    assert middle[0] != middle[1]


def _check_parameters(step: StepGraph) -> None:
    """A gradient is added to, measured and used for an update in the layer of its parameter."""
    layer_named = layer_finder(f"{_layer(at)}.mlp" for at in range(LAYERS))
    checked: Counter[str] = Counter()
    for node in step.nodes:
        owners = {
            step.gradients[value.storage]
            for source in node.all_input_nodes
            for value in values_of(source)
            if value.storage in step.gradients
        }
        if len(owners) == 1 and not node.meta["module"]:
            assert region_of(node).layer == layer_named(next(iter(owners)))
            checked[region_of(node).phase] += 1
    assert checked["backward"] and checked["clip"] and checked["optimizer"]


def _check_order(step: StepGraph) -> None:
    """Micro-batches follow each other, and layers in either direction."""
    regions = list(dict.fromkeys(region_of(node) for node in step.nodes))
    passes = [region for region in regions if region.phase in ("forward", "backward")]
    numbers = [region.micro_batch for region in passes if region.micro_batch is not None]
    assert numbers == sorted(numbers)
    for micro in range(MICRO):
        for phase, wanted in (("forward", range(LAYERS)), ("backward", reversed(range(LAYERS)))):
            layers = [r.layer for r in passes if r.layer and r.micro_batch == micro and r.phase == phase]
            assert layers == [_layer(at) for at in wanted]


_Passes = dict[str, Callable[[StepGraph], StepGraph]]


def _overlaps(step: StepGraph) -> _Passes:
    cluster = Cluster.named("h100x4")
    return {
        "buckets": Buckets(),
        "chunks": Chunks(Chunked(2, 2, 2), Chunked(2, 2, 2)),
        "overlap": lambda step: overlap(step, cluster).step,
        "whole": Overlap(cluster, pieces=False),
    }


@pytest.mark.parametrize("name", ["buckets", "chunks", "overlap", "whole"])
def test_overlap_keeps_regions(name: str) -> None:
    step = _step()
    made = _overlaps(step)[name](step)
    before, after = ({node.name: region_of(node) for node in one.nodes} for one in (step, made))
    assert [node.name for node in step.nodes] != [node.name for node in made.nodes]
    new = [node for node in made.nodes if node.name not in before]
    assert new
    assert {region_of(node) for node in new} <= set(before.values())
    assert all(after[node] == before[node] for node in before.keys() & after.keys())
    if name == "chunks":
        assert all(
            region_of(node) == before[node.meta["origin"]] for node in new if node.meta["origin"] in before
        )
    if name == "buckets":
        joined = [node for node in new if is_collective(node)]
        layers = Counter(region_of(node).layer for node in joined)
        assert all(layers[_layer(at)] for at in range(LAYERS))


def test_lanes_are_micro_batches_and_the_update_comes_last() -> None:
    step = _step()
    for node, lane in lanes_of(step).items():
        region = region_of(node)
        last = MICRO if region.phase in ("clip", "optimizer") else 0
        assert lane == (last if region.micro_batch is None else region.micro_batch)


def test_an_excerpt_is_one_pass_through_layers_in_the_middle() -> None:
    step = _step()
    for phase in ("forward", "backward"):
        part = excerpt(step, 2, phase)  # type: ignore[arg-type]
        assert {region_of(node) for node in part.nodes} == {
            Region(_layer(at), micro, phase)  # type: ignore[arg-type]
            for micro in range(MICRO)
            for at in (1, 2)
        }
        assert set(lanes_of(part).values()) == set(range(MICRO))


def test_moves_to_other_tiers_are_in_a_region() -> None:
    step = _step(axes={"replicate": 1})
    problem = build_problem(step, Cluster.named("h100"), 0, (HOST,))
    chosen = [
        Move(held.storage, "host", 0, first, first, last)
        for held in problem.held
        if held.movable and held.kind == "activation"
        for first, last in held.gaps(problem.nodes)[:1]
        if last > first
    ]
    made = apply(step, problem, chosen)
    moves = [node for node in made.nodes if is_cache(node)]
    assert len(moves) >= 4 * len(chosen) > 40
    assert {region_of(node) for node in moves} <= {region_of(node) for node in step.nodes}


def test_sizes_of_experts_rows_are_in_the_micro_batch_that_they_are_of() -> None:
    step = _step(True, axes={"shard": 2, "expert": 2})
    assert step.sizes and balanced_sizes(step)
    assert Counter(region_of(node).micro_batch for node in step.sizes.values()).keys() == set(range(MICRO))


@pytest.mark.parametrize("change", ["drop", "layer", "micro_batch"])
def test_a_pass_that_loses_regions_is_refused(change: str) -> None:
    def does(step: StepGraph) -> StepGraph:
        made = step.copy()
        node = next(node for node in made.nodes if region_of(node).layer == _layer(1))
        if change == "drop":
            del node.meta["region"]
        else:
            changed: Any = {"layer": _layer(0)} if change == "layer" else {"micro_batch": None}
            node.meta["region"] = replace(region_of(node), **changed)
        return made

    message = "lacks meta region" if change == "drop" else "and what it repeats in Region"
    with pytest.raises(GraphError, match=f"pass 'bad': .*{message}"):
        rewritten(_step(), [Rewrite("bad", does)])


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("model.layers.3.mlp.experts.7", "model.layers.3"),
        ("model.layers.3", "model.layers.3"),
        ("visual.blocks.0.attn", "visual.blocks.0"),
        ("0", "0"),
        ("model.layers", ""),
        ("model.block3", ""),
        ("", ""),
    ],
)
def test_a_module_is_in_the_layer_with_the_first_index(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_a_tensor_is_of_the_layer_that_its_name_contains() -> None:
    find = layer_finder(["model.layers.0.mlp", "model.layers.10", "model.norm"])
    assert find("parameter.model.layers.10.weight") == "model.layers.10"
    assert find("exp_avg.model.layers.0.mlp.weight") == "model.layers.0"
    assert find("parameter.model.norm.weight") == ""
    assert find("micro.0.input_ids") == ""
