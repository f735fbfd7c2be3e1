"""Experts placed by measured loads beside experts that stay: python benchmarks/expert_balance.py

A small DeepSeek-V3 (64 experts, 2 for each token, 2 layers) on 8 gloo workers, `shard: 8, expert: 8`. The
routers' correction biases, which are the model's own, are set so that experts get rows by Zipf's law; which expert is
how hot is drawn. Models with the same values take the same steps, one after the other in each process, in an order that
changes from round to round: `none` leaves experts where they are, `placed` moves them and gives none replicas, and
`balanced` is the default of `strategy.expert_balance` with 2 replicas in each layer.

Measured: the rows that each rank's experts compute (counted where they are multiplied); what losses, gradients and
updates differ by in steps from the same values, and losses over the run, where a difference of rounding may grow once a
router chooses another expert; bytes that cross between ranks when experts move, bytes that each rank receives in a
step, and seconds of a step. Eight workers share the machine's cores: a step takes as long as the work of all ranks, not
of the heaviest, so its seconds show what balancing costs and not what it spares.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
from commandline import run
from measure import in_turns, paired_ratio, timed
from pages import Benchmark
from shapes import Fields, llama
from torch import Tensor, nn
from training import build, largest_difference, micro_batch, recipe_of

from harness import run_ranks
from hyper_parallel import Strategy, init_weights
from hyper_parallel.compat import collectives
from hyper_parallel.shard.experts import dispatch
from hyper_parallel.shard.experts.placement import replicas_needed
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.expert_balance import ExpertBalancer, Replacement
from hyper_parallel.step.recipe import Recipe, StepResult
from hyper_parallel.step.train_step import Stepper

BENCHMARK = Benchmark("expert_balance")
WORLD, EXPERTS, TOP_K, LAYERS = 8, 64, 2, 2
VOCABULARY, ROWS, LENGTH = 512, 4, 256
LIMIT, EVERY = 1.15, 10
SAME = 10
"""Steps from the same values after those that are measured."""
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "placed": {"every": EVERY, "limit": LIMIT, "replicas": 0},
    "balanced": {"every": EVERY, "limit": LIMIT, "replicas": 2},
}
BIAS = "e_score_correction_bias"


MODEL: Fields = llama(64, LAYERS, 4, inner=128, kv=4, vocabulary=VOCABULARY, positions=LENGTH)
MODEL |= {"model_type": "deepseek_v3", "moe_intermediate_size": 64, "first_k_dense_replace": 0}
MODEL |= {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_group": 1, "topk_group": 1}
MODEL |= {"n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 32}
MODEL |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


def batch(rank: int, step: int) -> StepBatch:
    rows = ROWS * WORLD
    micro = micro_batch(rows, LENGTH, VOCABULARY, share=rank, shares=WORLD, seed=step)
    return StepBatch(step, list(range(rows)), [micro], torch.tensor(float(ROWS * LENGTH)))


@dataclass
class Side:
    """One of the models, and what its steps came to on this rank."""

    model: nn.Module
    recipe: Recipe
    balancer: ExpertBalancer | None
    rank: int
    losses: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    """Of each step: the rows that this rank's experts computed, layer by layer."""
    placed: list[tuple[int, Replacement, float]] = field(default_factory=list)
    """Step, what was placed anew, and the seconds that took."""

    @classmethod
    def of(cls, balance: dict[str, Any] | None, rank: int) -> Side:
        strategy = Strategy(axes={"shard": WORLD, "expert": WORLD}, expert_balance=balance, check=False)
        made = build(MODEL, strategy, lowering="fsdp")
        init_weights(made, seed=1)
        recipe = recipe_of(made, lr=1e-4)
        return cls(made, recipe, ExpertBalancer.of(recipe.handle, recipe.optimizer), rank)

    def step(self, number: int) -> StepResult:
        stepper = Stepper(self.recipe)
        stepper.begin(batch(self.rank, number))
        return stepper.run(load_next=None, memory=0.0)

    def next(self, counted: list[int]) -> float:
        """The next step, of the ranks together; its seconds."""
        number = len(self.losses)
        counted.clear()
        results: list[StepResult] = []
        seconds = timed(lambda: results.append(self.step(number)), WORLD)
        self.losses.append(results[0].loss)
        self.rows.append(list(counted))
        loads, balancer, found = results[0].expert_loads, self.balancer, list[Replacement | None]()
        if balancer is not None and loads is not None:
            placing = timed(lambda: found.append(balancer.after_step(loads)), WORLD)
            if found[0] is not None:
                self.placed.append((number, found[0], placing))
        return seconds


def count_rows(counted: list[int]) -> None:
    """From now on the rows of each forward pass of a layer's experts are appended."""
    multiply, whole = dispatch.apply_experts, dispatch.compute

    def apply_experts(module: Any, weights: Any, rows: Tensor, counts: list[int]) -> Tensor:
        if counted:
            counted[-1] += sum(counts)
        return multiply(module, weights, rows, counts)

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        counted.append(0)
        return whole(*args, **kwargs)

    mock.patch.multiple(dispatch, apply_experts=apply_experts, compute=compute).start()


def biases_of(side: Side) -> list[Tensor]:
    return [buffer for name, buffer in side.model.named_buffers() if name.endswith(BIAS)]


def skew_routers(side: Side, skew: float, rounds: int) -> list[Tensor]:
    """Set the routers' biases so that loads follow Zipf's law, by steps that update nothing; the biases."""
    handle, biases = side.recipe.handle, biases_of(side)
    draw = torch.Generator().manual_seed(5)
    shares = 1 / torch.arange(1, EXPERTS + 1).float() ** skew
    wanted = [(shares / shares.sum())[torch.randperm(EXPERTS, generator=draw)] for _ in biases]
    assert handle.routing is not None
    for at in range(rounds):
        handle.routing.counts.clear()
        side.model(input_ids=batch(side.rank, 10_000 + at).micro[0].input_ids, use_cache=False)
        loads = torch.stack(list(handle.routing.counts.values())).float()
        dist.all_reduce(loads)
        for bias, load, want in zip(biases, loads, wanted, strict=True):
            share = (load + 1) / (load + 1).sum()
            bias.add_(0.1 / (1 + at / 20) * (want / share).log().clamp(-1, 1))
    handle.routing.counts.clear()
    return biases


def from_same_values(plain: Side, side: Side, number: int) -> dict[str, float]:
    """What one step of two sides from the same values and moments differs by: the loss, the gradient's norm over its
    size, and the largest difference of an updated value."""
    ours, theirs = side.recipe, plain.recipe
    pairs: list[tuple[Any, Any]] = list(zip(ours.handle.owned(), theirs.handle.owned(), strict=True))
    moments = theirs.optimizer.pieces()
    pairs += [(piece, moments[name]) for name, piece in ours.optimizer.pieces().items()]
    for one, other in pairs:
        one.local.copy_(ours.handle.cut(theirs.handle.gather(other.local, other.layout), one.layout))
    expected, got = plain.step(number), side.step(number)
    updated = (
        [recipe.handle.gather(one.local, one.layout) for one in recipe.handle.owned()]
        for recipe in (ours, theirs)
    )
    return {
        "loss": abs(got.loss - expected.loss),
        "gradient_norm": abs(got.grad_norm - expected.grad_norm) / expected.grad_norm,
        "updated_value": largest_difference(*updated),
    }


def received(side: Side, number: int) -> float:
    """Bytes that this rank receives in a step that is not measured otherwise."""
    with collectives.counting() as calls:
        side.step(number)
    return float(sum(call.bytes_received for call in calls))


def worker(rank: int, world: int, skew: float, rounds: int, steps: int) -> dict[str, Any]:
    sides = {kind: Side.of(balance, rank) for kind, balance in KINDS.items()}
    biases = skew_routers(sides["none"], skew, rounds)
    for side in sides.values():
        for own, bias in zip(biases_of(side), biases, strict=True):
            own.copy_(bias)
        side.model.zero_grad(set_to_none=True)
    counted: list[int] = []
    count_rows(counted)
    turns = {kind: partial(side.next, counted) for kind, side in sides.items()}
    seconds = in_turns(turns, steps, lambda step: step())
    found = {
        kind: {
            "losses": side.losses,
            "rows": side.rows,
            "seconds": seconds[kind],
            "placed": [(n, vars(one), s) for n, one, s in side.placed],
            "received": received(side, steps),
            "same": [from_same_values(sides["none"], side, steps + 1 + at) for at in range(SAME)]
            if kind != "none"
            else [],
        }
        for kind, side in sides.items()
    }
    dist.barrier()
    return found


def imbalance(rows: Tensor) -> list[float]:
    """[rank, step, layer] rows to each step's heaviest rank over the mean, in the layer where that is the largest."""
    return (rows.amax(0) / rows.mean(0)).amax(1).tolist()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def result(found: list[dict[str, Any]], settled: int) -> dict[str, Any]:
    """Of all ranks' measurements, those of the steps from `settled` on."""
    first, sides = found[0], {}
    plain = first["none"]
    for kind, side in first.items():
        differences = [abs(a - b) for a, b in zip(side["losses"], plain["losses"], strict=True)]
        rows = torch.tensor([one[kind]["rows"] for one in found], dtype=torch.float64)
        uneven, same = imbalance(rows), side["same"]
        sides[kind] = {
            "heaviest_rank_over_mean": spread(uneven[settled:]),
            "heaviest_rank_over_mean_before": spread(uneven[:EVERY]),
            "heaviest_rank_over_mean_of_all_steps": imbalance(rows[:, settled:].sum(1, keepdim=True))[0],
            "from_same_values": {key: max(one[key] for one in same) for key in (same or [{}])[0]},
            "largest_loss_difference_over_the_run": max(differences),
            "last_loss": side["losses"][-1],
            "bytes_received_per_step_and_rank": statistics.mean(one[kind]["received"] for one in found),
            "placed": [{"after_step": n + 1, "seconds": s, **one} for n, one, s in side["placed"]],
            "step_seconds": paired_ratio(side["seconds"][settled:], plain["seconds"][settled:]),
        }
    return sides


def needed() -> dict[str, dict[str, int]]:
    """Ranks to experts to the replicas in each layer with which Zipf's law keeps the limit; computed."""
    found: dict[str, dict[str, int]] = {}
    for ranks in (8, 32, 64):
        for experts in (64, 128, 256):
            shares = [100_000 / (at + 1) for at in range(experts)]
            count = replicas_needed([round(s / sum(shares) * 100_000) for s in shares], ranks, LIMIT)
            found.setdefault(f"ranks {ranks}", {})[f"experts {experts}"] = count
    return found


def main(
    skew: tuple[float, ...] = (1.0, 1.2),
    steps: int = 50,
    rounds: Annotated[int, "forward passes that set the routers' biases"] = 120,
) -> None:
    found = {}
    for exponent in skew:
        ranks = run_ranks(worker, WORLD, exponent, rounds, steps, timeout=1800)
        found[f"zipf {exponent}"] = result(ranks, settled=2 * EVERY)
        print(exponent, found[f"zipf {exponent}"], flush=True)
    BENCHMARK.keep(
        {
            "workers": WORLD,
            "experts": EXPERTS,
            "experts_per_token": TOP_K,
            "tokens_per_rank": ROWS * LENGTH,
            "limit": LIMIT,
            "every": EVERY,
            "steps": steps,
            "runs": found,
            "replicas_needed": needed(),
        }
    )


if __name__ == "__main__":
    run(main)
