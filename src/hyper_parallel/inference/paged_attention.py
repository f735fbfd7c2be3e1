"""Attention of a ragged pass, registered with Transformers as `NAME`: each request's queries see its own pages.

What a query sees is the model's own mask function (causal, sliding window, chunks), evaluated at the positions of the
request: models hand it to their attention's mask function, which here returns it unevaluated (`RaggedMask`). Keys that
no query of a segment sees, before a sliding window, are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import causal_mask_function

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.ragged_pass import Segment, current, padded

NAME = "hyper_parallel_paged"
_IGNORED = frozenset({"dropout", "sliding_window", "position_ids", "cache_position", "past_key_values"})
"""Keywords that change nothing here: the mask says what is seen, and nothing is trained."""


class RaggedMask:
    """The mask of one kind of layers in one pass, evaluated for each segment when first needed."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._causal = function is causal_mask_function
        self._device = device
        self._seen: dict[Segment, tuple[int, Tensor | None]] = {}

    def of(self, segment: Segment) -> tuple[int, Tensor | None]:
        """The first position that some query of the segment sees, and bool [queries, keys from there], True where seen;
        None where all are."""
        if self._causal and segment.count == 1:
            return 0, None
        if segment not in self._seen:
            queries = torch.arange(segment.first, segment.end, device=self._device)
            keys = torch.arange(segment.end, device=self._device)
            zero = torch.zeros((), dtype=torch.int64, device=self._device)
            seen = self._function(zero, zero, queries[:, None], keys[None, :])
            seen = torch.as_tensor(seen, device=self._device).expand(segment.count, segment.end)
            first = int(seen.any(0).int().argmax())
            part = seen[:, first:]
            self._seen[segment] = (first, None if bool(part.all()) else part.contiguous())
        return self._seen[segment]


def ragged_mask(
    *_: Any, mask_function: Callable[..., Any], attention_mask: Any = None, **given: Any
) -> RaggedMask:
    """Transformers' mask function for `NAME`. Raises UnsupportedModelError for a mask of padding."""
    if attention_mask is not None:
        raise UnsupportedModelError("the model makes its own mask, which does not suit a ragged batch")
    return RaggedMask(mask_function, given.get("device") or torch.device("cpu"))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function for `NAME`: query [1, H, T, D] to output [1, T, H, D of values].

    Raises UnsupportedModelError for what it does not know, which would be left out silently.
    """
    if not isinstance(attention_mask, RaggedMask):
        raise UnsupportedModelError(f"{type(module).__name__} gives attention no mask function")
    check_keywords(module, given)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    read = _contexts(module, key, value)
    plain = softcap is not None or s_aux is not None
    parts = []
    for segment in current().segments:
        first, mask = attention_mask.of(segment)
        keys, values = read(segment, first)
        queries = query[:, :, segment.rows]
        if plain:
            part = _plain(queries, keys, values, mask, scale, softcap, s_aux)
        else:
            grouped = keys.size(1) != queries.size(1)
            part = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=grouped)
        parts.append(part.transpose(1, 2))
    filling = query.size(2) - sum(segment.count for segment in current().segments)
    if filling:
        parts.append(parts[0].new_zeros(1, filling, *parts[0].shape[2:]))
    # Contiguous: some models view it.
    return torch.cat(parts, 1), None


def check_keywords(module: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a keyword that attention would leave out silently."""
    for name, setting in given.items():
        if setting is not None and name not in _IGNORED and not isinstance(setting, bool):
            raise UnsupportedModelError(
                f"{type(module).__name__} gives attention {name}, which paged attention does not know"
            )


def register() -> None:
    """Make the attention and its masks known to Transformers, once."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ragged_mask)


class ExpandsKeys(Exception):
    """A layer computes with what the cache returned. It is now given all contexts: run the pass again."""


Read = Callable[[Segment, int], tuple[Tensor, Tensor]]


def _contexts(module: nn.Module, key: Tensor, value: Tensor) -> Read:
    """How keys and values [1, H, end - first, D] of a segment are read: from pages, or out of all contexts."""
    ragged = current()
    found = ragged.returned.get(key.data_ptr())
    if found is not None and found.same(key, value):
        return found.layer.read
    layer = ragged.last
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends without writing to the cache")
    if not layer.expand:
        layer.expand = True
        raise ExpandsKeys
    starts = dict(
        zip(ragged.segments, accumulate((one.end for one in ragged.segments), initial=0), strict=False)
    )
    total = sum(segment.end for segment in ragged.segments)
    if key.size(2) != padded(total):
        raise UnsupportedModelError(
            f"{type(module).__name__} gives attention {key.size(2)} keys, where its requests have {total}"
        )

    def out_of_all(segment: Segment, first: int) -> tuple[Tensor, Tensor]:
        part = slice(starts[segment] + first, starts[segment] + segment.end)
        return key[:, :, part], value[:, :, part]

    return out_of_all


def _plain(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores (Gemma 2, section 2) or attention sinks (Xiao et al. 2023: a logit of each head
    without a value), which no kernel of PyTorch has. Softmax in float32."""
    groups = queries.size(1) // keys.size(1)
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    scores = queries @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks_H is None:
        shares = scores.softmax(-1, dtype=torch.float32)
    else:
        sinks = sinks_H.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return shares.to(values.dtype) @ values
