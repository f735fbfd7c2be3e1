"""Matrix products and attention in a graph: FLOPs, shapes and layouts.

    [m, k] · [k, n], b times              2 · b · m · n · k                              `product`
    grouped: rows of g groups             2 · rows · n · k, as g products of rows / g    `product`
    convolution                           2 · elements of the output · inputs to each    `product`
    attention, forward                    2 · b · h · s · t · (size of q + size of v)    `attention`
    attention, backward                   5 products where the forward pass has 2        `attention`

Attention where a kernel skips what a causal mask hides is half of that. (`cluster.efficiency.attention_flops` is the
same count, for heads of one size.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from hyper_parallel.cluster.efficiency import attention_flops

Shape = tuple[int, ...]
Strides = tuple[int, ...]
Matrix = tuple[Shape, Strides]
"""Shape and strides of an operand, all ints."""

_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "addmv": (1, 2),
    "baddbmm": (1, 2),
    "linear": (0, 1),
    "_scaled_mm": (0, 1),
    "_grouped_mm": (0, 1),
    "grouped_mm": (0, 1),
    "_scaled_grouped_mm": (0, 1),
    "_int_mm": (0, 1),
    "convolution": (0, 1),
    "convolution_backward": (1, 2),
}
"""Where the two operands stand."""


def operator_name(node: fx.Node) -> str:
    """The operator's name without its namespace, overload and the underscore of an in-place form: ``mm``."""
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


def operands_of(name: str) -> tuple[int, int] | None:
    """Where the operands of a matrix product stand among its arguments; None for what is no product."""
    return _OPERANDS.get(name)


def product(name: str, a: Matrix, b: Matrix, out: Sequence[Shape]) -> tuple[float, Shape, str]:
    """(FLOPs, (batch, m, n, k), layout) of the matrix product `name` of two operands; `out` are its results' shapes."""
    if name.startswith("convolution"):
        return _convolution(name, a[0], b[0], out)
    if name.startswith(("_grouped", "grouped", "_scaled_grouped")):
        return _grouped(a, b, out[0])
    if name == "linear":
        b = (b[0][::-1], b[1][::-1])
    shape_a, shape_b = a[0], b[0]
    batch = shape_a[0] if len(shape_a) == 3 else 1
    m = shape_a[-2] if len(shape_a) > 1 else 1
    k = shape_a[-1]
    n = shape_b[-1] if len(shape_b) > 1 else 1
    if name == "linear":
        m = math.prod(shape_a[:-1])
    return 2.0 * batch * m * n * k, (batch, m, n, k), _letter(a) + _letter(b)


def is_expensive(name: str, shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether an operator is attention or a product that takes long for the bytes that it gives.

    All products do but batched ones whose result is larger than both operands, [b, m, k] · [b, k, n] with m · n >
    k · (m + n): scores of attention. `shapes`: of the operator's tensor arguments, in order.
    """
    operands = operands_of(name)
    if operands is None:
        return is_attention(name)
    if name not in ("bmm", "baddbmm"):
        return True
    (_, m, k), (_, _, n) = (shapes[place] for place in operands)
    known = all(isinstance(size, int) for size in (m, k, n))
    return not (known and m * n > k * (m + n))


def _letter(matrix: Matrix) -> str:
    """`n` for rows in memory one after the other, `t` for columns."""
    shape, strides = matrix[0][-2:], matrix[1][-2:]
    if len(shape) < 2 or strides[1] == 1 or shape[1] == 1:
        return "n"
    return "t" if strides[0] == 1 or shape[0] == 1 else "n"


def _grouped(a: Matrix, b: Matrix, out: Shape) -> tuple[float, Shape, str]:
    """Rows of groups times a matrix a group ([t, k] · [g, k, n]), or rows times rows ([m, t] · [t, n] gives
    [g, m, n])."""
    layout = _letter(a) + _letter(b)
    if len(a[0]) == 2 and len(b[0]) == 2:
        groups, m, n = out
        rows = a[0][1]
        return 2.0 * rows * m * n, (groups, m, n, max(1, rows // max(1, groups))), layout
    if len(b[0]) == 2:
        groups, m, k = a[0]
        columns = b[0][1]
        return 2.0 * columns * m * k, (groups, m, max(1, columns // max(1, groups)), k), layout
    groups, k, n = b[0]
    rows = a[0][0] if len(a[0]) == 2 else a[0][0] * a[0][1]
    return 2.0 * rows * n * k, (groups, max(1, rows // max(1, groups)), n, k), layout


def _convolution(name: str, given: Shape, weight: Shape, out: Sequence[Shape]) -> tuple[float, Shape, str]:
    """As the product of every place's inputs with the weights. The backward pass has one more than its results tell."""
    places = given[0] * math.prod(out[0][2:]) if name == "convolution" else math.prod(given) // given[1]
    inner = math.prod(weight[1:])
    times = 1.0 if name == "convolution" else 2.0
    return times * 2.0 * places * weight[0] * inner, (1, places, weight[0], inner), "nt"


def is_attention(name: str) -> bool:
    """Whether an operator is a fused attention kernel."""
    return "attention" in name and not name.endswith("mask")


def attention(
    name: str, shapes: Mapping[str, Shape], causal: bool, windows: tuple[Any, Any] = (None, None)
) -> tuple[float, Shape, str]:
    """(FLOPs, (batch, heads, queries, keys, size of a head), layout) of a fused attention kernel.

    `shapes`: those of its arguments by name, ``query``, ``key`` and ``value``, [B, H, S, D], or [B, S, H, D] where the
    operator is one of ``_flash_attention_*`` or ``_efficient_attention_*``. `causal`: it skips what the mask hides.
    `windows`: how far back and ahead a query sees, None for all.
    """
    q, k, v = shapes["query"], shapes["key"], shapes["value"]
    if not name.startswith("_scaled_dot_product"):
        q, k, v = (
            (*x[:1], x[-2], x[-3], x[-1]) if len(x) == 4 else (1, x[-2], x[-3], x[-1]) for x in (q, k, v)
        )
    back, _ = windows
    keys = k[-2] if not isinstance(back, int) or back < 0 else min(k[-2], 2 * (back + 1))
    # Heads of keys and of values may differ in size: their mean does as many FLOPs.
    shape = (q[0], q[1], q[2], keys, (q[-1] + v[-1]) // 2)
    layout = ("backward" if "backward" in name else "forward") + (" causal" if causal else "")
    return attention_flops(shape, layout), shape, layout
