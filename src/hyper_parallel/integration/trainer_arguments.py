"""A Trainer's arguments, overrides and model under a strategy: mapped, or refused where they cannot be honoured.

Nothing that was written is silently ignored: it is put into effect here, left to the Trainer, or refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import IntegrationError
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.strategy import Strategy

_SPREADS = "the strategy spreads the model; leave it out, or leave the strategy to it"
_CASTS = "the model computes in the strategy's dtypes; leave it out"
_REFUSED = {
    "fsdp": _SPREADS,
    "deepspeed": _SPREADS,
    "parallelism_config": _SPREADS,
    "fp16": "there is no scaling of losses; use bf16, which needs none",
    "fp16_full_eval": _CASTS,
    "bf16_full_eval": _CASTS,
    "torch_compile": "it would trace past what spreads the model; leave it out",
    "use_liger_kernel": "the loss is computed in chunks, split over the vocabulary, without it; leave it out",
    "auto_find_batch_size": "ranks that ran out of memory alone would leave the others waiting; set "
    "per_device_train_batch_size",
}
"""Arguments of a Trainer that cannot be honoured, and why."""


def check_arguments(args: Any) -> None:
    """Refuse what asks Transformers or Accelerate to spread the model, and what a spread model cannot do.

    Raises IntegrationError for the first.
    """
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise IntegrationError(f"{name} cannot be used with a HyperParallel trainer: {why}")
    if args.n_gpu > 1:
        raise IntegrationError(
            f"one process sees {args.n_gpu} devices, over which Transformers would copy the model; start one process "
            f"for each: torchrun --nproc-per-node {args.n_gpu} …"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise IntegrationError(
            "average_tokens_across_devices=False asks for the mean of each rank's mean; the loss here is the mean over "
            "all tokens of the step, on any number of ranks; leave it out"
        )


def check_trainer(trainer: Any) -> None:
    """Refuse settings that a Trainer has from its environment, or beside its arguments. Raises IntegrationError."""
    for name, enabled in (("FSDP", trainer.is_fsdp_enabled), ("DeepSpeed", trainer.is_deepspeed_enabled)):
        if enabled:
            raise IntegrationError(
                f"accelerate launch was told to use {name}, and the strategy spreads the model; start the script with "
                "torchrun, or with an accelerate config that says distributed_type: MULTI_GPU"
            )
    if trainer.optimizer is not None:
        raise IntegrationError(
            "optimizers=… holds the parameters of the model before it was spread; give optimizer_cls_and_kwargs, or "
            "args.optim"
        )


def check_model(model: nn.Module) -> None:
    """Refuse a model that somebody else has spread or quantised. Raises IntegrationError."""
    seen: Any = model
    if getattr(seen, "is_quantized", False) or getattr(seen, "hf_quantizer", None) is not None:
        raise IntegrationError(
            f"this {type(model).__name__} is quantised, and weights of a few bits cannot be split; load it without "
            "quantization_config"
        )
    if (
        getattr(seen, "is_distributed_loading_by_transformers", False)
        or (getattr(seen, "tp_size", None) or 1) > 1
    ):
        raise IntegrationError(
            f"this {type(model).__name__} was split by Transformers while it was loaded; load it without tp_plan and "
            "distributed_config, and give the strategy to the trainer"
        )
    places = {
        str(device) for device in (getattr(seen, "hf_device_map", None) or {}).values() if device != "cpu"
    }
    if len(places) > 1 or "disk" in places:
        raise IntegrationError(
            f"device_map put this {type(model).__name__} on {', '.join(sorted(places))}; load it without device_map"
        )


def check_strategy(strategy: Strategy, trainer: Any) -> None:
    """Refuse arguments that do not go with the axes. Raises IntegrationError."""
    args, axes = trainer.args, strategy.axes
    if strategy.expert_balance is not None:
        raise IntegrationError(
            "strategy.expert_balance moves experts between the steps of hyper-parallel train, not of a Trainer; leave "
            "it out, or name hot experts in strategy.expert_replicas"
        )
    splits = axes.context > 1 or strategy.sequence or axes.tensor_y > 1
    if args.neftune_noise_alpha is not None and splits:
        raise IntegrationError(
            "neftune_noise_alpha draws noise for whole rows, which the strategy splits; leave it out, or split no "
            "positions (context, sequence, tensor_y)"
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance" and axes.data != axes.world:
        raise IntegrationError(
            "train_sampling_strategy='batch_rebalance' deals rows to every rank, but the strategy has ranks that share "
            "them; use 'group_by_length'"
        )
    if getattr(args, "predict_with_generate", False) and splits:
        raise IntegrationError(
            "predict_with_generate computes one position at a time, and the strategy splits positions (context, "
            "sequence, tensor_y); leave it out and evaluate by the loss, or split none"
        )


def adjusted(strategy: Strategy, args: Any, model: nn.Module) -> Strategy:
    """The strategy with what the arguments and the model say where it says nothing.

    Parameters stay in the dtype of those that are trained. `bf16` computes in bfloat16, and so does a model that was
    loaded in it. Transformers' gradient checkpointing becomes `memory.recompute: layer`, and is switched off.
    Raises IntegrationError for a model in another dtype, and for checkpointing that the strategy contradicts.
    """
    trained = {p.dtype for p in model.parameters() if p.requires_grad} or {
        p.dtype for p in model.parameters()
    }
    strange = trained - {torch.float32, torch.bfloat16}
    if strange:
        raise IntegrationError(
            f"parameters in {', '.join(str(dtype) for dtype in sorted(strange, key=str))} cannot be trained; load the "
            "model in float32 or bfloat16 (dtype=…)"
        )
    kept = "float32" if torch.float32 in trained else "bfloat16"
    halves = args.bf16 or kept == "bfloat16"
    stated = strategy.precision.model_fields_set
    precision = {"param": kept, "compute": "bfloat16" if halves else "float32"}
    found = strategy.precision.model_copy(
        update={key: value for key, value in precision.items() if key not in stated}
    )
    return _recomputed(strategy.model_copy(update={"precision": found}), args)


def _recomputed(strategy: Strategy, args: Any) -> Strategy:
    # `activation_checkpointing` is what Transformers calls it since 5.20; the older name is kept beside it.
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name)]
    if not any(getattr(args, name) for name in names):
        return strategy
    if strategy.memory.recompute == "none":
        raise IntegrationError(
            f"{names[-1]}=True recomputes layers, and the strategy says memory.recompute: none; say one of them"
        )
    options = {
        key: value
        for name in names
        for key, value in (getattr(args, f"{name}_kwargs", None) or {}).items()
        if key != "use_reentrant"
    }
    if options:
        raise IntegrationError(
            f"{names[-1]}_kwargs: {', '.join(sorted(options))} cannot be honoured; layers are recomputed whole, each "
            "of them (memory.recompute: layer)"
        )
    for name in names:
        setattr(args, name, False)
    if strategy.memory.recompute == "selective":
        return strategy
    return strategy.model_copy(update={"memory": strategy.memory.model_copy(update={"recompute": "layer"})})


# Methods of a Trainer that a class of the user's has in place of ours and Transformers': reached, or refused by name.
#
# What a Trainer calls is called as ever, so that overrides are honoured; this names those that nothing would call.

_OWNERS = ("hyper_parallel", "transformers", "trl", "llamafactory")
NEVER_CALLED = {
    "get_cp_size": "the strategy's axes say how positions are split",
    "get_tp_size": "the strategy's axes say how weights are split",
    "_save": "the ranks write a model's folder together; override save_model, which calls super().save_model",
    "hyperparameter_search": "every trial would spread a model anew; start a run for each trial",
}
WITHOUT_PIPELINE = dict.fromkeys(
    (
        *("training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager"),
        "_prepare_context_parallel_inputs",
    ),
    "the stages compute the model's own next-token loss of all micro-batches together",
)


def owner_of(trainer: Any, name: str) -> type | None:
    """The class of the user's whose method `name` a Trainer has; None where it is a library's."""
    found = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if found is None or found.__module__.partition(".")[0] in _OWNERS:
        return None
    return found


def check_overrides(trainer: Any, *, pipeline: bool) -> None:
    """Refuse overrides that nothing would call. Raises IntegrationError for the first."""
    for name, why in {**NEVER_CALLED, **(WITHOUT_PIPELINE if pipeline else {})}.items():
        if (kind := owner_of(trainer, name)) is not None:
            mend = "; leave it out, or set axes.pipeline to 1" if name not in NEVER_CALLED else ""
            raise IntegrationError(f"{kind.__name__}.{name} would not be called: {why}{mend}")


def parameters_that_count(model: nn.Module) -> int:
    """Parameters that a Trainer counts operations by."""
    core: Any = without_adapters(model)
    if hasattr(core, "num_parameters"):
        return int(core.num_parameters(exclude_embeddings=True))
    return sum(parameter.numel() for parameter in core.parameters())


def has_next_token_loss(model: nn.Module) -> bool:
    """Whether the loss that a Transformers model computes by itself is that of the next token."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    core: Any = without_adapters(model)
    found = LOSS_MAPPING.get(getattr(core, "loss_type", None))
    return found is ForCausalLMLoss and not getattr(core.config, "is_encoder_decoder", False)
