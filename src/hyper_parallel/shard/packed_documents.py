"""Packed documents: masks that keep them apart, and whether rows hold several, also where tensors have no values.

Transformers' mask functions keep documents apart that they are given the positions of. Many families (GPT-OSS, Falcon,
OPT) do not hand theirs on, or take none; while `positions_known`, those functions find them all the same, with what
each makes of sliding windows and of attention kernels.

They ask the positions' values where documents begin, and build a mask only if there are several. Which it is
decides which attention kernel runs, so a step without values must be told, and is right for such batches only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.rules import is_transformers

_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)

_MASKS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)
"""The functions of ``transformers.masking_utils`` that make causal masks."""


@contextlib.contextmanager
def positions_known(position_ids: Tensor | None) -> Iterator[None]:
    """Inside, causal masks keep the documents of these positions, int64 [B, S], apart."""
    token = _positions.set(position_ids)
    try:
        yield
    finally:
        _positions.reset(token)


def known_positions() -> Tensor | None:
    """The positions of `positions_known`; None outside."""
    return _positions.get()


def find_positions_in_masks(model: nn.Module) -> None:
    """Let the mask functions that the model's code calls find `positions_known`. Elsewhere nothing changes."""
    if not is_transformers(model):
        return
    from transformers import masking_utils

    theirs = {name: getattr(masking_utils, name) for name in _MASKS if hasattr(masking_utils, name)}
    sources = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for source in sources:
        namespace = vars(sys.modules.get(source, object))
        for name, function in theirs.items():
            if namespace.get(name) is function:
                setattr(sys.modules[source], name, _finding(function))


@functools.cache
def _finding(create: Callable[..., Any]) -> Callable[..., Any]:
    """The mask function, which finds the positions where it is given none."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def found(*args: Any, **kwargs: Any) -> Any:
        positions = _positions.get()
        if positions is None or positions.dim() != 2:
            return create(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        embeds = given.get("inputs_embeds", given.get("input_embeds"))
        cached = given.get("past_key_values") is not None
        if cached or embeds is None or embeds.size(0) != positions.size(0):
            return create(*args, **kwargs)
        # Of split rows (`shard.context.mask`) only the number of positions is looked at.
        if given.get("attention_mask") is not None:
            _hide_other_documents(given, positions[:, : embeds.size(1)])
        elif given.get("position_ids") is None:
            given["position_ids"] = positions[:, : embeds.size(1)]
        return create(*bound.args, **bound.kwargs)

    return found


def _hide_other_documents(arguments: dict[str, Any], positions: Tensor) -> None:
    """Change the arguments of a mask function that is given a mask of padding, with which it looks for no documents."""
    from transformers import masking_utils

    if arguments["attention_mask"].dim() != 2:
        return
    documents = masking_utils.find_packed_sequence_indices(positions)
    if documents is not None:
        hides = masking_utils.packed_sequence_mask_function(documents)
        theirs = arguments.get("and_mask_function")
        arguments["and_mask_function"] = hides if theirs is None else masking_utils.and_masks(theirs, hides)


@contextlib.contextmanager
def documents_known(several: bool) -> Iterator[None]:
    """Inside, rows hold `several` documents, or one each, and no values are looked at to find out."""
    import transformers.masking_utils as masks

    asked = masks.find_packed_sequence_indices, masks.is_tracing
    masks.find_packed_sequence_indices = _documents if several else lambda position_ids: None
    # Transformers takes fake tensors for a compilation, in which it builds masks that a run does not.
    masks.is_tracing = lambda tensor=None: False
    try:
        with replace(current_step(), documents=several).installed():
            yield
    finally:
        masks.find_packed_sequence_indices, masks.is_tracing = asked


def several_documents(positions: Tensor) -> bool:
    """Whether any row of int64 [B, S] begins anew: its values are looked at."""
    return bool((positions.diff(dim=-1) != 1).any())


def _documents(position_ids: Tensor) -> Tensor:
    """What `find_packed_sequence_indices` gives where there are several."""
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
