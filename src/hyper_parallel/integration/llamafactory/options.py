"""LlamaFactory's own options on a parallelized model: passed through, implemented here, or refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.errors import IntegrationError

_WHOLE_MATRICES = {
    "use_galore": "GaLore",
    "use_apollo": "APOLLO",
    "use_adam_mini": "Adam-mini",
    "use_muon": "Muon",
}
"""Options that choose an optimizer whose update looks at whole matrices, rows or blocks."""
_PATCHED_BY = {
    "liger_kernel": "enable_liger_kernel",
    "unsloth": "use_unsloth",
    "MoD": "mixture_of_depths",
    "kt_kernel": "use_kt",
}
"""Packages that put passes of their own into a model to the options that ask for them."""


_OWN_LOSSES = ("use_dft_loss", "use_eaft_loss", "use_asft_loss")
_NEED_LOGITS = {**dict.fromkeys(_OWN_LOSSES, "loss"), "compute_accuracy": "metric"}
"""Options whose numbers are computed from whole logits."""


def check_stages(args: Any, finetuning_args: Any, stages: int) -> None:
    """Refuse what needs whole logits, which no worker has while `stages` run. Raises IntegrationError."""
    for option, what in _NEED_LOGITS.items():
        if stages > 1 and getattr(finetuning_args, option, False):
            raise IntegrationError(
                f"{option}: the {what} is computed from whole logits, which no worker has with pp_size {stages}; leave "
                "it out, or set pp_size to 1"
            )
    if stages > 1 and getattr(args, "predict_with_generate", False):
        raise IntegrationError(
            f"predict_with_generate: the stages of pp_size {stages} compute no text; leave it out and evaluate by the "
            "loss, or set pp_size to 1"
        )


def check_options(args: Any, finetuning_args: Any, model: nn.Module, world: int) -> None:
    """Refuse what cannot be honoured on a model that is spread over `world` workers. Raises IntegrationError."""
    if getattr(args, "fp8", False):
        raise IntegrationError("fp8 cannot be used with use_hyper_parallel; train in bfloat16 (bf16: true)")
    if getattr(finetuning_args, "use_badam", False):
        raise IntegrationError(
            "use_badam changes which parameters are trained as it goes, and a model is spread once; leave it out"
        )
    for option, name in _WHOLE_MATRICES.items():
        if getattr(finetuning_args, option, False) and world > 1:
            raise IntegrationError(
                f"{option}: {name} looks at whole matrices, of which each of the {world} workers has a part; leave it "
                "out, or train on one worker"
            )
    for module in model.modules():
        package = module.forward.__module__.partition(".")[0]
        if package in _PATCHED_BY:
            raise IntegrationError(
                f"{_PATCHED_BY[package]} puts passes of its own into {type(module).__name__}, which cannot be spread; "
                "leave it out"
            )


def without_checkpointing(model: nn.Module) -> bool:
    """Switch off LlamaFactory's gradient checkpointing, which knows nothing of a spread model; whether it was on."""
    seen: Any = model
    if not getattr(seen, "is_gradient_checkpointing", False):
        return False
    seen.gradient_checkpointing_disable()
    return True


def keep_document_numbers(data_collator: Any) -> None:
    """Let `neat_packing` tell documents by their numbers, [B, S], not by a mask [B, 1, S, S] that no axis can split."""
    if getattr(data_collator, "block_diag_attn", False):
        data_collator.block_diag_attn = False
