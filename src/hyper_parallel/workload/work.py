"""Work of one operator: FLOPs, bytes, and the shape that decides its efficiency.

No torch here. `cluster.Device.seconds` turns a Work into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkKind = Literal["matmul", "attention", "elementwise", "reduce", "copy", "view", "optimizer", "host"]
"""Kinds of operators, which differ in their engine and in the share of its peak that they reach."""


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
