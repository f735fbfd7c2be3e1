"""A training loop of the user's own, under any strategy: the same script on one device and on several.

python examples/own_step.py
torchrun --nproc-per-node 2 examples/own_step.py '{axes: {pipeline: 2}}'
torchrun --nproc-per-node 4 examples/own_step.py '{axes: {pipeline: 2, shard: 2}}'
torchrun --nproc-per-node 2 examples/own_step.py '{axes: {tensor: 2}, memory: {device: 2MiB, host: 64MiB}}'
"""

import os
import sys

import torch
import torch.distributed as dist
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp


def train(steps: int, strategy: dict[str, object]) -> list[float]:
    """The loss of each step; eight rows a step, the same for any strategy."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    step = hp.step(
        model,
        strategy,
        optimizer={"name": "adamw", "lr": 3e-3},
        schedule={"name": "linear"},
        steps=steps,
        micro_batch=1,
    )
    losses = []
    for number in range(steps):
        text = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(number % 4))
        mine = text.chunk(step.data_ranks)[step.data_rank]
        losses.append(step({"input_ids": mine, "labels": mine}).loss)
    step.close()
    return losses


if __name__ == "__main__":
    strategy = yaml.safe_load(sys.argv[1]) if len(sys.argv) > 1 else {}
    if strategy:
        dist.init_process_group("gloo")
    losses = train(40, strategy)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last\n")
    if strategy:
        dist.destroy_process_group()
