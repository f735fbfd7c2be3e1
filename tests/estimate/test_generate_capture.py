"""A captured pass of generation: affine in its tokens, on any rank, beside the one derived from the model's
dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.families import FAMILIES
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate import generate_capture
from hyper_parallel.estimate.generate_capture import captured_pass
from hyper_parallel.estimate.generate_predict import in_dtype
from hyper_parallel.simulator.generation import PassLoad, Piece
from hyper_parallel.simulator.generation.pass_cost import PassPricer
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.shape_pass import of_shape
from hyper_parallel.strategy import Strategy
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.transformers_config import to_config
from hyper_parallel.workload.work import Work


def meta(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model without values."""
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def captured(fields: dict[str, Any], **axes: int) -> PassModel:
    """Its pass."""
    model = meta(fields)
    return captured_pass(model, in_dtype(Strategy(version=1, axes=axes, check=False), model))


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek-v3", "gemma3"])
def test_three_captures_stand_for_all_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    of = generate_capture._Pass.of

    def kept(model: nn.Module, strategy: Strategy, rows: int, answers: int) -> Any:
        # Another pass than the three, of the same model.
        if not found:
            found.append((of(model, strategy, 5 * rows, 4 * answers), 5 * rows, 4 * answers))
        return of(model, strategy, rows, answers)

    monkeypatch.setattr(generate_capture._Pass, "of", kept)
    model = captured(FAMILIES[name])
    other, rows, answers = found[0]
    ops = [op for op in other.lowered.ops if (op.work or op.collective) and not op.name.endswith("attention")]
    named = {op.name for op in ops}
    assert named
    works = {_facts(op.name, op.work) for op in ops if op.work is not None}
    for op in (*model.before, *(op for kind in model.kinds for op in kind.ops), *model.after):
        if op.role != "attention" and op.kind is not None and op.name in named:
            assert _facts(op.name, op.work(rows, answers)) in works


def _facts(name: str, work: Work) -> tuple[Any, ...]:
    return name, work.kind, work.shape, work.flops, work.read, work.written


def test_weights_and_cache_of_a_rank() -> None:
    fields = FAMILIES["llama"]
    model = meta(fields)
    parameters = sum(p.numel() for p in model.parameters())
    whole, half = captured(fields), captured(fields, tensor=2)
    assert whole.weights == 2 * parameters
    assert whole.parameters == half.parameters == parameters
    assert 2 * parameters / 2 <= half.weights < 0.55 * 2 * parameters
    assert half.token * 2 == whole.token
    assert half.world == 2
    assert any(op.collective is not None for op in half.kinds[0].ops)
    assert captured(fields, replicate=2).split == 2


def test_latents_and_windows_are_found() -> None:
    config = AutoConfig.for_model(**FAMILIES["deepseek-v3"])
    sizes = captured(FAMILIES["deepseek-v3"]).kinds[0].attention
    assert sizes is not None
    assert sizes.latent == (config.kv_lora_rank, config.qk_rope_head_dim)
    windows = {kind.attention.window for kind in captured(FAMILIES["gemma3"]).kinds if kind.attention}
    assert windows == {0, AutoConfig.for_model(**FAMILIES["gemma3"]).sliding_window}


@pytest.mark.parametrize(("name", "axes"), [("llama-3-8b", {}), ("mixtral-8x7b", {"tensor": 4, "expert": 4})])
def test_the_dimensions_give_nearly_the_same_pass(name: str, axes: dict[str, int]) -> None:
    own = captured(to_config(shape(name)), **axes)
    plain = of_shape(shape(name), **axes)
    assert plain.weights == pytest.approx(own.weights, rel=1e-3)
    assert plain.token == own.token
    machine = Cluster.named("h100x8")
    for load, most in ((PassLoad.decode(32, 4096), 0.12), (PassLoad.of([Piece(4096, 8192)], 1), 0.2)):
        one, other = (PassPricer(model, machine).price(load) for model in (own, plain))
        assert other.seconds == pytest.approx(one.seconds, rel=most)
        assert other.read == pytest.approx(one.read, rel=1e-3)


def test_axes_that_are_not_predicted() -> None:
    for axis in ("context", "pipeline"):
        with pytest.raises(ConfigError, match=rf"strategy.axes.{axis}"):
            captured(FAMILIES["llama"], **{axis: 2})
