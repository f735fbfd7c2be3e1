"""Processor seconds of the owner check for published shapes, cold and from its cache; models without values, on a CPU.

python benchmarks/owner_cost.py [NAME ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.shard.owner_check.check import verdicts
from hyper_parallel.shard.owner_check.comparisons import KINDS
from hyper_parallel.shard.parallelize import on_simulated_ranks
from hyper_parallel.shard.region_check import result_cache

_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 8B": (
        "llama",
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "Llama 70B": (
        "llama",
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "Qwen3-MoE 235B": (
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": True,
        },
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
}


def measured(name: str) -> tuple[float, float, str]:
    """Seconds cold, seconds cached, and the verdicts."""
    family, fields = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    seconds = []
    for _ in ("cold", "cached"):
        result_cache._known.clear()
        begun = time.process_time()
        found = verdicts(model, KINDS, on_simulated_ranks)
        seconds.append(time.process_time() - begun)
    return seconds[0], seconds[1], ", ".join(f"{kind} {verdict}" for kind, verdict in found.items())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        print("| Model | Cold, s | Cached, s | Verdicts |\n|---|---|---|---|")
        for chosen in sys.argv[1:] or SHAPES:
            cold, cached, words = measured(chosen)
            print(f"| {chosen} | {cold:.2f} | {cached:.3f} | {words} |", flush=True)
