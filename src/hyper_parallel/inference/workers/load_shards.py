"""A model from a folder on several workers: built on the meta device, parallelized, and read piece by piece.

No worker ever holds the whole model: each reads the slices of the files that its shards are.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint import export
from hyper_parallel.compat import collectives, store
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.generation_settings import generation_settings
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference.load_model import located, tokenizer_of
from hyper_parallel.shard import load_weights, parallelize
from hyper_parallel.shard.safetensors_folder import Folder
from hyper_parallel.step.build import causal_model, transformers_config
from hyper_parallel.strategy import Memory, Precision, Strategy

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def load_shards(folder: Path, strategy: Strategy) -> tuple[nn.Module, Tokenizer | None]:
    """The parallelized model with this worker's shards, on the worker's device, and the tokenizer.

    A collective. Raises ConfigError or CheckpointError for a folder that holds no model, StrategyError where the
    strategy does not fit it.
    """
    with _readable(located(folder)) as found:
        hf = transformers_config(ModelConfig(path=str(found)))
        with Folder(found) as files:
            dtype = hf.dtype or files.dtype() or torch.float32
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
        written = Path(store.broadcast_text(key, None))
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
        yield Path(store.broadcast_text(key, str(written)))
        dist.barrier()


_COUNT = itertools.count()
"""Of exports by this process: the same on every rank."""


def _device() -> torch.device:
    """That of this worker, which `launch` or the script has set."""
    kind = collectives.device_type()
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )
