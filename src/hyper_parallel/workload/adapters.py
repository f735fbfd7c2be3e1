"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): what a step trains in place of the whole model.

A linear layer of `in` features by `out` gets two matrices, rank · in and out · rank, whose product is added to its
result; its own weights are frozen:

    adapters = rank · Σ over adapted linear layers (in + out)                  `Adapter.parameters`

Routed experts are not adapted: they are no linear layers but parameters of three dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.shape import LARGEST, Shape

BaseFormat = Literal["bf16", "fp32", "int8", "nf4"]
"""How frozen weights are kept; `nf4` is QLoRA's (arXiv 2305.14314), with a scale for each 64 elements that is itself
quantized."""

BASE_BYTES: dict[str, float] = {"bf16": 2.0, "fp32": 4.0, "int8": 1.0, "nf4": 0.5 + 0.127 / 8}
"""Bytes of a frozen weight; the scales of `nf4` take 0.127 bits (2305.14314, section 3)."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MIXER = ("in_proj", "out_proj")
ALL = (*ATTENTION, *MLP, *MIXER)
GROUPS: dict[str, tuple[str, ...]] = {
    "all-linear": ALL,
    "attention": ATTENTION,
    "qkv": ATTENTION[:3],
    "mlp": MLP,
    "mixer": MIXER,
}
"""Names of several linear layers."""
ALSO = {
    "q_a_proj": "q_proj",
    "q_b_proj": "q_proj",
    "kv_a_proj_with_mqa": "k_proj",
    "kv_b_proj": "v_proj",
    "qkv_proj": "qkv",
    "query_key_value": "qkv",
    "c_attn": "qkv",
    "gate_up_proj": "mlp",
    "c_fc": "up_proj",
    "fc1": "up_proj",
    "fc2": "down_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "dense": "o_proj",
    "in_proj_qkvz": "in_proj",
    "in_proj_qkv": "in_proj",
}
"""Names that families give the same linear layers."""


@dataclass(frozen=True)
class Adapter:
    """Adapters of a step. Raises ConfigError for names of linear layers that are not known."""

    rank: int
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers that have one: `all-linear`, `attention`, `qkv`, `mlp`, or names such as q_proj."""
    base: BaseFormat = "bf16"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= LARGEST:
            raise ConfigError(f"an adapter's rank is 1 to {LARGEST:,}; got {self.rank:,}")
        if self.base not in get_args(BaseFormat):
            raise ConfigError(
                f"frozen weights are kept in one of {', '.join(get_args(BaseFormat))}; got {self.base!r}"
                f"{nearest(self.base, get_args(BaseFormat))}"
            )
        if not self.targets:
            raise ConfigError("an adapter needs a linear layer; give all-linear, attention, qkv or mlp")
        known = (*GROUPS, *ALL, *ALSO)
        for name in self.targets:
            if name not in known:
                raise ConfigError(
                    f"no linear layer is named {name!r}{nearest(name, known)}; give all-linear, attention, qkv, mlp or "
                    f"some of {', '.join(ALL)}"
                )

    @property
    def linear(self) -> frozenset[str]:
        """The linear layers that are adapted, of ALL."""
        found: set[str] = set()
        for name in self.targets:
            plain = ALSO.get(name, name)
            found |= set(GROUPS.get(plain, (plain,)))
        return frozenset(found)

    def parameters(self, shape: Shape) -> int:
        """Elements of all adapters of a model."""
        return self.rank * sum(into + out for into, out in self.features(shape))

    def features(self, shape: Shape) -> list[tuple[int, int]]:
        """Input and output features of every adapted linear layer of a model; layers of one kind are one entry each.

        Features are multiplied by the number of layers.
        """
        chosen, hidden = self.linear, shape.hidden
        groups = [(shape.attention_layers, _attention(shape))]
        dense = shape.mlp_layers - shape.expert_layers
        groups.append((dense, _mlp(shape, shape.ffn)))
        groups.append((shape.expert_layers, _mlp(shape, shape.shared_ffn) if shape.shared_ffn else []))
        if shape.mixer is not None:
            sizes = [("in_proj", hidden, shape.mixer.inputs), ("out_proj", shape.mixer.inner, hidden)]
            groups.append((shape.mixer_layers, sizes))
        return [
            (layers * into, layers * out)
            for layers, sizes in groups
            for name, into, out in sizes
            if layers and name in chosen
        ]


def _attention(shape: Shape) -> list[tuple[str, int, int]]:
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        wide, keys = heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return [
            ("q_proj", hidden, wide + shape.gate),
            ("k_proj", hidden, keys),
            ("v_proj", hidden, keys),
            ("o_proj", wide, hidden),
        ]
    wide = heads * (latent.plain + latent.rotary)
    rank = latent.query_rank
    queries = [("q_proj", hidden, rank), ("q_proj", rank, wide)] if rank else [("q_proj", hidden, wide)]
    return [
        *queries,
        ("k_proj", hidden, latent.key_rank + latent.rotary),
        ("v_proj", latent.key_rank, heads * (latent.plain + latent.value)),
        ("o_proj", heads * latent.value, hidden),
    ]


def _mlp(shape: Shape, features: int) -> list[tuple[str, int, int]]:
    sizes = [("up_proj", shape.hidden, features), ("down_proj", features, shape.hidden)]
    return [("gate_proj", shape.hidden, features), *sizes] if shape.gated else sizes
