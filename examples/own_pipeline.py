"""A user's own training loop over the stages of a pipeline: the same script on one device and on several.

python examples/own_pipeline.py
torchrun --nproc-per-node 2 examples/own_pipeline.py '{pipeline: 2}'
torchrun --nproc-per-node 4 examples/own_pipeline.py '{pipeline: 2, shard: 2}'
"""

import os
import sys

import torch
import torch.distributed as dist
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp


def train(steps: int, axes: dict[str, int]) -> list[float]:
    """The loss of each step; eight rows a step, the same for any axes."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    strategy = hp.Strategy(axes=axes)
    share = 8 // strategy.axes.data
    pipeline = hp.pipeline(model, strategy, rows=1, length=32, micro_batches=share)
    hp.init_weights(model, seed=0)
    handle = hp.sharded(model)
    optimizer = torch.optim.AdamW([one.parameter for one in handle.owned()], lr=3e-3, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)

    losses = []
    for step in range(steps):
        text = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step % 4))
        mine = text.split(share)[handle.data_index]
        loss = pipeline.forward_backward(mine[:, :-1], mine[:, 1:], step=step)
        handle.clip(handle.grad_norm(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    axes = yaml.safe_load(sys.argv[1]) if len(sys.argv) > 1 else {}
    if axes:
        dist.init_process_group("gloo")
    losses = train(40, axes)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last\n")
    if axes:
        dist.destroy_process_group()
