"""Models that cannot be generated with are refused by name, and a wrong attention is found before the first token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from harness.families import SHAPE
from harness.small_models import shrunken
from hyper_parallel.errors import DataError, UnsupportedModelError
from hyper_parallel.inference import Generator, paged_attention
from inference.small_models import made, prompts, small


def test_a_recurrent_model() -> None:
    model = made(
        "mamba", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, "eager"
    )
    with pytest.raises(UnsupportedModelError, match="state beside keys and values"):
        Generator(model)


def test_a_model_with_linear_attention() -> None:
    kinds = ["linear_attention", "full_attention"]
    model = made(
        "qwen3_next", {**SHAPE, "layer_types": kinds, "num_experts": 4, "num_experts_per_tok": 2}, "eager"
    )
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        Generator(model)


def test_a_module_of_the_users() -> None:
    with pytest.raises(UnsupportedModelError, match="not a Transformers model"):
        Generator(nn.Linear(2, 2))


def test_positions() -> None:
    with pytest.raises(UnsupportedModelError, match="600 tokens, and the model has 512 positions"):
        Generator(small("llama"), max_tokens=590)([[1] * 10])


def test_an_answer_of_no_stated_length_ends_where_positions_do() -> None:
    generator = Generator(small("llama", max_position_embeddings=40, eos_token_id=None))
    (answer,) = generator([[1] * 10])
    assert (len(answer.tokens), answer.finish) == (30, "length")
    with pytest.raises(UnsupportedModelError, match="41 tokens, and the model has 40 positions"):
        generator([[1] * 40])


def test_rotary_positions_that_depend_on_the_batch() -> None:
    scaling = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    model = made("llama", {**SHAPE, "max_position_embeddings": 256, "rope_parameters": scaling})
    generator = Generator(model, page=16, max_tokens=10)
    assert len(generator([[1, 2, 3]])[0].tokens) == 10
    with pytest.raises(UnsupportedModelError, match="dynamic rotary positions"):
        generator([[1] * 60])


def test_attention_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = paged_attention.RaggedMask.of

    def blind(mask: Any, segment: Any) -> tuple[int, torch.Tensor | None]:
        first, seen = of(mask, segment)
        return (first, seen) if segment.first == 0 else (max(first, 1), None if seen is None else seen[:, 1:])

    monkeypatch.setattr(paged_attention.RaggedMask, "of", blind)
    with pytest.raises(UnsupportedModelError, match="computes other logits"):
        Generator(small("llama"))


def _without_cap() -> str:
    """The name of eager attention that leaves out the cap of scores, as SDPA does."""

    def attention(*given: Any, softcap: float | None = None, **more: Any) -> Any:
        return eager_attention_forward(*given, **more)

    AttentionInterface.register("without_cap", attention)
    AttentionMaskInterface.register("without_cap", eager_mask)
    return "without_cap"


def test_capped_scores_are_compared_with_attention_that_caps_them() -> None:
    model: Any = copy.deepcopy(small("gemma2"))
    texts = prompts(model, (3, 40))
    expected = [answer.tokens for answer in Generator(model, max_tokens=4)(texts)]
    model.set_attn_implementation(_without_cap())
    assert [answer.tokens for answer in Generator(model, max_tokens=4)(texts)] == expected
    assert model.config._attn_implementation == "without_cap"


def test_capped_scores_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = paged_attention.attention

    def uncapped(*given: Any, softcap: float | None = None, **more: Any) -> Any:
        return attention(*given, **more)

    monkeypatch.setattr(paged_attention, "attention", uncapped)
    model: Any = copy.deepcopy(small("gemma2"))
    model.set_attn_implementation(_without_cap())
    with pytest.raises(UnsupportedModelError, match="computes other logits"):
        Generator(model)
    assert model.config._attn_implementation == "without_cap"


def test_settings_of_attention_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = paged_attention.attention

    def biased(*given: Any, **more: Any) -> Any:
        return attention(*given, **more, position_bias=torch.zeros(1))

    monkeypatch.setattr(paged_attention, "attention", biased)
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        Generator(small("llama"))


def test_empty_prompts_and_texts_without_a_tokenizer() -> None:
    generator = Generator(small("llama"))
    with pytest.raises(DataError, match="the prompt has no tokens"):
        generator([[]])
    with pytest.raises(DataError, match="no tokenizer"):
        generator(["def"])
    with pytest.raises(DataError, match="token 131"):
        generator([[131]])


def test_memory_below_what_one_request_needs() -> None:
    with pytest.raises(DataError, match="needs 3 pages"):
        Generator(small("llama"), pages=2, max_tokens=64)([[1] * 32])


@pytest.mark.parametrize("kind", ["xlnet", "falcon", "bart"])
def test_a_model_of_another_kind(kind: str) -> None:
    """Their code fails on a ragged row, computes positions from a mask, or makes a mask of its own."""
    fields = shrunken(AutoConfig.for_model(kind))
    fields.pop("model_type", None)
    with pytest.raises(UnsupportedModelError):
        Generator(made(kind, fields, "eager"))
