"""LlamaFactory: the names that it imports when a run says `use_hyper_parallel: true`.

`arguments` and `strategy` say what the user's fields mean; `trainer` is for the release 0.9.5. The main branch has its
own trainer, which calls `prepare_model`, `saving`, `context_parallel` and `expert_parallel`. Each name is
imported when it is first used, and LlamaFactory itself with the trainer only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments
    from hyper_parallel.integration.llamafactory.expert_parallel import ep_prepare_model
    from hyper_parallel.integration.llamafactory.prepare_model import (
        HSDPModule,
        clip_grad_norm_,
        fsdp2_prepare_model,
        hsdp_sync_stream,
        wrap_optimizer_with_skip_dtensor_dispatch,
    )
    from hyper_parallel.integration.llamafactory.saving import (
        export_to_hf_format,
        load_hsdp_model,
        load_hsdp_optimizer_and_scheduler,
        save_hsdp_checkpoint,
    )
    from hyper_parallel.integration.llamafactory.trainer import HyperParallelTrainer

_HOMES = {
    "HSDPModule": "prepare_model",
    "HyperParallelArguments": "arguments",
    "HyperParallelTrainer": "trainer",
    "clip_grad_norm_": "prepare_model",
    "ep_prepare_model": "expert_parallel",
    "export_to_hf_format": "saving",
    "fsdp2_prepare_model": "prepare_model",
    "hsdp_sync_stream": "prepare_model",
    "load_hsdp_model": "saving",
    "load_hsdp_optimizer_and_scheduler": "saving",
    "save_hsdp_checkpoint": "saving",
    "wrap_optimizer_with_skip_dtensor_dispatch": "prepare_model",
}

__all__ = [
    "HSDPModule",
    "HyperParallelArguments",
    "HyperParallelTrainer",
    "clip_grad_norm_",
    "ep_prepare_model",
    "export_to_hf_format",
    "fsdp2_prepare_model",
    "hsdp_sync_stream",
    "load_hsdp_model",
    "load_hsdp_optimizer_and_scheduler",
    "save_hsdp_checkpoint",
    "wrap_optimizer_with_skip_dtensor_dispatch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
