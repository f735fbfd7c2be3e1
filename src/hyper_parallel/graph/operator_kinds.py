"""Kinds of operators by name: lookups, reductions, copies, and FLOPs per element."""

from __future__ import annotations

from hyper_parallel.workload.work import WorkKind

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
    {
        "zeros",
        "ones",
        "full",
        "arange",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
    }
    | {"scalar_tensor", "eye", "lift_fresh_copy", "linspace"}
)
COPIES = frozenset(
    {
        "clone",
        "copy",
        "_to_copy",
        "contiguous",
        "cat",
        "stack",
        "fill",
        "zero",
        "repeat",
        "flip",
        "roll",
        "tril",
        "triu",
    }
    | {
        "slice_backward",
        "select_backward",
        "constant_pad_nd",
        "embedding_dense_backward",
        "repeat_interleave",
    }
    | {"slice_scatter", "select_scatter", "_foreach_copy", "split_with_sizes_copy", "as_strided_scatter"}
    | MAKES
    | LOOKS_UP
    | ADDS_INTO
)
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
"""Elements that lie together: from so many on, memory is as good as contiguous."""
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
