"""HyperParallel: a supernode as one computer.

The names that a script needs. They are imported when they are used: importing the package is cheap and torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel._version import __version__

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig, load
    from hyper_parallel.shard import init_weights, load_weights, parallelize, sharded
    from hyper_parallel.strategy import Strategy
    from hyper_parallel.train import Trainer

__all__ = [
    "RunConfig",
    "Strategy",
    "Trainer",
    "__version__",
    "init_weights",
    "load",
    "load_weights",
    "parallelize",
    "sharded",
]

_HOME = {
    "RunConfig": "config",
    "Strategy": "strategy",
    "Trainer": "train",
    "init_weights": "shard",
    "load": "config",
    "load_weights": "shard",
    "parallelize": "shard",
    "sharded": "shard",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
