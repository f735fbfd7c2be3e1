"""The data of a run: packed text, or rows of the model's processor where documents have images or sound."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hyper_parallel.config.data import DataConfig
from hyper_parallel.data.multimodal import Found, MultimodalData
from hyper_parallel.data.processor_folder import has_processor
from hyper_parallel.data.text import TextData, check_positions
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.data.tokenizer_choice import choose
from hyper_parallel.errors import ConfigError

TrainingData = TextData | MultimodalData


def load_data(
    config: DataConfig,
    *,
    seed: int = 0,
    positions: int | None = None,
    model: str | None = None,
    family: str = "the model",
    kinds: Collection[str] = (),
) -> TrainingData:
    """What the `data` section declares. `seed`, `positions` and `model` are as of `TextData`; `family` names the model,
    and `kinds` what it takes beside text: ``image``, ``audio``.

    Raises what `TextData` does, and DataError for media that the model does not take.
    """
    folder = _processor_folder(config, model)
    if folder is None or not kinds:
        why = _no_media(config, model, family, kinds)
        return TextData(config, seed=seed, positions=positions, model=model, no_media=why)
    train = Found.of(config, "train", family, kinds)
    held_out = None if config.eval is None else Found.of(config, "eval", family, kinds)
    if train.media is None and (held_out is None or held_out.media is None):
        return TextData(config, seed=seed, positions=positions, model=model)
    check_positions(config, positions)
    tokenizer = choose(config.tokenizer, model, _never)
    return MultimodalData(config, folder, tokenizer, seed=seed, train=train, held_out=held_out)


def _processor_folder(config: DataConfig, model: str | None) -> Path | None:
    named = [Path(path).expanduser() for path in (config.tokenizer.folder, model) if path is not None]
    return next((folder for folder in named if has_processor(folder)), None)


def _no_media(config: DataConfig, model: str | None, family: str, kinds: Collection[str]) -> str:
    """Why images or sound cannot be trained on."""
    if not kinds:
        return f"{family} takes text alone; train a model that takes them, or leave the record out"
    named = config.tokenizer.folder or model
    where = f"{named} has no processor" if named else "no folder with a processor is named"
    key = "" if named else "; name it with data.tokenizer.path"
    return (
        f"{where} (preprocessor_config.json or processor_config.json); AutoProcessor's save_pretrained writes its files"
        f"{key}"
    )


def _never() -> Tokenizer:
    raise ConfigError(
        "data.tokenizer: a processor of images or sound needs its own tokenizer, and none is trained for it; leave "
        "'replace' and 'vocab_size' out"
    )
