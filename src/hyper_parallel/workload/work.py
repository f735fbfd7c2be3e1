"""Work: FLOPs and bytes of one operator; and the FLOP convention: model FLOPs per training token, and MFU, their share
of the hardware's peak.

No torch here; `flops_of_model` takes a module. `cluster.Device.seconds` turns a Work into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import hybrids

if TYPE_CHECKING:
    from torch import nn

WorkKind = Literal[
    "matmul", "attention", "elementwise", "reduce", "copy", "view", "optimizer", "host", "task"
]
"""Kinds of operators, which differ in their engine and in the share of its peak that they reach. A `task` is all of a
part of a step, of known seconds."""


@dataclass(frozen=True, slots=True)
class Work:
    """One operator's share of one rank's step.

    >>> Work.of_matmul(512, 1024, 256, dtype="bfloat16").flops
    268435456
    """

    kind: WorkKind
    flops: float = 0
    """FLOPs of matrix products, with a multiply and an add counted as two; limited by `matrix` peaks."""
    vector_flops: float = 0
    """FLOPs of other arithmetic; limited by `vector` peaks."""
    read: float = 0
    """Bytes of its inputs, each read once."""
    written: float = 0
    """Bytes of its outputs, each written once; also for an in-place operator."""
    dtype: str = "float32"
    """The inputs' dtype as PyTorch names it, without its module."""
    shape: tuple[int, ...] = ()
    """Shape of a matmul (batch, m, n, k), for [m, k] · [k, n]; of attention (batch, heads, queries, keys, head size).
    Empty if irrelevant or unknown.
    """
    op: str = ""
    """The operator, as `aten.silu` or `aten.add.Tensor`: a device may have been measured for it by name."""
    layout: str = ""
    """Memory layout of a matmul's two matrices: `nn` both row by row, `nt` the second transposed (a linear layer's
    forward product), `tn` the first (its weight's gradient), `tt`. For attention: `forward` or `backward`, followed by
    ` causal` if the kernel skips masked scores. For others: `strided` if an input is not contiguous.
    """
    fresh: float = 0
    """Bytes of `written` in memory allocated for this call. On a CPU the first touch of a page costs more than the
    write.
    """
    seconds: float | None = None
    """What it takes where that is known, which no device prices again."""

    @classmethod
    def of_matmul(
        cls,
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        dtype: str = "float32",
        layout: str = "nn",
        size: int = 0,
    ) -> Work:
        """[m, k] · [k, n], `batch` times, each operand read and the result written once, into fresh memory.

        `size` is the bytes of an element; left out, it is that of `dtype`.
        """
        size = size or bytes_of(dtype)
        written = size * batch * m * n
        return cls(
            "matmul",
            flops=2 * batch * m * n * k,
            read=size * batch * (m * k + k * n),
            written=written,
            dtype=dtype,
            shape=(batch, m, n, k),
            layout=layout,
            fresh=written,
        )


_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


def bytes_of(dtype: str) -> int:
    """Bytes of one element of a dtype named as PyTorch names it; 1 for the eight-bit ones.

    >>> bytes_of("bfloat16"), bytes_of("float8_e4m3fn")
    (2, 1)
    """
    return _BYTES.get(dtype, 1)


# The FLOP convention: model FLOPs per training token, and MFU, their share of the hardware's peak.
#
# For a token of a sequence of S tokens, forward and backward,
#
#     flops = 6 · N + 12 · Σ_layers H · Q · K(S)          `Flops.per_token`
#     K(S)  = S / 2                  causal                `_keys`
#     K(S)  = W − W² / (2 S)         causal with a sliding window of W < S
#
# N counts the elements of every matrix that a token is multiplied with, including a tied head, and only the experts
# that a token uses. Embedding lookups, norms, activations and biases are not counted. H · Q is the number of query
# heads times their size. The factor 6 is 2 for a multiply and an add, times 3 for the forward pass and the two products
# of the backward pass; recomputation is not counted. This is the convention of PaLM (Chowdhery et al., arXiv
# 2204.02311, appendix B) and of Megatron-LM (Narayanan et al., arXiv 2104.04473, appendix), except that both of them
# count the whole S × S attention matrix: here only the part that the mask keeps, on average, is counted, once. Packed
# documents count as one sequence.
#
#     mfu = flops / (seconds · devices · peak)            `mfu`


@dataclass(frozen=True)
class Flops:
    """The sizes that determine a token's FLOPs at any sequence length."""

    matmul_parameters: int
    """Elements of the matrices that a token is multiplied with, the head included."""
    heads_times_size: int
    """Query heads times head size, in each attention layer."""
    windows: tuple[int | None, ...]
    """Sliding window of each attention layer in tokens, or None if it attends to the whole past."""

    def per_token(self, sequence: int) -> float:
        """Model FLOPs of training on one token of a sequence of `sequence` tokens."""
        keys = sum(_keys(sequence, window) for window in self.windows)
        return 6.0 * self.matmul_parameters + 12.0 * self.heads_times_size * keys


def _keys(sequence: int, window: int | None) -> float:
    """Keys that a query attends to, averaged over a causal sequence."""
    if window is None or window >= sequence:
        return sequence / 2
    return window - window * window / (2 * sequence)


def mfu(flops: float, seconds: float, devices: int, peak: float) -> float:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B), 0 to 1.

    `flops` were done in `seconds` on `devices` devices of `peak` FLOP/s each.
    """
    return flops / (seconds * devices * peak)


def flops_of_model(model: nn.Module, config: Mapping[str, Any] | None = None) -> Flops:
    """From a whole (not yet sharded) module: counts every parameter of two dims except lookup embeddings, and of
    experts, whose parameters have three dims, those that a token uses.

    `config` is its Transformers config as a dict; without one (and without `model.config`) the attention
    term, which no parameter shows, is 0. Works on the meta device.
    """
    from torch import nn

    if config is None:
        own: Any = getattr(model, "config", None)
        if hasattr(own, "to_dict"):
            # Many families keep sizes under names of their own; the config object knows the common ones, too.
            common = {*getattr(own, "attribute_map", {}), "num_hidden_layers"}
            config = {key: getattr(own, key, None) for key in common} | own.to_dict()
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    known = config or {}
    chosen = next((known[key] for key in ("num_experts_per_tok", "moe_topk") if known.get(key)), None)
    multiplied: dict[tuple[int, str], float] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            # A tied head is an embedding's parameter held by a module that multiplies with it.
            if parameter.ndim == 2 and (id(parameter) not in lookups or isinstance(module, nn.Linear)):
                multiplied[id(parameter), name] = parameter.numel()
            elif parameter.ndim == 3 and chosen is not None:
                # A matrix for each expert: a token is multiplied with those of its experts.
                multiplied[id(parameter), name] = parameter.numel() * int(chosen) / parameter.shape[0]
    matrices = round(sum(multiplied.values()))
    if config is None:
        return Flops(matrices, 0, ())
    windows = _attention_windows(config)
    if not windows:
        return Flops(matrices, 0, ())
    heads = _field(config, "num_attention_heads", "n_head")
    size = config.get("head_dim") or _field(config, "hidden_size", "n_embd") // heads
    return Flops(matrices, heads * size, windows)


def _attention_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The windows of the layers that have attention; recurrences of other token mixers are not counted."""
    kinds = hybrids.kinds(config, int(config.get("num_hidden_layers") or 0))
    if str(config.get("model_type")) in hybrids.ALONE | hybrids.UNDESCRIBED:
        return ()
    layers = len(kinds) if kinds else _field(config, "num_hidden_layers", "n_layer")
    windows = _windows({**config, "layer_types": kinds} if kinds else config, layers)
    if str(config.get("model_type")) in hybrids.BOTH or not kinds:
        return windows
    return tuple(
        window for window, kind in zip(windows, kinds, strict=True) if kind not in hybrids.WITHOUT_ATTENTION
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window; `layer_types` says which layers have it, else all do."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types")
    if window is None:
        return (None,) * layers
    if not kinds:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _field(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise ConfigError(
        f"cannot count FLOPs: the model's config ({config.get('model_type', 'no model_type')}) "
        f"has no {' or '.join(names)}"
    )
