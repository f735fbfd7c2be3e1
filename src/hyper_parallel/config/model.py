"""Which model is trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from hyper_parallel.strategy.section import Section


class ModelConfig(Section):
    """An unmodified Transformers causal language model, from a config (new weights) or a folder (its weights)."""

    config: dict[str, Any] | None = None
    """A Transformers config: `model_type` and the fields that differ from its defaults. Weights are new.
    `vocab_size` is filled in from the tokenizer when it is left out."""
    path: str | None = None
    """A folder with `config.json` and safetensors weights, as `save_pretrained` writes it."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """The attention implementation that Transformers is asked for; `auto` is its own choice for the family."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.config is None) == (self.path is None):
            raise ValueError(
                "give either 'config' (a Transformers config, new weights) or 'path' (a folder), and leave the other "
                "out or null"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs a 'model_type', for example llama")
        return self
