"""Lion, Adafactor and AdamW in 8 bits: against their formulas, against one device on any layout, saved and loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import LLAMA, metrics, run, run_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.optimization import Adafactor as TransformersAdafactor

from harness import run_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.config.train import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
)
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.optimizer.adamw_8bit import (
    blocks,
    dequantized,
    dynamic_map,
    quantized,
    scale_layout,
)
from hyper_parallel.strategy import Strategy

CONFIGS: dict[str, Any] = {
    "lion": LionConfig(name="lion", lr=1e-3),
    "adafactor": AdafactorConfig(name="adafactor", lr=1e-2, weight_decay=0.1, scale_parameter=True),
    "adafactor-plain": AdafactorConfig(name="adafactor", lr=1e-2, clip_threshold=0.5, weight_decay=0.1),
    # A large eps: a gradient that is zero but for rounding gives whole updates otherwise.
    "adamw_8bit": AdamW8bitConfig(name="adamw_8bit", lr=1e-2, eps=1e-4, block=16),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": None}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 0, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "shard-tensor": ("llama", SIZES, {"shard": 2, "tensor": 2}),
    "fused": ("gpt2", GPT2, {"replicate": 2, "tensor": 2}),
    "tensor2d": ("llama", SIZES, {"tensor_x": 2, "tensor_y": 2}),
    "uneven": ("llama", {**SIZES, "vocab_size": 62}, {"shard": 4}),
    "expert": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, {"shard": 4, "expert": 2}),
}  # fmt: skip


def _model(family: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


def _whole_gradients(model: nn.Module, steps: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of whole parameters, some rows and columns much larger than others."""
    found = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        found.append(
            {
                name: torch.randn(p.shape, generator=draw) * 10 ** torch.randn(p.shape[-1:], generator=draw)
                for name, p in model.named_parameters()
            }
        )
    return found


def _updated(case: str, config: Any, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Whole parameters and state after three updates from the same whole gradients under any axes."""
    family, sizes, _ = CASES[case]
    model = _model(family, sizes)
    gradients = _whole_gradients(model, 3)
    parallelize(model, Strategy(axes=axes, check=False))
    handle = sharded(model)
    optimizer = build_optimizer(model, config)
    for grads in gradients:
        for p in handle.parameters():
            local = handle.cut(grads[p.name], p.layout)
            grad = torch.zeros_like(p.parameter)
            p.parameter.grad = grad
            assert p.grad is not None
            p.grad.copy_(local)
        optimizer.step(0.5)
    values = {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}
    state = {name: handle.gather(piece.local, piece.layout) for name, piece in optimizer.pieces().items()}
    return {**values, **state}


def _all_updated(rank: int, world: int) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    return {
        (case, name): _updated(case, config, axes)
        for case, (_, _, axes) in CASES.items()
        for name, config in CONFIGS.items()
    }


def test_split_layouts_give_one_devices_update_and_state() -> None:
    expected = {
        (case, name): _updated(case, config, {}) for case in CASES for name, config in CONFIGS.items()
    }
    for found in run_ranks(_all_updated, 4):
        for key, tensors in expected.items():
            assert found[key].keys() == tensors.keys()
            for name, value in tensors.items():
                if value.dtype == torch.uint8:
                    # Rounding of sums is none here: an elementwise update has the bits of one device.
                    assert torch.equal(found[key][name], value), (key, name)
                else:
                    torch.testing.assert_close(
                        found[key][name], value, atol=1e-6, rtol=2e-6, msg=f"{key} {name}"
                    )


def test_adafactor_is_transformers() -> None:
    for scale_parameter in (False, True):
        theirs, ours = _pair(), parallelize(_pair(), Strategy())
        reference = TransformersAdafactor(
            theirs.parameters(),
            lr=1e-2,
            scale_parameter=scale_parameter,
            relative_step=False,
            warmup_init=False,
        )
        config = AdafactorConfig(name="adafactor", lr=1e-2, scale_parameter=scale_parameter)
        _same_updates(reference.step, theirs, build_optimizer(ours, config), ours, 1e-6)


def _pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64))


def _same_updates(step: Any, theirs: nn.Module, optimizer: Any, ours: nn.Module, tolerance: float) -> None:
    for number in range(5):
        draw = torch.Generator().manual_seed(number)
        for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=draw) * (number + 1)
            other.grad = one.grad.clone()
        step()
        optimizer.step(1.0)
        for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(other, one, atol=tolerance, rtol=0)


def test_lion_is_its_program() -> None:
    theirs, ours = _pair(), parallelize(_pair(), Strategy())
    config = LionConfig(name="lion", lr=1e-2, betas=(0.9, 0.99), weight_decay=0.3)
    momenta = {p: torch.zeros_like(p) for p in theirs.parameters()}

    @torch.no_grad()
    def step() -> None:
        for p, m in momenta.items():
            p.mul_(1 - 1e-2 * (0.3 if p.dim() == 2 else 0))
            p.sub_(1e-2 * torch.sign(0.9 * m + 0.1 * p.grad))
            m.mul_(0.99).add_(0.01 * p.grad)

    _same_updates(step, theirs, build_optimizer(ours, config), ours, 1e-6)


def test_adamw_in_8_bits_begins_as_adamw_and_stays_near() -> None:
    theirs, ours = parallelize(_pair(), Strategy()), parallelize(_pair(), Strategy())
    exact = build_optimizer(theirs, AdamWConfig(lr=1e-3))
    narrow = build_optimizer(ours, AdamW8bitConfig(name="adamw_8bit", lr=1e-3))
    assert narrow.pieces()["optimizer.exp_avg.0.weight"].local.dtype == torch.uint8
    assert narrow.pieces()["optimizer.exp_avg.0.bias"].local.dtype == torch.float32
    # Each update is 1e-3 in size: after five, moments in 8 bits are off by less than a tenth of one.
    _same_updates(lambda: exact.step(1.0), theirs, narrow, ours, 1e-3)
    off = (theirs[0].weight - ours[0].weight).abs().mean()
    assert 0 < off < 1e-4


def test_the_dynamic_map_and_its_rounding() -> None:
    for signed in (True, False):
        values = dynamic_map(signed)
        assert len(set(values)) == 256 and values[-1] == 1 and 0 in values
    rows = torch.randn((3, 700), generator=torch.Generator().manual_seed(0))
    codes, scales = quantized(rows, 256, signed=True)
    assert codes.shape == rows.shape and scales.shape == (3, 3) == (3, blocks(700, 256))
    back = dequantized(codes, scales, 256, signed=True)
    per_element = scales.repeat_interleave(256, -1)[:, :700]
    assert ((back - rows).abs() <= per_element * 0.0071).all()
    # Small elements are rounded relative to themselves.
    small = (rows.abs() < per_element / 100) & (rows.abs() > per_element / 1000)
    assert small.any() and ((back - rows).abs()[small] < rows.abs()[small] * 0.2).all()
    assert torch.equal(
        dequantized(*quantized(torch.zeros(2, 5), 16, signed=True), 16, signed=True), torch.zeros(2, 5)
    )


def test_scales_lie_as_their_blocks_or_are_refused() -> None:
    mesh = Mesh(("shard", 2), ("tensor", 2))
    assert str(scale_layout(Layout(mesh, (6, 704), (("shard",), ()), {}), 256)) == "[6/shard, 3]"
    assert (
        str(scale_layout(Layout(mesh, (6, 1024), ((), ("tensor", "shard")), {}), 256))
        == "[6, 4/tensor/shard]"
    )
    assert scale_layout(Layout(mesh, (6, 704), ((), ("tensor",)), {}), 256) is None
    fused = Layout(mesh, (6, 96), ((), ("tensor",)), {1: (64, 32)})
    assert str(scale_layout(fused, 16)) == "[6, (4+2)/tensor]"
    assert scale_layout(fused, 64) is None


def _refused(rank: int, world: int, block: int) -> str:
    model = parallelize(_model("llama", SIZES), Strategy(axes={"tensor": 2}))
    try:
        build_optimizer(model, AdamW8bitConfig(name="adamw_8bit", block=block))
    except StrategyError as error:
        return str(error)
    return ""


def test_a_split_inside_a_block_is_refused_with_a_block_that_fits() -> None:
    said = run_ranks(_refused, 2, 256)[0]
    assert "splits rows inside blocks of 256 elements" in said
    found = re.search(r"set train.optimizer.block=(\d+)", said)
    assert found is not None
    assert run_ranks(_refused, 2, int(found[1]))[0] == ""


def _half_and_on(rank: int, world: int, folder: Path, optimizer: dict[str, Any], engine: str) -> None:
    """Three steps on two workers, with the schedule of six."""
    run(_six_steps(folder, "moved", optimizer, engine, steps=3, strategy={"axes": {"shard": 2}}))


def _six_steps(folder: Path, name: str, optimizer: dict[str, Any], engine: str, **more: Any) -> RunConfig:
    train = {"steps": more.pop("steps", 6), "engine": engine, "optimizer": optimizer, "sample": False,
             "schedule": {"name": "constant"}, "eval": {"batches": 1}}  # fmt: skip
    return run_config(folder, name, train=train, model={"config": {**LLAMA, "hidden_size": 64}}, **more)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("adafactor", "graph"),
        ("adamw_8bit", "eager"),
        pytest.param("lion", "eager", marks=pytest.mark.matrix),
    ],
)
def test_a_run_goes_on_with_another_strategy(name: str, engine: str, tmp_path: Path) -> None:
    """On one worker after two; the losses are those of one device throughout."""
    optimizer = {"name": name, "lr": 1e-3}
    straight = _six_steps(tmp_path, "straight", optimizer, engine)
    run(straight)
    run_ranks(_half_and_on, 2, tmp_path, optimizer, engine)
    moved = _six_steps(tmp_path, "moved", optimizer, engine)
    assert run(moved).resumed_from == 3
    expected, found = metrics(straight, "loss"), metrics(moved, "loss")
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=2e-4)
    if name == "adamw_8bit":
        other = moved.model_copy(
            update={
                "train": moved.train.model_copy(update={"optimizer": AdamW8bitConfig(name=name, block=16)})
            }
        )
        with pytest.raises(ConfigError, match=r"train\.optimizer\.block was 256 and is 16"):
            run(other)
