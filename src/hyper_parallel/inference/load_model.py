"""Models and tokenizers from folders: Transformers', a run's, or a checkpoint's; whole, in tiers, or as shards."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint import export
from hyper_parallel.checkpoint.verify import find
from hyper_parallel.compat import backend, collectives, process_groups
from hyper_parallel.config.model import ModelConfig, read_config
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.generation_settings import generation_settings
from hyper_parallel.data.tokenizer import load as load_tokenizer
from hyper_parallel.errors import CheckpointError, ConfigError, one_line
from hyper_parallel.hub.hub_id import reading
from hyper_parallel.inference.memory_budget import MemoryBudget
from hyper_parallel.inference.weights.tiers import FolderSource, ModelSource, WeightSource
from hyper_parallel.shard import load_weights, parallelize
from hyper_parallel.shard.safetensors_folder import Folder
from hyper_parallel.step.build import causal_model, transformers_config
from hyper_parallel.strategy import Memory, Precision, Strategy
from hyper_parallel.strategy.memory import GenerationMemory

log = logging.getLogger(__name__)


def located(folder: Path) -> Path:
    """The folder of the model that a folder means: itself for Transformers', for a run's its newest checkpoint.

    Raises CheckpointError for a folder that holds no model.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; give a Transformers folder, a run's or a checkpoint's{reading(str(folder))}"
        )
    return folder if (folder / "config.json").is_file() else find(folder, log.warning)


def load(folder: Path, device: str = "auto") -> tuple[nn.Module, Tokenizer | None]:
    """The model, on this machine's device of a kind, and its tokenizer, None where the folder has none.

    Raises ConfigError or CheckpointError for a folder that holds no model, LaunchError for a device that is not there.
    """
    found = located(folder)
    if (found / "config.json").is_file():
        return _read(found, device)
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as temporary:
        return _read(export(found, Path(temporary) / "model"), device)


def identity(found: Path) -> list[Any]:
    """Facts that tell whether a located folder holds the same model later: its path, and size and time of each file."""
    files = [(path, path.stat()) for path in sorted(found.rglob("*")) if path.is_file()]
    return [
        str(found.absolute()),
        [[str(one.relative_to(found)), at.st_size, at.st_mtime_ns] for one, at in files],
    ]


def load_within(
    folder: Path, memory: GenerationMemory, device: str = "auto"
) -> tuple[nn.Module, Tokenizer | None, MemoryBudget]:
    """As `load`, with the weights in the tiers of a budget; never more of them in memory than it says.

    Raises TierError for a tier that cannot be opened, besides what `load` raises.
    """
    found = located(folder)
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as temporary:
        if not (found / "config.json").is_file():
            found = export(found, Path(temporary) / "model")
        model, source = _opened(found)
        return (
            model,
            tokenizer_of(found),
            MemoryBudget(model, source, memory, backend(device).device(0), restore=False),
        )


def _opened(folder: Path) -> tuple[nn.Module, WeightSource]:
    """The model, and where its weights come from."""
    hf, dtype = _config_and_dtype(folder)
    model: Any = causal_model(hf, dtype, folder=str(folder))
    model.tie_weights()
    model.generation_config = generation_settings(folder, hf)
    try:
        return model.eval(), FolderSource(model, folder)
    except CheckpointError as error:
        log.info("%s; Transformers reads the model, as a whole", error)
    whole = _from_pretrained(folder)
    return whole, ModelSource(whole)


def _config_and_dtype(folder: Path) -> tuple[Any, torch.dtype]:
    """The config of a Transformers folder, and the dtype of its weights."""
    hf = transformers_config(ModelConfig(path=str(folder)))
    with Folder(folder, pread=True) as files:
        return hf, hf.dtype or files.dtype() or torch.float32


def _read(folder: Path, device: str) -> tuple[nn.Module, Tokenizer | None]:
    read_config(folder)
    return _from_pretrained(folder).to(backend(device).device(0)), tokenizer_of(folder)


def _from_pretrained(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype="auto"
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: the model cannot be loaded: {one_line(error, 300)}") from error
    return model


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Transformers folder; None where it has none."""
    return load_tokenizer(str(folder), "MODEL") if (folder / "tokenizer.json").is_file() else None


# A model from a folder on several workers: built on the meta device, parallelized, and read piece by piece.
#
# No worker ever holds the whole model: each reads the slices of the files that its shards are.

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def load_shards(folder: Path, strategy: Strategy) -> tuple[nn.Module, Tokenizer | None]:
    """The parallelized model with this worker's shards, on the worker's device, and the tokenizer.

    A collective. Raises ConfigError or CheckpointError for a folder that holds no model, StrategyError where the
    strategy does not fit it.
    """
    with _readable(located(folder)) as found:
        hf, dtype = _config_and_dtype(found)
        if dtype not in _DTYPES:
            raise ConfigError(
                f"{found}: the weights are {str(dtype).removeprefix('torch.')}, and several workers compute in "
                f"{' or '.join(_DTYPES.values())}; convert the folder, or use one worker"
            )
        model: Any = causal_model(hf, dtype, folder=str(found))
        one = _DTYPES[dtype]
        precision = Precision(param=one, compute=one, reduce=one)  # type: ignore[arg-type]
        parallelize(model, strategy.model_copy(update={"precision": precision, "memory": Memory()}))
        load_weights(model, found, _device())
        model.generation_config = generation_settings(found, hf)
        return model.eval(), tokenizer_of(found)


@contextmanager
def _readable(found: Path) -> Iterator[Path]:
    """A Transformers folder: the folder itself, or what rank 0 exports from a checkpoint for the time of loading."""
    if (found / "config.json").is_file():
        yield found
        return
    key = f"hyper_parallel/exported/{next(_COUNT)}"
    if dist.get_rank() != 0:
        written = Path(process_groups.broadcast_text(key, None))
        if not written.is_dir():
            raise ConfigError(
                f"{found}: a checkpoint is exported on the first machine only; write it to a folder that all machines "
                "see (hyper-parallel export), and give that folder"
            )
        yield written
        dist.barrier()
        return
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as temporary:
        written = export(found, Path(temporary) / "model")
        yield Path(process_groups.broadcast_text(key, str(written)))
        dist.barrier()


_COUNT = itertools.count()
"""Of exports by this process: the same on every rank."""


def _device() -> torch.device:
    """The device of this worker, which `launch` or the script has set."""
    kind = collectives.device_type()
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )
