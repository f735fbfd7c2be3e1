"""A decoder's dimensions, which determine its time and memory, and its number of parameters.

With h the hidden size, d a head's size, a and k the heads of queries and of keys, a layer has

    h·d·(a + 2k) + a·d·h                                 attention                    `Shape.attention`
    q·(h + a(n + r)) + h(c + r) + c·a(n + v) + a·v·h     latent attention             `Shape.attention`
    (2 + gated)·h·f                                      MLP of f features            `Shape.dense`
    h·E + (2 + gated)·h·(E·e + s)                        E experts of e features, shared ones of s together
    2·h                                                  norms
    h·g                                                  columns g of a gate on attention's result
    2·h·l                                                projections to the l features that experts work on, if not h
    `Mixer.parameters`                                   another token mixer (`LayerMix`)

and the model V·h for its embedding, the same again for its head unless that is tied, and a last norm of h. In latent
attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) q and c are the ranks of queries and keys, n and r a head's
dims without and with position, v its values; where q is 0, queries are h·a(n + r). Biases, the norms of heads and
latents, and learned positions are counted as `vectors` where a config with other mixers than attention states them,
else not; of the published models they are less than 1%.

A module that predicts one token more (multi-token prediction; DeepSeek-V3, arXiv 2412.19437, section 2.2) has a layer
like the last, a projection 2h·h and three norms; embedding and head are the model's (`Shape.prediction_module`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload.config_fields import shape_fields
from hyper_parallel.workload.mixers import Latent, LayerMix, Mixer

LARGEST = 10**9
"""Upper limit of a dimension: larger values are errors in units."""


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
    """Share of the layers with attention that attend to `window` tokens only, 0 to 1."""
    gate: int = 0
    """Columns of a gate on attention's result: one for each head, or for each of its features."""
    expert_hidden: int = 0
    """Features that routed experts take and give, where they are projected to fewer than `hidden`; 0: `hidden`."""
    expert_bias: bool = False
    """Whether routed experts have biases, as GPT-OSS's do; they are too few to count as parameters."""
    mix: LayerMix | None = None
    """None: every layer has attention and an MLP or experts."""
    vectors: int = 0
    """Elements of biases and of norms of heads in all layers, mixers apart."""
    positions: int = 0
    """The model's maximum sequence length in tokens; 0: unknown."""
    expert_groups: int = 0
    """Equal groups of experts; a token chooses `chosen_groups` of them first (DeepSeek-V2, arXiv 2405.04434, section
    2.2.2); 0: a token may go to any experts."""
    chosen_groups: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        needed = ["layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary"]
        if self.experts:
            needed += ["chosen", "expert_ffn"]
        elif self.mlp_layers:
            needed += ["ffn"]
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
        if self.dense_layers > self.mlp_layers:
            raise self._error(f"{self.dense_layers} of its {self.mlp_layers} layers cannot be dense")
        if self.mix is not None:
            self._check_mix(self.mix)
        if self.experts and self.dense_layers and not self.ffn:
            raise self._error(f"it has {self.dense_layers} dense layers; give their features, ffn")
        if not 0 <= self.windowed <= 1 or (self.windowed > 0 and not self.window):
            raise self._error(
                f"windowed is the share of layers with a window, 0 to 1; got {self.windowed} with window {self.window}"
            )

    def _check_mix(self, mix: LayerMix) -> None:
        for name in ("mixing", "attending", "feeding"):
            if not 0 <= getattr(mix, name) <= self.layers:
                raise self._error(f"{name} is a number of its {self.layers} layers; got {getattr(mix, name)}")
        if not (mix.mixing or mix.attending):
            raise self._error("no layer mixes tokens")
        if mix.mixing and mix.mixer is None:
            raise self._error(f"{mix.mixing} layers have a mixer, whose sizes are not given")

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"the model {self.name or '?'!r} cannot be: {text}")

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str = "") -> Shape:
        """The shape that a Transformers config describes, as `config.to_dict()` or its JSON file has it.

        Raises ConfigError for a config without the dimensions, naming them, and for families whose layers are not
        those of a decoder with attention and MLPs.
        """
        return cls(**shape_fields(config, name))

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return self.name or "the model"

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.mlp_layers - self.dense_layers if self.experts else 0

    @property
    def attention_layers(self) -> int:
        """Layers with softmax attention."""
        return self.layers if self.mix is None else self.mix.attending

    @property
    def mixer_layers(self) -> int:
        """Layers with another token mixer."""
        return 0 if self.mix is None else self.mix.mixing

    @property
    def mlp_layers(self) -> int:
        """Layers with an MLP or experts."""
        return self.layers if self.mix is None else self.mix.feeding

    @property
    def mixer(self) -> Mixer | None:
        """The other token mixer."""
        return None if self.mix is None else self.mix.mixer

    @property
    def matrices(self) -> int:
        """Matrices of an MLP: 3 with a gate, 2 without."""
        return 3 if self.gated else 2

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        hidden, heads = self.hidden, self.heads
        gate = hidden * self.gate
        if self.latent is None:
            return hidden * self.head_dim * 2 * (heads + self.kv_heads) + gate
        latent = self.latent
        size = latent.plain + latent.rotary
        queries = latent.query_rank * (hidden + heads * size) if latent.query_rank else hidden * heads * size
        keys = hidden * (latent.key_rank + latent.rotary) + latent.key_rank * heads * (
            latent.plain + latent.value
        )
        return queries + keys + heads * latent.value * hidden + gate

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

    @property
    def prediction_module(self) -> int:
        """Parameters of a module that predicts one token more."""
        mlp = self._sparse(self.experts) if self.expert_layers else self.dense
        return self.attention + mlp + 2 * self.hidden * self.hidden + 5 * self.hidden

    def _sparse(self, experts: int) -> int:
        """Parameters of a layer's router and experts, `experts` of the routed ones counted."""
        latent = self.expert_hidden
        routed = experts * self.matrices * (latent or self.hidden) * self.expert_ffn
        shared = self.matrices * self.hidden * self.shared_ffn
        return self.hidden * (self.experts + 2 * latent) + routed + shared

    def _total(self, experts: int) -> int:
        """All weights with the given number of routed experts per layer, without a separate head."""
        norms = 2 * self.layers if self.mix is None else self.mix.norms
        layers = self.attention_layers * self.attention + norms * self.hidden + self.vectors
        if self.mixer is not None:
            layers += self.mixer_layers * self.mixer.parameters(self.hidden)
        dense = self.mlp_layers - self.expert_layers
        mlps = self.expert_layers * self._sparse(experts) + dense * self.dense
        return layers + mlps + self.vocabulary * self.hidden + self.hidden
