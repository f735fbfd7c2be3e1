"""Log-probabilities of rollout and trainer on the same tokens: python benchmarks/rl_logprobs.py

A rollout draws 256 answers of up to 48 tokens with continuous batching; the trainer computes the same tokens in a
padded forward pass. Absolute differences in nats per token, in float32 and where the rollout and the trainer compute in
bfloat16.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from commandline import run
from measure import without_notes
from pages import Benchmark
from shapes import llama

from hyper_parallel.config.load import build
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.roles.actor import Actor
from hyper_parallel.rl.roles.models import rollout_model, tokenizer_of, trained_policy
from hyper_parallel.rl.roles.rollout import Rollout
from hyper_parallel.rl.sample import Prompted
from hyper_parallel.rl.tasks import tasks
from hyper_parallel.rl.weights.transfer import local_tensors

BENCHMARK = Benchmark("rl_logprobs")
SIZES = llama(64, 4, 4, inner=128, positions=128)
del SIZES["vocab_size"]  # the tokenizer's
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
}


def gaps(
    dtype: str, device: torch.device, families: Iterable[str] = tuple(FAMILIES)
) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each family, in a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for family in families:
            with without_notes():
                found = measured({**SIZES, "model_type": family, **FAMILIES[family]}, dtype, device)
            yield family, found
    finally:
        dist.destroy_process_group()


def measured(model: dict[str, Any], dtype: str, device: torch.device) -> dict[str, float]:
    """Of one model, with weights large enough that its distributions are not flat."""
    given = {
        "version": 1,
        "out": "unused",
        "model": {"config": model},
        "task": {"name": "sort"},
        "rl": {"max_tokens": 48, "group": 8, "prompts": 32},
        "roles": {
            "actor": {"strategy": {"precision": {"compute": dtype}}},
            "rollout": {"devices": 1, "page": 16},
        },
    }
    config = build(RLConfig, [("run.yaml", given)], ())
    tokenizer = tokenizer_of(config)
    policy = trained_policy(config, tokenizer, config.roles.actor.strategy, device)
    actor = Actor(config, policy, tokenizer, device)
    target = rollout_model(config, tokenizer, device)
    with torch.no_grad():
        for name, value in local_tensors(actor.model).items():
            if value.dim() > 1:
                value.mul_(4.0)
            local_tensors(target)[name].copy_(value)
    rollout = Rollout(config, target, tokenizer)
    asked = [
        Prompted(ticket=row, place=place, row=row, prompt=one["prompt"])
        for row, one in enumerate(tasks("sort", 0, "train", 32))
        for place in range(8)
    ]
    samples = rollout.generate(asked, 1000)
    while rollout.busy:
        samples += rollout.generate([], 1000)
    pairs = [
        pair
        for one, found in zip(samples, actor.logprobs(samples), strict=True)
        for pair in zip(one.logprobs, found, strict=True)
    ]
    apart = torch.tensor([abs(own - other) for own, other in pairs])
    return {
        "tokens": float(len(apart)),
        "median": float(apart.median()),
        "p99": float(apart.quantile(0.99)),
        "largest": float(apart.max()),
        "mean": float(apart.mean()),
        "entropy": -statistics.fmean(own for own, _ in pairs),
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = {}
    for dtype in ("float32", "bfloat16"):
        for family, found in gaps(dtype, torch.device("cpu")):
            rows[f"{family}, {dtype}"] = found
            print(family, dtype, found, flush=True)
    BENCHMARK.keep({"rows": rows})


if __name__ == "__main__":
    run(main)
