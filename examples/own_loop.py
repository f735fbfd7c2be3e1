"""A user's own training loop with HyperParallel's parts: the same script on one device and on several.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.config.train import AdamWConfig
from hyper_parallel.train import build_optimizer, causal_lm_loss


def train(steps: int, world: int) -> list[float]:
    """The loss of each step; the same for any `world` that divides 4."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    hp.parallelize(model, hp.Strategy(axes={"shard": world}))
    hp.init_weights(model, seed=0)
    handle, optimizer = hp.sharded(model), build_optimizer(model, AdamWConfig(lr=3e-3))

    losses = []
    for step in range(steps):
        text = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step % 4))
        mine = text.tensor_split(world)[handle.data_index]
        with handle.micro_batch(step=step):
            loss = causal_lm_loss(model, mine[:, :-1], mine[:, 1:], None, tokens=text[:, 1:].numel())
            loss.backward()
        handle.clip(handle.grad_norm(), 1.0)
        optimizer.step(lr_scale=1.0)
        model.zero_grad()
        losses.append(float(handle.all_reduce(loss.detach(), ("replicate", "shard"))))
    return losses


if __name__ == "__main__":
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    losses = train(40, world)
    if world == 1 or dist.get_rank() == 0:
        sys.stdout.write(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last\n")
    if world > 1:
        dist.destroy_process_group()
