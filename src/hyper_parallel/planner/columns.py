"""Columns of a table of configurations, a row a strategy: the codes of columns that are a choice among names
(architectures, recomputation, schedules, context methods, axis orders), and the columns that a workload and what a
framework does (`Profile`) give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hyper_parallel.workload.mixers import Latent
from hyper_parallel.workload.workload import BASE_BYTES, PRECISIONS, Precision, Workload

Array = npt.NDArray[np.float64]
Columns = dict[str, Array]
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def taken(rows: Columns, index: Any) -> Columns:
    """The rows of an index."""
    return {name: column[index] for name, column in rows.items()}


def unique(columns: Columns) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The first row of each kind of equal rows, and the kind of each row.

    Columns are whole numbers, so kinds are found by counting instead of sorting: there may be a million rows.
    """
    keys = np.zeros(next(iter(columns.values())).size, dtype=np.intp)
    size = 1
    for column in columns.values():
        kinds, many = _ranked(column.astype(np.intp))
        keys, size = keys * many + kinds, size * many
        if size > keys.size:
            keys, size = _ranked(keys)
    keys, size = _ranked(keys)
    first = np.empty(size, dtype=np.intp)
    first[keys[::-1]] = np.arange(keys.size)[::-1]
    return first, keys


def _ranked(numbers: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], int]:
    """For each number how many different ones are below it, and how many there are."""
    seen = np.zeros(int(numbers.max(initial=0)) + 1, dtype=np.bool_)
    seen[numbers] = True
    rank = np.cumsum(seen) - 1
    return rank[numbers], int(rank[-1]) + 1 if numbers.size else 0


CHUNK = 4096
"""Rows that are estimated at once: their columns stay in a core's cache."""


def chunks(n: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices of n rows, `size` at a time."""
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))


def full_like(rows: Columns, **values: float) -> Columns:
    """Columns that have one value for all rows."""
    n = next(iter(rows.values())).size
    return {name: np.full(n, value) for name, value in values.items()}


ARCHITECTURES = ("other", "volta", "ampere", "hopper", "blackwell", "blackwell-ultra", "ascend")
"""Generations of devices that reach different shares of their peaks."""

RECOMPUTE = ("none", "selective", "full")
"""`selective`: attention's core again (Korthikanti et al., arXiv 2205.05198, section 5). `full`: whole layers."""

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe")
"""Of pipelines: PipeDream-Flush (arXiv 2104.04473, section 2.2), GPipe (1811.06965), interleaved 1F1B (2104.04473),
zero bubble H1 and V (2401.10241, 2405.15362), DualPipe (DeepSeek-V3, 2412.19437)."""

CONTEXT_METHODS = ("ring", "ulysses", "hybrid")
"""How attention sees the other ranks' keys: passed round, by exchanging positions for heads, or both."""

ORDERS = (
    ("tensor_x", "tensor_y", "context", "data", "pipeline"),
    ("tensor_x", "tensor_y", "context", "pipeline", "data"),
    ("tensor_y", "tensor_x", "context", "data", "pipeline"),
    ("context", "tensor_x", "tensor_y", "data", "pipeline"),
    ("data", "tensor_x", "tensor_y", "context", "pipeline"),
    ("tensor_x", "data", "tensor_y", "context", "pipeline"),
    ("pipeline", "tensor_x", "tensor_y", "context", "data"),
)
"""How axes lie on the machine, the innermost first: an axis spans the levels that those before it have not filled.
`data` is shard within replicate. The first is what Megatron, nanotron and DeepSpeed do."""

CODES: Mapping[str, tuple[Any, ...]] = {
    "precision": PRECISIONS,
    "architecture": ARCHITECTURES,
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "method": CONTEXT_METHODS,
    "order": ORDERS,
}
"""The names of each column that is a code."""

_ARCHITECTURE_WORDS = (
    ("V100", "volta"),
    ("A100", "ampere"),
    ("A800", "ampere"),
    ("H100", "hopper"),
    ("H200", "hopper"),
    ("H800", "hopper"),
    ("H20", "hopper"),
    ("B200", "blackwell"),
    ("B300", "blackwell-ultra"),
    ("Ascend", "ascend"),
)
"""Words of a device's name, as PyTorch gives it; the first that is found decides."""


def code(column: str, name: Any) -> int:
    """The code of a name, `code("recompute", "full")`. Raises ValueError for a name that the column has not."""
    return CODES[column].index(name)


def architecture(device: str) -> str:
    """A device's generation, of ARCHITECTURES, by the name that PyTorch gives it.

    >>> architecture("NVIDIA H100 80GB HBM3")
    'hopper'
    """
    return next((name for word, name in _ARCHITECTURE_WORDS if word in device), "other")


SHAPE = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "vocabulary", "tied"),
    *(
        "experts",
        "chosen",
        "expert_ffn",
        "shared_ffn",
        "dense_layers",
        "window",
        "windowed",
        "gate",
        "expert_hidden",
        "expert_bias",
        "expert_groups",
        "chosen_groups",
    ),
    *("attention_layers", "mixer_layers", "mlp_layers"),
)
"""Fields and properties of Shape."""
LATENT = tuple(field.name for field in fields(Latent))
"""0 where attention is not latent."""
MIXER = ("inputs", "inner", "scanned", "moved", "reference", "reference_scanned", "saved")
"""Of Mixer, in columns that begin with `mixer_`; 0 without another mixer than attention. `mixer_rest` are the elements
of its other matrices and vectors."""
ADAPTER = (
    # 1: only adapters are trained; 0: the whole model, and what follows is 0. Bytes of a frozen weight.
    *("frozen", "frozen_bytes"),
    # Features of all adapted linear layers of a mean layer.
    *("adapter_rank", "adapter_inputs", "adapter_outputs"),
    # 1: the first or the last linear layers of attention, or of a mixer, have adapters; a gradient needs their input.
    *("adapted_attention", "adapted_output"),
    # 1: the first or the last linear layers of MLPs have them.
    *("adapted_mlp", "adapted_down"),
)
STEP = ("prediction_modules", "sequence", "batch", "precision")
"""Of Workload; tokens of a sequence, sequences of a step on all devices, a code of PRECISIONS."""
WORKLOAD_COLUMNS = (*SHAPE, *LATENT, *(f"mixer_{name}" for name in MIXER), "mixer_rest", *ADAPTER, *STEP)


def of_workload(workload: Workload) -> dict[str, float]:
    """The columns of what is trained."""
    shape, latent, mixer = workload.shape, workload.shape.latent, workload.shape.mixer
    columns = {name: float(getattr(shape, name)) for name in SHAPE}
    columns |= {name: float(getattr(latent, name)) if latent else 0.0 for name in LATENT}
    columns |= {f"mixer_{name}": float(getattr(mixer, name)) if mixer else 0.0 for name in MIXER}
    rest = mixer.others + mixer.channels * mixer.kernel + mixer.vectors if mixer else 0
    return {
        **columns,
        "mixer_rest": float(rest),
        **_of_adapter(workload),
        "prediction_modules": float(workload.prediction_modules),
        "sequence": workload.sequence,
        "batch": workload.batch,
        "precision": PRECISIONS.index(workload.precision),
    }


def _of_adapter(workload: Workload) -> dict[str, float]:
    adapter = workload.adapter
    if adapter is None:
        return dict.fromkeys(ADAPTER, 0.0)
    features, chosen = adapter.features(workload.shape), adapter.linear
    layers = workload.shape.layers
    return {
        "frozen": 1.0,
        "frozen_bytes": BASE_BYTES[adapter.base],
        "adapter_rank": float(adapter.rank),
        "adapter_inputs": sum(into for into, _ in features) / layers,
        "adapter_outputs": sum(out for _, out in features) / layers,
        "adapted_attention": float(bool(chosen & {"q_proj", "k_proj", "v_proj", "in_proj"})),
        "adapted_output": float(bool(chosen & {"o_proj", "out_proj"})),
        "adapted_mlp": float(bool(chosen & {"gate_proj", "up_proj"})),
        "adapted_down": float("down_proj" in chosen),
    }


# Framework facts: what each does by default, from its documentation, as columns of the table and defaults of options.
#
# A `Profile` has two sorts of facts. Those of `Profile` itself say how a step runs whatever its user asks for, and are
# columns of the table. Its `Defaults` say what an option is that the user has not written, and what a word of theirs
# means; rows of published runs are filled with them, and the output names each. `framework_profiles` has the profiles.


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Options as they are where nobody has set them."""

    zero: int = 0
    """0 to 3, over the ranks that see different data."""
    sequence_parallel: bool = False
    """Where tensor parallelism is used."""
    recompute: Literal["none", "selective", "full"] = "none"
    precision: Precision = "bf16"
    schedule: Literal["1f1b", "interleaved", "dualpipe"] = "1f1b"
    """Of pipelines."""
    vocabulary: int = 50257
    """Tokens; 50257 is GPT-2's, which Megatron and what follows it are shipped with."""
    selective: float = 0.0
    """What the word "selective" means of recomputation. 0: the scores of attention, as in Megatron. Else a share of the
    layers, whole, or as much of each."""
    expert_tensor: Literal["whole", "tensor"] = "whole"
    """Experts that are spread: each whole, or its features split over the tensor axes."""
    gathered_in_pipelines: bool = False
    """With a pipeline weights that are split for good stay gathered, and gradients whole, from a step's first
    micro-batch to its last."""


UNKNOWN = ("overlap_expert", "graphs", "fused_routing", "dedup", "even")
"""Facts of a mixture's step that a run's source may leave open; each is the faster at 1."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A framework's behaviour, beyond what its user spreads over which axes.

    Shares are 0 or 1 where documentation says that something is not done, or done. 0.5 in a column of UNKNOWN says that
    a framework does either, as its user asks: the interval of an estimate then holds both (`error_interval`).
    """

    name: str
    source: str
    """Where its facts stand."""
    fused: float = 1.0
    """Elementwise operators and norms are fused into few kernels. 0: one kernel for each operator. -0.6: norms and
    rotations are many operators each, some in float32. 0.5: those that move most bytes (norms, softmax, a
    bias with its activation or dropout), in about as many kernels, and products do not add into sums of gradients."""
    flash: float = 1.0
    """Attention's scores stay on the chip: 1 by the best kernels that a device has; a share of their rate by others; 2
    by FlashAttention-2, PyTorch's copy or its own package, which knows no instruction that is newer than Ampere."""
    overlap_data: float = 1.0
    """Gradients are reduced, and weights gathered, beside computation."""
    overlap_split: float = 1.0
    """What is left of that for gradients where the optimizer's state is split (ZeRO)."""
    overlap_tensor: float = 0.0
    """The collectives of a layer's split products run beside them, in parts."""
    overlap_expert: float = 0.0
    """Tokens travel to experts and back beside the computation of another micro-batch."""
    ordered: float = 0.0
    """Collectives are in the order that `hyper_parallel.overlap` searches: without a pipeline, and with an even number
    of micro-batches, tokens travel to experts and back beside the other micro-batch of a pair, and take turns with
    gathered weights on the links that both use. Links have the rates that a cluster states (`simulated_links`)."""
    graphs: float = 0.0
    """Kernels are launched from recorded graphs."""
    fused_routing: float = 0.0
    """A routed layer's top-k, probabilities and permutations are few kernels (Megatron's --moe-router-fusion and
    --moe-permute-fusion)."""
    shared_beside: float = 0.0
    """Shared experts run in a stream of their own beside the exchanges of routed ones."""
    bias_by_expert: float = 0.0
    """Biases of routed experts are added to their results expert by expert, times a token's probability, in float32
    (`TEGroupedMLP._apply_bias` of Megatron Core, and its copy in NeMo AutoModel)."""
    balanced: float = 0.0
    """Pipeline stages are cut by cost, the head's included, and not by a number of layers."""
    greedy: float = 0.0
    """That cut fills a stage until it exceeds its share of the cost; where the last are never reached, a run fails."""
    dedup: float = 0.0
    """A token that goes to several experts of a node crosses the network once."""
    dispatch_bytes: float = 2.0
    """Bytes of an element on its way to experts, scales included, where it is sent in 8 bits; else the activations'."""
    even: float = 0.0
    """Routing is forced to be even, as benchmarks do."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient's element, as it is summed over micro-batches and ranks."""
    scatter_bytes: float = 2.0
    """The same where parameters are split for good (ZeRO-3) and gradients are scattered layer by layer; at least the
    bytes that a weight is computed in."""
    weight_bytes: float = 2.0
    """Bytes of a parameter as ranks keep it between steps, a float32 master in the optimizer's state not counted."""
    state_bytes: float = 12.0
    """Bytes of a parameter's optimizer state, a float32 master included: AdamW's two moments and a master are 12."""
    logit_bytes: float = 8.0
    """Bytes of a logit while the loss goes back: in 16 bits and in float32, the float32 gradient in its copy's place,
    and the gradient in 16 bits. A loss that keeps a float32 copy more takes 12, one within the 16-bit logits 4."""
    logit_chunk: float = 0.0
    """Logits of a rank that the loss has at once, at most, of a power of two of positions; 0: all of a micro-batch."""
    narrow_copies: float = 0.0
    """1: where ZeRO splits less than the parameters, a rank has its part of them in `weight_bytes`, and whole copies in
    the bytes that a weight is computed in. The loss has two gradients of the head's weight while its chunks add up."""
    products_ratio: float = 1.0
    """Seconds of products of layers to those of the closed forms. This and what follows is read off captured steps of
    the model that is asked for (`planner.captured_costs`)."""
    attention_ratio: float = 1.0
    elementwise_ratio: float = 1.0
    unsplit: float = 0.0
    """Of the seconds of elementwise operators without tensor axes, the share that these do not split: sums of gradients
    of what several products read, among others."""
    kernel_seconds: float = 0.0
    """Of the kernels of a layer's elementwise operators, forward and backward: what their number costs the device,
    whatever their size."""
    head_ratio: float = 1.0
    head_squared: float = 0.0
    """Of the seconds of the head without tensor axes, the share that falls with the square of these: there are fewer
    chunks of logits, each of them smaller."""
    saved_ratio: float = 1.0
    """Bytes that a layer keeps of a token to those of the closed forms."""
    weight_traffic: float = 0.0
    """Bytes that a rank reads and writes of each weight in a micro-batch beside its products, where parameters are
    split for good: casts and copies of what is gathered, and of gradients."""
    regathers: float = 1.0
    """A product whose input is split by tokens keeps its part, and gathers it again for its gradient; a half says that
    it is not known."""
    stops: float = 0.0
    """A layer that is computed again for the backward pass ends with the last tensor that a gradient needs, as in
    PyTorch's checkpoint without re-entry (`early_stop`): the last product of an MLP and what experts send back are
    computed once."""
    tuned: float = 0.0
    """Kernels of products are chosen for Hopper by Transformer Engine or XLA, not as PyTorch's library offers them; a
    half says that it is not known."""
    scans: float = 1.0
    """Token mixers such as Mamba run in kernels that keep a chunk's products on the chip; 0: reference code, which
    writes each intermediate."""
    defaults: Defaults = field(default_factory=Defaults)
