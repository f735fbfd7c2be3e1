"""What HyperParallel costs beside a loop written by hand: python benchmarks/overhead.py

The same unmodified Llama, the same data, the same strategy, in the same processes, steps alternating:
- 4 workers, shard 2 · tensor 2: ours beside `parallelize_module` + `fully_shard` + `torch.optim.AdamW`;
- 1 worker: ours beside a plain eager loop.
Each side does a whole step: forward, loss, backward, global norm and clipping, update, and reads its loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from commandline import run
from measure import in_turns, paired_ratio, quartile_ratio, timed
from pages import Benchmark
from processes import threads_of, workers
from shapes import NO_ENDS, llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Step, build, engine_step, micro_batch, recipe_of, step_batch
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.step.batches import MicroBatch

BENCHMARK = Benchmark("overhead")
# examples/quickstart.yaml's model and data shape.
BATCH, SEQUENCE, VOCABULARY = 16, 256, 4096
MODEL = llama(256, 6, 8, vocabulary=VOCABULARY, tie_word_embeddings=False, **NO_ENDS)
LR, CLIP = 1e-3, 1.0
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def our_step(axes: dict[str, int]) -> Step:
    recipe = recipe_of(build(MODEL, hp.Strategy(axes=axes), lowering="fsdp", values="cpu"), LR)
    return engine_step("eager", recipe, lambda: recipe, step_batch(recipe, BATCH, SEQUENCE, VOCABULARY))


def loss_of(model: nn.Module, mine: MicroBatch) -> Tensor:
    """This rank's part of the mean over the batch."""
    logits = model(input_ids=mine.input_ids, position_ids=mine.position_ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), mine.labels.flatten(), reduction="sum")
    return loss / (BATCH * SEQUENCE)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


def hand_written_on_four() -> Step:
    """PyTorch's own pieces, as its tutorials combine them, on shard 2 · tensor 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS},
        **{f"model.layers.*.{name}": RowwiseParallel() for name in ROWS},
    }
    parallelize_module(model, mesh["tensor"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = optimizer_of(model)
    mine = micro_batch(BATCH, SEQUENCE, VOCABULARY, share=mesh.get_local_rank("shard"), shares=2)
    by_mesh: dict[int, list[DTensor]] = {}
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
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = optimizer_of(model)
    mine = micro_batch(BATCH, SEQUENCE, VOCABULARY)

    def step() -> float:
        loss = loss_of(model, mine)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def worker(rank: int, world: int, pairs: int) -> dict[str, Any]:
    steps = {
        "ours": our_step({"shard": 2, "tensor": 2} if world > 1 else {}),
        "theirs": hand_written_on_four() if world > 1 else plain_eager(),
    }
    first, *_ = [[step() for step in steps.values()] for _ in range(3)]  # warm-up
    times = in_turns(steps, pairs, partial(timed, world=world))
    return {
        **paired_ratio(times["ours"], times["theirs"]),
        "spread": quartile_ratio(times["ours"]),
        "first_loss": first,
        "last_loss": [step() for step in steps.values()],
    }


def main(pairs: int = 60) -> None:
    result = {}
    for name, world in {"4 workers, shard 2 · tensor 2": 4, "1 worker": 1}.items():
        result[name] = workers(worker, world, pairs, threads=threads_of(world))[0]
        print(name, result[name], flush=True)
    BENCHMARK.keep({"cases": result})


if __name__ == "__main__":
    run(main)
