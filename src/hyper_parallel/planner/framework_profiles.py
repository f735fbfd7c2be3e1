"""Framework profiles: default settings of Megatron, DeepSpeed and others, from their documentation.

What a profile says is in `profile`. Each names its source; the first pattern that a framework's name has decides.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.planner.columns import Defaults, Profile

GENERIC = Profile(
    name="generic",
    source=(
        "what most frameworks for large models share: fused attention, reduction beside the backward pass, float32 "
        "gradients, the optimizer's state split over data-parallel ranks, activations split beside tensor parallelism"
    ),
    dedup=0.5,
    overlap_expert=0.5,
    fused_routing=0.5,
    even=0.5,
    tuned=0.5,
    defaults=Defaults(zero=1, sequence_parallel=True),
)

MEGATRON_LM = Profile(
    name="megatron-lm",
    source=(
        "Megatron Core's guide: recommended are --use-distributed-optimizer, --overlap-grad-reduce and "
        "--sequence-parallel; gradients of bfloat16 are summed in float32; fused kernels of Transformer Engine; its "
        "MoE guide offers an all-to-all or DeepEP, --overlap-moe-expert-parallel-comm, --moe-router-fusion and forced "
        "balance, all as asked"
    ),
    dedup=0.5,
    overlap_expert=0.5,
    fused_routing=0.5,
    even=0.5,
    bias_by_expert=1,
    tuned=1,
    defaults=Defaults(zero=1, sequence_parallel=True),
)

MEGATRON_DEEPSPEED = Profile(
    name="megatron-deepspeed",
    source=(
        "Megatron-DeepSpeed: attention's scores are stored; norms, softmax, and biases with GELU or dropout are fused, "
        "other operators are not; DeepSpeed's overlap_comm is false below ZeRO-3, its float16 gradients are reduced as "
        "they are"
    ),
    fused=0.5,
    flash=0,
    overlap_data=0,
    gradient_bytes=2,
    defaults=Defaults(precision="fp16"),
)

DEEPSPEED = Profile(
    name="deepspeed",
    source="DeepSpeed's configuration: overlap_comm is true for ZeRO-3; gradients are reduced in the training dtype",
    fused=0,
    gradient_bytes=2,
    logit_bytes=12,
    regathers=0,
    defaults=Defaults(zero=3),
)

NEMO = Profile(
    name="nemo",
    source=(
        "NVIDIA NeMo 24.07, performance guide: ub_tp_comm_overlap, the distributed optimizer with "
        "overlap_grad_sync, sequence_parallel; its launcher's configs have grad_sync_dtype bf16; experts by an "
        "all-to-all, their features split as tensor parallelism splits others (Megatron Core's default)"
    ),
    overlap_tensor=1,
    gradient_bytes=2,
    even=0.5,
    bias_by_expert=1,
    tuned=1,
    defaults=Defaults(zero=1, sequence_parallel=True, expert_tensor="tensor"),
)

AUTOMODEL = Profile(
    name="nemo-automodel",
    source=(
        "NeMo AutoModel, examples/benchmark/configs: FSDP2 with parameters and Adam's moments in bfloat16, Transformer "
        "Engine's products, norms and attention, the loss without a float32 copy, DeepEP or HybridEP where enabled, "
        "weights gathered once a step in pipelines; torch.optim.Adam, no master copy; at 2861c414 "
        "components/moe/layers.py has a stream for shared experts"
    ),
    dedup=0.5,
    fused_routing=0.5,
    shared_beside=1,
    even=0.5,
    weight_bytes=2,
    state_bytes=4,
    logit_bytes=4,
    regathers=0,
    stops=1,
    bias_by_expert=1,
    tuned=1,
    defaults=Defaults(zero=3, vocabulary=128256, gathered_in_pipelines=True),
)

MEGATRON_BRIDGE = Profile(
    name="megatron-bridge",
    source=(
        "Megatron-Bridge, performance guide: overlap of tensor and data parallelism, the distributed optimizer; its "
        "flex dispatcher sends a token to a node once, its alltoall does not; its recipes of mixtures have the "
        "precision-aware optimizer: gradients and moments in bfloat16, a float32 master"
    ),
    overlap_tensor=1,
    dedup=0.5,
    overlap_expert=0.5,
    fused_routing=0.5,
    even=0.5,
    gradient_bytes=2,
    state_bytes=8,
    bias_by_expert=1,
    tuned=1,
    defaults=Defaults(zero=1, sequence_parallel=True),
)

MEGATRON_BRIDGE_RECIPES = replace(
    MEGATRON_BRIDGE,
    name="megatron-bridge-recipes",
    source=(
        "Megatron-Bridge, scripts/performance: recorded graphs of kernels, grad_reduce_in_fp32 false, layers laid "
        "out so that embedding and loss count as layers, routing forced to be even, moe_router_fusion and "
        "moe_permute_fusion"
    ),
    graphs=1,
    fused_routing=1,
    balanced=1,
    even=1,
)

MEGATRON_BRIDGE_MIXTURES = replace(
    MEGATRON_BRIDGE_RECIPES,
    name="megatron-bridge-mixtures",
    source=(
        "Megatron-Bridge, scripts/performance/configs, workload_base_configs of DeepSeek-V3, Qwen3 and gpt-oss: on "
        "H100, B200 and B300 moe_token_dispatcher_type alltoall in some and DeepEP or HybridEP in others, "
        "moe_a2a_overlap and recorded graphs in some"
    ),
    graphs=0.5,
)

MEGATRON_BRIDGE_NVL72 = replace(
    MEGATRON_BRIDGE_RECIPES,
    name="megatron-bridge-nvl72",
    source=(
        "Megatron-Bridge, the same files for GB200 and GB300: HybridEP, moe_a2a_overlap false but for the newest of "
        "DeepSeek-V3, graphs of attn, moe_router, moe_preprocess"
    ),
    dedup=1,
    overlap_expert=0,
)

MEGATRON_BRIDGE_HYBRIDEP = replace(
    MEGATRON_BRIDGE_RECIPES,
    name="megatron-bridge-hybridep",
    source=f"{MEGATRON_BRIDGE_RECIPES.source}; with HybridEP exchanges of experts run beside computation",
    dedup=1,
    overlap_expert=1,
)

MEGASCALE = Profile(
    name="megascale",
    source=(
        "MegaScale, arXiv 2402.15627, sections 3.2 and 3.3: collectives of tensor, pipeline and data parallelism "
        "beside computation, FlashAttention-2, fused LayerNorm and GELU, ZeRO-2"
    ),
    overlap_tensor=1,
    tuned=1,
    defaults=Defaults(zero=2, sequence_parallel=True),
)

NANOTRON = Profile(
    name="nanotron",
    source=(
        "nanotron v0.5: pipeline blocks by get_block_compute_costs, the head's included; with ZeRO-1 and "
        "accumulate_grad_in_fp32 gradients are reduced after the backward pass, without ZeRO beside it, by PyTorch's "
        "wrapper (make_ddp in its trainer); FlashAttention, SwiGLU by PyTorch; tp_recompute_allgather is an option"
    ),
    fused=0,
    flash=2,
    overlap_split=0,
    regathers=0.5,
    balanced=1,
    greedy=1,
    logit_bytes=12,
    defaults=Defaults(zero=1, vocabulary=131072),
)

LLM_FOUNDRY = Profile(
    name="llm-foundry",
    source=(
        "llm-foundry's benchmarks of training: FSDP FULL_SHARD, which gathers ahead; parameters kept in float32 and "
        "gathered in bfloat16; attn_impl flash; low-precision LayerNorm; loss_fn fused_crossentropy"
    ),
    fused=0,
    flash=0.5,
    gradient_bytes=4,
    weight_bytes=4,
    state_bytes=8,
    logit_bytes=4,
    defaults=Defaults(zero=3, vocabulary=50368),
)

FSDP = Profile(
    name="fsdp",
    source="PyTorch's FSDP: gathers ahead, parameters kept in float32, gradients reduced in float32 unless told",
    fused=0,
    flash=2,
    weight_bytes=4,
    state_bytes=8,
    logit_bytes=12,
    regathers=0,
    stops=1,
    defaults=Defaults(zero=3),
)

TORCHTITAN = Profile(
    name="torchtitan",
    source=(
        "torchtitan, arXiv 2410.06511 and its code: FSDP2; the first and the last stage have a layer less; "
        "activation_checkpoint.mode selective computes every other layer again, or every other product; "
        "fsdp_reshard_after_forward default keeps weights gathered with pipelines; compile is off unless asked for, "
        "and the loss then keeps the logits' float32 copy, its log-softmax and both gradients, and RMSNorm and the "
        "rotation in complex float32 are operators of their own, with SwiGLU three times the bytes of fused ones"
    ),
    fused=-0.6,
    flash=2,
    balanced=1,
    weight_bytes=4,
    state_bytes=8,
    logit_bytes=14,
    regathers=0,
    stops=1,
    defaults=Defaults(
        zero=3,
        sequence_parallel=True,
        recompute="selective",
        vocabulary=128256,
        selective=0.5,
        gathered_in_pipelines=True,
    ),
)

TORCHTITAN_COMPILED = replace(
    TORCHTITAN,
    name="torchtitan-compiled",
    source="torchtitan with --training.compile: torch.compile of each layer and the loss fuses elementwise operators",
    fused=1,
    logit_bytes=12,
)

MINDSPEED = Profile(
    name="mindspeed-llm",
    source=(
        "MindSpeed-LLM 1.0: its table of performance has MC2 on, which runs collectives of tensor parallelism beside "
        "products; fused attention, RMSNorm, rotation and SwiGLU; its scripts pass --use-distributed-optimizer; "
        "--moe-alltoall-overlap-comm is an option"
    ),
    overlap_tensor=1,
    overlap_expert=0.5,
    even=0.5,
    defaults=Defaults(zero=1, sequence_parallel=True),
)

HAI_LLM = Profile(
    name="hai-llm",
    source=(
        "DeepSeek-V3, arXiv 2412.19437, section 3.2: DualPipe, exchanges of experts beside computation, a token sent "
        "to a node once and in 8 bits with a scale for each 128 elements (section 3.3.3), ZeRO-1; gradients and their "
        "sums in float32, moments in bfloat16"
    ),
    fused_routing=1,
    overlap_expert=1,
    dedup=1,
    dispatch_bytes=1 + 4 / 128,
    state_bytes=8,
    defaults=Defaults(zero=1, precision="fp8", schedule="dualpipe", vocabulary=129280),
)

META = Profile(
    name="meta-llama-3",
    source=(
        "The Llama 3 herd of models, arXiv 2407.21783, section 3.3: FSDP that splits state and gradients and does not "
        "gather weights again for the backward pass, float32 gradients, interleaved stages, a layer less on the first "
        "and on the last of them"
    ),
    balanced=1,
    tuned=1,
    defaults=Defaults(zero=2, sequence_parallel=True, schedule="interleaved", vocabulary=128256),
)

MAXTEXT = Profile(
    name="maxtext",
    source="MaxText's documentation: XLA fuses elementwise operators, its scheduler hides collectives; fsdp by default",
    overlap_tensor=1,
    weight_bytes=4,
    state_bytes=8,
    tuned=1,
    defaults=Defaults(zero=3, sequence_parallel=True, recompute="full"),
)

HYPER_PARALLEL = Profile(
    name="hyper-parallel",
    source=(
        "docs/overlap.md, docs/experts.md and strategy.precision: weights gathered a layer ahead, gradients reduced "
        "beside the next layer and in float32; two micro-batches side by side; parameters and both moments in float32; "
        "kernels as the model's code has them"
    ),
    fused=0,
    flash=2,
    ordered=1,
    scatter_bytes=4,
    weight_bytes=4,
    state_bytes=8,
    logit_bytes=12,
    logit_chunk=1 << 27,
    narrow_copies=1,
    balanced=1,
    regathers=0,
    scans=0,
    defaults=Defaults(zero=3),
)

_BY_PATTERN: tuple[tuple[str, Profile], ...] = (
    (r"hyper[-_ ]?parallel", HYPER_PARALLEL),
    (r"megatron[-_ ]?deepspeed", MEGATRON_DEEPSPEED),
    (r"bridge.*hybridep", MEGATRON_BRIDGE_HYBRIDEP),
    (r"bridge.*(nemo|recipes)", MEGATRON_BRIDGE_RECIPES),
    (r"bridge-nvl72", MEGATRON_BRIDGE_NVL72),
    (r"bridge-mixtures", MEGATRON_BRIDGE_MIXTURES),
    (r"bridge", MEGATRON_BRIDGE),
    (r"auto[-_ ]?model", AUTOMODEL),
    (r"nemo", NEMO),
    (r"megascale", MEGASCALE),
    (r"mindspeed|mindformers|modellink", MINDSPEED),
    (r"hai[-_ ]?llm|dualpipe", HAI_LLM),
    (r"^meta\b|llama[-_ ]?3 (report|paper|herd)", META),
    (r"maxtext|\bjax\b", MAXTEXT),
    (r"llm[-_ ]?foundry|composer|mosaic", LLM_FOUNDRY),
    (r"torch[-_ ]?titan.*compile", TORCHTITAN_COMPILED),
    (r"torch[-_ ]?titan", TORCHTITAN),
    (r"nanotron|picotron", NANOTRON),
    (r"megatron", MEGATRON_LM),
    (r"deepspeed", DEEPSPEED),
    (r"fsdp|accelerate", FSDP),
)
"""The first pattern that is found in a framework's name, in lower case, decides."""

PROFILES: dict[str, Profile] = {p.name: p for p in (GENERIC, *(p for _, p in _BY_PATTERN))}
"""By name."""


def profile_of(framework: str) -> Profile:
    """The profile of a framework as published runs name it, `Megatron-LM 0.14 / TE 2.11`; the generic one for others.

    >>> profile_of("nanotron v0.5").balanced
    1
    """
    name = framework.lower()
    return next((found for pattern, found in _BY_PATTERN if re.search(pattern, name)), GENERIC)


def profile(name: str) -> Profile:
    """A profile by its own name. Raises ConfigError for a name that is not known, with the nearest."""
    if name not in PROFILES:
        raise ConfigError(
            f"there is no framework profile {name!r}{nearest(name, PROFILES)}; known are {', '.join(PROFILES)}"
        )
    return PROFILES[name]
