"""The run file: model, data, training, launch, checkpoints and trackers around a Strategy. No torch.

`load` reads it (inheritance, overrides, strict keys) into a `RunConfig`; `dump` writes it.
"""

from hyper_parallel.config.data import DataConfig
from hyper_parallel.config.launch import LaunchConfig
from hyper_parallel.config.load import dump, from_dict, load, load_strategy
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.config.run import CheckpointConfig, RunConfig
from hyper_parallel.config.train import TrainConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LaunchConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "dump",
    "from_dict",
    "load",
    "load_strategy",
]
