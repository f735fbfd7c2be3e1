"""TRL's trainer for supervised fine-tuning with a spread model: `HyperParallelSFTTrainer`.

TRL is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.integration.versions import check

if TYPE_CHECKING:
    from hyper_parallel.integration.trl.sft import HyperParallelSFTTrainer

__all__ = ["HyperParallelSFTTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check("trl", "transformers", "accelerate", "torch")
    from hyper_parallel.integration.trl import sft

    return getattr(sft, name)
