"""Small runs that tests inspect, and the same runs done by real workers and measured there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from hyper_parallel import config, shard
from hyper_parallel.compat.collectives import counting
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.prediction import count_micro_batches, micro_batch, model_of
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.recipe import Recipe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "sliding_window": 8,
    "layer_types": ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(7)],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
}


def run_of(model: dict[str, Any], strategy: dict[str, Any], **train: Any) -> RunConfig:
    """A run of sequences of 32 tokens whose data is not there."""
    return config.from_dict(
        {
            "version": 1,
            "out": "nowhere",
            "model": {"config": model},
            "data": {"train": "there/is/no/such.txt", "sequence": 32},
            "train": {"batch": 8, **train},
            "strategy": strategy,
        }
    )


def real_rank(rank: int, world: int, run: RunConfig) -> dict[str, Any]:
    """What a worker holds in an eager step of `run`, read off its tensors, and what it sends in a step by its graph."""
    graphs = Graphs(Recipe.of(run, _shadow(model_of(run, []), run)), "cpu")
    graphs.ordered = False  # a call for each tensor, as `inspect` counts them
    batch = _batch(rank, run)
    # FSDP2 holds gathered weights itself, so that what autograd saves is activations alone.
    _, activations = _eager(run, batch, "fsdp")
    model, _ = _eager(run, batch, "traceable")
    recipe = Recipe.of(run, model)
    parameters = recipe.handle.parameters()
    # What is held of a gradient: where shards are uneven, it is a part of what was reduced with padding.
    gradients = {p.name: p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None}
    model.zero_grad(set_to_none=True)
    stepper = GraphStepper(recipe, graphs)
    stepper.begin(batch)
    with counting() as calls:
        stepper.run(load_next=None, memory=0.0)
    state: Counter[str] = Counter()
    for name, piece in recipe.optimizer.pieces().items():
        state[name.split(".", 2)[2]] += _bytes(piece.local)
    by_ranks: Counter[Any] = Counter()
    for call in calls:
        by_ranks[call.ranks, call.kind, "count"] += 1
        by_ranks[call.ranks, call.kind, "bytes"] += call.bytes_received
    return {
        "parameters": {p.name: _bytes(p.local) for p in parameters},
        "gradients": gradients,
        "optimizer": dict(state),
        "activations": activations,
        "calls": dict(by_ranks),
    }


def _batch(rank: int, run: RunConfig) -> StepBatch:
    """Micro-batches of documents of one sequence each, their tokens spread over the vocabulary."""
    rows, length = micro_batch(run), run.data.sequence
    ids = torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(rank))
    one = MicroBatch(ids, ids, torch.arange(length).expand(rows, -1), torch.arange(rows))
    return StepBatch(0, [0], [one] * count_micro_batches(run), torch.tensor(256.0))


def _eager(run: RunConfig, batch: StepBatch, lowering: Any) -> tuple[nn.Module, int]:
    """A model after an eager backward pass of each micro-batch, and the bytes that autograd saved for the last."""
    model = model_of(run, [])
    shard.parallelize(model, run.strategy, lowering=lowering)
    shard.init_weights(model, seed=1)
    model.train()
    for index, one in enumerate(batch.micro):
        last = index == len(batch.micro) - 1
        with shard.sharded(model).micro_batch(rows=one.rows, last=last):
            with _Saved(model) as saved:
                loss = causal_lm_loss(
                    model, one.input_ids, one.labels, one.position_ids, 256.0, run.train.loss
                )
            activations = saved.bytes({id(t.untyped_storage()) for t in (one.input_ids, one.position_ids)})
            loss.backward()
    return model, activations


def _shadow(model: nn.Module, run: RunConfig) -> nn.Module:
    """A copy without values, whose step is captured."""
    shadow = without_values(model)
    shard.parallelize(shadow, run.strategy, lowering="traceable")
    return shadow


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """The storages that autograd saves inside, but those of the weights that modules compute with."""

    def __init__(self, model: nn.Module) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.weights: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            self.storages[id(storage)] = storage
            return tensor

        def weights_of(module: nn.Module, _: Any) -> None:
            for parameter in module._parameters.values():
                if parameter is not None:
                    local = getattr(parameter, "_local_tensor", parameter)
                    self.weights[id(local.untyped_storage())] = local.untyped_storage()

        super().__init__(pack, lambda tensor: tensor)
        self.hooks = [module.register_forward_pre_hook(weights_of) for module in model.modules()]

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for hook in self.hooks:
            hook.remove()

    def __enter__(self) -> _Saved:
        super().__enter__()
        return self

    def bytes(self, given: set[int]) -> int:
        """Bytes of what was saved, without `given`."""
        return sum(s.nbytes() for key, s in self.storages.items() if key not in given | self.weights.keys())
