"""Keys of a DeepSpeed JSON as tables: those that are one key of a run file, and the reasons why others are none."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.errors import nearest

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
}
"""Parameters of each optimizer with DeepSpeed's default. They have the same names in a run file."""
OPTIMIZER_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
}
"""Training arguments of Transformers that fill a parameter that is `auto`."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfp16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
}

# fmt: off
_GATHERS = "gathers and reductions are grouped and ordered by strategy.overlap.schedule; there are no sizes to tune"
_COPIES = "copies are planned from the budget in strategy.memory (docs/offload.md); there are no buffers to tune"
_DEGREE = "'auto' is no degree; write it in strategy.axes"
_DENOMINATOR = "the loss is divided by the step's tokens before the backward pass"
_DTYPE = "strategy.precision says the dtypes"
_EXPORT = "hyper-parallel export writes a folder for Transformers"
_FORMAT = "checkpoints have one format, which loads under every strategy (section checkpoint of the run file)"
_FUSED = "PyTorch's fused kernels update the parameters"
_NONE = "no counterpart"
_PROFILE = "train --profile measures a step, operator by operator"
_RULES = "how modules are split follows from the model; strategy.rules overrides it (docs/hypershard.md)"

_ZERO, _PARAMS = "zero_optimization", "optimizer.params"
_REASONS: tuple[tuple[str, str, str], ...] = (
    # Section, keys, reason. The first row that matches counts; `*` matches dots, too.
    ("*", "pin_memory", _COPIES),
    ("", "zero_optimization zero_optimization.stage", "no ZeRO: strategy.axes.replicate"),
    (_ZERO, "mics_shard_size", "no group of its own: strategy.axes.shard is all data ranks"),
    (_ZERO, "overlap_comm", "strategy.overlap.schedule: auto is the default"),
    (_ZERO, "offload_*.nvme_path", "with an offload to nvme and --device-memory it is strategy.memory.flash"),
    (_ZERO, "offload_*.ratio", "how much is offloaded follows from the budget in strategy.memory"),
    (_ZERO, "offload_* cpu_offload* sub_group_size save_muon_momentum_buffer_in_memory", _COPIES),
    ("aio", "*", _COPIES),
    (_ZERO, "stage3_gather_*_on_model_save gather_16bit_weights_on_model_save", _EXPORT),
    (_ZERO, "*quantized* zeropp_loco_param*", f"{_NONE}: collectives are not quantized"),
    (
        _ZERO,
        "zero_hpz_partition_size",
        f"{_NONE}: parameters have no second copy inside a node; "
        "replicate with shard in strategy.axes (HSDP) keeps gathers inside a node, optimizer state included",
    ),
    (_ZERO, "mics_hierarchical_params_gather", "strategy.placement.collectives: levels does it, the default"),
    (_ZERO, "zenflow*", f"{_NONE}; strategy.memory.update: host overlaps updates on the host"),
    (_ZERO, "leaf_module*", _RULES),
    (_ZERO, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", _FORMAT),
    (_ZERO, "ignore_unused_parameters", f"{_NONE}: parameters without a gradient need no setting"),
    (_ZERO, "log_trace_cache_warnings", "there is no trace of the model's modules"),
    (_ZERO, "enable_sanity_checks", "strategy.check compares gradients before training, by default"),
    (_ZERO, "stage3_* contiguous_gradients reduce_scatter reduce_bucket_size allgather_*", _GATHERS),
    (_ZERO, "use_multi_rank_bucket_allreduce round_robin_gradients legacy_stage1", _GATHERS),
    (_ZERO, "memory_efficient_linear override_module_apply prefetch_bucket_size", _GATHERS),
    (_ZERO, "param_persistence_threshold model_persistence_threshold max_live_parameters", _GATHERS),
    (_ZERO, "max_reuse_distance parameter_alignment compute_grad_norm", _GATHERS),
    ("", "disable_allgather", _GATHERS),
    ("", "fp16.enabled bf16.enabled", f"false: {_DTYPE}"),
    ("fp16", "*", "for float16 only: arithmetic is bfloat16 or float32 here, and losses are not scaled"),
    ("", "bf16.* data_types.grad_accum_dtype", "accumulation follows strategy.precision"),
    ("bfloat16", "*", _DTYPE),
    (
        "torch_autocast",
        "*",
        f"{_NONE}: the compute dtype is set by module, not by operator; use "
        "strategy.precision.compute and precision.modules",
    ),
    ("amp", "*", f"{_NONE}: Apex; {_DTYPE}"),
    ("", "fp32_allreduce", "strategy.precision.reduce is the dtype of reductions"),
    ("", "seq_parallel_comm*_data_type", "attention exchanges activations in their own dtype"),
    ("", "prescale_gradients gradient_predivide_factor", _DENOMINATOR),
    ("", "gradient_allreduce_op", f"{_NONE}: gradients are those of the mean over the step's tokens"),
    ("", "managed_gradient_accumulation", "train runs the loop, and accumulates over micro-batches"),
    ("", "sparse_gradients", f"{_NONE}: gradients of embeddings are dense"),
    ("optimizer", "legacy_fusion params.torch_adam params.fused params.foreach", _FUSED),
    (_PARAMS, "adam_w_mode", "decay is always decoupled, as in AdamW"),
    (_PARAMS, "bias_correction", "moments are always corrected for their bias"),
    (_PARAMS, "amsgrad", f"{_NONE}: AdamW without amsgrad"),
    (_PARAMS, "max_grad_norm", "train.clip is the largest gradient norm; gradient_clipping sets it"),
    ("optimizer", "*", f"{_NONE} in train.optimizer"),
    ("", "zero_allow_untested_optimizer", "every optimizer of train.optimizer runs under every ZeRO level"),
    ("", "zero_force_ds_cpu_optimizer", "strategy.memory.update says where the optimizer's updates run"),
    ("scheduler.params", "last_batch_iteration", "a resumed run goes on from its checkpoint's step"),
    ("scheduler.params", "warmup_max_lr", "train.optimizer.lr is the peak"),
    ("scheduler.params", "total_num_steps", "a constant rate needs no end; train.steps is the number of steps"),
    ("scheduler", "*", "no parameter of this schedule in DeepSpeed"),
    ("", "steps_per_print", "every step is shown; train.log_every changes it"),
    ("", "activation_checkpointing.profile flops_profiler.* wall_clock_breakdown", _PROFILE),
    ("activation_checkpointing", "*", "strategy.memory.recompute says which layers are recomputed"),
    ("", "tensor_parallel.autotp_size sequence_parallel_size", _DEGREE),
    ("tensor_parallel", "*", _RULES),
    ("expert_parallel", "*", "strategy.axes.expert splits the experts that the model has (docs/experts.md)"),
    ("", "moe*", "sizes of experts are part of model.config; strategy.axes.expert splits them (docs/experts.md)"),
    ("", "use_data_before_expert_parallelism*", "experts fold over the innermost ranks (docs/experts.md)"),
    ("", "pipeline*", "stages are cut from the model: strategy.axes.pipeline (docs/pipelines.md)"),
    ("hybrid_engine", "*", "hyper-parallel rl is another run file (docs/rl.md)"),
    ("compile", "*", "train.compile compiles a captured step (docs/compile.md)"),
    ("", "graph_harvesting", "train.engine: graph, the default, runs the step's graph"),
    ("comms_logger", "*", "hyper-parallel inspect lists a step's collectives"),
    ("", "memory_breakdown", "hyper-parallel simulate shows the contents of each memory"),
    ("", "dump_state", "out/run.yaml is the whole run file"),
    ("", "log_level", "logs are in out/logs"),
    ("tensorboard", "*", "the run's folder has tensorboard/ (trackers: [tensorboard])"),
    ("wandb", "*", "trackers: [wandb] logs the run; it takes no other keys"),
    ("csv_monitor", "*", "out/metrics.jsonl is always written"),
    ("comet", "*", f"{_NONE}; register a tracker of your own (docs/training.md)"),
    ("monitor_config", "*", "trackers names the trackers"),
    ("checkpoint", "*", _FORMAT),
    ("nebula", "*", "checkpoints are written in the background by default (checkpoint.background)"),
    ("", "data_parallel*", "strategy.axes has the degrees"),
    ("", "dataloader_drop_last", "every step has a whole batch"),
    ("", "vocabulary_size", "model.config has the model's sizes"),
    ("autotuning", "*", "strategy: auto, or hyper-parallel plan, chooses a strategy (docs/plan.md)"),
    ("elasticity", "*", f"{_NONE}: a checkpoint loads under any number of workers, started anew"),
    ("", "sparse_attention* progressive_layer_drop* curriculum_learning* data_efficiency*", _NONE),
    ("", "eigenvalue* quantize_training* compression_training* weight_quantization*", _NONE),
)
_PATTERNS = tuple(
    (f"{section}.{key}" if section else key, why) for section, keys, why in _REASONS for key in keys.split()
)
_SECTIONS = (
    "zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "activation_checkpointing", "tensor_parallel",
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print", "sequence_parallel_size", "expert_parallel", "communication_data_type",
)
# fmt: on


def resembles(key: str) -> bool:
    """Whether a top-level key is one of DeepSpeed's, or a misspelt one."""
    heads = {pattern.split(".")[0] for pattern, _ in _PATTERNS} - {"*"}
    return key in _SECTIONS or bool(nearest(key, _SECTIONS)) or any(fnmatchcase(key, head) for head in heads)


def reason(path: tuple[str, ...], value: Any) -> str:
    """One line: why this key has no setting."""
    if value is None:
        return "null, as if it were left out"
    if value == {}:
        return "a section without keys"
    dotted = ".".join(path)
    for pattern, why in _PATTERNS:
        if fnmatchcase(dotted, pattern):
            return why
    return f"unknown key{nearest(path[0], _SECTIONS) if path[0] not in _SECTIONS else ''}; it has no effect"
