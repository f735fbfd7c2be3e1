"""Attention of a ragged pass, registered with Transformers as `NAME`: each request's queries see its own pages.

What a query sees is the model's own mask function (causal, sliding window, chunks), evaluated at the positions of the
request: models hand it to their attention's mask function, which here returns it unevaluated (`RaggedMask`). Keys that
no query of a segment sees, before a sliding window, are not read.

Each segment is a separate call, whose bits depend on that request alone. What these calls need and layers have in
common (masks, where keys lie) is found once a pass (`Contexts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import causal_mask_function

from hyper_parallel.compat.dispatch import unchanged_products
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.kv_cache.paged_cache import Matrices, PagedLayer
from hyper_parallel.inference.ragged_pass import RaggedPass, Segment, current

# Views of the rows of many requests in one call: PyTorch's split, with the gaps between them as parts of their own.
#
# A slice for each request and layer costs a few microseconds of Python each; one split of the whole store costs a
# tenth, and its sizes are the same for all layers of a pass.


class RowViews:
    """Slices of the rows of a tensor, None for those that no view can give. Of slices that overlap, the second is given
    none either."""

    def __init__(self, slices: Sequence[slice | None]) -> None:
        self._places: list[int | None] = [None] * len(slices)
        """The part of the split that each is."""
        self._sizes: list[int] = []
        self._end = 0
        known = [(rows.start, rows.stop, place) for place, rows in enumerate(slices) if rows is not None]
        for start, stop, place in sorted(known):
            if start < self._end:
                continue
            self._places[place] = len(self._sizes) + 1
            self._sizes += [start - self._end, stop - start]
            self._end = stop

    def of(self, x: Tensor, dim: int) -> list[Tensor | None]:
        """The views, of a tensor whose rows are its dimension `dim`."""
        parts = x.split_with_sizes([*self._sizes, x.size(dim) - self._end], dim)
        return [None if place is None else parts[place] for place in self._places]


M = TypeVar("M", bound="PositionMask")
NAME = "hyper_parallel_paged"
_IGNORED = frozenset({"dropout", "sliding_window", "position_ids", "cache_position", "past_key_values"})
"""Keywords that change nothing here: the mask says what is seen, and nothing is trained."""


@dataclass(frozen=True)
class Contexts:
    """The contexts that the segments of a pass see in one kind of layers."""

    ragged: RaggedPass
    seen: list[tuple[int, Tensor | None]]
    """Of each segment: the first position that some query sees, and bool [queries, keys from there], True where seen;
    None where all are."""
    on_device: RowViews
    """Keys of each segment in the pages, where they lie in one run."""


MaskFunction = Callable[..., Any]
"""Transformers' mask function of (batch, head, query position, key position)."""


class PositionMask:
    """The mask of one kind of layers, evaluated at positions."""

    def __init__(self, function: MaskFunction) -> None:
        self._function = function

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bool [queries, keys], True where seen."""
        zero = torch.zeros((), dtype=torch.int64, device=queries.device)
        seen = self._function(zero, zero, queries[:, None], keys[None, :])
        return torch.as_tensor(seen, device=queries.device).expand(len(queries), len(keys))


class RaggedMask(PositionMask):
    """The mask of one kind of layers in one pass."""

    def __init__(self, function: MaskFunction, device: torch.device) -> None:
        super().__init__(function)
        self._causal = function is causal_mask_function
        self._device = device
        self._contexts: Contexts | None = None

    def contexts(self, ragged: RaggedPass) -> Contexts:
        """Evaluated for the segments of a pass, when first needed."""
        if self._contexts is None or self._contexts.ragged is not ragged:
            seen = [self.of(segment) for segment in ragged.segments]
            pairs = list(zip(ragged.segments, seen, strict=True))
            self._contexts = Contexts(
                ragged,
                seen,
                RowViews([_in_one_run(ragged, segment, first) for segment, (first, _) in pairs]),
            )
        return self._contexts

    def of(self, segment: Segment) -> tuple[int, Tensor | None]:
        """The first position that some query of the segment sees, and what they see from there; None for all."""
        if self._causal and segment.count == 1:
            return 0, None
        queries = torch.arange(segment.first, segment.end, device=self._device)
        keys = torch.arange(segment.end, device=self._device)
        seen = self.seen(queries, keys)
        first = int(seen.any(0).int().argmax())
        part = seen[:, first:]
        return first, None if bool(part.all()) else part.contiguous()


def _in_one_run(ragged: RaggedPass, segment: Segment, first: int) -> slice | None:
    """Rows of the KV cache with a segment's context from token `first` on, where it is one run of the device."""
    if first < segment.base:
        return None
    rows = ragged.cached_rows(segment, first)
    return rows[0] if len(rows) == 1 else None


def ragged_mask(*_: Any, mask_function: MaskFunction, **given: Any) -> RaggedMask:
    """Makes the mask of `NAME` for a model."""
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
    contexts = checked_mask(module, attention_mask, RaggedMask, given).contexts(current())
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    read = _read(module, key, value, contexts)
    kernel = _Kernel(scale, softcap, s_aux)
    # Its products are of one request each, whatever else is in the pass.
    with unchanged_products():
        counts = [segment.count for segment in contexts.ragged.segments]
        filling = query.size(2) - sum(counts)
        *queries, rest = query.split_with_sizes([*counts, filling], 2)
        parts = [
            kernel.absorbed(one, keys, values, matrices, mask)
            if matrices is not None
            else kernel(one, keys, values, mask)
            for one, (_, mask), (keys, values, matrices) in zip(queries, contexts.seen, read, strict=True)
        ]
        if filling:
            parts.append(parts[0].new_zeros(*rest.shape[:3], parts[0].size(3)))
        # Contiguous: some models view it.
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def checked_mask(module: nn.Module, mask: object, kind: type[M], given: Mapping[str, Any]) -> M:
    """The mask that a module gives attention. Raises UnsupportedModelError for one of another kind, and for keywords
    `given` that attention would leave out silently."""
    if not isinstance(mask, kind):
        raise UnsupportedModelError(f"{type(module).__name__} gives attention no mask function")
    for name, setting in given.items():
        if setting is not None and name not in _IGNORED and not isinstance(setting, bool):
            raise UnsupportedModelError(
                f"{type(module).__name__} gives attention {name}, which paged attention does not know"
            )
    return mask


def register(name: str, function: Callable[..., Any], mask: Callable[..., PositionMask]) -> None:
    """Make an attention function and its masks known to Transformers. A model that makes a mask of padding is refused
    with UnsupportedModelError."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def checked(*args: Any, attention_mask: Any = None, **given: Any) -> PositionMask:
        if attention_mask is not None:
            raise UnsupportedModelError("the model makes its own mask, which does not suit a ragged batch")
        return mask(*args, **given)

    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, checked)


class ExpandsKeys(Exception):
    """A layer computes with what the cache returned. It is now given what it needs for that: run the pass again."""


def _read(
    module: nn.Module, key: Tensor, value: Tensor, contexts: Contexts
) -> Iterator[tuple[Tensor, Tensor, Matrices | None]]:
    """Keys and values [1, H, S, D] that each segment sees: from pages, or expanded by the layer; or what it cached
    [1, 1, S, R], and the matrices that expand it. The next ones may overwrite them."""
    ragged = contexts.ragged
    found = ragged.returned.get(key.data_ptr())
    if found is not None and found.same(key, value):
        layer: PagedLayer = found.layer
        views = (contexts.on_device.of(x, 2) for x in layer.rows)
        for segment, (first, _), keys, values in zip(ragged.segments, contexts.seen, *views, strict=True):
            if keys is None or values is None:
                yield *layer.read(segment, first), None
            else:
                yield *layer.unpacked(keys, values), None
        return
    last: PagedLayer | None = ragged.last
    if last is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends without writing to the cache")
    if not last.expand:
        last.expand = True
        raise ExpandsKeys
    latents = last.latents
    if key.size(2) != latents.rows:
        raise UnsupportedModelError(
            f"{type(module).__name__} gives attention {key.size(2)} keys, and was given {latents.rows} cached ones"
        )
    matrices = latents.learn(key, value)
    places = [latents.whole(segment) for segment in ragged.segments]
    if matrices is None and None in places:
        raise ExpandsKeys
    for segment, rows, (first, _) in zip(ragged.segments, places, contexts.seen, strict=True):
        if rows is None:
            yield *last.read(segment, first), matrices
        else:
            seen = slice(rows.start + first, rows.stop)
            yield key[:, :, seen], value[:, :, seen], None


@dataclass(frozen=True)
class _Kernel:
    """Attention of one segment's queries [1, H, count, D]. Softmax in float32."""

    scale: float
    softcap: float | None
    """Of scores (Gemma 2, section 2)."""
    sinks_H: Tensor | None
    """A logit of each head without a value (Xiao et al. 2023)."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """To keys and values [1, H, S, D]."""
        if self.softcap is None and self.sinks_H is None:
            grouped = keys.size(1) != queries.size(1)
            return scaled_dot_product_attention(
                queries, keys, values, mask, scale=self.scale, enable_gqa=grouped
            )
        groups = queries.size(1) // keys.size(1)
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        return self._shares(queries @ keys.transpose(2, 3), mask, values.dtype) @ values

    def absorbed(
        self, queries: Tensor, first: Tensor, second: Tensor, matrices: Matrices, mask: Tensor | None
    ) -> Tensor:
        """To what was cached, [1, 1, S, R1] and [1, 1, S, R2]."""
        one, other = first[0, 0], second[0, 0]
        heads, count = queries.shape[1:3]
        # Contiguous: a view's strides depend on what else is in the pass, and kernels are chosen by them.
        to_both = torch.bmm(queries[0].contiguous(), matrices.keys.transpose(1, 2))
        to_one, to_other = to_both.split([one.size(1), other.size(1)], 2)
        scores = to_one.reshape(-1, one.size(1)) @ one.t()
        scores = scores + to_other.reshape(-1, other.size(1)) @ other.t()
        shares = self._shares(scores.view(1, heads, count, -1), mask, one.dtype).view(heads * count, -1)
        out = torch.bmm((shares @ one).view(heads, count, -1), matrices.values[:, : matrices.first])
        if not matrices.one_in_values:
            out = out + torch.bmm(
                (shares @ other).view(heads, count, -1), matrices.values[:, matrices.first :]
            )
        return out[None]

    def _shares(self, scores: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The share of each value, for products [1, H, count, S] of queries and keys."""
        scores = scores * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks_H is None:
            return scores.softmax(-1, dtype=torch.float32).to(dtype)
        sinks = self.sinks_H.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(dtype)
