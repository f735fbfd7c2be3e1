"""Forward passes: a model called with explicit positions, with packed documents kept apart, and without gradients.

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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.model_structure import is_transformers

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

    functions = masks.find_packed_sequence_indices, masks.is_tracing
    masks.find_packed_sequence_indices = lambda positions: begins(positions).cumsum(-1) if several else None
    # Transformers takes fake tensors for a compilation, in which it builds masks that a run does not.
    masks.is_tracing = lambda tensor=None: False
    try:
        with replace(current_step(), documents=several).installed():
            yield
    finally:
        masks.find_packed_sequence_indices, masks.is_tracing = functions


def begins(positions: Tensor) -> Tensor:
    """bool [B, S]: where a document begins in a row of positions, int64 [B, S], but for its first."""
    return torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1


def several_documents(positions: Tensor) -> bool:
    """Whether any row of int64 [B, S] begins anew: its values are looked at."""
    return bool(begins(positions).any())


def call(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, **inputs: Any) -> Any:
    """The model's output for ids and positions, both int64 [B, S], and what else it takes (`pixel_values`).

    A Transformers model is given `position_ids`, in which a packed document restarts at 0, no attention mask and
    `use_cache=False`: only then does it keep packed documents apart. Its masks find the positions also where it does
    not hand them on; where the model's own numbers begin above 0 (RoBERTa), so do those it is given. Some hand
    `use_cache` on without naming it as a parameter (Granite's mixtures, LLaVA). Any other module is given what its
    `forward` has parameters for.
    """
    given: dict[str, Any] = {"use_cache": False}
    core: Any = without_adapters(model)
    if position_ids is not None:
        first = first_position(core)
        given["position_ids"] = position_ids + first if first else position_ids
    taken = parameters_of(type(core).forward)
    if _hands_on(type(core).forward) and _may_cache(core):
        taken = taken | {"use_cache"}
    with positions_known(position_ids):
        return model(input_ids, **{name: value for name, value in given.items() if name in taken}, **inputs)


def first_position(model: nn.Module) -> int:
    """The number of a row's first position where the model numbers positions itself: not 0 where their table begins
    with a row for padding (RoBERTa)."""
    if model not in _first_positions:
        _first_positions[model] = next(
            (_numbered(one) for one in model.modules() if hasattr(one, _NUMBERS)), 0
        )
    return _first_positions[model]


def _numbered(module: Any) -> int:
    if not isinstance(module.padding_idx, int):
        return 0
    with outside_modes(), torch.device("cpu"):
        token = torch.tensor([[module.padding_idx + 1]])
        return int(getattr(module, _NUMBERS)(token, module.padding_idx)[0, 0])


_NUMBERS = "create_position_ids_from_input_ids"
"""The function by which every family with such a table numbers positions."""
_first_positions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _may_cache(model: Any) -> bool:
    """Whether a Transformers model's config says whether it caches keys and values."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return hasattr(text, "use_cache")


@functools.cache
def _hands_on(forward: Callable[..., Any]) -> bool:
    """Whether a `forward` takes any keyword."""
    kinds = (one.kind for one in inspect.signature(forward).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


def logits_in(output: Any) -> Tensor:
    """The logits in what a model returned: the tensor itself, or the object's `logits`."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def logits_of(model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, **inputs: Any) -> Tensor:
    """Logits [B, S, V] of `call`, whole."""
    return logits_in(call(model, input_ids, position_ids, **inputs))


@functools.cache
def parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of a module's `forward`."""
    return frozenset(inspect.signature(forward).parameters)


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients, nothing dropped; afterwards the model is as it was, memory included."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), fsdp.gathered_between_passes(model):
            yield
    finally:
        for module in training:
            module.training = True
