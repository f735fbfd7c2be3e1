"""A decoder's dimensions, which determine its time and memory, and its number of parameters.

With h the hidden size, d a head's size, a and k the heads of queries and of keys, a layer has

    h·d·(a + 2k) + a·d·h                                 attention                    `Shape.attention`
    q·(h + a(n + r)) + h(c + r) + c·a(n + v) + a·v·h     latent attention             `Shape.attention`
    (2 + gated)·h·f                                      MLP of f features            `Shape.dense`
    h·E + (2 + gated)·h·(E·e + s)                        E experts of e features, shared ones of s together
    2·h                                                  norms

and the model V·h for its embedding, the same again for its head unless that is tied, and a last norm of h. In latent
attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) q and c are the ranks of queries and keys, n and r a head's
dims without and with position, v its values; where q is 0, queries are h·a(n + r). Biases, the norms of heads and
latents, and learned positions are not counted; of the published models they are less than 1%.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hyper_parallel.errors import ConfigError

LARGEST = 10**9
"""Upper limit of a dimension: larger values are errors in units."""


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


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions. Raises ConfigError for invalid sizes.

    >>> Shape("tiny", 2, 64, 4, 2, 16, ffn=256, gated=True, vocabulary=1000).parameters
    251200
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than `heads` in grouped-query attention."""
    head_dim: int
    ffn: int
    """MLP width of a layer without experts."""
    gated: bool
    """Whether an MLP has a gate, as in SwiGLU."""
    vocabulary: int
    tied: bool = False
    """Whether head and embedding share their weights."""
    experts: int = 0
    """Routed experts of a layer; 0: none."""
    chosen: int = 0
    """Routed experts per token (top-k)."""
    expert_ffn: int = 0
    """Features of one routed expert."""
    shared_ffn: int = 0
    """Features of all shared experts together."""
    dense_layers: int = 0
    """Layers without experts in a model that has them."""
    latent: Latent | None = None
    """None: attention keeps whole keys and values."""
    window: int = 0
    """Tokens that a windowed layer attends to; 0: no layer is windowed."""
    windowed: float = 0.0
    """Share of the layers that attend to `window` tokens only, 0 to 1."""
    positions: int = 0
    """The model's maximum sequence length in tokens; 0: unknown."""
    expert_groups: int = 0
    """Equal groups of experts of which a token chooses `chosen_groups` first (DeepSeek-V2, arXiv 2405.04434, section
    2.2.2); 0: a token may go to any experts."""
    chosen_groups: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        needed = ["layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary"]
        needed += ["chosen", "expert_ffn"] if self.experts else ["ffn"]
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int:
                continue
            least = 1 if field.name in needed else 0
            if not least <= value <= LARGEST:
                raise self._error(f"{field.name} must be {least} to {LARGEST:,}; got {value:,}")
        if self.latent is None and self.heads % self.kv_heads:
            raise self._error(
                f"heads of keys must divide heads of queries; got kv_heads {self.kv_heads} of heads {self.heads}"
            )
        if self.experts and self.chosen > self.experts:
            raise self._error(f"a token cannot go through {self.chosen} of {self.experts} experts")
        if self.chosen_groups > self.expert_groups:
            raise self._error(
                f"a token cannot choose {self.chosen_groups} of {self.expert_groups} groups of experts"
            )
        if self.dense_layers > self.layers:
            raise self._error(f"{self.dense_layers} of its {self.layers} layers cannot be dense")
        if self.experts and self.dense_layers and not self.ffn:
            raise self._error(f"it has {self.dense_layers} dense layers; give their features, ffn")
        if not 0 <= self.windowed <= 1 or (self.windowed > 0 and not self.window):
            raise self._error(
                f"windowed is the share of layers with a window, 0 to 1; got {self.windowed} with window {self.window}"
            )

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"the model {self.name or '?'!r} cannot be: {text}")

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str = "") -> Shape:
        """The shape that a Transformers config describes, as `config.to_dict()` or its JSON file has it.

        Raises ConfigError for a config without the dimensions, naming them, and for families whose layers are not
        those of a decoder with attention and MLPs.
        """
        from hyper_parallel.workload.from_config import of_config

        return of_config(config, name)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def matrices(self) -> int:
        """Matrices of an MLP: 3 with a gate, 2 without."""
        return 3 if self.gated else 2

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        hidden, heads = self.hidden, self.heads
        if self.latent is None:
            return hidden * self.head_dim * 2 * (heads + self.kv_heads)
        latent = self.latent
        size = latent.plain + latent.rotary
        queries = latent.query_rank * (hidden + heads * size) if latent.query_rank else hidden * heads * size
        keys = hidden * (latent.key_rank + latent.rotary) + latent.key_rank * heads * (
            latent.plain + latent.value
        )
        return queries + keys + heads * latent.value * hidden

    @property
    def dense(self) -> int:
        """Parameters of an MLP without experts."""
        return self.matrices * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self._total(self.experts) + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def active_parameters(self) -> int:
        """Elements used per token: `chosen` experts, and embedding and head as in `parameters`."""
        return self._total(self.chosen) + (0 if self.tied else self.vocabulary * self.hidden)

    def _total(self, experts: int) -> int:
        """All weights with the given number of routed experts per layer, without a separate head."""
        features = experts * self.expert_ffn + self.shared_ffn
        sparse = self.hidden * (self.experts + self.matrices * features)
        layers = self.layers * (self.attention + 2 * self.hidden)
        mlps = self.expert_layers * sparse + (self.layers - self.expert_layers) * self.dense
        return layers + mlps + self.vocabulary * self.hidden + self.hidden
