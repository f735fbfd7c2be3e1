"""Matrix products and attention by shape, dtype and layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch.nn import functional

from hyper_parallel.calibrate.results import Results
from hyper_parallel.calibrate.timing import Sample, Timer, filled, in_turns, keeping

LAYOUTS = ("nn", "nt", "tn")
"""A linear layer's gradient of its input, its forward product, and the gradient of its weight."""
DTYPES = ("float32", "bfloat16")


BETWEEN: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "full": (
        (1, 512, 384, 384),
        (1, 640, 1536, 384),
        (1, 512, 192, 768),
        (1, 2048, 320, 320),
        (1, 320, 2000, 512),
    ),
    "shared": ((1, 512, 384, 384), (1, 512, 192, 768)),
    "quick": ((1, 512, 384, 384), (1, 512, 192, 768)),
    "tiny": ((1, 32, 32, 32),),
}
"""Shapes between the grid's, on which the tables' error is measured."""


def shapes(level: str) -> Iterator[tuple[int, int, int, int]]:
    """(batch, m, n, k) to measure: a grid without its largest products, and batches of small ones."""
    sizes, limit = {
        "full": ((16, 64, 256, 1024, 4096), 2**28),
        "shared": ((16, 64, 256, 1024, 4096), 2**26),
        "quick": ((64, 256, 1024), 2**26),
        "tiny": ((16, 64), 2**20),
    }[level]
    for m, n, k in product(sizes, repeat=3):
        if m * n * k <= limit:
            yield 1, m, n, k
    if level == "full":
        # Large enough for the rate to have settled, of shapes as a block and a head have them.
        yield from ((1, 1024, 1024, 1024), (1, 512, 2048, 512), (1, 2048, 512, 512), (1, 512, 512, 2048))
        yield from ((1, 512, 16384, 256), (1, 512, 256, 16384), (1, 16384, 256, 512), (1, 128, 512, 512))
    batches, edges = ((8, 64), (32, 64, 256)) if level == "full" else ((16,), (64,))
    for batch, m, n in product(batches, edges, edges):
        for k in sorted({64, n}):
            if batch * m * n * k <= limit:
                yield batch, m, n, k


def measure_products(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Seconds by ("matmul" or "between", dtype, layout, batch, m, n, k), and by ("matmul launch", dtype)."""
    for name in DTYPES:
        small = filled((8, 8), getattr(torch, name), device)
        sample = timer.of(partial(torch.ops.aten.mm.default, small, small))
        results.add(("matmul launch", name), sample.seconds, sample.spread)
        for layout in LAYOUTS:
            for table, measured in (("matmul", shapes(level)), ("between", BETWEEN[level])):
                for shape in measured:
                    sample = _product(timer, device, shape, layout, getattr(torch, name))
                    results.add((table, name, layout, *shape), sample.seconds, sample.spread)


def _product(
    timer: Timer, device: torch.device, shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype
) -> Sample:
    batch, m, n, k = shape
    first = _matrix(batch, m, k, layout[0], dtype, device)
    second = _matrix(batch, k, n, layout[1], dtype, device)
    operator = torch.ops.aten.mm.default if batch == 1 else torch.ops.aten.bmm.default
    turns = in_turns((first, second))
    return timer.of(keeping(lambda: operator(*next(turns)), batch * m * n * dtype.itemsize))


def _matrix(
    batch: int, rows: int, columns: int, layout: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[rows, columns] or [batch, rows, columns]; a transposed view of memory if the layout says so."""
    shape = (rows, columns) if layout == "n" else (columns, rows)
    matrix = filled(shape if batch == 1 else (batch, *shape), dtype, device)
    return matrix if layout == "n" else matrix.transpose(-1, -2)


def attention_shapes(level: str) -> Iterator[tuple[int, int, int, int]]:
    """(batch · heads, queries, keys, size)"""
    heads, lengths, widths = {
        "full": ((4, 16, 64), (128, 512, 1024), (32, 64, 128)),
        "shared": ((4, 32), (128, 512), (32, 64)),
        "quick": ((8,), (128, 512), (64,)),
        "tiny": ((2,), (64,), (32,)),
    }[level]
    for batch, length, width in product(heads, lengths, widths):
        if batch * length * length * width <= 2**29:
            yield batch, length, length, width


def measure_attention(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Seconds by ("attention", dtype, direction and causal, heads, queries, keys, size)."""
    for name, causal in product(DTYPES, (False, True)):
        for heads, queries, keys, size in attention_shapes(level):
            # [1, heads, length, size] as a model has it: the heads of a position lie together.
            q, k, v = (
                filled((1, length, heads, size), getattr(torch, name), device)
                .transpose(1, 2)
                .requires_grad_()
                for length in (queries, keys, keys)
            )
            kernel = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=causal)
            with torch.no_grad():
                forward = timer.of(keeping(kernel, q.nbytes))
            out = kernel()
            gradients = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
            backward = timer.of(keeping(gradients, 3 * q.nbytes))
            for direction, sample in (("forward", forward), ("backward", backward)):
                layout = direction + (" causal" if causal else "")
                key = ("attention", name, layout, heads, queries, keys, size)
                results.add(key, sample.seconds, sample.spread)
