"""Small mixture-of-experts models of each family, and one step of them on one device or on a strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import each_rank, on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.shard.experts.loads import imbalance, take_loads, update_biases
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.strategy import Strategy

# 131 tokens and 23 features: nothing that an axis splits needs to divide, except experts.
_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **_SHAPE, "intermediate_size": 23, "num_local_experts": 8},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        "head_dim": 8,
        "intermediate_size": 50,
        "moe_intermediate_size": 23,
        "num_experts": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **_SHAPE,
        "intermediate_size": 50,
        "moe_intermediate_size": 23,
        "shared_expert_intermediate_size": 27,
        "num_experts": 8,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_SHAPE,
        "num_key_value_heads": 4,
        "intermediate_size": 50,
        "moe_intermediate_size": 23,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_SHAPE,
        "head_dim": 8,
        "intermediate_size": 23,
        "num_local_experts": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": None,
    },
    "olmoe": {"model_type": "olmoe", **_SHAPE, "intermediate_size": 23, "num_experts": 8},
    "glm4-moe": {
        "model_type": "glm4_moe",
        **_SHAPE,
        "head_dim": 8,
        "intermediate_size": 50,
        "moe_intermediate_size": 23,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
    },
}

ROWS, LENGTH = 8, 16


@dataclass
class Step:
    """What one step gave: whole tensors, by parameter name."""

    loss: float
    auxiliary: float
    norm: float
    gradients: dict[str, torch.Tensor]
    loads: torch.Tensor
    imbalance: float
    biases: dict[str, torch.Tensor] = field(default_factory=dict)


def build(family: str, **overrides: Any) -> torch.nn.Module:
    """An unmodified model on the meta device, by the model's own loop over experts where it is alone."""
    fields = {**FAMILIES[family], **overrides}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with one_device(), torch.device("meta"):
        attention = "eager" if family == "gpt-oss" else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    model.config._experts_implementation = "eager"
    return model


def batch() -> dict[str, torch.Tensor]:
    """Labels are shifted."""
    ids = torch.randint(0, 131, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, [5, LENGTH - 1]] = -100
    return {"input_ids": ids, "labels": labels}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """One rank's copy; all must be alike."""
    with one_device():
        copies = list(each_rank(tensor).values())
        assert all(torch.equal(copies[0], copy) for copy in copies)
        return copies[0].detach().clone()


def step(model: torch.nn.Module, strategy: Strategy, micro_batches: int = 1, bias_rate: float = 0.0) -> Step:
    """One step on this rank, or on all simulated ones, of a model that was parallelized and has values."""
    handle = shard.sharded(model)
    mesh = handle.mesh
    with one_device():
        rows_of = batch()
    tokens = int((rows_of["labels"] != -100).sum())
    loss, auxiliary = torch.zeros(()), torch.zeros(())
    for micro in range(micro_batches):

        def rows(rank: int, micro: int = micro) -> torch.Tensor:
            here = mesh.coordinate(rank)
            index = here["replicate"] * mesh.size("shard") + here["shard"]
            share = torch.arange(ROWS).chunk(strategy.axes.data)[index]
            return share.chunk(micro_batches)[micro]

        mine = {key: per_rank(lambda rank, x=x: x[rows(rank)]) for key, x in rows_of.items()}
        with handle.micro_batch(last=micro == micro_batches - 1):
            logits = model(input_ids=mine["input_ids"], use_cache=False).logits
            part = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), mine["labels"].flatten(), reduction="sum"
            )
            balance = handle.auxiliary_loss() / micro_batches
            (part / tokens + balance).backward()
        loss, auxiliary = loss + part.detach() / tokens, auxiliary + balance.detach()
    parameters = handle.parameters()
    gradients = {p.name: whole(handle.gather(p.grad, p.layout)) for p in parameters if p.grad is not None}
    told = handle.all_reduce(take_loads(handle), mesh.names)
    assert not float(on_rank(take_loads(handle).sum(), 0))
    if bias_rate:
        update_biases(model, told, bias_rate)
    return Step(
        loss=float(on_rank(handle.all_reduce(loss, LOSS_AXES), 0)),
        auxiliary=float(on_rank(handle.all_reduce(auxiliary, LOSS_AXES), 0)),
        norm=float(on_rank(handle.grad_norm(), 0)),
        gradients=gradients,
        loads=whole(told),
        imbalance=float(on_rank(imbalance(handle, told), 0)),
        biases={n: whole(b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")},
    )


def filled(family: str, strategy: Strategy, lowering: str = "traceable", **overrides: Any) -> torch.nn.Module:
    model = build(family, **overrides)
    shard.parallelize(model, strategy, lowering=lowering)  # type: ignore[arg-type]
    shard.init_weights(model, seed=1)
    # Routers that some families start at zero would find all experts alike.
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            with one_device():
                for copy in each_rank(buffer).values():
                    copy.copy_(torch.linspace(-0.1, 0.1, copy.numel()))
    return model


def one_device_step(family: str, micro_batches: int = 1, bias_rate: float = 0.0, **overrides: Any) -> Step:
    return step(filled(family, Strategy(), **overrides), Strategy(), micro_batches, bias_rate)


def simulated_step(
    family: str, strategy: Strategy, micro_batches: int = 1, bias_rate: float = 0.0, **overrides: Any
) -> Step:
    """All ranks in this process."""
    with simulated_ranks(strategy.axes.world):
        return step(filled(family, strategy, **overrides), strategy, micro_batches, bias_rate)


# A sum over ranks adds the same terms in another order: a few units in the last place of float32 on gradients of
# size 0.1.
GRADIENT_TOLERANCE = 5e-7


def assert_same_step(got: Step, expected: Step) -> None:
    assert abs(got.loss - expected.loss) < 2e-6
    assert abs(got.auxiliary - expected.auxiliary) < 1e-6
    assert abs(got.norm - expected.norm) < 1e-5 * expected.norm
    assert torch.equal(got.loads, expected.loads)
    assert got.imbalance == expected.imbalance
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        worst = float((got.gradients[name] - gradient).abs().max())
        assert worst <= GRADIENT_TOLERANCE, f"gradient of {name} is off by {worst:.1e}"
    for name, bias in expected.biases.items():
        assert torch.equal(got.biases[name], bias), name
