"""Experts of a ragged pass, registered with Transformers as `NAME`: each expert's rows are a multiple of `BLOCK`.

How many tokens reach an expert depends on the other requests, and a matrix product of few rows adds up in another order
than one of many (`blocked_products`). So tokens of weight 0 are added until every expert that has any has a multiple;
the model's own code then computes all of them. Tokens that fill up a pass choose the experts of its first token, so
that they cost none of their own; nobody reads what they become.

Where a byte budget keeps the experts in tiers, the choice is announced before they compute, so that they can be read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hyper_parallel.graph.step_context import current_step
from hyper_parallel.inference.blocked_products import blocked_products
from hyper_parallel.inference.ragged_pass import current
from hyper_parallel.inference.weights.away_weight import experts_of

NAME = "hyper_parallel_padded"
BLOCK = 16
"""Rows of a product of an expert, which few tokens reach."""


def padded_experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Transformers' experts function for `NAME`: [T, D] to [T, D]."""
    # Without what a parallelized model wraps around it, too: that has been entered.
    own = inspect.unwrap(type(module).forward)
    slots = experts_TK.size(1)
    streamed = experts_of(module)
    if current_step().widest_spread:
        if streamed is not None:
            reached = min(slots, module.num_experts)
            streamed.choose([len(hidden_TD)] * reached + [0] * (module.num_experts - reached), slots)
        experts_TK = torch.arange(slots, device=experts_TK.device, dtype=experts_TK.dtype).expand_as(
            experts_TK
        )
        filling = min(module.num_experts, experts_TK.numel()) * (BLOCK - 1) // slots + BLOCK
        with blocked_products(BLOCK):
            wide: Tensor = own(
                module,
                pad(hidden_TD, (0, 0, 0, filling)),
                experts_TK[:1].expand(len(experts_TK) + filling, -1),
                pad(weights_TK, (0, 0, 0, filling)),
            )
        return wide[: len(hidden_TD)]
    tokens = _tokens(len(hidden_TD))
    if streamed is not None:
        reached = torch.bincount(experts_TK[:tokens].reshape(-1), minlength=module.num_experts)
        streamed.choose(reached[: module.num_experts].tolist(), slots)
    if tokens < len(hidden_TD):
        experts_TK = torch.cat([experts_TK[:tokens], experts_TK[:1].expand(len(hidden_TD) - tokens, -1)])
    counts = torch.bincount(experts_TK.reshape(-1), minlength=module.num_experts)
    missing = torch.where(counts > 0, -counts % BLOCK, 0)
    # The slots of a token are all used: whole multiples more, of the expert that has the most, make the sum fit.
    while int(missing.sum()) % slots:
        missing[counts.argmax()] += BLOCK
    added = torch.arange(len(missing), device=missing.device).repeat_interleave(missing).view(-1, slots)
    filling = len(added)
    with blocked_products(BLOCK):
        out: Tensor = own(
            module,
            pad(hidden_TD, (0, 0, 0, filling)),
            torch.cat([experts_TK, added.to(experts_TK.dtype)]),
            pad(weights_TK, (0, 0, 0, filling)),
        )
    return out[: len(hidden_TD)]


def _tokens(rows: int) -> int:
    """How many of the rows are tokens of requests: the first ones, where these are the rows of the pass."""
    ragged = current()
    return len(ragged.slots) or rows if rows == ragged.length else rows


def register() -> bool:
    """Make the function known to Transformers; whether this version of it has such functions."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, padded_experts)
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
