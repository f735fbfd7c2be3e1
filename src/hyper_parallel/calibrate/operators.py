"""Benchmarks of operators by name and size, and of matrix products and attention by shape, dtype and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from hyper_parallel.calibrate.timing import Results, Sample, Timer, filled, in_turns, keeping, tensors_of

WIDTH = 512
"""Elements of a row, for operators that work on rows."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Operator:
    """An operator of ATen and how to call it."""

    name: str
    """With its overload."""
    kind: str
    arguments: Callable[[torch.Tensor], Arguments]
    """From x [rows, WIDTH] to the call's arguments; it reads the tensors among them."""
    layout: str = ""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    in_place: bool = False
    """The operator works in place on its first argument."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """The name without the overload."""
        return ".".join(self.name.split(".")[:2])


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x, dtype=torch.float32).to(x.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A column of row indices in random order."""
    return torch.randperm(x.shape[0], device=x.device)


def _plain(name: str, kind: str = "elementwise", inputs: int = 1, *more: Any, **options: Any) -> Operator:
    """An operator on one or several tensors of one shape, then on `more`."""
    return Operator(name, kind, lambda x: (x, *(_like(x) for _ in range(inputs - 1)), *more), **options)


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.float().mean(1, keepdim=True).to(x.dtype), x.float().std(1, keepdim=True).to(x.dtype)


_ONE = ("float32",)

OPERATORS: tuple[Operator, ...] = (
    _plain("aten.add.Tensor", inputs=2),
    _plain("aten.sub.Tensor", inputs=2),
    _plain("aten.mul.Tensor", inputs=2),
    _plain("aten.div.Tensor", inputs=2),
    _plain("aten.add_.Tensor", inputs=2, in_place=True),
    _plain("aten.mul_.Tensor", inputs=2, in_place=True),
    _plain("aten.neg.default"),
    _plain("aten.exp.default"),
    _plain("aten.cos.default", dtypes=_ONE),
    _plain("aten.sin.default", dtypes=_ONE),
    _plain("aten.rsqrt.default", dtypes=_ONE),
    _plain("aten.tanh.default"),
    _plain("aten.sigmoid.default"),
    _plain("aten.relu.default"),
    _plain("aten.silu.default"),
    _plain("aten.gelu.default"),
    Operator(
        "aten.gelu.default", "elementwise", lambda x: (x,), layout="tanh", options={"approximate": "tanh"}
    ),
    Operator("aten.pow.Tensor_Scalar", "elementwise", lambda x: (x, 2)),
    _plain("aten.silu_backward.default", inputs=2),
    _plain("aten.gelu_backward.default", inputs=2),
    Operator(
        "aten.gelu_backward.default",
        "elementwise",
        lambda x: (x, _like(x)),
        layout="tanh",
        options={"approximate": "tanh"},
    ),
    _plain("aten.tanh_backward.default", inputs=2),
    _plain("aten.sigmoid_backward.default", inputs=2),
    Operator("aten.threshold_backward.default", "elementwise", lambda x: (_like(x), x, 0)),
    Operator("aten.where.self", "elementwise", lambda x: (x > 0, x, _like(x))),
    Operator("aten.masked_fill.Scalar", "elementwise", lambda x: (x, x > 0, 0.0)),
    Operator("aten.native_dropout.default", "elementwise", lambda x: (x, 0.1, True)),
    Operator("aten.fill_.Scalar", "copy", lambda x: (x, 0.0), in_place=True),
    Operator("aten.zeros_like.default", "copy", lambda x: (x,)),
    _plain("aten.clone.default", "copy"),
    Operator(
        "aten.clone.default",
        "copy",
        # [batch, heads, positions, size] whose positions lie outside its heads, as attention gets and gives them.
        lambda x: (x.view(-1, 4, 64, 8).permute(0, 2, 1, 3) if x.shape[0] >= 4 else x.t(),),
        layout="strided",
    ),
    Operator("aten._to_copy.default", "copy", lambda x: (x,)),
    Operator("aten.copy_.default", "copy", lambda x: (x, _like(x)), in_place=True),
    Operator("aten.cat.default", "copy", lambda x: ([x, _like(x)], 1)),
    Operator("aten.slice_backward.default", "copy", lambda x: (x, [x.shape[0], 2 * WIDTH], 1, 0, WIDTH, 1)),
    Operator("aten.sum.dim_IntList", "reduce", lambda x: (x, [1])),
    Operator("aten.sum.dim_IntList", "reduce", lambda x: (x, [0]), layout="strided"),
    Operator("aten.mean.dim", "reduce", lambda x: (x, [1], True)),
    Operator("aten.linalg_vector_norm.default", "reduce", lambda x: (x,), dtypes=_ONE),
    Operator("aten.logsumexp.default", "reduce", lambda x: (x, [1])),
    Operator("aten._softmax.default", "reduce", lambda x: (x, 1, False)),
    Operator("aten._log_softmax.default", "reduce", lambda x: (x, 1, False)),
    Operator("aten._softmax_backward_data.default", "reduce", lambda x: (_like(x), x.softmax(1), 1, x.dtype)),
    Operator(
        "aten._log_softmax_backward_data.default",
        "reduce",
        lambda x: (_like(x), x.log_softmax(1), 1, x.dtype),
    ),
    Operator(
        "aten.native_layer_norm.default", "reduce", lambda x: (x, [WIDTH], _like(x[0]), _like(x[0]), 1e-5)
    ),
    Operator(
        "aten.native_layer_norm_backward.default",
        "reduce",
        lambda x: (_like(x), x, [WIDTH], *_statistics(x), _like(x[0]), _like(x[0]), [True, True, True]),
    ),
    Operator("aten.embedding.default", "copy", lambda x: (x, _rows(x))),
    Operator(
        "aten.embedding_dense_backward.default",
        "copy",
        lambda x: (x, _rows(x), x.shape[0], -1, False),
    ),
    Operator("aten.index.Tensor", "copy", lambda x: (x, [_rows(x)])),
    Operator("aten.index_select.default", "copy", lambda x: (x, 0, _rows(x))),
    Operator("aten.index_add.default", "copy", lambda x: (x, 0, _rows(x), _like(x))),
    Operator("aten.index_put.default", "copy", lambda x: (x, [_rows(x)], _like(x), True)),
    Operator("aten.cumsum.default", "reduce", lambda x: (x, 1), dtypes=_ONE),
    Operator("aten.sort.default", "reduce", lambda x: (x, 1), dtypes=_ONE),
    Operator("aten.topk.default", "reduce", lambda x: (x.view(-1, 8), 2), dtypes=_ONE),
    Operator("aten.view.default", "view", lambda x: (x, [-1]), dtypes=_ONE),
    Operator("aten.transpose.int", "view", lambda x: (x, 0, 1), dtypes=_ONE),
)

ESSENTIAL = ("add", "mul", "exp", "silu", "clone", "_softmax", "native_layer_norm", "view")
"""The operators of a quick calibration."""


def sizes(level: str) -> tuple[int, ...]:
    """Elements, rows of WIDTH."""
    return {
        "full": (2**10, 2**14, 2**17, 2**20, 2**23),
        "shared": (2**12, 2**17, 2**21),
        "quick": (2**12, 2**17, 2**20),
        "tiny": (2**12, 2**15),
    }[level]


def measure_operators(timer: Timer, device: torch.device, level: str, results: Results) -> None:
    """Seconds by ("operator", name, kind, layout, dtype, bytes read, bytes written)."""
    for operator in OPERATORS:
        if level in ("quick", "tiny") and operator.short.removeprefix("aten.") not in ESSENTIAL:
            continue
        for dtype in operator.dtypes:
            for elements in sizes(level):
                x = filled((elements // WIDTH, WIDTH), getattr(torch, dtype), device)
                try:
                    _one(operator, dtype, x, timer, results)
                except (AttributeError, RuntimeError, NotImplementedError) as error:
                    # This PyTorch or device lacks the operator: its kind's table is used.
                    reason = (str(error).splitlines() or [type(error).__name__])[0][:80]
                    results.notes.append(f"{operator.name} in {dtype} was not measured: {reason}")
                    break


def _one(operator: Operator, dtype: str, x: torch.Tensor, timer: Timer, results: Results) -> None:
    call: Any = reduce(getattr, operator.name.split("."), torch.ops)
    arguments = operator.arguments(x)
    options = dict(operator.options)
    if operator.short == "aten._to_copy":
        options["dtype"] = torch.bfloat16 if x.dtype == torch.float32 else torch.float32
    result = call(*arguments, **options)
    read = sum(tensor.nbytes for tensor in tensors_of(arguments))
    written = sum(tensor.nbytes for tensor in tensors_of((result,)))
    if operator.kind == "view":
        read = written = 0
    elif operator.in_place:
        read = sum(tensor.nbytes for tensor in tensors_of(arguments))
        read -= 0 if operator.short in ("aten.add_", "aten.mul_") else x.nbytes
    turns = in_turns(arguments)
    sample = timer.of(keeping(lambda: call(*next(turns), **options), written))
    key = ("operator", operator.short, operator.kind, operator.layout, dtype, read, written)
    results.add(key, sample.seconds, sample.spread)


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
