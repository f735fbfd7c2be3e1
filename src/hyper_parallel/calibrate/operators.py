"""Operators by name: seconds by the elements they are given, with the bytes that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from hyper_parallel.calibrate.results import Results
from hyper_parallel.calibrate.timing import Timer, filled, in_turns, keeping, tensors_of

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
    made = call(*arguments, **options)
    read = sum(tensor.nbytes for tensor in tensors_of(arguments))
    written = sum(tensor.nbytes for tensor in tensors_of((made,)))
    if operator.kind == "view":
        read = written = 0
    elif operator.in_place:
        read = sum(tensor.nbytes for tensor in tensors_of(arguments))
        read -= 0 if operator.short in ("aten.add_", "aten.mul_") else x.nbytes
    turns = in_turns(arguments)
    sample = timer.of(keeping(lambda: call(*next(turns), **options), written))
    key = ("operator", operator.short, operator.kind, operator.layout, dtype, read, written)
    results.add(key, sample.seconds, sample.spread)
