"""How a published run's step is priced: what its framework's kernels and libraries are, beside what a run file says.

Attention with sinks and sliding windows is captured as one kernel (`fuse`), which Transformers writes out operator by
operator. A window is a mask in its call of fused attention, under which all scores are computed; the published
frameworks' kernels skip what it hides. GPT-OSS adds to each head's softmax a learnt logit without a value, a sink, and
every other layer sees 128 positions back. Transformers has both without a fused kernel only; Transformer Engine and
FlashAttention 3, which the published frameworks call, compute them in the kernel. The sink enters the normalization
within the kernel and is no operator of its own: times are right, numbers are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.collective_cost import TokenDispatch
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.prediction import model_of
from hyper_parallel.estimate.stage_price import left_out_seconds
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.planner.table import Table
from hyper_parallel.simulator.op_costs import Costs


@dataclass(frozen=True)
class Pricing:
    """What a framework's kernels and libraries are, beside what a run file says."""

    fused: bool
    """Memory-bound operators of all layers and of the loss are fused."""
    fused_loss: bool
    dispatch: TokenDispatch | None
    recomputes_whole: bool
    """What computes a layer again runs all of its forward pass."""

    @classmethod
    def of(cls, t: Table, profile: str, *, recompute: bool) -> Pricing:
        """Of a row's framework. `recompute`: the row computes layers again."""
        share = float(t.dedup[0])
        sends = t.expert[0] > 1 and share > 0
        groups = float(t.expert_groups[0]), float(t.chosen_groups[0])
        return cls(
            bool(t.fused[0] >= 1),
            bool(t.logit_bytes[0] <= FUSED_LOSS),
            TokenDispatch(float(t.chosen[0]), *groups, share) if sends else None,
            recompute and profile not in NEEDED_ONLY,
        )

    def parts(self, data: Mapping[str, Any], cluster: Cluster, name: str) -> Mapping[str, float]:
        """Seconds of a step by part."""
        loss: frozenset[str] = frozenset({"loss"}) if self.fused_loss else frozenset()
        context = replace(
            current_step(), fused=loss, sums_in_products=self.fused, recomputes_whole=self.recomputes_whole
        )
        with context.installed():
            run = config.from_dict(dict(data), source=name)
            model = model_of(run, [])
            if run.model.attention == "auto":
                fuse(model)
            found = predict_run(run, cluster, model=model, fused=self.fused, dispatch=self.dispatch)
        parts = defaultdict(float, found.parts)
        if self.recomputes_whole and found.pipeline is None:
            trace = found.timeline.trace
            (ops,) = trace.ops.values()
            parts["products"] += left_out_seconds(ops, Costs(cluster, self.dispatch, trace.world))
        return parts


NEEDED_ONLY = ("torchtitan", "torchtitan-compiled", "nemo-automodel", "fsdp", "maxtext", "hyper-parallel")
"""Profiles that compute again only what a gradient needs: PyTorch's checkpoint without reentry, which since PyTorch 2.1
stops when it has that (`set_checkpoint_early_stop`), and XLA, which removes what nothing uses. Megatron's
`CheckpointFunction`, DeepSpeed's and nanotron's run the layer again as a whole, and so did PyTorch 1.13, with which
llm-foundry's benchmark ran (scripts/train/benchmarking/submit_benchmarks.py: mosaicml/pytorch:1.13.1)."""
FUSED_LOSS = 6.0
"""Bytes of a logit in a framework whose loss is fused: its value and its gradient, beside a copy at most."""


KERNEL = "published_attention"


def fuse(model: nn.Module) -> None:
    """Have a model's attention captured as one kernel, where the family has none in Transformers, or has a window."""
    from transformers import AttentionInterface, AttentionMaskInterface

    config: Any = getattr(model, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if not eager and getattr(config, "sliding_window", None) is None:
        return
    AttentionInterface.register(KERNEL, _attention)
    AttentionMaskInterface.register(KERNEL, _no_mask)
    config._attn_implementation = KERNEL


def _no_mask(*_: Any, **__: Any) -> None:
    """The kernel knows its causal mask and its window."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[B, S, H, D] of queries [B, H, S, D], keys and values [B, K, S, D]."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    left, right = (None, None) if sliding_window is None else (sliding_window - 1, 0)
    window = {"window_size_left": left, "window_size_right": right}
    lengths, causal = (None, None, q.size(1), k.size(1)), (0.0, True, False)  # no dropout, causal, no mask
    kernel = torch.ops.aten._flash_attention_forward
    out: Tensor = kernel(q, k, v, *lengths, *causal, scale=scaling, **window)[0]
    return out, None
