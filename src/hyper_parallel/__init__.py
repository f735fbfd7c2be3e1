"""HyperParallel: a supernode as one computer.

Public names are imported on first use, so that `import hyper_parallel` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel._version import __version__

if TYPE_CHECKING:
    from hyper_parallel.config import RunConfig, load
    from hyper_parallel.inference import Generator, TieredCache
    from hyper_parallel.integration.own_step import Step, step
    from hyper_parallel.offloading.autograd import Swap, offload, release
    from hyper_parallel.shard.load_weights import init_weights, load_weights
    from hyper_parallel.shard.parallelize import parallelize
    from hyper_parallel.shard.sharded_model import sharded
    from hyper_parallel.step.pipeline import Pipeline, pipeline
    from hyper_parallel.step.submodels import Submodels, submodels
    from hyper_parallel.strategy import Strategy
    from hyper_parallel.train import Trainer
    from hyper_parallel.verify import verify_file

# A name without a home is that of a package, which is called: `step`.
_HOMES = {
    "Generator": "inference",
    "Pipeline": "step.pipeline",
    "RunConfig": "config",
    "Step": "integration.own_step",
    "Strategy": "strategy",
    "Submodels": "step.submodels",
    "Swap": "offloading.autograd",
    "TieredCache": "inference",
    "Trainer": "train",
    "init_weights": "shard",
    "load": "config",
    "load_weights": "shard",
    "offload": "offloading.autograd",
    "parallelize": "shard",
    "pipeline": "step.pipeline",
    "release": "offloading.autograd",
    "sharded": "shard",
    "step": "",
    "submodels": "step.submodels",
    "verify_file": "verify",
}

__all__ = [
    "Generator",
    "Pipeline",
    "RunConfig",
    "Step",
    "Strategy",
    "Submodels",
    "Swap",
    "TieredCache",
    "Trainer",
    "__version__",
    "init_weights",
    "load",
    "load_weights",
    "offload",
    "parallelize",
    "pipeline",
    "release",
    "sharded",
    "step",
    "submodels",
    "verify_file",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name] or name}")
    return getattr(home, name) if _HOMES[name] else home


def __dir__() -> list[str]:
    return __all__
