"""Generation settings of a model's folder, and the tokens at which its answers end: as Transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import ConfigError, one_line

GENERATION = "generation_config.json"


def generation_settings(folder: str | Path | None, hf: Any) -> Any:
    """Transformers' GenerationConfig: the folder's own, or, where it has none, what Transformers makes of the model's
    config `hf`. Raises ConfigError for a file that is none."""
    from transformers import GenerationConfig

    path = None if folder is None else Path(folder).expanduser() / GENERATION
    if path is None or not path.is_file():
        return GenerationConfig.from_model_config(hf)
    try:
        found = GenerationConfig.from_pretrained(path.parent, local_files_only=True)
        ids_of(found.eos_token_id)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no generation config: {one_line(error)}; put back the one that belongs to the weights"
        ) from error
    return found


def stop_tokens(settings: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer: those of the generation settings; where these name none, the tokenizer's
    end-of-text token."""
    own = ids_of(getattr(settings, "eos_token_id", None))
    return frozenset(own or ([] if tokenizer is None else [tokenizer.eos]))


def ids_of(given: Any) -> list[int]:
    """Token ids of a setting that is none, one id, or several."""
    return (
        [] if given is None else [int(one) for one in (given if isinstance(given, list | tuple) else [given])]
    )
