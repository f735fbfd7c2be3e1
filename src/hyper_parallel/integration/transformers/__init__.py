"""Transformers' Trainer with a spread model: `HyperParallelTrainer`, `HyperParallelSeq2SeqTrainer`.

Transformers is imported when one of them is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.integration.transformers.trainers import (
        HyperParallelSeq2SeqTrainer,
        HyperParallelTrainer,
    )

__all__ = ["HyperParallelSeq2SeqTrainer", "HyperParallelTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyper_parallel.integration.transformers import trainers

    return getattr(trainers, name)
