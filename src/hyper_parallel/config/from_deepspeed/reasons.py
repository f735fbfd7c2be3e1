"""Why a key of DeepSpeed has no setting in a run file: the table of known keys, and the rest.

Patterns are matched in order against the dotted key; `*` also matches dots.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.errors import nearest

_GATHERS = (
    "gathers and reductions are grouped and ordered by strategy.overlap.schedule; there are no sizes to tune"
)
_QUANTIZED = "no counterpart: collectives are not quantized"
_MOVES = (
    "copies are planned from the budget in strategy.memory (docs/offload.md); there are no buffers to tune"
)
_FLOAT16 = "for float16 only: arithmetic is bfloat16 or float32 here, and losses are not scaled"
_RULES = "how modules are split follows from the model; strategy.rules overrides it (docs/hypershard.md)"
_MEASURE = "train --profile measures a step, operator by operator"
_FORMAT = "checkpoints have one format, which loads under every strategy (section checkpoint of the run file)"

_TABLE: tuple[tuple[str, str], ...] = (
    ("*.pin_memory", _MOVES),
    ("zero_optimization.offload_*.ratio", "how much is offloaded follows from the budget in strategy.memory"),
    ("zero_optimization.offload_*", _MOVES),
    ("zero_optimization.cpu_offload*", _MOVES),
    ("zero_optimization.sub_group_size", _MOVES),
    ("aio.*", _MOVES),
    (
        "zero_optimization.stage3_gather_*_on_model_save",
        "hyper-parallel export writes a folder for Transformers",
    ),
    (
        "zero_optimization.gather_16bit_weights_on_model_save",
        "hyper-parallel export writes a folder for Transformers",
    ),
    ("zero_optimization.*quantized*", _QUANTIZED),
    ("zero_optimization.zeropp_loco_param*", _QUANTIZED),
    (
        "zero_optimization.zero_hpz_partition_size",
        "no counterpart: parameters have no second copy inside a node; "
        "replicate with shard in strategy.axes (HSDP) keeps gathers inside a node, optimizer state included",
    ),
    (
        "zero_optimization.mics_hierarchical_params_gather",
        "strategy.placement.collectives: levels does it, the default",
    ),
    (
        "zero_optimization.zenflow*",
        "no counterpart; strategy.memory.update: host overlaps updates on the host",
    ),
    ("zero_optimization.leaf_module*", _RULES),
    ("zero_optimization.load_from_fp32_weights", _FORMAT),
    ("zero_optimization.elastic_checkpoint", _FORMAT),
    ("zero_optimization.pipeline_loading_checkpoint", _FORMAT),
    (
        "zero_optimization.ignore_unused_parameters",
        "no counterpart: parameters without a gradient need no setting",
    ),
    (
        "zero_optimization.log_trace_cache_warnings",
        "there is no trace of the model's modules",
    ),
    (
        "zero_optimization.enable_sanity_checks",
        "strategy.check compares gradients before training, by default",
    ),
    ("zero_optimization.save_muon_momentum_buffer_in_memory", _MOVES),
    *(
        (f"zero_optimization.{name}", _GATHERS)
        for name in (
            "stage3_*",
            "contiguous_gradients",
            "reduce_scatter",
            "reduce_bucket_size",
            "allgather_*",
            "use_multi_rank_bucket_allreduce",
            "round_robin_gradients",
            "legacy_stage1",
            "memory_efficient_linear",
            "override_module_apply",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "parameter_alignment",
            "compute_grad_norm",
        )
    ),
    ("disable_allgather", _GATHERS),
    ("fp16.enabled", "false: strategy.precision says the dtypes"),
    ("bf16.enabled", "false: strategy.precision says the dtypes"),
    ("fp16.*", _FLOAT16),
    ("bf16.*", "accumulation follows strategy.precision"),
    ("bfloat16.*", "strategy.precision says the dtypes"),
    (
        "torch_autocast.*",
        "no counterpart: the compute dtype is set by module, not by operator; use "
        "strategy.precision.compute and precision.modules",
    ),
    ("amp.*", "no counterpart: Apex; strategy.precision says the dtypes"),
    ("data_types.grad_accum_dtype", "accumulation follows strategy.precision"),
    ("fp32_allreduce", "strategy.precision.reduce is the dtype of reductions"),
    ("seq_parallel_comm*_data_type", "attention exchanges activations in their own dtype"),
    ("prescale_gradients", "the loss is divided by the step's tokens before the backward pass"),
    ("gradient_predivide_factor", "the loss is divided by the step's tokens before the backward pass"),
    ("gradient_allreduce_op", "no counterpart: gradients are those of the mean over the step's tokens"),
    ("managed_gradient_accumulation", "train runs the loop, and accumulates over micro-batches"),
    ("sparse_gradients", "no counterpart: gradients of embeddings are dense"),
    ("optimizer.legacy_fusion", "PyTorch's fused kernels update the parameters"),
    ("optimizer.params.torch_adam", "PyTorch's fused kernels update the parameters"),
    ("optimizer.params.fused", "PyTorch's fused kernels update the parameters"),
    ("optimizer.params.foreach", "PyTorch's fused kernels update the parameters"),
    ("optimizer.params.adam_w_mode", "decay is always decoupled, as in AdamW"),
    ("optimizer.params.bias_correction", "moments are always corrected for their bias"),
    ("optimizer.params.amsgrad", "no counterpart: AdamW without amsgrad"),
    ("zero_allow_untested_optimizer", "every optimizer of train.optimizer runs under every ZeRO level"),
    ("zero_force_ds_cpu_optimizer", "strategy.memory.update says where the optimizer's updates run"),
    ("scheduler.params.last_batch_iteration", "a resumed run goes on from its checkpoint's step"),
    ("scheduler.params.warmup_max_lr", "train.optimizer.lr is the peak"),
    ("scheduler.params.total_num_steps", "a constant rate needs no end; train.steps is the number of steps"),
    ("scheduler.*", "no parameter of this schedule in DeepSpeed"),
    ("optimizer.params.max_grad_norm", "train.clip is the largest gradient norm; gradient_clipping sets it"),
    ("optimizer.*", "no counterpart in train.optimizer"),
    ("steps_per_print", "every step is shown; train.log_every changes it"),
    ("activation_checkpointing.profile", _MEASURE),
    (
        "activation_checkpointing.*",
        "strategy.memory.recompute says which layers are recomputed",
    ),
    ("tensor_parallel.*", _RULES),
    (
        "expert_parallel.*",
        "strategy.axes.expert splits the experts that the model has (docs/experts.md)",
    ),
    ("moe*", "sizes of experts are part of model.config; strategy.axes.expert splits them (docs/experts.md)"),
    ("use_data_before_expert_parallelism*", "experts fold over the innermost ranks (docs/experts.md)"),
    (
        "pipeline*",
        "stages are cut from the model: strategy.axes.pipeline (docs/pipelines.md)",
    ),
    ("hybrid_engine.*", "hyper-parallel rl is another run file (docs/rl.md)"),
    ("compile.*", "train.compile compiles a captured step (docs/compile.md)"),
    ("graph_harvesting", "train.engine: graph, the default, runs the step's graph"),
    ("flops_profiler.*", _MEASURE),
    ("comms_logger.*", "hyper-parallel inspect lists a step's collectives"),
    ("wall_clock_breakdown", _MEASURE),
    ("memory_breakdown", "hyper-parallel simulate shows the contents of each memory"),
    ("dump_state", "out/run.yaml is the whole run file"),
    ("log_level", "logs are in out/logs"),
    ("tensorboard.*", "the run's folder has tensorboard/ (trackers: [tensorboard])"),
    ("wandb.*", "trackers: [wandb] logs the run; it takes no other keys"),
    ("csv_monitor.*", "out/metrics.jsonl is always written"),
    ("comet.*", "no counterpart; register a tracker of your own (docs/training.md)"),
    ("monitor_config.*", "trackers names the trackers"),
    ("checkpoint.*", _FORMAT),
    ("nebula.*", "checkpoints are written in the background by default (checkpoint.background)"),
    ("data_parallel*", "strategy.axes has the degrees"),
    ("dataloader_drop_last", "every step has a whole batch"),
    ("vocabulary_size", "model.config has the model's sizes"),
    ("autotuning.*", "strategy: auto, or hyper-parallel plan, chooses a strategy (docs/plan.md)"),
    ("elasticity.*", "no counterpart: a checkpoint loads under any number of workers, started anew"),
    *(
        (f"{name}*", "no counterpart")
        for name in (
            "sparse_attention",
            "progressive_layer_drop",
            "curriculum_learning",
            "data_efficiency",
            "eigenvalue",
            "quantize_training",
            "compression_training",
            "weight_quantization",
        )
    ),
)

_SECTIONS = (
    "zero_optimization",
    "fp16",
    "bf16",
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "tensor_parallel",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "sequence_parallel_size",
    "expert_parallel",
    "communication_data_type",
)


def resembles(key: str) -> bool:
    """Whether a top-level key is one of DeepSpeed's, or a misspelt one."""
    heads = {pattern.split(".")[0] for pattern, _ in _TABLE}
    return (
        key in _SECTIONS
        or bool(nearest(key, _SECTIONS))
        or any(fnmatchcase(key, head) for head in heads - {"*"})
    )


def reason(path: tuple[str, ...], value: Any) -> str:
    """One line: why this key has no setting."""
    if value is None:
        return "null, as if it were left out"
    if value == {}:
        return "a section without keys"
    dotted = ".".join(path)
    for pattern, why in _TABLE:
        if fnmatchcase(dotted, pattern):
            return why
    return f"unknown key{nearest(path[0], _SECTIONS) if path[0] not in _SECTIONS else ''}; it has no effect"
