"""Attention whose values have fewer features than its keys, captured as the one kernel that devices have for it.

PyTorch's fused attention of a CPU takes heads of one size. Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)
has queries and keys of 192 features and values of 128, so that on a CPU it becomes products of float32 matrices with
all scores between them, which no accelerator computes. Under `padded_values` the values are padded with zeros to the
size of the keys, and the result is cut: the same numbers by a fused kernel, for (d_qk − d_v) / (d_qk + d_v) more FLOPs
of attention, a fifth for these heads. For costs alone; a run computes what PyTorch has on its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ATTENTION = functional.scaled_dot_product_attention


class padded_values(TorchFunctionMode):
    """A context in which attention's values are padded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not ATTENTION:
            return func(*args, **named)
        named |= dict(
            zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)
        )
        query, value = named["query"], named["value"]
        features, narrow = query.size(-1), value.size(-1)
        if narrow >= features:
            return func(*args, **(kwargs or {}))
        if named.get("scale") is None:
            named["scale"] = features**-0.5
        named["value"] = functional.pad(value, (0, features - narrow))
        found: Tensor = func(**named)
        return found[..., :narrow]
