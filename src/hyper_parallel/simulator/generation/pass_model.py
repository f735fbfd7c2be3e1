"""Model of a pass of generation on one rank: operators whose work is affine in the tokens of the pass.

    amount(T, A) = fixed + row · T + answer · A             T rows of the pass, A rows whose logits are computed

All of a pass but attention is such: FLOPs, bytes and matrix sizes of every operator. Attention depends on the
contexts of the pass's requests (`attention`), the weights of experts on how many of them its tokens choose
(`distinct_experts`). A `PassModel` is captured from the model's code (`estimate.generate_capture`) or derived from
its dimensions (`shape_pass`); bounds, predictions and Traces are made from either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work, WorkKind

GRANULE = 16
"""Rows of a pass, and rows of logits, are filled up to a multiple of this, as the engine does."""


@dataclass(frozen=True, slots=True)
class Affine:
    """fixed + row · T + answer · A."""

    fixed: float = 0.0
    row: float = 0.0
    answer: float = 0.0

    def at(self, rows: float, answers: float) -> float:
        """The amount for T rows and A answers."""
        return self.fixed + self.row * rows + self.answer * answers


@dataclass(frozen=True, slots=True)
class PassOp:
    """One operator of a pass: a kernel, or a collective that is waited for."""

    name: str
    module: str = ""
    """Of the module that runs it; in a layer, from the layer on."""
    kind: WorkKind | None = None
    """None for a collective."""
    dtype: str = "bfloat16"
    op: str = ""
    layout: str = ""
    flops: Affine = Affine()
    vector_flops: Affine = Affine()
    read: Affine = Affine()
    written: Affine = Affine()
    fresh: Affine = Affine()
    shape: tuple[Affine, ...] = ()
    collective: Collective | None = None
    """Its bytes are `read`."""
    role: Literal["", "attention", "experts"] = ""
    """`attention` is priced by the contexts of a pass; `experts`: a product with the weights of a rank's experts, the
    fixed part of whose `read` they are."""

    def work(self, rows: int, answers: int, touched: float = 1.0) -> Work:
        """For a pass; `touched`: the share of the rank's experts that are chosen."""
        share = touched if self.role == "experts" else 1.0
        read = self.read.at(rows, answers) - (1 - share) * self.read.fixed
        shape = [round(size.at(rows, answers)) for size in self.shape]
        if self.role == "experts" and len(shape) == 4:
            groups = max(1, round(shape[0] * share))
            shape[1] = max(1, round(shape[0] * shape[1] / groups))
            shape[0] = groups
        assert self.kind is not None
        return Work(
            self.kind,
            flops=self.flops.at(rows, answers),
            vector_flops=self.vector_flops.at(rows, answers),
            read=read,
            written=self.written.at(rows, answers),
            dtype=self.dtype,
            shape=tuple(shape),
            op=self.op,
            layout=self.layout,
            fresh=self.fresh.at(rows, answers),
        )

    def call(self, rows: int, answers: int) -> Collective:
        """The collective of a pass."""
        assert self.collective is not None
        return replace(self.collective, bytes=round(self.read.at(rows, answers)))


@dataclass(frozen=True)
class AttentionSizes:
    """Attention of one layer on one rank."""

    heads: int
    kv_heads: int
    key: int
    """Size of a head's query and key."""
    value: int
    window: int = 0
    """Tokens that a query sees; 0: all before it."""
    latent: tuple[int, int] | None = None
    """(rank of keys and values, dims with position) where latents are cached; decode then attends to these, with the
    weights that would expand them absorbed into queries and outputs."""
    element: int = 2
    """Bytes of an element of the cache."""
    dtype: str = "bfloat16"

    @property
    def token(self) -> int:
        """Bytes that the layer caches of a token."""
        elements = self.kv_heads * (self.key + self.value) if self.latent is None else sum(self.latent)
        return elements * self.element

    def seen(self, context: float) -> float:
        """Tokens that the last query of a context sees."""
        return min(context, self.window) if self.window else context


@dataclass(frozen=True)
class Layer:
    """The work of every layer of one kind."""

    ops: tuple[PassOp, ...]
    weights: int
    """Bytes on this rank, experts included."""
    experts: int = 0
    """Bytes of routed experts among them."""
    attention: AttentionSizes | None = None


@dataclass(frozen=True)
class PassModel:
    """A model's pass on one rank."""

    name: str
    before: tuple[PassOp, ...]
    """Of the embedding."""
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
    """The kind of each layer."""
    after: tuple[PassOp, ...]
    """Of the last norm and the head."""
    outer_weights: int
    """Bytes of embedding, last norm and head on this rank."""
    live: tuple[tuple[Affine, Affine], ...]
    """By operator of a few layers, bytes that it allocates and then frees."""
    parameters: int
    """Elements of the whole model."""
    experts: int = 0
    """Routed experts of a layer, on all ranks."""
    chosen: int = 0
    routed: int = 1
    """Ranks with different tokens whose tokens meet at this rank's experts."""
    world: int = 1
    split: int = 1
    """Ranks that have different requests (replicate, shard)."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """In order."""
        return tuple(self.kinds[kind] for kind in self.order)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights on this rank."""
        return self.outer_weights + sum(layer.weights for layer in self.layers)

    @cached_property
    def local_experts(self) -> int:
        """Routed experts of a layer on one rank."""
        products = (op for kind in self.kinds for op in kind.ops if op.role == "experts" and op.shape)
        return next((round(op.shape[0].fixed) for op in products), 0)

    @property
    def token(self) -> int:
        """Bytes that this rank caches of a token."""
        return sum(layer.attention.token for layer in self.layers if layer.attention)

    def held(self, tokens: float, past_windows: bool = True) -> float:
        """Bytes of a context's pages; without `past_windows` only what a query can still see."""
        return sum(
            one.token * (tokens if past_windows else one.seen(tokens))
            for layer in self.layers
            if (one := layer.attention)
        )

    def workspace(self, rows: int, answers: int) -> float:
        """Peak of what a pass allocates and frees, in bytes."""
        now = most = 0.0
        for made, freed in self.live:
            now += made.at(rows, answers)
            most = max(most, now)
            now -= freed.at(rows, answers)
        return most


def filled(rows: int) -> int:
    """Rows of a pass with those that fill it up."""
    return -(-rows // GRANULE) * GRANULE


def fitted(points: Sequence[tuple[int, int]], values: Sequence[float]) -> Affine:
    """The amount with these values at three points (T, A): (t, a), (u, a) and (t, b)."""
    (t, a), (u, _), (_, b) = points
    row = (values[1] - values[0]) / (u - t)
    answer = (values[2] - values[0]) / (b - a)
    return Affine(values[0] - row * t - answer * a, row, answer)


# Load of one pass: which tokens of which contexts it computes, and the attention that this takes.
#
# A piece is `count` tokens of a request behind `first` cached ones. For a layer with H heads of queries, and keys and
# values of sizes d and e,
#
#     keys     = Σ_pieces count · (first + (count + 1) / 2)            seen keys, without a window         `Piece.keys`
#     FLOPs    = 2 · H · (d + e) · keys                                                                    `works`
#     bytes    = Σ_pieces (first + count) · bytes of a token           each context is read once a pass
#
# Requests that generate (pieces of one token) are one call; each piece of a prompt is one. Latents of rank c with r
# dims of position are attended to as they are cached by requests that generate (d = c + r, e = c), and expanded for a
# piece of a prompt: 2 · (first + count) · c · H · (d + e − r) FLOPs.


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
