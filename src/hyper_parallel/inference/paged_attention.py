"""Attention of a ragged pass, registered with Transformers as `NAME`: each request's queries see its own pages.

What a query sees is the model's own mask function (causal, sliding window, chunks), evaluated at the positions of the
request: models hand it to their attention's mask function, which here returns it unevaluated (`RaggedMask`). Keys that
no query of a segment sees, before a sliding window, are not read.

Each segment is a call of its own, whose bits depend on that request alone. What these calls need and layers have in
common (masks, where keys lie) is found once a pass (`Contexts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import causal_mask_function

from hyper_parallel.compat.matrix_products import unchanged_products
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.ragged_pass import RaggedPass, Segment, current, padded
from hyper_parallel.inference.row_views import RowViews

NAME = "hyper_parallel_paged"
_IGNORED = frozenset({"dropout", "sliding_window", "position_ids", "cache_position", "past_key_values"})
"""Keywords that change nothing here: the mask says what is seen, and nothing is trained."""


@dataclass(frozen=True)
class Contexts:
    """What the segments of a pass see in one kind of layers."""

    ragged: RaggedPass
    seen: list[tuple[int, Tensor | None]]
    """Of each segment: the first position that some query sees, and bool [queries, keys from there], True where seen;
    None where all are."""
    on_device: RowViews
    """Keys of each segment in the pages, where they lie in one run."""
    in_all: RowViews
    """Keys of each segment among those of all segments, one after the other."""


class RaggedMask:
    """The mask of one kind of layers in one pass."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._causal = function is causal_mask_function
        self._device = device
        self._contexts: Contexts | None = None

    def contexts(self, ragged: RaggedPass) -> Contexts:
        """Evaluated for the segments of a pass, when first needed."""
        if self._contexts is None or self._contexts.ragged is not ragged:
            seen = [self.of(segment) for segment in ragged.segments]
            pairs = list(zip(ragged.segments, seen, strict=True))
            starts = accumulate((one.end for one in ragged.segments), initial=0)
            self._contexts = Contexts(
                ragged,
                seen,
                RowViews([_in_one_run(ragged, segment, first) for segment, (first, _) in pairs]),
                RowViews(
                    [
                        slice(start + first, start + segment.end)
                        for (segment, (first, _)), start in zip(pairs, starts, strict=False)
                    ]
                ),
            )
        return self._contexts

    def of(self, segment: Segment) -> tuple[int, Tensor | None]:
        """The first position that some query of the segment sees, and what they see from there; None for all."""
        if self._causal and segment.count == 1:
            return 0, None
        queries = torch.arange(segment.first, segment.end, device=self._device)
        keys = torch.arange(segment.end, device=self._device)
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        seen = self._function(zero, zero, queries[:, None], keys[None, :])
        seen = torch.as_tensor(seen, device=self._device).expand(segment.count, segment.end)
        first = int(seen.any(0).int().argmax())
        part = seen[:, first:]
        return first, None if bool(part.all()) else part.contiguous()


def _in_one_run(ragged: RaggedPass, segment: Segment, first: int) -> slice | None:
    """Rows of the KV cache with a segment's context from token `first` on, where it is one run of the device."""
    if first < segment.base:
        return None
    rows = ragged.cached_rows(segment, first)
    return rows[0] if len(rows) == 1 else None


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
    contexts = attention_mask.contexts(current())
    given_keys = _read(module, key, value, contexts)
    plain = softcap is not None or s_aux is not None
    # Its products are of one request each, whatever else is in the pass.
    with unchanged_products():
        counts = [segment.count for segment in contexts.ragged.segments]
        filling = query.size(2) - sum(counts)
        *queries, rest = query.split_with_sizes([*counts, filling], 2)
        parts = []
        for one, (_, mask), (keys, values) in zip(queries, contexts.seen, given_keys, strict=True):
            if plain:
                part = _plain(one, keys, values, mask, scale, softcap, s_aux)
            else:
                grouped = keys.size(1) != one.size(1)
                part = scaled_dot_product_attention(one, keys, values, mask, scale=scale, enable_gqa=grouped)
            parts.append(part)
        if filling:
            parts.append(parts[0].new_zeros(*rest.shape[:3], parts[0].size(3)))
        # Contiguous: some models view it.
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


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


def _read(
    module: nn.Module, key: Tensor, value: Tensor, contexts: Contexts
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [1, H, S, D] that each segment sees: from pages, or out of all contexts. The next ones may
    overwrite them."""
    ragged = contexts.ragged
    found = ragged.returned.get(key.data_ptr())
    if found is not None and found.same(key, value):
        layer = found.layer
        views = (contexts.on_device.of(x, 2) for x in layer.rows)
        for segment, (first, _), keys, values in zip(ragged.segments, contexts.seen, *views, strict=True):
            yield layer.read(segment, first) if keys is None or values is None else (keys, values)
        return
    last = ragged.last
    if last is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends without writing to the cache")
    if not last.expand:
        last.expand = True
        raise ExpandsKeys
    total = sum(segment.end for segment in ragged.segments)
    if key.size(2) != padded(total):
        raise UnsupportedModelError(
            f"{type(module).__name__} gives attention {key.size(2)} keys, where its requests have {total}"
        )
    for keys, values in zip(contexts.in_all.of(key, 2), contexts.in_all.of(value, 2), strict=True):
        assert keys is not None
        assert values is not None
        yield keys, values


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
