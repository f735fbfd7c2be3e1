"""Token mixers beside softmax attention: state-space layers, delta rules, linear attention, short convolutions.

A mixer projects the hidden state h to `inputs` columns, convolves `channels` of them over `kernel` tokens, mixes tokens
by a recurrence over a state of H heads of N keys by P values, and projects `inner` rows back to h:

    parameters = h · inputs + inner · h + others + channels · kernel + vectors           `Mixer.parameters`

A recurrence is computed in chunks of C tokens; for each token forward, a multiply and an add counted as two:

    Mamba-2 (arXiv 2405.21060, section 6), linear attention (Lightning, 2401.04658)
        2 C N G + 2 C P H + 4 N P H                 scores within a chunk by group, their sums, states in and out
    gated delta rule (2412.06464, section 3.3), Kimi's delta rule (2510.26692, section 3)
        H (6 C N + 4 C P + 6 N P)                   three products of keys, two sums, three uses of the state,
                                                    with the triangular system in the products       `Mixer.scanned`

Mamba (2312.00752) and the gated linear recurrent unit (Griffin, 2402.19427) have no products in the recurrence: their
time is that of the bytes. Kernels that keep chunks on the chip move what goes in and comes out (`Mixer.moved`); the
reference code, which Transformers runs where such kernels are not installed, writes each intermediate
(`Mixer.reference`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MixerKind = Literal["mamba2", "linear", "gated_delta", "kimi_delta", "mamba", "recurrent_unit", "convolution"]

CHUNKED: tuple[MixerKind, ...] = ("mamba2", "linear", "gated_delta", "kimi_delta")
"""Recurrences that chunks turn into matrix products; each of their heads has its own state."""
DELTA: tuple[MixerKind, ...] = ("gated_delta", "kimi_delta")


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """Sizes of a token mixer; those that a kind has not are 0."""

    kind: MixerKind
    inputs: int
    """Columns of the products of the hidden state, together."""
    inner: int
    """Rows of the product that gives the hidden state."""
    others: int = 0
    """Elements of other matrices, such as gates of a low rank."""
    channels: int = 0
    """Channels of the short convolution."""
    kernel: int = 0
    """Tokens of the short convolution."""
    heads: int = 0
    key: int = 0
    """Rows of a head's state (N)."""
    value: int = 0
    """Columns of a head's state (P)."""
    groups: int = 0
    """Heads of keys; several heads share one."""
    chunk: int = 0
    """Tokens that are mixed by products at once (C)."""
    vectors: int = 0
    """Elements of decays, biases and norms."""

    def parameters(self, hidden: int) -> int:
        """Elements of a layer's mixer."""
        projections = hidden * (self.inputs + self.inner) + self.others
        return projections + self.channels * self.kernel + self.vectors

    @property
    def state(self) -> int:
        """Elements that a sequence hands on from token to token."""
        return self.heads * self.key * self.value

    @property
    def scanned(self) -> float:
        """FLOPs of products of the recurrence for a token, forward."""
        chunk, heads, key, value = self.chunk, self.heads, self.key, self.value
        if self.kind in DELTA:
            return heads * (6.0 * chunk * key + 4.0 * chunk * value + 6.0 * key * value)
        if self.kind in CHUNKED:
            return 2.0 * chunk * (key * self.groups + value * heads) + 4.0 * key * value * heads
        return 0.0

    @property
    def moved(self) -> float:
        """Elements of 2 bytes that kernels read and write for a token, forward; those of float32 count twice.

        The convolution reads and writes its channels; gate and norm read twice and write once. Between them, Mamba-2's
        five kernels (mamba_ssm, `ssd_combined`): states of chunks written, passed on and read, scores of chunks
        written and read. The delta rule's (flash-linear-attention, `gated_delta_rule/chunk`): norms of keys, the
        triangular system and its inverse, what it makes of keys and values, states and result. Mamba's one kernel
        reads and writes what goes in and comes out.
        """
        keys, values = self.heads * self.key, self.heads * self.value
        around = 2.0 * self.channels + 3.0 * self.inner
        if self.kind in DELTA:
            return (
                around
                + 11.0 * keys
                + 6.0 * values
                + 7.0 * self.chunk * self.heads
                + 2.0 * self.state / self.chunk
            )
        if self.kind in CHUNKED:
            shared = 4.0 * self.groups * (self.key + self.chunk)
            return around + 3.0 * values + shared + 8.0 * self.state / self.chunk
        return around + self.inputs + self.inner

    @property
    def reference(self) -> float:
        """Elements of 2 bytes that reference code reads and writes for a token, forward.

        Counted in the graphs of Transformers' code, which computes in float32: for Mamba-2 about 18 passes over the
        decays and scores of a chunk's pairs, 12 over keys and 16 over values; for delta rules 20 over pairs, 48 over
        keys and values. Mamba's and the recurrent unit's code keeps a state for each token. The backward pass of delta
        rules also writes zeros for each chunk's slice, which grows with the number of chunks and is not counted.
        """
        keys, values = self.heads * self.key, self.heads * self.value
        pairs = self.chunk * self.heads
        around = 2.0 * self.channels + 3.0 * self.inner
        if self.kind in DELTA:
            return around + 2.0 * (20.0 * pairs + 48.0 * (keys + values))
        if self.kind in CHUNKED:
            return around + 2.0 * (18.0 * pairs + 12.0 * keys + 16.0 * values)
        plain = {"mamba": 8.0 * self.inner * self.key, "recurrent_unit": 20.0 * self.inner}
        return self.moved + 2.0 * plain.get(self.kind, 0.0)

    @property
    def reference_scanned(self) -> float:
        """FLOPs of products of the recurrence in reference code, which computes scores for each head."""
        alone = replace(self, groups=self.heads) if self.kind == "mamba2" else self
        return alone.scanned

    @property
    def saved(self) -> float:
        """Elements of 2 bytes that a token keeps for the backward pass with fused kernels, product inputs apart.

        What was projected, what was convolved, and the recurrence's result; kernels compute states and scores again.
        """
        return self.inputs + self.channels + self.inner

    @property
    def splits(self) -> int:
        """Ranks of tensor and context axes divide this; 0: no framework splits it.

        Megatron-Core splits Mamba-2 and delta rules by heads and groups, and exchanges heads for positions over the
        context axis (`megatron/core/ssm`). It has no split of the others, whose channels a product mixes.
        """
        return self.groups if self.kind in CHUNKED else 0


@dataclass(frozen=True, kw_only=True)
class LayerMix:
    """The mix of layers of a model that are not all attention and an MLP: how many have what."""

    mixer: Mixer | None
    mixing: int
    """Layers with the mixer."""
    attending: int
    """Layers with softmax attention; a layer may have both."""
    feeding: int
    """Layers with an MLP or experts."""
    norms: int
    """Norms of the hidden size in all layers."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434, section 2.1); the dims are one head's."""

    query_rank: int
    """0: queries come straight from the hidden state."""
    key_rank: int
    plain: int
    """Dims of a query or key without position."""
    rotary: int
    """Dims of a query or key with position; the heads share the keys' part."""
    value: int
