"""Models and tokenizers from folders: Transformers', a run's, or a checkpoint's."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.checkpoint import export
from hyper_parallel.checkpoint.find import find
from hyper_parallel.compat import backend
from hyper_parallel.config.model import read_config
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.tokenizer import load as load_tokenizer
from hyper_parallel.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


def located(folder: Path) -> Path:
    """The folder of the model that a folder means: itself for Transformers', for a run's its newest checkpoint.

    Raises CheckpointError for a folder that holds no model.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; give a Transformers folder, a run's or a checkpoint's"
        )
    return folder if (folder / "config.json").is_file() else find(folder, log.warning)


def load(folder: Path) -> tuple[nn.Module, Tokenizer | None]:
    """The model, on this machine's device, and its tokenizer, None where the folder has none.

    Raises ConfigError or CheckpointError for a folder that holds no model.
    """
    found = located(folder)
    if (found / "config.json").is_file():
        return _read(found)
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as temporary:
        return _read(export(found, Path(temporary) / "model"))


def identity(found: Path) -> list[Any]:
    """What tells whether a located folder holds the same model later: its path, and size and time of each file."""
    files = [(path, path.stat()) for path in sorted(found.rglob("*")) if path.is_file()]
    return [
        str(found.absolute()),
        [[str(one.relative_to(found)), at.st_size, at.st_mtime_ns] for one, at in files],
    ]


def _read(folder: Path) -> tuple[nn.Module, Tokenizer | None]:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    read_config(folder)
    disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype="auto"
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{folder}: the model cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from error
    return model.to(backend().device(0)), tokenizer_of(folder)


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Transformers folder; None where it has none."""
    return load_tokenizer(str(folder), "MODEL") if (folder / "tokenizer.json").is_file() else None
