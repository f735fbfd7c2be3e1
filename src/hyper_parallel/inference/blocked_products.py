"""Matrix products in blocks of a fixed number of rows, so that a row's bits do not depend on how many there are.

A library chooses its kernel by the size of a product, and with several threads whether these share a sum: MKL with two
threads adds up 64 rows of [M, 1408] x [1408, 512] in another order than 32. Products of one size have one order. More
rows are computed as one product where that has the bits of blocks, which a product of random numbers shows once for
each size of a weight. Elsewhere than on the host products are left as they are.

The host reads weights of K rows of N fastest: 32 rows take 0.55 to 0.85 of the time that they take with the N rows of K
that linear layers have (`column_major`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hyper_parallel.compat.dispatch import products_by
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.inference.ragged_pass import current
from hyper_parallel.inference.weights.weight_stand_in import experts_of

_PLAIN = (Tensor, nn.Parameter)
"""Not distributed tensors, whose products are those of their shards."""
_MOST = 128
"""Rows of a product, at most: more take as long."""


@contextmanager
def blocked_products(block: int, *, merged: bool | None = None) -> Iterator[None]:
    """In it, products of more than `block` rows on the host have the bits of products of `block` rows. `merged`: more
    rows are computed as one product, where the bits are the same; what shows it takes the memory of such a product
    once. By default as in the block around this one, else True."""
    merge = _MERGED.get() if merged is None else merged

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if x.device.type != "cpu" or type(x) not in _PLAIN or type(weight) not in _PLAIN:
            return None
        rows, inner = x.shape[-2:]
        # A product of one number is no sum.
        if rows <= block or inner == 1:
            return None
        if x.dim() == 3:
            return _batched(x, weight, bias, block)
        # A bias of each row is cut as rows are.
        by_row = bias is not None and bias.dim() == 2 and bias.size(0) == rows
        whole = merge and not by_row and x.is_contiguous()
        out = x.new_empty(rows, weight.size(1))
        first = 0
        while first < rows:
            count = _rows_at_once(rows - first, block, weight, bias) if whole else block
            end = first + count
            part, own = x[first:end], bias[first:end] if bias is not None and by_row else bias
            if end <= rows:
                _product(part, weight, own, out[first:end])
            else:
                filled = pad(part, (0, 0, 0, end - rows))
                if own is not None and by_row:
                    own = pad(own, (0, 0, 0, block - len(own)))
                out[first:] = _product(filled, weight, own)[: rows - first]
            first = end
        return out

    token = _MERGED.set(merge)
    try:
        with products_by(product):
            yield
    finally:
        _MERGED.reset(token)


def _batched(x: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
    """x [B, M, K] @ weight [B, K, N] + bias."""
    rows = x.size(1)
    filling = -rows % block
    parts = pad(x, (0, 0, 0, filling)).split(block, 1)
    if bias is None:
        products = [torch.bmm(part, weight) for part in parts]
    else:
        biases = pad(bias.expand(x.size(0), rows, weight.size(2)), (0, 0, 0, filling)).split(block, 1)
        products = [torch.baddbmm(own, part, weight) for own, part in zip(biases, parts, strict=True)]
    # Cut before they are joined: models view the result as if it were PyTorch's, which is contiguous.
    products[-1] = products[-1][:, : block - filling]
    return torch.cat(products, 1)


def _rows_at_once(rows: int, block: int, weight: Tensor, bias: Tensor | None) -> int:
    """Rows of the largest product of at most `rows` rows that has the bits of products of `block` rows; else `block`,
    which may be more than there are."""
    for count in (rows, *(block * blocks for blocks in (8, 6, 4, 3, 2))):
        if block < count <= min(rows, _MOST) and _same_bits(count, block, weight, bias):
            return count
    return block


def _same_bits(rows: int, block: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product of `rows` rows has the bits of products of `block` rows, with weights like this one."""
    key = (
        *(rows, block, weight.shape, weight.stride(), weight.dtype),
        None if bias is None else (bias.shape, bias.dtype),
        torch.get_num_threads(),
    )
    if key not in _SAME:
        _SAME[key] = _shown_same(rows, block, weight, bias)
    return _SAME[key]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def _shown_same(rows: int, block: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Compared on random rows. False where these would not show another order of the sums: a weight of zeros."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.size(0), generator=draws).to(weight.dtype)
    at_once = _product(x, weight, bias)
    blocks = pad(x, (0, 0, 0, -rows % block)).split(block)
    places = zip(blocks, at_once.split(block), strict=True)
    if not all(torch.equal(_product(part, weight, bias)[: len(same)], same) for part, same in places):
        return False
    cut = weight.size(0) // 2 - 1
    if cut < 1:
        return False
    return not torch.equal(
        _product(x[:, :cut], weight[:cut], bias) + torch.mm(x[:, cut:], weight[cut:]), at_once
    )


_SAME: dict[tuple[object, ...], bool] = {}
"""What was found by `_same_bits`."""
_MERGED: ContextVar[bool] = ContextVar("merged", default=True)


def column_major(model: nn.Module, rows: int) -> None:
    """Lay the float32 weights of a model's linear layers on the host out as K rows of N, in place, where products of
    `rows` rows have the same bits with them, and so with any way of keeping weights. Weights that another module uses
    too are left alone."""
    uses = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    same: dict[torch.Size, bool] = {}
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight
        if type(weight) not in _PLAIN or weight.device.type != "cpu" or weight.dtype != torch.float32:
            continue
        if uses[id(weight)] == 1 and same.get(weight.shape, True):
            turned = weight.data.t().contiguous()
            if weight.shape not in same:
                x = torch.randn(rows, weight.size(1), generator=torch.Generator().manual_seed(0))
                same[weight.shape] = torch.equal(x @ weight.data.t(), x @ turned)
            if same[weight.shape]:
                weight.data = turned.t()


# Experts of a ragged pass, registered with Transformers as `PADDED`: each expert's rows are a multiple of `BLOCK`.
#
# How many tokens reach an expert depends on the other requests, and a matrix product of few rows adds up in another
# order than one of many (`blocked_products`). So tokens of weight 0 are added until every expert that has any has a
# multiple; the model's own code then computes all of them. Tokens that fill up a pass choose the experts of its first
# token, so that they cost none of their own; nobody reads what they become.
#
# Where a byte budget keeps the experts in tiers, the choice is announced before they compute, so that they can be read.

PADDED = "hyper_parallel_padded"
BLOCK = 16
"""Rows of a product of an expert, which few tokens reach."""


def padded_experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Transformers' experts function for `PADDED`: [T, D] to [T, D]."""
    # Without what a parallelized model wraps around it, too: that has been entered.
    own = inspect.unwrap(type(module).forward)
    slots = experts_TK.size(1)
    streamed = experts_of(module)
    if current_step().widest_spread:
        if streamed is not None:
            reached = min(slots, module.num_experts)
            streamed.choose([len(hidden_TD)] * reached + [0] * (module.num_experts - reached), slots)
        filling = min(module.num_experts, experts_TK.numel()) * (BLOCK - 1) // slots + BLOCK
        first = torch.arange(slots, device=experts_TK.device, dtype=experts_TK.dtype)
        chosen = first.expand(len(experts_TK) + filling, -1)
    else:
        tokens = _tokens(len(hidden_TD))
        if streamed is not None:
            reaching = torch.bincount(experts_TK[:tokens].reshape(-1), minlength=module.num_experts)
            streamed.choose(reaching[: module.num_experts].tolist(), slots)
        if tokens < len(hidden_TD):
            experts_TK = torch.cat([experts_TK[:tokens], experts_TK[:1].expand(len(hidden_TD) - tokens, -1)])
        counts = torch.bincount(experts_TK.reshape(-1), minlength=module.num_experts)
        missing = torch.where(counts > 0, -counts % BLOCK, 0)
        # The slots of a token are all used: whole multiples more, of the expert that has the most, make the sum fit.
        while int(missing.sum()) % slots:
            missing[counts.argmax()] += BLOCK
        added = torch.arange(len(missing), device=missing.device).repeat_interleave(missing).view(-1, slots)
        filling = len(added)
        chosen = torch.cat([experts_TK, added.to(experts_TK.dtype)])
    with blocked_products(BLOCK):
        out: Tensor = own(
            module, pad(hidden_TD, (0, 0, 0, filling)), chosen, pad(weights_TK, (0, 0, 0, filling))
        )
    return out[: len(hidden_TD)]


def _tokens(rows: int) -> int:
    """How many of the rows are tokens of requests: the first ones, where these are the rows of the pass."""
    ragged = current()
    return len(ragged.slots) or rows if rows == ragged.length else rows


def register_padded_experts() -> bool:
    """Make the function known to Transformers; whether this version of it has such functions."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(PADDED, padded_experts)
    return True


@contextmanager
def experts_by(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, experts are computed by the function that Transformers knows as `name`; afterwards as before.

    What `set_experts_implementation` does, which in early releases of Transformers (5.6) takes no registered name.
    """
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    before = [
        (config, chosen)
        for config in configs.values()
        if (chosen := getattr(config, "_experts_implementation_internal", None)) is not None
    ]
    try:
        for config, _ in before:
            config._experts_implementation_internal = name
        yield
    finally:
        for config, chosen in before:
            config._experts_implementation_internal = chosen
