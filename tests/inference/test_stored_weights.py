"""What Transformers would do with a folder's weights beside renaming them is told, and then not imitated."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from hyper_parallel.compat.hf_conversions import beyond_names


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ("model.layers.0.mlp.experts.3.w1.weight", "weights are converted (Transpose)"),
        ("model.layers.0.mlp.experts.w1.weight", None),
        ("model.layers.0.mlp.w1.weight", None),
    ],
)
def test_a_pattern_with_a_star_is_any_expert(
    stored: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter = WeightConverter("mlp.experts.*.w1.weight", "mlp.experts.w", [Transpose(0, 1)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [converter])
    tiny = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert beyond_names(AutoModelForCausalLM.from_config(tiny), [stored]) == told
