"""The training loop and its parts: loss, schedule, optimizers, evaluation, progress, trackers, resume.

`Trainer` runs a run file; `build_optimizer`, `causal_lm_loss`, `ExpertBalancer` and `schedule` are for your own loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.step.lr_schedule import schedule

if TYPE_CHECKING:
    from hyper_parallel.shard.loss import causal_lm_loss, valid_tokens
    from hyper_parallel.step.expert_balance import ExpertBalancer
    from hyper_parallel.step.optimizer import Optimizer, build_optimizer, register_optimizer
    from hyper_parallel.train.summary import Summary
    from hyper_parallel.train.trackers import register_tracker
    from hyper_parallel.train.trainer import Trainer

__all__ = [
    "ExpertBalancer",
    "Optimizer",
    "Summary",
    "Trainer",
    "build_optimizer",
    "causal_lm_loss",
    "register_optimizer",
    "register_tracker",
    "schedule",
    "valid_tokens",
]

# Most of this needs torch; a script that only asks for a schedule or starts workers does not pay for it.
_HOME = {
    "ExpertBalancer": "hyper_parallel.step.expert_balance",
    "Optimizer": "hyper_parallel.step.optimizer",
    "Summary": "hyper_parallel.train.summary",
    "Trainer": "hyper_parallel.train.trainer",
    "build_optimizer": "hyper_parallel.step.optimizer",
    "causal_lm_loss": "hyper_parallel.shard.loss",
    "register_optimizer": "hyper_parallel.step.optimizer",
    "register_tracker": "hyper_parallel.train.trackers",
    "valid_tokens": "hyper_parallel.shard.loss",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
