"""The policy's model and tokenizer on a worker, as a run declares them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.character_tokenizer import character_tokenizer
from hyper_parallel.data.generation_settings import generation_settings, stop_tokens
from hyper_parallel.data.tokenizer import load as load_tokenizer
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.environments.tasks import VOCABULARY
from hyper_parallel.shard import init_weights, load_weights, parallelize
from hyper_parallel.step.build import causal_model, transformers_config
from hyper_parallel.strategy import Strategy


def tokenizer_of(config: RLConfig) -> Tokenizer:
    """That of the model's folder, or one of characters. Raises DataError."""
    if config.model.folder is not None:
        return load_tokenizer(config.model.folder, "model.path")
    return Tokenizer(character_tokenizer(config.characters or VOCABULARY))


def policy_on_meta(config: RLConfig, tokenizer: Tokenizer, dtype: torch.dtype) -> nn.Module:
    """The model without values. Raises ConfigError for one that Transformers cannot build, or that does not have the
    tokenizer's tokens."""
    hf = _transformers_config(config, tokenizer)
    return causal_model(hf, dtype, _attention(config), config.model.folder)


def plain_policy(
    config: RLConfig, tokenizer: Tokenizer, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Transformers' own model on one device, with values that mean nothing until weights arrive. Raises as
    `policy_on_meta`."""
    from transformers import AutoModelForCausalLM

    hf = _transformers_config(config, tokenizer)
    # Raises what is wrong with it, in one line, and unties a head that the folder has for itself.
    causal_model(hf, dtype, _attention(config), config.model.folder)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            hf, dtype=dtype, attn_implementation=_attention(config), trust_remote_code=False
        )
    return model


def _attention(config: RLConfig) -> str | None:
    return None if config.model.attention == "auto" else config.model.attention


def _transformers_config(config: RLConfig, tokenizer: Tokenizer) -> Any:
    hf = transformers_config(config.model)
    if config.model.path is None:
        given = config.model.config or {}
        if "vocab_size" not in given:
            hf.vocab_size = tokenizer.vocab_size
        for key, value in (
            ("bos_token_id", tokenizer.eos),
            ("eos_token_id", tokenizer.eos),
            ("pad_token_id", None),
        ):
            if key not in given:
                setattr(hf, key, value)
    if hf.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model: vocab_size is {hf.vocab_size}, and the tokenizer has {tokenizer.vocab_size} tokens; leave "
            "vocab_size out, or make it as large"
        )
    return hf


def trained_policy(
    config: RLConfig, tokenizer: Tokenizer, strategy: Strategy, device: torch.device
) -> nn.Module:
    """The parallelized model with its values, on every rank. Raises StrategyError besides."""
    dtype = getattr(torch, strategy.precision.param)
    model = parallelize(policy_on_meta(config, tokenizer, dtype), strategy)
    fill(model, config, device)
    return model


def fill(model: nn.Module, config: RLConfig, device: torch.device) -> None:
    """Give a parallelized model on the meta device its values: the folder's, or new ones of the run's seed."""
    if config.model.folder is not None:
        load_weights(model, config.model.folder, device)
    else:
        init_weights(model, config.seed, device)


def ends_of(model: Any, tokenizer: Tokenizer, folder: str | None) -> frozenset[int]:
    """The tokens that end an answer, as `Generator` has them for the folder."""
    return stop_tokens(generation_settings(folder, model.config), tokenizer)
