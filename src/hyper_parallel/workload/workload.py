"""Workload: the model, the batch, the sequence length, the adapters and the optimizer's state of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.shape import LARGEST, Shape

# Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): what a step trains in place of the whole model.
#
# A linear layer of `in` features by `out` gets two matrices, rank · in and out · rank, whose product is added to its
# result; its own weights are frozen:
#
#     adapters = rank · Σ over adapted linear layers (in + out)                  `Adapter.parameters`
#
# Routed experts are not adapted: they are no linear layers but parameters of three dims.

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


Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""Precision of matrix products. `fp8` has a scale for each tensor; `mxfp8` one for each 32 elements (OCP Microscaling
Formats, 2023); `nvfp4` one for each 16 of 4 bits. Other operators of the last three are in bf16.
"""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

OPTIMIZERS = ("adamw", "adamw_8bit", "lion", "adafactor", "muon")


@dataclass(frozen=True)
class Workload:
    """A training step. Raises ConfigError for invalid sizes."""

    shape: Shape
    batch: int
    """Sequences per step, over all devices."""
    sequence: int
    """Tokens per sequence."""
    precision: Precision = "bf16"
    optimizer: str = "adamw"
    adapter: Adapter | None = None
    """None: the whole model is trained."""
    prediction_modules: int = 0
    """Modules that each predict one token more (multi-token prediction), trained behind the last layer."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            value = getattr(self, name)
            if not 1 <= value <= LARGEST:
                raise ConfigError(f"{name} must be 1 to {LARGEST:,}; got {value:,}")
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"{name} is one of {', '.join(known)}; got {value!r}{nearest(value, known)}"
                )

        if not 0 <= self.prediction_modules <= self.shape.layers:
            raise ConfigError(
                f"modules that predict one token more are 0 to {self.shape.layers}; got {self.prediction_modules}"
            )
        if self.adapter is not None:
            if self.prediction_modules:
                raise ConfigError(
                    "adapters leave the model frozen, and modules that predict one token more are trained; give one"
                )
            if not self.adapter.features(self.shape):
                raise ConfigError(
                    f"the model {self.shape.name!r} has none of the linear layers {', '.join(self.adapter.targets)}; "
                    "give all-linear"
                )

    @property
    def trained_parameters(self) -> int:
        """Elements that the optimizer updates."""
        if self.adapter is not None:
            return self.adapter.parameters(self.shape)
        return self.shape.parameters + self.prediction_modules * self.shape.prediction_module

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence


# Bytes of state that an optimizer keeps of a trained parameter's element, with float32 moments.
#
# | Optimizer | Bytes of an element of an m × n matrix | Exceptions |
# |---|---|---|
# | adamw | 8: two moments | |
# | adamw_8bit | 2 + 8 / 256: two codes, and two float32 scales of a block of a row | embeddings 8 |
# | lion | 4: a momentum | |
# | adafactor | 4 (1 / m + 1 / n): means of rows and columns | |
# | muon | 4: a momentum | embedding, head and routed experts, which are stacked, 8 |
#
# `state_bytes` is the mean over what a workload trains. Vectors and small matrices, which some optimizers treat
# otherwise, are too few to count. The optimizers themselves are in `step/optimizer`, and `inspect` counts their
# tensors.

ADAMW = 8.0
BLOCK = 256
"""Elements of a row with one scale, as `train.optimizer.block` is where a run does not say."""


def state_bytes(workload: Workload) -> float:
    """Mean bytes of state of an element that is trained."""
    shape, adapter = workload.shape, workload.adapter
    table = shape.vocabulary * shape.hidden
    total = workload.trained_parameters
    # The two matrices of an adapter have its rank as one side.
    side = shape.hidden if adapter is None else adapter.rank
    match workload.optimizer:
        case "adamw_8bit":
            if adapter is not None:
                return 2 + 4 / BLOCK + 4 / min(side, BLOCK)
            return _mean(2 + 8 / BLOCK, table, total)
        case "lion":
            return 4.0
        case "adafactor":
            return 4 / shape.hidden + 4 / side
        case "muon":
            one = shape.matrices * (shape.expert_hidden or shape.hidden) * shape.expert_ffn
            routed = shape.expert_layers * shape.experts * one if shape.experts else 0
            ends = table * (1 if shape.tied else 2)
            return 4.0 if adapter is not None else _mean(4.0, ends + routed, total)
    return ADAMW


def _mean(most: float, whole: float, total: float) -> float:
    """Where `whole` elements of `total` have AdamW's float32 moments, and the others `most` bytes."""
    share = whole / total
    return most * (1 - share) + ADAMW * share
