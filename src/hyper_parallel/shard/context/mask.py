"""Attention masks as descriptions: which keys a query sees, for any two sets of positions.

Transformers asks the mask function that is registered for an attention, and hands what it returns to every layer as
its mask. So the description reaches the attention whenever a layer runs, recomputation included. What Transformers
asks for is a chain of closures (``transformers.masking_utils``); those that are known are read, anything else is
refused by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.compat.local_tensor import is_simulated, per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.context.block_attention import UNKNOWN, Documents
from hyper_parallel.shard.context.plan import PositionSplit, position_chunks


class Positions:
    """The positions of one forward pass: their split over ranks, and their documents."""

    def __init__(
        self,
        split: PositionSplit,
        ring: Callable[[int], int],
        position_ids: Tensor,
        documents: tuple[Tensor, Tensor] | None = None,
        padded: bool = False,
    ) -> None:
        """`ring`: a rank to its ring index. `position_ids` [..., S] of whole rows. `documents`: of queries and of keys,
        int64 [B, S] of whole rows, non-decreasing; None for one document a row. `padded`: `documents` mark padding
        instead of packed documents."""
        self.padded = padded
        self.split, self.position_ids = split, position_ids
        self.length = position_ids.size(-1)
        self._ring_index = ring
        self.packed = documents is not None and not padded
        self._queries = documents[0] if documents is not None else None
        self._keys = documents[1] if documents is not None else None
        self._host: Documents | None = None
        self.attentions = 0
        """How many times attention has been computed in the forward pass."""

    @property
    def documents(self) -> Documents | None:
        """The documents on the host; copied there once. UNKNOWN where the tensors have no values."""
        if self._queries is None or self._keys is None or is_simulated():
            return None
        if is_fake(self._queries):
            return UNKNOWN
        if self._host is None:
            both: Any = torch.stack([self._queries, self._keys]).cpu().numpy()
            self._host = Documents(both[0], both[1])
        return self._host

    def at(self, distance: int, device: torch.device) -> Tensor:
        """int64 [S / ring]: the positions of the ring index `distance` before each rank's."""
        rings = self.split.ring
        return per_rank(
            lambda rank: torch.cat(
                [
                    torch.arange(*piece, device=device)
                    for piece in position_chunks(
                        self.length, rings, (self._ring_index(rank) - distance) % rings
                    )
                ]
            )
        )

    def together(self, queries_S: Tensor, keys_T: Tensor) -> Tensor | None:
        """bool [B, S, T]: which are of one document; None where all are."""
        if self._queries is None or self._keys is None:
            return None
        documents_q = self._queries.index_select(1, queries_S)
        documents_k = self._keys.index_select(1, keys_T)
        return documents_q[:, :, None] == documents_k[:, None, :]


class ContextMask:
    """The mask that a layer's attention gets. No tensor, so that nothing slices or converts it."""

    def __init__(self, positions: Positions, window: int | None, separate: bool) -> None:
        """`separate`: documents do not see each other."""
        self.positions, self.window, self.separate = positions, window, separate

    @property
    def documents(self) -> Documents | None:
        """The documents that are kept apart, on the host."""
        return self.positions.documents if self.separate else None

    def seen(self, queries: Interval, keys: Interval, device: torch.device) -> Tensor:
        """bool [B or 1, 1, queries, keys]: which keys of one interval of positions queries of another see."""
        return self._seen(torch.arange(*queries, device=device), torch.arange(*keys, device=device))

    def seen_at(self, distance: int, device: torch.device) -> Tensor:
        """bool [B or 1, 1, S / ring, S / ring]: what the queries of each rank's ring index see of the keys of the
        ring index `distance` before it."""
        return self._seen(self.positions.at(0, device), self.positions.at(distance, device))

    def _seen(self, queries_S: Tensor, keys_T: Tensor) -> Tensor:
        q, k = queries_S[:, None], keys_T[None, :]
        seen = k <= q
        if self.window is not None:
            seen = seen & (k > q - self.window)
        together = self.positions.together(queries_S, keys_T) if self.separate else None
        return seen[None, None] if together is None else (seen[None] & together)[:, None]


_running: ContextVar[Positions | None] = ContextVar("positions", default=None)


@contextlib.contextmanager
def split_positions(positions: Positions) -> Iterator[None]:
    """Inside, a forward pass runs whose positions are split. It says so to its own masks and embeddings: an input of
    the step, which would be in `graph.step_context`, this is not."""
    token = _running.set(positions)
    try:
        yield
    finally:
        _running.reset(token)


def running_positions() -> Positions | None:
    """The positions of the forward pass that is running; None where none are split."""
    return _running.get()


def context_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    cache_position: Tensor | None = None,
    **others: Any,
) -> ContextMask:
    """The mask function registered with Transformers. Raises StrategyError for a mask that is not understood."""
    positions = running_positions()
    if positions is None:
        raise StrategyError(
            "a mask was asked for outside of the language model's forward pass, whose positions are split over "
            "axes.context; set axes.context to 1 for this model"
        )
    if q_length is None:
        # Transformers 5.3 gives the queries' positions, which without a cache begin at 0.
        assert cache_position is not None
        q_length = cache_position.size(0)
    if q_length != kv_length or not _is_zero(q_offset) or not _is_zero(kv_offset):
        raise StrategyError(
            f"{q_length} queries at {q_offset} and {kv_length} keys at {kv_offset}: with axes.context queries and keys "
            "are those of one sequence, without a cache; call the model with use_cache=False"
        )
    causal, window, packed = read_mask(mask_function)
    if not causal:
        raise StrategyError(
            "the model asks for attention in both directions; axes.context knows causal masks, with windows and "
            "documents; set axes.context to 1 for this model"
        )
    return ContextMask(positions, window, positions.padded or packed)


class MaskKind(NamedTuple):
    """The keys that a mask function of Transformers hides."""

    causal: bool
    window: int | None
    packed: bool
    """Packed documents do not see each other."""


def read_mask(function: Callable[..., Any] | None) -> MaskKind:
    """What the chain of closures that Transformers asks for makes of a mask.

    Which documents there are `Positions` knows from the whole rows. Raises StrategyError when a part is not known.
    """
    causal, windows, packed = False, list[int](), False
    pending = [function]
    while pending:
        part = pending.pop()
        name = getattr(part, "__qualname__", type(part).__name__).partition(".")[0]
        held = _closure(part)
        if getattr(part, "__module__", None) != "transformers.masking_utils":
            name = f"{getattr(part, '__module__', '')}.{name}"
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            windows.append(int(held["sliding_window"]))
        elif name == "and_masks":
            pending += held["mask_functions"]
        elif name in ("remap_positions_for_packed_sequence", "add_offsets_to_mask_function"):
            pending.append(held["mask_function"])
        elif name == "packed_sequence_mask_function":
            packed = True
        else:
            raise StrategyError(
                f"the model's attention mask is made with {name}, which axes.context does not understand; known are "
                "causal masks, sliding windows and packed documents; set axes.context to 1 for this model"
            )
    return MaskKind(causal, min(windows, default=None), packed)


def watch_for_documents() -> None:
    """Let Transformers' search for packed documents, which a model asks for or not, answer for the whole rows.

    Of the positions that are left of a row after the cut it would find other ones. What it answers while no positions
    are split is its own.
    """
    from transformers import masking_utils

    theirs: Any = masking_utils.find_packed_sequence_indices
    if getattr(theirs, "__wrapped__", None) is not None:
        return

    @functools.wraps(theirs)
    def find(position_ids: Tensor) -> Tensor | None:
        positions = running_positions()
        if positions is None:
            found: Tensor | None = theirs(position_ids)
            return found
        # Only that there are documents is read from the closure that this ends up in.
        return torch.zeros_like(position_ids) if positions.packed else None

    masking_utils.find_packed_sequence_indices = find


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _is_zero(offset: Any) -> bool:
    return isinstance(offset, int) and offset == 0
