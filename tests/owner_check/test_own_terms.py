"""The terms of a model's own loss: found in its code under any name, and the same under every strategy."""

from __future__ import annotations

import pytest
import torch
from small_families import small
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.loss.auxiliary_loss import OwnTerms, own_terms
from hyper_parallel.shard.parallelize import on_simulated_ranks, parallelize
from hyper_parallel.shard.region_check.check import quiet
from hyper_parallel.shard.region_check.outcome import TokenCall, compared
from hyper_parallel.shard.region_check.reduced_model import fill
from hyper_parallel.strategy import Strategy


@pytest.mark.parametrize(
    ("family", "coefficient", "arguments"),
    [
        ("mixtral", 0.5, (4, 2)),
        ("jetmoe", 0.25, (4, 2)),
        ("dbrx", 0.125, (4, 2)),
        ("doge", 0.5, (16, 4, 3)),
        ("mixtral, silent", None, ()),
        ("llama", None, ()),
        ("bamba", None, ()),
    ],
)
def test_the_balancing_term(family: str, coefficient: float | None, arguments: tuple[int, ...]) -> None:
    terms = own_terms(small(family))
    assert terms.of_logits == (family == "bamba")
    if coefficient is None:
        assert terms.balancing is None
    else:
        assert terms.balancing is not None
        assert terms.balancing.coefficient == coefficient
        assert terms.balancing.arguments == arguments


def test_a_coefficient_that_the_code_does_not_use_is_no_term() -> None:
    """The config of a mixture may name one all the same."""
    model = small("mixtral")
    own = type(model)

    class Silent(own):  # type: ignore[misc, valid-type]
        def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[no-untyped-def]
            return super().forward(input_ids, **kwargs)

    model.__class__ = Silent
    assert own_terms(model).balancing is None


def test_a_family_that_computes_its_cross_entropy_by_itself_adds_nothing() -> None:
    """Qwen2-Audio calls PyTorch's, and not the model's loss function."""
    audio = {
        "num_mel_bins": 8,
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
    }
    text = {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2AudioConfig(audio_config=audio, text_config={**text, **heads}, audio_token_id=5)
    assert own_terms(Qwen2AudioForConditionalGeneration(config)) == OwnTerms()


@pytest.mark.parametrize("family", ["jetmoe", "dbrx", "bamba"])
@pytest.mark.parametrize("axes", [{"shard": 2}, {"tensor": 2}], ids=lambda axes: next(iter(axes)))
def test_own_terms_do_not_depend_on_the_axes(family: str, axes: dict[str, int]) -> None:
    model = small(family)
    model.config._experts_implementation = "eager"
    with quiet():
        fill(model)
        strategy = Strategy(axes=axes, check=False)
        assert compared(model, strategy, TokenCall(151, 4, 16), on_simulated_ranks) is None


def test_a_balancing_loss_that_is_not_the_published_one_needs_all_tokens_on_one_rank() -> None:
    parallelize(small("doge"), Strategy(check=False))
    strategy = Strategy(axes={"shard": 2}, check=False)
    with (
        quiet(),
        pytest.raises(StrategyError, match=r"load-balancing loss of its own.* set axes\.shard to 1"),
    ):
        compared(small("doge"), strategy, TokenCall(151, 2, 16), on_simulated_ranks)


def test_no_term_without_gradients() -> None:
    """Evaluation is plain cross-entropy."""
    losses = []
    for coefficient in (0.0, 0.5):
        model = small("bamba", z_loss_coefficient=coefficient)
        parallelize(model, Strategy(check=False))
        ids = torch.arange(32).view(2, 16)
        with torch.no_grad(), sharded(model).micro_batch(rows=torch.arange(2)):
            losses.append(float(causal_lm_loss(model, ids, ids, torch.arange(16).repeat(2, 1), 32.0)))
    assert losses[0] == losses[1]
