"""From the run file's `model` section to an unmodified Transformers model without values, and its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import one_device
from hyper_parallel.config import ModelConfig
from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.shard.weights import init_weights, load_weights


def build_model(config: ModelConfig, vocab_size: int | None = None) -> nn.Module:
    """The model on the meta device, in training mode.

    `vocab_size` is the tokenizer's: it fills in a config that states none, and must fit one that does.
    Raises ConfigError when Transformers does not know the family or refuses the config.
    """
    from transformers import AutoModelForCausalLM

    theirs = transformers_config(config, vocab_size)
    try:
        with one_device(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs, attn_implementation=config.attention)
    except (ValueError, TypeError, AttributeError, AssertionError, ZeroDivisionError) as error:
        raise ConfigError(f"model.config: Transformers cannot build this model: {_first_line(error)}") from error
    assert isinstance(model, nn.Module)
    return model.train()


def fill_model(model: nn.Module, config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> None:
    """Give a parallelized model its values: the folder's, or new ones that are a function of `seed`."""
    if config.path is not None:
        load_weights(model, config.path, device)
    else:
        init_weights(model, seed, device)


def transformers_config(config: ModelConfig, vocab_size: int | None = None) -> Any:
    """The Transformers config object of the section."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.path is not None:
        folder = Path(config.path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {folder} has no config.json; give a folder that save_pretrained wrote")
        try:
            theirs = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"model.path: {folder / 'config.json'}: {_first_line(error)}") from error
    else:
        assert config.config is not None
        fields = dict(config.config)
        family = str(fields.pop("model_type"))
        if family not in CONFIG_MAPPING:
            raise ConfigError(
                f"model.config.model_type: Transformers knows no {family!r}{nearest(family, list(CONFIG_MAPPING))}"
            )
        if vocab_size is not None:
            fields.setdefault("vocab_size", vocab_size)
        try:
            theirs = AutoConfig.for_model(family, **fields)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"model.config: {_first_line(error)}") from error
        except Exception as error:  # huggingface_hub's strict dataclass errors share no base class
            if "Validation" not in type(error).__name__:
                raise
            raise ConfigError(f"model.config: {' '.join(str(error).split())}") from error
    text = theirs.get_text_config()
    if vocab_size is not None and text.vocab_size < vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, but the model's vocab_size is {text.vocab_size}; "
            "leave vocab_size out of model.config, or use the model's own tokenizer"
        )
    return theirs


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
