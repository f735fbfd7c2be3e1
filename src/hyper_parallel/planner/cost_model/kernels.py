"""Kernel times: matrix products and memory-bound operators on one device.

    product(m, n, k) = max(2 m n k / (peak · r / ((1 + h_m s/m) (1 + h_n s/n) (1 + h_k s/k))),         `product`
                           (w (m k + k n) + 2 m n) / (hbm · e))
    bytes(B)         = B / (hbm · e)                                                                   `moved`

r is the share of the peak that large products reach in a training step, by architecture, and on Hopper by who chooses
their kernels (`large`); h are the sizes at which half of it is reached (Hockney's n_½, as in `cluster.efficiency`), and
s = √(rate / 250 TFLOP/s), since a faster unit needs larger products to be as busy. The second term of the product is
the roofline's memory side (Williams, Waterman and Patterson, CACM 52(4), 2009), with w bytes an operand's element,
scales included, and results in 16 bits. e is the constant `memory`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.planner.codes import ARCHITECTURES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.dims import in_eight_bits, in_four_bits, product_bytes
from hyper_parallel.planner.table import Table

Array = NDArray[np.float64]


def large(t: Table, k: Constants) -> Array:
    """The share of the peak that large products reach, by architecture."""
    shares = {
        "volta": k.volta,
        "ampere": k.ampere,
        "hopper": k.hopper,
        "blackwell": k.blackwell,
        "blackwell-ultra": k.blackwell * k.ultra,
        "ascend": k.ascend,
    }
    of_code = np.array([shares.get(name, k.other) for name in ARCHITECTURES])
    return of_code[t.architecture.astype(np.intp)] * np.where(_is_hopper(t), k.first ** (1 - t.tuned), 1.0)


def _is_hopper(t: Table) -> NDArray[np.bool_]:
    return np.asarray(t.architecture == ARCHITECTURES.index("hopper"))


def rate(t: Table, k: Constants, *, linear: bool = True) -> Array:
    """FLOP/s of large products; `linear`: in the precision of the linear layers, else in 16 bits."""
    share = large(t, k)
    sixteen = t.peak16 * share
    if not linear:
        return sixteen
    eight, four = in_eight_bits(t), in_four_bits(t)
    if not eight.any() and not four.any():
        return sixteen
    found = np.where(eight, t.peak8 * share * np.where(_is_hopper(t), k.eight_hopper, k.eight), sixteen)
    return np.where(four, t.peak4 * share * k.four, found)


class Products:
    """Products at one configuration each; what does not depend on their shape is computed once."""

    def __init__(self, t: Table, k: Constants, *, linear: bool = True) -> None:
        self.rate = rate(t, k, linear=linear)
        scale = np.sqrt(self.rate / 250e12)
        self.half = (k.half_rows * scale, k.half_columns * scale, k.half_depth * scale)
        self.bandwidth = t.hbm * k.memory
        few = linear and bool(in_eight_bits(t).any() or in_four_bits(t).any())
        self.operand = np.minimum(product_bytes(t), 2.0) if few else np.full(1, 2.0)

    def __call__(self, m: Array, n: Array, depth: Array) -> Array:
        """Seconds of [m, depth] · [depth, n]; 0 where a size is 0."""
        rows, columns, inner = self.half
        # m n k / share = (m + h_m) (n + h_n) (k + h_k): no division by a size that may be 0.
        flops = 2 * (m + rows) * (n + columns) * (depth + inner)
        bytes = 2 * m * n + self.operand * (n + m) * depth
        return np.where(m * n * depth > 0, np.maximum(flops / self.rate, bytes / self.bandwidth), 0.0)


def moved(t: Table, k: Constants, bytes: Array) -> Array:
    """Seconds to read and write `bytes` in total, at the device's memory bandwidth."""
    return bytes / (t.hbm * k.memory)
