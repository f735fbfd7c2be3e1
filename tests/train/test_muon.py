"""Muon: the iteration against a singular value decomposition, the update against its formula, any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness import run_ranks
from hyper_parallel.checkpoint import Piece
from hyper_parallel.config.train import AdamWConfig, MuonConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.optimizer import AdamW, build_optimizer
from hyper_parallel.step.optimizer.muon import Muon, hidden_matrices, orthogonalise
from hyper_parallel.strategy import Strategy

# A large eps: the gradient of a key's bias is zero but for rounding, which AdamW would blow up to whole updates.
CONFIG = MuonConfig(name="muon", lr=0.02, weight_decay=0.1, adamw=AdamWConfig(lr=1e-2, eps=1e-4))
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": None}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "phi3": SMALL,
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 32,
             "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
}  # fmt: skip


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalise(matrix, 5)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linalg.svdvals(found)
    assert found.shape == matrix.shape
    assert values.min() > 0.5 and values.max() < 1.3
    # The singular vectors are kept: in their basis the result is diagonal.
    inside = u.mT @ found @ v.mT
    assert (inside - inside.diagonal().diag()).abs().max() < 1e-4
    assert torch.equal(orthogonalise(torch.zeros(shape), 5), torch.zeros(shape))


def _model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", {"self_attn.q_proj": (0, 1), "mlp.down_proj": (0, 1)}),
        ("phi3", {"self_attn.qkv_proj": (0, 3), "mlp.gate_up_proj": (0, 2), "mlp.down_proj": (0, 1)}),
        ("gpt2", {"attn.c_attn": (1, 3), "mlp.c_fc": (1, 1)}),
    ],
)
def test_hidden_matrices_and_their_parts(family: str, parts: dict[str, tuple[int, int]]) -> None:
    model = _model(family)
    found = hidden_matrices(model, shapes_of(model))
    assert not any("embed" in name or "lm_head" in name or "wte" in name or "wpe" in name for name in found)
    assert len(found) == sum(
        (p.ndim == 2 and ".layers." in n) or (".h." in n and p.ndim == 2) for n, p in model.named_parameters()
    )
    for end, (output, count) in parts.items():
        how = next(h for name, h in found.items() if name.endswith(f"{end}.weight"))
        assert (how.output, len(how.parts)) == (output, count)


def test_a_plain_modules_head_is_found_by_its_size() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20))
    assert list(hidden_matrices(model, shapes_of(model))) == ["1.weight"]


def test_the_first_update_is_the_formula() -> None:
    model = parallelize(
        nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16, bias=False), nn.Linear(16, 20)), Strategy()
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.arange(20)).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG)
    optimizer.step(0.5)
    lr = 0.5 * CONFIG.lr
    # m = 0.05 g and u = 0.05 g + 0.95 m: a multiple of g, which orthogonalising does not see.
    update = orthogonalise(grads["1.weight"], 5) * (16 / 8) ** 0.5
    expected = before["1.weight"] * (1 - lr * 0.1) - lr * update
    torch.testing.assert_close(model[1].weight.detach(), expected, atol=1e-5, rtol=0)
    # The embedding is AdamW's: its first update is lr in size, wherever there is a gradient.
    moved = model[0].weight.detach() - before["0.weight"] * (1 - 0.5 * 1e-2 * 0.1)
    grad = grads["0.weight"]
    torch.testing.assert_close(moved, -0.5 * 1e-2 * grad / (grad.abs() + 1e-4), atol=1e-6, rtol=0)
    assert set(optimizer.pieces()) >= {"optimizer.momentum.1.weight", "optimizer.exp_avg.0.weight"}
    assert "optimizer.exp_avg.1.weight" not in optimizer.pieces()


def test_a_fused_projection_is_orthogonalised_part_by_part() -> None:
    model = parallelize(_model("phi3"), Strategy())
    ids = torch.arange(16).unsqueeze(0)
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    before, grads = weight.detach().clone(), weight.grad.split((32, 16, 16))
    build_optimizer(model, CONFIG).step(1.0)
    # No part has more outputs than inputs, so that none is scaled.
    update = torch.cat([orthogonalise(grad, 5) for grad in grads])
    expected = before * (1 - CONFIG.lr * 0.1) - CONFIG.lr * update
    torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=0)


def _train(rank: int, world: int, family: str, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    model = parallelize(_model(family), Strategy(axes=axes, check=False))
    handle = sharded(model)
    optimizer = build_optimizer(model, CONFIG)
    for step in range(2):
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))
        count = handle.mesh.size("shard") * handle.mesh.size("replicate")
        mine = ids.tensor_split(count)[handle.data_index]
        with handle.micro_batch(step=step):
            logits = model(input_ids=mine, use_cache=False).logits
            (logits[:, :-1].log_softmax(-1).gather(-1, mine[:, 1:, None]).sum() / -60).backward()
        optimizer.step(1.0)
        model.zero_grad()
    return {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_split_layouts_give_one_devices_update(family: str) -> None:
    expected = _train(0, 1, family, {})
    for found in run_ranks(_train, 4, family, {"shard": 2, "tensor": 2}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("config", [AdamWConfig(lr=1e-2), CONFIG], ids=["adamw", "muon"])
def test_state_goes_on_where_it_was(config: Any) -> None:
    def advance(model: nn.Module, optimizer: Any, step: int) -> None:
        model(torch.arange(20)).square().sum().mul(step + 1).backward()
        optimizer.step(1.0)
        model.zero_grad()

    def made() -> nn.Module:
        torch.manual_seed(0)
        return parallelize(
            nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 20)), Strategy()
        )

    straight, first = made(), made()
    optimizer = build_optimizer(straight, config)
    for step in range(4):
        advance(straight, optimizer, step)
    early = build_optimizer(first, config)
    advance(first, early, 0)
    advance(first, early, 1)
    late = build_optimizer(first, config)
    for name, piece in late.pieces().items():
        assert isinstance(piece, Piece)
        piece.local.copy_(early.pieces()[name].local)
    late.load_state(early.state())
    advance(first, late, 2)
    advance(first, late, 3)
    for mine, theirs in zip(first.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_optimizers_are_found_by_name() -> None:
    model = parallelize(nn.Sequential(nn.Linear(4, 4)), Strategy())
    assert isinstance(build_optimizer(model, AdamWConfig()), AdamW)
    assert isinstance(build_optimizer(model, MuonConfig(name="muon")), Muon)
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        build_optimizer(model, AdamWConfig().model_copy(update={"name": "adamv"}))
