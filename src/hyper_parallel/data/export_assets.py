"""Assets of an exported model: tokenizer, chat template and stop tokens.

A model that was loaded from a folder keeps that folder's files. The generation config's stop tokens are all tokens with
which the training text ended texts or answers: a chat template's end-of-turn token often differs from the tokenizer's
end-of-text token, and without it generation does not stop.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData, Tokenizer, TrainingData
from hyper_parallel.data.generation_settings import GENERATION, generation_settings, ids_of
from hyper_parallel.hub.download import PROCESSOR_FILES, TOKENIZER_FILES


def assets_of(config: RunConfig, text: TrainingData, generation: dict[str, Any] | None) -> dict[str, bytes]:
    """The files by name: those of the loaded folder, the tokenizer's, and the generation config."""
    source: str | Path | None = config.model.folder
    if isinstance(text, MultimodalData):
        source = text.processor.folder
    files = {} if source is None else _files(Path(source), PROCESSOR_FILES)
    files |= tokenizer_assets(text.tokenizer)
    if generation is not None:
        files[GENERATION] = (json.dumps(generation, indent=2, sort_keys=True) + "\n").encode()
    return files


def tokenizer_assets(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The tokenizer's files by name: unchanged from its folder, or newly written if it has none."""
    if tokenizer.folder is not None:
        return _files(tokenizer.folder, TOKENIZER_FILES)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return _files(Path(folder), ("*",))


def generation_config(config: RunConfig, hf: Any, text: TrainingData) -> dict[str, Any] | None:
    """The generation config: from the model's folder or its Transformers config `hf`, with the training text's stop
    tokens. None for a module that is not Transformers'.

    Raises ConfigError for a file that cannot be read.
    """
    from transformers import PretrainedConfig

    if not isinstance(hf, PretrainedConfig):
        return None
    found = json.loads(generation_settings(config.model.folder, hf).to_json_string())
    # If it is set, Transformers derives the rest from config.json again, with other stop tokens.
    found.pop("_from_model_config", None)
    if config.data.tokenizer.replace:  # the ids in the folder are those of the tokenizer that was replaced
        found = {key: value for key, value in found.items() if not key.endswith("_token_id")}
        found["bos_token_id"] = text.tokenizer.transformers.bos_token_id
    own = ids_of(found.get("eos_token_id"))
    ends = list(dict.fromkeys((*own, *text.stops)))
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if found.get("pad_token_id") is None:
        found["pad_token_id"] = text.tokenizer.pad
    return dict(sorted(found.items()))


def ends_of(generation: dict[str, Any] | None, text: TrainingData) -> frozenset[int]:
    """The ids at which the model's text ends."""
    return frozenset(text.stops) if generation is None else frozenset(ids_of(generation["eos_token_id"]))


def _files(folder: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    found = {path.name: path for pattern in patterns for path in folder.expanduser().glob(pattern)}
    return {name: path.read_bytes() for name, path in sorted(found.items()) if path.is_file()}
