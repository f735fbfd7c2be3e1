"""What a run file does not train is refused in a line that says what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import run_config

from hyper_parallel.errors import ConfigError
from hyper_parallel.step.build import on_meta, transformers_config

ENCODERS: list[dict[str, Any]] = [
    {"model_type": "bert", "num_hidden_layers": 1},
    {"model_type": "roberta", "num_hidden_layers": 1},
    {"model_type": "vit"},
    {"model_type": "t5"},
    {"model_type": "clip"},
]


@pytest.mark.parametrize("settings", ENCODERS, ids=lambda settings: settings["model_type"])
def test_encoders_are_refused_by_what_is_supported(settings: dict[str, Any], tmp_path: Path) -> None:
    config = run_config(tmp_path, model={"config": settings})
    with pytest.raises(ConfigError) as refused:
        on_meta(transformers_config(config.model), config)
    said = str(refused.value)
    assert "a run file trains decoder-only language models and their vision towers" in said
    assert repr(settings["model_type"]) in said and "\n" not in said


def test_an_encoder_may_be_a_decoder(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = run_config(tmp_path, model={"config": {"model_type": "bert", "is_decoder": True, **small}})
    assert type(on_meta(transformers_config(config.model), config)).__name__ == "BertLMHeadModel"
