"""Inputs of a run's step, from its run file: the model on the meta device, rows and micro-batches of a rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.step.build import on_meta, transformers_config
from hyper_parallel.step.multimodal import refuse_media_model


def micro_batch(config: RunConfig) -> int:
    """Sequences that a rank computes at once."""
    return config.micro_batch


def count_micro_batches(config: RunConfig) -> int:
    """Micro-batches of a step on each rank."""
    share = config.train.batch // config.effective_strategy.axes.data
    return share // config.micro_batch


def model_of(config: RunConfig, notes: list[str]) -> nn.Module:
    """The run's model on the meta device. Needs no data: the vocabulary is the config's, or what `data.tokenizer` asks
    for, which `notes` then tells."""
    hf: Any = transformers_config(config.model)
    refuse_media_model(hf, "the simulator")
    given = config.model.config
    if given is not None and "vocab_size" not in given:
        if config.data.tokenizer.path is not None:
            raise ConfigError(
                "model.config.vocab_size: is left out, and inspect reads no tokenizer; write the vocabulary's size"
            )
        hf.vocab_size = config.data.tokenizer.trained_size
        notes.append(f"the vocabulary is taken to have data.tokenizer.vocab_size = {hf.vocab_size} tokens")
    if given is not None and "pad_token_id" not in given:
        hf.pad_token_id = None
    return on_meta(hf, config)
