"""Load of one pass: which tokens of which contexts it computes, and the attention that this takes.

A piece is `count` tokens of a request behind `first` cached ones. For a layer with H heads of queries, and keys and
values of sizes d and e,

    keys     = Σ_pieces count · (first + (count + 1) / 2)            seen keys, without a window         `Piece.keys`
    FLOPs    = 2 · H · (d + e) · keys                                                                    `works`
    bytes    = Σ_pieces (first + count) · bytes of a token           each context is read once a pass

Requests that generate (pieces of one token) are one call; each piece of a prompt is one. Latents of rank c with r
dims of position are attended to as they are cached by requests that generate (d = c + r, e = c), and expanded for a
piece of a prompt: 2 · (first + count) · c · H · (d + e − r) FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hyper_parallel.simulator.generation.pass_model import AttentionSizes, filled
from hyper_parallel.workload.work import Work


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request in a pass."""

    count: int
    first: int = 0

    @property
    def end(self) -> int:
        """Tokens that are cached after the pass."""
        return self.first + self.count

    def keys(self, window: int = 0) -> float:
        """Keys that its queries see together."""
        if not window or self.end <= window:
            return self.count * (self.first + (self.count + 1) / 2)
        # Queries at positions below the window see all before them, the others `window` keys.
        whole = max(0, min(self.count, window - self.first))
        return whole * (self.first + (whole + 1) / 2) + (self.count - whole) * window

    def read(self, window: int = 0) -> int:
        """Tokens of the context that its queries see."""
        return min(self.end, window + self.count - 1) if window else self.end


@dataclass(frozen=True)
class PassLoad:
    """The pieces of a pass, and how many of its tokens decide a next one."""

    pieces: tuple[Piece, ...]
    ready: int

    @classmethod
    def of(cls, pieces: Iterable[Piece], ready: int) -> PassLoad:
        """In the order that does not matter, so that equal passes are equal."""
        return cls(tuple(sorted(pieces, key=lambda one: (one.count, one.first))), ready)

    @classmethod
    def decode(cls, batch: int, context: int) -> PassLoad:
        """One new token for each of `batch` requests with `context` cached tokens."""
        return cls((Piece(1, context),) * batch, batch)

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(piece.count for piece in self.pieces)

    @property
    def rows(self) -> int:
        """Rows of the pass, filled up."""
        return filled(self.tokens)

    @property
    def answers(self) -> int:
        """Rows of logits, filled up."""
        return filled(self.ready)


def works(load: PassLoad, sizes: AttentionSizes, selected: int = 0) -> Iterator[Work]:
    """The kernels of a layer's attention. `selected`: tokens that sparse attention reads of a context; 0: all."""
    window = min(filter(None, (sizes.window, selected)), default=0)
    single = [piece for piece in load.pieces if piece.count == 1]
    if single:
        keys = sum(piece.keys(window) for piece in single)
        yield _single(sizes, len(single), keys)
    for piece in load.pieces:
        if piece.count > 1:
            yield from _prompt(sizes, piece, sizes.window)


def _single(sizes: AttentionSizes, batch: int, keys: float) -> Work:
    """One query for each request, in one call."""
    heads, key, value = sizes.heads, sizes.key, sizes.value
    if sizes.latent is not None:
        rank, rotary = sizes.latent
        key, value = rank + rotary, rank
    ends = batch * heads * sizes.element
    return Work(
        "attention",
        flops=2.0 * heads * (key + value) * keys,
        read=keys * sizes.token + ends * key,
        written=float(ends * value),
        dtype=sizes.dtype,
        shape=(batch, heads, 1, max(1, round(keys / batch)), (key + value) // 2),
        op="paged_attention",
        layout="forward",
    )


def _prompt(sizes: AttentionSizes, piece: Piece, window: int) -> Iterator[Work]:
    """A piece of a prompt. Keys are the mean number that a query sees, which is what a kernel that skips masked scores
    computes."""
    heads, key, value = sizes.heads, sizes.key, sizes.value
    end = piece.read(window)
    read, element = float(end * sizes.token), sizes.element
    if sizes.latent is not None:
        rank, rotary = sizes.latent
        # The piece's own latents are expanded by an operator of the pass.
        before, out = end - piece.count, heads * (key + value - rotary)
        if before > 0:
            yield Work.of_matmul(before, out, rank, dtype=sizes.dtype, layout="nt", size=element)
        read += float(end * out * element)
    mean = piece.keys(window) / piece.count
    yield Work(
        "attention",
        flops=2.0 * heads * (key + value) * piece.keys(window),
        read=read + piece.count * heads * key * element,
        written=float(piece.count * heads * value * element),
        dtype=sizes.dtype,
        shape=(1, heads, piece.count, max(1, round(mean)), (key + value) // 2),
        op="paged_attention",
        layout="forward",
    )
