"""Costs of operators: FLOPs of products and attention, kinds of all others, and kernels that a compiler fuses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from hyper_parallel.cluster.efficiency import attention_flops
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import StepGraph, Value, is_wait, values_of
from hyper_parallel.graph.memory_effects import touched, writes
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.trace import Collective
from hyper_parallel.workload.work import Work, WorkKind

LOOKS_UP = frozenset({"embedding", "gather", "index", "index_select", "take", "take_along_dim"})
"""They read, of their first argument, as much as they give."""
ADDS_INTO = frozenset(
    {"scatter_add", "scatter", "scatter_reduce", "index_add", "index_copy", "index_put", "put"}
)
"""They change, of their first argument, as much as their source has."""
OVERWRITES = frozenset({"copy", "fill", "zero", "normal", "uniform", "random", "exponential", "bernoulli"})
"""In place, they do not read what they write."""
NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "sym_size", "sym_numel"}
)
MAKES = frozenset(
    {"zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
    | {"scalar_tensor", "eye", "lift_fresh_copy", "linspace"}
)  # fmt: skip
COPIES = frozenset(
    {"clone", "copy", "_to_copy", "contiguous", "cat", "stack", "fill", "zero", "repeat", "flip", "roll", "tril"}
    | {"triu", "slice_backward", "select_backward", "constant_pad_nd", "embedding_dense_backward", "repeat_interleave"}
    | {"slice_scatter", "select_scatter", "_foreach_copy", "split_with_sizes_copy", "as_strided_scatter"}
    | MAKES | LOOKS_UP | ADDS_INTO
)  # fmt: skip
REDUCES = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "var", "var_mean", "std"}
    | {"norm", "linalg_vector_norm", "logsumexp", "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm"}
    | {"_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward", "cumsum", "cumprod"}
    | {"native_group_norm_backward", "nll_loss_forward", "nll_loss_backward", "sort", "topk", "argsort", "bincount"}
    | {"_fused_rms_norm", "_fused_rms_norm_backward", "histc", "unique", "searchsorted", "_foreach_norm", "nonzero"}
)  # fmt: skip
ADDS_UP = frozenset({"sum", "mean", "amax", "amin", "prod", "var", "var_mean", "logsumexp", "any", "all"})
"""They are given dims."""
TOGETHER = 32
"""Contiguous elements from which on memory is as good as contiguous."""
FLOPS = {
    **dict.fromkeys(
        ("exp", "log", "sin", "cos", "tanh", "sigmoid", "rsqrt", "sqrt", "div", "reciprocal", "pow"), 4.0
    ),
    **dict.fromkeys(("silu", "gelu", "logaddexp", "softplus", "erf"), 8.0),
    **dict.fromkeys(("silu_backward", "gelu_backward"), 12.0),
    **dict.fromkeys(("tanh_backward", "sigmoid_backward", "_softmax_backward_data"), 3.0),
    **dict.fromkeys(("_softmax", "_log_softmax", "logsumexp", "native_layer_norm", "_fused_rms_norm"), 6.0),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), 12.0),
    **dict.fromkeys(("_fused_adamw", "_fused_adam"), 14.0),
}
"""FLOPs to an element, where it is not one; a square root, a quotient or a power counts as four."""


def work_kind(name: str) -> WorkKind:
    """The kind of work of an operator, by its name."""
    if name.startswith("_fused_ada") or name in ("_fused_sgd", "_fused_adagrad"):
        return "optimizer"
    return "copy" if name in COPIES else "reduce" if name in REDUCES else "elementwise"


# Matrix products and attention in a graph: FLOPs, shapes and layouts.
#
#     [m, k] · [k, n], b times              2 · b · m · n · k                              `product`
#     grouped: rows of g groups             2 · rows · n · k, as g products of rows / g    `product`
#     convolution                           2 · elements of the output · inputs to each    `product`
#     attention, forward                    2 · b · h · s · t · (size of q + size of v)    `attention`
#     attention, backward                   5 products where the forward pass has 2        `attention`
#
# Attention where a kernel skips what a causal mask hides is half of that. (`cluster.efficiency.attention_flops` is the
# same count, for heads of one size.)

Shape = tuple[int, ...]
Strides = tuple[int, ...]
Matrix = tuple[Shape, Strides]
"""Shape and strides of an operand, all ints."""

_OPERANDS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "convolution", "_int_mm"), (0, 1)),
    **dict.fromkeys(("_scaled_mm", "_grouped_mm", "grouped_mm", "_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "convolution_backward"), (1, 2)),
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


# Costs of a compiled step: memory-bound operators that a compiler fuses are priced as one kernel.
#
# With `train.compile` PyTorch's Inductor compiles the layers (`graph.compiled`). Where memory-bound operators of one
# layer and pass follow one another, between products, attention and collectives, it makes one kernel of them (Ansel et
# al., PyTorch 2, ASPLOS 2024, section 4): what they hand to one another stays in registers. So a run of them reads what
# it is given from outside once, writes what is used behind it, and is launched once:
#
#     read    = Σ bytes of the storages that the run reads and has not made, each once          `_price`
#     written = Σ bytes of the storages that it makes and that are used later, and of those that it changes
#     FLOPs   = Σ FLOPs of its operators
#
# Lookups, scatters and sorts stay kernels of their own. Reductions over rows are taken to keep their rows on the chip.

PHASES = frozenset({"forward", "loss", "backward"})
"""Phases that are compiled; the update's operators are whole kernels already."""
_ALONE = LOOKS_UP | ADDS_INTO | {"sort", "topk", "argsort", "cumsum", "cumprod", "bincount", "nonzero"}
"""Memory-bound operators that no compiler fuses with their neighbours."""
_FUSED = ("elementwise", "reduce", "copy")

Costs = Mapping[fx.Node, Work | Collective]


def fused_costs(
    step: StepGraph,
    costs: Costs,
    sizes: Mapping[object, int] | None = None,
    phases: frozenset[str] = PHASES,
) -> dict[fx.Node, Work | Collective]:
    """The costs with each run of fused operators at its last one; the others of a run do nothing.

    `costs`: of `graph.costs.costs`, with the same `sizes`. `phases`: in which operators are fused.
    """
    found = dict(costs)
    last = _last_uses(step)
    run: list[tuple[int, fx.Node]] = []
    key: tuple[object, ...] | None = None
    for at, node in enumerate(step.nodes):
        cost = costs.get(node)
        if isinstance(cost, Work) and cost.kind == "view":
            continue
        if cost is None and not is_wait(node) and node.target is not HOST:
            continue
        own = _key(node) if _is_fused(node, cost, phases) else None
        if own is None or own != key:
            _join(run, found, last, step, sizes)
            run, key = [], own
        if own is not None:
            run.append((at, node))
    _join(run, found, last, step, sizes)
    return found


def _key(node: fx.Node) -> tuple[object, ...]:
    region = region_of(node)
    return region.layer, region.phase, region.micro_batch, bool(node.meta["recomputed"])


def _is_fused(node: fx.Node, cost: Work | Collective | None, phases: frozenset[str]) -> bool:
    return (
        isinstance(cost, Work)
        and cost.kind in _FUSED
        and (region_of(node).phase in phases or ("loss" in phases and _is_loss_backward(node)))
        and operator_name(node) not in _ALONE
    )


def _is_loss_backward(node: fx.Node) -> bool:
    """Whether a node is of no module and of the backward pass: of the loss, whose operators are in no module."""
    return region_of(node).phase == "backward" and not node.meta["module"]


def _last_uses(step: StepGraph) -> dict[int, int]:
    """By storage, the place of the last node that touches it; what outlives the step is used behind its end."""
    found: dict[int, int] = {}
    end = 0
    for at, node in enumerate(step.nodes):
        end = at
        for storage in touched(node):
            found[storage] = at
    outlives = set(step.outside)
    outlives |= {value.storage for node in step.returned.values() for value in values_of(node)}
    return found | dict.fromkeys(outlives | set(step.gradients), end + 1)


def _join(
    run: Sequence[tuple[int, fx.Node]],
    costs: dict[fx.Node, Work | Collective],
    last: Mapping[int, int],
    step: StepGraph,
    sizes: Mapping[object, int] | None,
) -> None:
    """One kernel in place of a run's, where that moves fewer bytes."""
    if len(run) < 2:
        return
    works = [cost for _, node in run if isinstance(cost := costs[node], Work)]
    read, written = _price(run, last, step, sizes)
    read, written = min(read, sum(one.read for one in works)), min(written, sum(one.written for one in works))
    widest = max(works, key=lambda one: one.read + one.written)
    kinds = {one.kind for one in works}
    whole = Work(
        "reduce" if "reduce" in kinds else "elementwise" if "elementwise" in kinds else "copy",
        vector_flops=sum(one.vector_flops for one in works),
        read=read,
        written=written,
        dtype=widest.dtype,
        op="fused",
        fresh=min(written, sum(one.fresh for one in works)),
    )
    for _, node in run[:-1]:
        del costs[node]
    costs[run[-1][1]] = whole


def _price(
    run: Sequence[tuple[int, fx.Node]],
    last: Mapping[int, int],
    step: StepGraph,
    sizes: Mapping[object, int] | None,
) -> tuple[float, float]:
    """Bytes that a run reads from outside, and that it leaves behind."""
    values = dict(sizes or {})
    end = run[-1][0]
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    changed: dict[int, int] = {}
    for _, node in run:
        given = {
            value.storage: max(_bytes(step, value, values), read.get(value.storage, 0))
            for source in node.all_input_nodes
            for value in values_of(source)
            if value.storage not in made
        }
        read.update(given)
        old = touched(node)
        into = set(writes(node))
        for value in values_of(node):
            size = _bytes(step, value, values)
            if value.storage not in into and (value.storage not in old or value.storage in made):
                made[value.storage] = size
            elif value.storage in into and value.storage not in made:
                changed[value.storage] = size
    kept = sum(size for storage, size in made.items() if last.get(storage, end) > end)
    return float(sum(read.values())), float(kept + sum(changed.values()))


def _bytes(step: StepGraph, value: Value, sizes: Mapping[object, int]) -> int:
    """Bytes of a tensor; of a broadcast one, of its elements in memory."""
    return min(known(value.bytes, sizes), known(step.storages[value.storage].bytes, sizes))
