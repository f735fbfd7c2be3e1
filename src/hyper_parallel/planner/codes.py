"""Codes of categorical columns: architectures, recomputation, pipeline schedules, context methods, axis orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.workload.workload import PRECISIONS

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
