"""Split of a device budget among the layers of a KV cache: resident layers, and layers that are streamed from tiers.

With T tokens and, for each layer, t bytes a token of the whole batch and h(T) tokens that attention reads,

    Σ resident t · h(T)  +  Σ streamed t · c  +  max t · h(T)  +  window  ≤  budget

c: tokens of a block; the newest, which do not fill one, stay on the device. The third term is the tensor that attention
is given, the fourth the blocks that are copied from or to the tiers at one time. Every layer is read once a token, in
the order of the layers, so it does not matter which are resident: they are spread evenly, so that a streamed layer is
read while resident ones compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRANSFER = 2**19
"""Bytes of a block, at least, where the budget allows it: smaller transfers do not reach a link's bandwidth."""
_TAILS = 16
"""The newest tokens of all layers take at most this part of the budget."""
_LEAST = 16
"""Tokens of a block, at least."""


@dataclass(frozen=True)
class LayerSize:
    """Bytes of a token in one layer, of the whole batch, and how many tokens attention reads before the newest ones;
    None for all."""

    token: int
    before: int | None = None
    pinned: bool = False
    """Whether the layer has to stay on the device."""

    def read(self, tokens: int, new: int) -> int:
        """Bytes that attention reads after `new` of `tokens` tokens have come."""
        old = tokens - new if self.before is None else min(tokens - new, self.before)
        return (old + new) * self.token

    def held(self, tokens: int) -> int:
        """Bytes of a resident layer."""
        return (tokens if self.before is None else min(tokens, self.before + 1)) * self.token

    def block(self, block: int) -> int:
        """Tokens of the layer's blocks: `block`, and at most half of what attention reads."""
        if self.before is None:
            return block
        return min(block, 1 << max(0, self.before.bit_length() - 2))


@dataclass(frozen=True)
class Split:
    """The layers that are streamed, and bytes of their blocks that may be under way at one time."""

    streamed: frozenset[int]
    window: int


def block_tokens(sizes: Sequence[LayerSize], budget: int) -> int:
    """Tokens of a block, a power of two: a transfer of `TRANSFER` bytes, or less where the budget is small."""
    most = max(one.token for one in sizes)
    block = _LEAST
    while block * most < TRANSFER and _chosen_from(sizes, 2 * block) <= budget:
        block *= 2
    return block


def spill_order(sizes: Sequence[LayerSize]) -> list[int]:
    """Layers in the order in which they become streamed: those that read all tokens first, each as far as possible from
    the others (van der Corput)."""
    full = [layer for layer, one in enumerate(sizes) if not one.pinned and one.before is None]
    windows = [layer for layer, one in enumerate(sizes) if not one.pinned and one.before is not None]
    return [group[place] for group in (full, windows) for place in _spread(len(group))]


def split(
    sizes: Sequence[LayerSize],
    tokens: int,
    new: int,
    budget: int,
    block: int,
    streamed: frozenset[int],
    largest: int = 0,
) -> Split | None:
    """The fewest streamed layers, those that are now among them, with which all fits; None where it never does.

    `largest`: bytes of the largest block that exists, of a batch that had more rows.
    """
    order = [*streamed, *(layer for layer in spill_order(sizes) if layer not in streamed)]
    least = max((sizes[layer].token * sizes[layer].block(block) for layer in order), default=0)
    least = max(least, largest)
    for count in range(len(streamed), len(order) + 1):
        chosen = frozenset(order[:count])
        wanted = max((max(sizes[layer].read(tokens, 0), least) for layer in chosen), default=0)
        free = budget - _bytes(sizes, tokens, new, block, chosen)
        if free >= wanted:
            return Split(chosen, wanted)
    return Split(frozenset(order), free) if order and free >= least else None


def smallest_budget(sizes: Sequence[LayerSize], tokens: int, new: int, block: int | None = None) -> int:
    """The least budget that suffices, and above which any does. `block`: tokens of a block, where layers are streamed
    already."""
    order = frozenset(spill_order(sizes))
    if block is not None:
        return _all_streamed(sizes, tokens, new, block, order)
    blocks = [_LEAST]
    while blocks[-1] * max(one.token for one in sizes) < TRANSFER:
        blocks.append(2 * blocks[-1])
    found: int | None = None
    for one in reversed(blocks):
        # With a larger budget blocks are larger: each size is chosen from a budget on.
        from_here = _chosen_from(sizes, one) if one > _LEAST else 0
        need = min(
            _bytes(sizes, tokens, new, one, frozenset()), _all_streamed(sizes, tokens, new, one, order)
        )
        if found is not None and need > found:
            break
        found = max(need, from_here)
        if need > from_here:
            break
    assert found is not None
    return found


def _all_streamed(
    sizes: Sequence[LayerSize], tokens: int, new: int, block: int, order: frozenset[int]
) -> int:
    """With one block under way at a time."""
    least = max((sizes[layer].token * sizes[layer].block(block) for layer in order), default=0)
    return _bytes(sizes, tokens, new, block, order) + least


def _chosen_from(sizes: Sequence[LayerSize], block: int) -> int:
    """The least budget for blocks of this number of tokens."""
    return block * max(one.token for one in sizes) * (len(sizes) + 1) * _TAILS


def _bytes(sizes: Sequence[LayerSize], tokens: int, new: int, block: int, streamed: frozenset[int]) -> int:
    """All terms but the window."""
    held = sum(
        one.token * one.block(block) if layer in streamed else one.held(tokens)
        for layer, one in enumerate(sizes)
    )
    # A resident layer moves to the tiers later by way of two blocks, when attention holds nothing.
    moving = max(
        (
            2 * one.token * one.block(block)
            for layer, one in enumerate(sizes)
            if layer not in streamed and not one.pinned
        ),
        default=0,
    )
    return held + max(moving, *(one.read(tokens, new) for one in sizes))


def _spread(count: int) -> list[int]:
    """0 … count - 1, by their bits in reverse."""
    bits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda at: int(format(at, f"0{bits}b")[::-1], 2) if bits else 0)
