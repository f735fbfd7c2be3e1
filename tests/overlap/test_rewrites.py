"""Rewrites of captured steps on real ranks: what runs is what ran before, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from harness.ranks import run_ranks
from harness.scheduling_pass import Schedule
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.graph import StepGraph, executable
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.ir import is_collective
from hyper_parallel.graph.pass_manager import Pass, run_passes
from hyper_parallel.launch.stop import Requests
from hyper_parallel.overlap import Overlap
from hyper_parallel.overlap.buckets import Buckets
from hyper_parallel.overlap.chunked_matmul import Chunked, Chunks
from hyper_parallel.overlap.fsdp_baseline_schedule import FsdpBaseline
from hyper_parallel.overlap.jobs import Prices
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.capture_train_step import BatchShape, batch_inputs, capture_step, state
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import control_values_of

ROWS, LENGTH, MICRO = 2, 16, 2


def _model(experts: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    with torch.device("meta"):
        if experts:
            return MixtralForCausalLM(
                MixtralConfig(**sizes, num_local_experts=4, experts_implementation="grouped_mm")
            )
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def _recipe(strategy: dict[str, Any], experts: bool) -> Recipe:
    model = _model(experts)
    hp.parallelize(model, hp.Strategy.model_validate({"version": 1, **strategy}), lowering="traceable")
    hp.init_weights(model, seed=0)
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-2))
    plan = schedule(ScheduleConfig(name="constant"), 10)
    return Recipe(model, hp.sharded(model), optimizer, plan, clip=1.0)


class _Step:
    """One rank's step, run as any graph of it on a state of its own."""

    def __init__(self, rank: int, strategy: dict[str, Any], experts: bool = False, rows: int = ROWS) -> None:
        self.recipe = _recipe(strategy, experts)
        self.rows = rows
        self.graph = capture_step(self.recipe, BatchShape(((rows, LENGTH),) * MICRO, (False,) * MICRO))
        replica = self.recipe.handle.coordinate.get("shard", 0)
        draw = torch.Generator().manual_seed(replica)
        self.micro = []
        for _ in range(MICRO):
            ids = torch.randint(64, (rows, LENGTH + 1), generator=draw)
            positions = torch.arange(LENGTH).expand(rows, -1).contiguous()
            places = torch.arange(rows) + rows * replica
            self.micro.append(
                MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, places)
            )

    def ran(self, graph: StepGraph, steps: int = 2) -> dict[str, torch.Tensor]:
        """The state after some steps from the start."""
        tokens = torch.tensor(float(self.rows * LENGTH * MICRO))
        batch = StepBatch(0, list(range(self.rows)), self.micro, tokens)
        held = {
            k: v.detach().clone() for k, (_, v) in state(self.recipe.handle, self.recipe.optimizer).items()
        }
        run = executable(graph)

        def host(point: str, values: Any) -> torch.Tensor | None:
            return control_values_of(batch, Requests(), 0.0, tokens.device) if point == "load" else None

        for step in range(steps):
            scale = torch.tensor(1.0, dtype=torch.float64)
            run.run({**held, **batch_inputs(self.micro, torch.tensor(step), tokens, scale)}, host)
        return held


def _prices(world: int) -> Prices:
    return Prices(Cluster.named(f"h100x{world}"))


_Named = dict[str, list[str]]


def _unequal(
    rank: int, world: int, strategy: dict[str, Any], experts: bool, names: Sequence[str]
) -> tuple[_Named, _Named]:
    """By rewrite, of these names, the tensors of the state that differ from those of the graph as it was captured, and
    its collectives in order."""
    step = _Step(rank, strategy, experts)
    prices = _prices(world)
    rewrites: dict[str, list[Pass]] = {
        "usual": [FsdpBaseline()],
        "buckets": [Buckets()],
        "small buckets": [Buckets(4096), FsdpBaseline()],
        "side by side": [Buckets(), Schedule(prices, together=2)],
        "window": [Schedule(prices, window=1e-4)],
        "chosen": [Overlap(Cluster.named(f"h100x{world}"), pieces=False)],
    }
    if step.graph.sizes:
        sizes = balanced_sizes(step.graph)
        rewrites["side by side"] = [Schedule(prices, together=2, sizes=sizes)]
        rewrites["window"] = [Schedule(prices, window=1e-4, sizes=sizes)]
    wanted = step.ran(step.graph)
    start = step.ran(step.graph, 0)
    assert not torch.equal(wanted["parameter.model.norm.weight"], start["parameter.model.norm.weight"])
    found, orders = {}, {}
    for name in names:
        made = run_passes(step.graph, rewrites[name])[-1].after
        orders[name] = [str(node.target) for node in made.nodes if is_collective(node)]
        assert [n.name for n in made.nodes] != [n.name for n in step.graph.nodes]
        got = step.ran(made)
        found[name] = [key for key in wanted if not torch.equal(wanted[key], got[key])]
    return found, orders


def test_order_and_buckets_change_no_bit_with_weights_and_sequence_sharded() -> None:
    strategy = {"axes": {"shard": 2, "tensor": 2}, "sequence": True}
    ranks = run_ranks(_unequal, 4, strategy, False, ("small buckets", "side by side", "chosen"), timeout=120)
    for unequal, order in ranks:
        assert unequal == {name: [] for name in unequal}
        assert order == ranks[0][1]


def test_order_and_buckets_change_no_bit_with_reductions_that_go_level_by_level() -> None:
    strategy = {"axes": {"shard": 4}, "placement": {"devices": {"node": 2}}}
    ranks = run_ranks(_unequal, 4, strategy, False, ("usual", "buckets", "window"), timeout=120)
    for unequal, order in ranks:
        assert unequal == {name: [] for name in unequal}
        assert order == ranks[0][1]
        reductions = [sum("reduce_scatter" in call for call in order[name]) for name in ("usual", "buckets")]
        assert reductions[1] < reductions[0] / 2


def test_order_changes_no_bit_with_rows_that_travel_to_experts() -> None:
    strategy = {"axes": {"shard": 2, "expert": 2}}
    every = ("usual", "buckets", "small buckets", "side by side", "window", "chosen")
    ranks = run_ranks(_unequal, 2, strategy, True, every, timeout=120)
    for unequal, order in ranks:
        assert unequal == {name: [] for name in unequal}
        assert order == ranks[0][1]
        assert any("all_to_all" in call for call in order["chosen"])


def test_buckets_leave_one_gather_and_one_reduction_a_layer() -> None:
    with fake_ranks(2, 0):
        step = _Step(0, {"axes": {"shard": 2}}).graph
    before, after = (sum(map(is_collective, graph.nodes)) for graph in (step, Buckets()(step)))
    # Of each micro-batch: gathers of 2 layers and the rest, reductions of 2 layers, the embedding and the last norm;
    # and once the gradient's norm, and what the ranks tell each other.
    assert after == 2 * (3 + 4) + 2 < before


def _apart(
    rank: int, world: int, strategy: dict[str, Any], experts: bool, rows: int
) -> dict[str, tuple[int, float]]:
    """By rewrite how many more collectives there are than before, and the largest share of its norm by which a gradient
    differs: told by Adam's first moment after one step, which is a multiple of it."""
    step = _Step(rank, strategy, experts, rows)
    prices, sizes = _prices(world), balanced_sizes(step.graph)
    two, four = Chunks(Chunked(2, 2, 2), Chunked(2, 2, 2)), Chunks(Chunked(4, 4, 4), Chunked(1, 1, 4))
    rewrites: dict[str, list[Pass]] = {
        "gathers": [Chunks(Chunked(gather=2), Chunked(gather=2))],
        "sums": [Chunks(Chunked(reduce=4), Chunked(reduce=4))],
        "travel": [Chunks(Chunked(travel=2), Chunked(travel=2))],
        "all, in another order": [two, Schedule(prices, together=2, sizes=sizes)],
        "one pass more than the other": [four],
    }
    wanted = step.ran(step.graph, 1)
    before = sum(map(is_collective, step.graph.nodes))
    names = [node.name for node in step.graph.nodes]
    found = {}
    for name, passes in rewrites.items():
        made = run_passes(step.graph, passes)[-1].after
        if [node.name for node in made.nodes] == names:  # as it was
            found[name] = (0, 0.0)
            continue
        got = step.ran(made, 1)
        moments = [key for key in wanted if key.startswith("optimizer.exp_avg.")]
        assert moments and all(wanted[key].norm() > 0 for key in moments)
        worst = max(((got[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in moments)
        found[name] = (sum(map(is_collective, made.nodes)) - before, worst)
    return found


_ROUNDING = 2e-6
"""Of a gradient's norm, in float32 with sums of at most 64 numbers: for another number of rows or columns a kernel may
sum in another order."""


def test_collectives_in_pieces_give_the_same_step_with_sequence_sharded() -> None:
    strategy = {"axes": {"shard": 2, "tensor": 2}, "sequence": True}
    for found in run_ranks(_apart, 4, strategy, False, 1, timeout=120):
        # A layer gathers rows twice and sums products twice in each pass, in each of two micro-batches and two layers;
        # in the backward pass of the first layer's input nobody sums.
        assert found["gathers"][0] >= 16 and found["sums"][0] >= 3 * 16
        assert found["travel"][0] == 0
        assert all(worst < _ROUNDING for _, worst in found.values()), found


def test_rows_travel_back_from_experts_in_pieces_in_numbers_that_the_data_decide() -> None:
    strategy = {"axes": {"shard": 2, "expert": 2}}
    for found in run_ranks(_apart, 2, strategy, True, 2, timeout=120):
        # Forward and backward, in each of two micro-batches and two layers.
        assert found["travel"][0] == 2 * 2 * 2
        assert found["gathers"][0] == 0
        assert all(worst < _ROUNDING for _, worst in found.values()), found
