"""What HyperParallel costs beside a loop written by hand: python benchmarks/overhead.py

The same unmodified Llama, the same data, the same strategy, in the same processes, steps alternating:
- 4 workers, shard 2 · tensor 2: ours beside `parallelize_module` + `fully_shard` + `torch.optim.AdamW`;
- 1 worker: ours beside a plain eager loop.
Each side does a whole step: forward, loss, backward, global norm and clipping, update, and reads its loss.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import paired_ratio, timed, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import Stepper

# examples/quickstart.yaml's model and data shape.
VOCABULARY, SEQUENCE, BATCH = 4096, 256, 16
MODEL = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=0,
)
LR, CLIP = 1e-3, 1.0
Step = Callable[[], float]


def data(share: int, shares: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    mine = ids.tensor_split(shares)[share]
    positions = torch.arange(SEQUENCE).expand(mine.size(0), -1)
    return {"ids": mine[:, :-1].contiguous(), "labels": mine[:, 1:].contiguous(), "positions": positions}


def our_step(axes: dict[str, int]) -> Step:
    with torch.device("meta"):
        model = LlamaForCausalLM(MODEL)
    hp.parallelize(model, hp.Strategy(axes=axes))
    hp.init_weights(model, seed=0)
    handle = hp.sharded(model)
    optimizer = build_optimizer(model, AdamWConfig(lr=LR))
    stepper = Stepper(
        Recipe(model, handle, optimizer, schedule(ScheduleConfig(name="constant"), 1000), seed=0, clip=CLIP)
    )
    shares = handle.strategy.axes.data
    mine = data(handle.data_index, shares)
    rows = torch.arange(mine["ids"].size(0)) + handle.data_index * mine["ids"].size(0)
    micro = MicroBatch(mine["ids"], mine["labels"], mine["positions"], rows)
    batch = StepBatch(0, list(range(BATCH)), [micro], torch.tensor(float(mine["ids"].numel())))
    stepper.begin(batch)

    def step() -> float:
        return stepper.run(load_next=lambda: batch, memory=0.0).loss

    return step


def loss_of(model: nn.Module, mine: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=mine["ids"], position_ids=mine["positions"], use_cache=False).logits
    loss = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), mine["labels"].flatten(), reduction="sum"
    )
    return loss / (BATCH * SEQUENCE)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


def hand_written_on_four() -> Step:
    """PyTorch's own pieces, as its tutorials combine them, on shard 2 · tensor 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(MODEL)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(MODEL.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tensor"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = optimizer_of(model)
    mine = data(mesh.get_local_rank("shard"), 2)
    by_mesh: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        by_mesh.setdefault(parameter.device_mesh.ndim, []).append(parameter)

    def step() -> float:
        loss = loss_of(model, mine)
        loss.backward()
        # clip_grad_norm_ does not take parameters on different meshes at once.
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None])
            for ps in by_mesh.values()
        ]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        total = torch.linalg.vector_norm(torch.stack(whole))
        for parameters in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, total)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach()
        dist.all_reduce(shown, group=mesh.get_group("shard"))
        return float(shown)

    return step


def plain_eager() -> Step:
    torch.manual_seed(0)
    model = LlamaForCausalLM(MODEL)
    optimizer = optimizer_of(model)
    mine = data(0, 1)

    def step() -> float:
        loss = loss_of(model, mine)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def worker(rank: int, world: int, port: int, pairs: int, answers: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    ours = our_step({"shard": 2, "tensor": 2} if world > 1 else {})
    theirs = hand_written_on_four() if world > 1 else plain_eager()
    losses = [(ours(), theirs()) for _ in range(3)]  # warm-up
    times: list[tuple[float, float]] = []
    for pair in range(pairs):
        # Whoever goes first meets other caches; take turns.
        if pair % 2:
            b = timed(theirs, world)
            times.append((timed(ours, world), b))
        else:
            times.append((timed(ours, world), timed(theirs, world)))
    last = (ours(), theirs())
    if rank == 0:
        answers.put((times, losses[0], last))
    if world > 1:
        dist.destroy_process_group()


def run(world: int, pairs: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    started = [
        context.Process(target=worker, args=(rank, world, port, pairs, answers)) for rank in range(world)
    ]
    for process in started:
        process.start()
    times, first, last = answers.get(timeout=1800)
    for process in started:
        process.join()
    ours, theirs = zip(*times, strict=True)
    return {
        **paired_ratio(ours, theirs),
        "spread": statistics.quantiles(ours, n=4)[2] / statistics.quantiles(ours, n=4)[0],
        "first_loss": first,
        "last_loss": last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=60)
    pairs = parser.parse_args().pairs
    result = {"4 workers, shard 2 · tensor 2": run(4, pairs), "1 worker": run(1, pairs)}
    for name, r in result.items():
        print(
            f"{name}: ours {r['ours_s'] * 1e3:.0f} ms, by hand {r['theirs_s'] * 1e3:.0f} ms, "
            f"ratio {r['ratio']:.3f} (95%: {r['low']:.3f} to {r['high']:.3f}, {r['pairs']:.0f} pairs)"
        )
    print(write("overhead", {"cases": result}))


if __name__ == "__main__":
    main()
