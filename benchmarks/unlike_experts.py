"""Skewed experts, simulated: python benchmarks/unlike_experts.py

A layer of a mixture of experts is captured as training captures it, on ranks that each own a part of the experts, and
its operators are priced on a cluster. Loads follow Zipf's law; which expert is how hot is drawn. The heaviest rank
holds up all others, so that with h = its rows over the mean

    layer = the rest + h · (products of experts + exchanges of rows)
    idle  = (h − 1) · products / layer, on the mean rank

once where experts stay (as in any framework that does not balance them), and once where `strategy.expert_balance`
places them, with as few replicas as its limit needs; the replicas' weights cross in every forward pass and their
gradients in every backward pass. Everything is simulated; no device is used. Writes
benchmarks/results/unlike_experts.json and the table of docs/experts.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from commandline import run
from pages import Benchmark, table
from shapes import DEEPSEEK_V3, Fields
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.estimate.stage_price import node_seconds
from hyper_parallel.graph.ir import is_collective
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.experts.placement import Placement, heaviest, place, replicas_needed
from hyper_parallel.step.capture_micro_batch import capture_micro_batch
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.strategy import Strategy

LENGTH = 4096
LIMIT = 1.15
DRAWS = 8
ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 1024, "max_position_embeddings": LENGTH}
QWEN = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
QWEN |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, Fields] = {
    "DeepSeek-V3": {**DEEPSEEK_V3, **ONE_LAYER, "first_k_dense_replace": 0},
    "Qwen3-30B-A3B": {**QWEN, **ONE_LAYER},
}
CLUSTERS = ("h100", "cloudmatrix384")
RANKS = (8, 32)
EXPONENTS = (1.0, 1.2)


def layer_seconds(name: str, where: Cluster, ranks: int) -> dict[str, float]:
    """Seconds of a layer's passes over a row: products of experts, exchanges of rows, the rest."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name])).to(torch.bfloat16)
    precision = {"param": "bfloat16", "compute": "bfloat16"}
    strategy = Strategy(axes={"shard": ranks, "expert": ranks}, precision=precision, check=False)
    found = {"products": 0.0, "exchanges": 0.0, "rest": 0.0}
    with fake_ranks(ranks, 0):
        parallelize(model, strategy, lowering="traceable")
        step = capture_micro_batch(GradientRecipe(model, sharded(model)), 1, LENGTH, 2)
        seconds = node_seconds(step, where, range(ranks), None)
        for node in step.nodes:
            module = str(node.meta.get("module", ""))
            if not module.startswith("model.layers"):
                continue
            kind = "products" if ".experts" in module and "shared" not in module else "rest"
            if is_collective(node):
                if "all_to_all" not in str(node.target):
                    continue  # gathered weights of what is not an expert's are hidden behind products
                kind = "exchanges"
            found[kind] += seconds(node)
    return found


def simulated(
    name: str, cluster: str, ranks: int, exponent: float, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Means over draws."""
    where = Cluster.preset(cluster)
    config = MODELS[name]
    count: int = config.get("n_routed_experts") or config["num_experts"]
    weights = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2

    def layer(heavy: float) -> float:
        return seconds["rest"] + heavy * (seconds["products"] + seconds["exchanges"])

    draws: list[tuple[float, float, int]] = []
    for seed in range(DRAWS):
        drawn = [(rank + 1) ** -exponent for rank in range(count)]  # of each expert
        random.Random(seed).shuffle(drawn)
        needed = replicas_needed(drawn, ranks, LIMIT)
        placed = place(drawn, Placement.initial(count, needed), ranks, LIMIT)
        initial = heaviest(drawn, Placement.initial(count, 0), ranks)
        draws.append((initial, heaviest(drawn, placed, ranks), needed))
    before, after, replicas = (sum(values) / DRAWS for values in zip(*draws, strict=True))
    # A sum over the ranks in the forward pass, and one of gradients in the backward pass.
    copies = 2 * where.collective_seconds("all_reduce", replicas * weights, range(ranks)) if replicas else 0.0
    old, new = layer(before), layer(after) + copies
    return {
        "model": name,
        "cluster": cluster,
        "ranks": ranks,
        "exponent": exponent,
        "before": before,
        "after": after,
        "replicas": replicas,
        "layer_before": old,
        "layer_after": new,
        "idle_before": (before - 1) * seconds["products"] / old,
        "idle_after": (after - 1) * seconds["products"] / new,
        **seconds,
    }


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/experts.md."""

    def cells(row: Mapping[str, Any]) -> Iterator[object]:
        ratio = row["layer_after"] / row["layer_before"]
        yield from (row["model"], f"{row['ranks']} × {row['cluster']}", row["exponent"])
        yield from (f"{row['before']:.2f} → {row['after']:.2f}", f"{row['replicas']:.1f}")
        yield f"{1e3 * row['layer_before']:.1f} → {1e3 * row['layer_after']:.1f} ms"
        yield from (f"{ratio - 1:+.0%}", f"{1 / ratio - 1:+.0%}")
        yield f"{row['idle_before']:.0%} → {row['idle_after']:.0%}"

    columns = "Layer of|Ranks|Zipf|Heaviest rank|Replicas|Layer|Step of such layers|Utilization|Idle"
    yield from table(columns, (list(cells(row)) for row in result["rows"]), "llrlrlrrl")


BENCHMARK = Benchmark("unlike_experts", {"experts.md": page})


def main() -> None:
    """Simulate, keep."""
    rows = []
    for name, cluster, ranks in itertools.product(MODELS, CLUSTERS, RANKS):
        seconds = layer_seconds(name, Cluster.preset(cluster), ranks)
        rows += [simulated(name, cluster, ranks, exponent, seconds) for exponent in EXPONENTS]
    BENCHMARK.keep({"rows": rows})


if __name__ == "__main__":
    run(main)
