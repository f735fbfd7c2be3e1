"""Splits positions at the model's inputs and gathers them at its outputs; a call means what it means on one device.

Two wrappers. The one around the language model's decoder cuts token ids, embeddings and positions, and puts documents,
found in the whole rows, where the mask function finds them. Before it, in a vision tower for one, rows are whole. The
one around the whole model shifts and cuts labels, sums the loss and gathers logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.compat.local_tensor import each_rank, one_device
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard.context.attention import NAME, PASSED_ON, attention, give_axes
from hyper_parallel.shard.context.mask import (
    Positions,
    context_mask,
    running_positions,
    split_positions,
    watch_for_documents,
)
from hyper_parallel.shard.context.plan import RING, ULYSSES, ContextPlan, PositionSplit
from hyper_parallel.shard.forward import begins
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import text_config

IGNORED = -100
"""The label that bears no loss."""

_CUT = ("input_ids", "inputs_embeds", "token_type_ids")
_READ = frozenset({*_CUT, "position_ids", "attention_mask", *PASSED_ON})


class ContextRoot:
    """A model's split of positions, and the wrappers that put it into effect."""

    def __init__(self, model: nn.Module, plan: ContextPlan, split: PositionSplit, ring: Axis) -> None:
        self.split = split
        self._plan, self._ring = plan, ring
        core: Any = without_adapters(model)
        base = getattr(core, str(getattr(core, "base_model_prefix", "")), core)
        self._base = next((name for name, module in model.named_modules() if module is base), "")
        self._config: Any = text_config(model)

    def cut(self, x: Tensor) -> Tensor:
        """This rank's positions of a whole [B, S, ...]."""
        return self.split.cut(x, 1)

    def positions_at(self, name: str) -> PositionSplit | None:
        """How positions are split in the activations of a module: in the decoder and in the head; before the decoder,
        where a vision tower stands, they are not."""
        decoder, base = self._plan.decoder, self._base
        inside = name.startswith(f"{decoder}." if decoder else "")
        return None if not inside and name.startswith(f"{base}.") else self.split

    # The decoder.

    def around_decoder(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The wrapper of the decoder: whole rows in, this rank's positions out."""
        kwargs = by_name(args, kwargs)
        refuse_caches(kwargs)
        unknown = sorted(key for key, value in kwargs.items() if key not in _READ and _holds_tensors(value))
        if unknown:
            raise StrategyError(
                f"the decoder is given {', '.join(unknown)}, and axes.context does not know their dim of positions; "
                "set axes.context to 1 for this model"
            )
        whole = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if whole is None:
            raise StrategyError("the model was given neither input_ids nor inputs_embeds; give it one")
        rows, length = whole.size(0), whole.size(1)
        self.split.check(length)
        given = kwargs.get("position_ids")
        positions = given if given is not None else torch.arange(length, device=whole.device).unsqueeze(0)
        padding = kwargs.get("attention_mask")
        documents = documents_of(positions, padding, rows, length)
        here = Positions(self.split, self._ring.index, positions, documents, padded=padding is not None)
        if here.packed and kwargs.get("use_cache") is None and getattr(self._config, "use_cache", False):
            raise StrategyError(
                "position_ids tell several documents in a row, which Transformers keeps apart only when no cache is "
                "made; call the model with use_cache=False"
            )
        for key in _CUT:
            if kwargs.get(key) is not None:
                kwargs[key] = self.split.cut(kwargs[key], 1)
        kwargs["position_ids"] = self.split.cut(positions, -1)
        if padding is not None:
            # Given a mask, Transformers looks for no documents; what ours hides is known by now.
            kwargs["attention_mask"] = torch.ones_like(self.split.cut(padding, 1))
        kwargs["use_cache"] = False
        with split_positions(here):
            output = forward(**kwargs)
        expected = sum(map(current_step().runs, self._plan.attentions))
        if here.attentions < expected:
            raise StrategyError(
                f"of {expected} attention modules only {here.attentions} computed attention over all "
                "positions: some layer mixes positions on its own; set axes.context to 1 for this model"
            )
        return output

    # The whole model.

    def around_model(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The wrapper of the root: logits of all positions and the loss of the whole rows, as on one device.

        The loss of a request (`shard.loss`) stays this rank's part.
        """
        kwargs = by_name(args, kwargs)
        refuse_caches(kwargs)
        if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
            kwargs = self._with_labels(kwargs)
        output = forward(**kwargs)
        if isinstance(output, Tensor):
            return output
        if isinstance(output, tuple) or not isinstance(output, Mapping):
            raise StrategyError(
                "axes.context needs the model's outputs by name, not as a tuple; leave return_dict out"
            )
        found: Any = output
        if found.get("loss") is not None:
            found["loss"] = self.split.context.reduce(found["loss"])
        for key in ("logits", "last_hidden_state"):
            if found.get(key) is not None:
                found[key] = self.split.gather(found[key], 1)
        if found.get("hidden_states") is not None:
            found["hidden_states"] = tuple(self.split.gather(hidden, 1) for hidden in found["hidden_states"])
        return found

    def _with_labels(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Labels of this rank's positions, shifted while rows were whole; divided by the tokens of whole rows."""
        if kwargs.get("output_router_logits") or getattr(self._config, "output_router_logits", False):
            raise StrategyError(
                "with axes.context a call with labels cannot add the routers' auxiliary loss, which is of all "
                "positions; compute the loss with hyper_parallel.shard.loss.causal_lm_loss, or set "
                "output_router_logits to False"
            )
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(kwargs["labels"], (0, 1), value=IGNORED)[:, 1:]
        count = kwargs.get("num_items_in_batch")
        mine = self.cut(shifted.contiguous())
        return {
            **kwargs,
            "labels": mine,
            "shift_labels": mine,
            "num_items_in_batch": (shifted != IGNORED).sum() if count is None else count,
        }


def apply_context(model: nn.Module, plan: ContextPlan | None, axes: Mapping[str, Axis]) -> ContextRoot | None:
    """Split the decoder's positions and route its attention; the root is wrapped by `apply_context_to_root`.

    None where there is nothing to split.
    """
    if plan is None:
        return None
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    watch_for_documents()
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, context_mask)
    config: Any = text_config(model)
    config._attn_implementation = NAME
    # The whole axis needs no second group of the same ranks.
    ring = axes["context" if plan.ulysses == 1 else RING]
    ulysses = axes["context" if plan.ring == 1 else ULYSSES]
    for name in plan.attentions:
        give_axes(model.get_submodule(name), ring, ulysses)
    decoder = model.get_submodule(plan.decoder)
    root = ContextRoot(model, plan, PositionSplit(axes["context"], plan.ulysses), ring)
    apply_whole_rotary(decoder)
    wrap(decoder, root.around_decoder)
    return root


def apply_context_to_root(model: nn.Module, root: ContextRoot | None) -> None:
    """Put the outermost wrapper around the model: after all that computes with this rank's positions."""
    if root is not None:
        wrap(model, root.around_model)


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, all by name."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        raise StrategyError("with axes.context give the model its arguments by name, all but input_ids")
    return {**kwargs, "input_ids": args[0]} if args else dict(kwargs)


def refuse_caches(kwargs: Mapping[str, Any]) -> None:
    """Raise StrategyError for a call that keeps a cache, or asks for outputs that parts of positions do not have."""
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise StrategyError(
            "with axes.context the model computes whole sequences and keeps no cache; call it with use_cache=False "
            "and without past_key_values"
        )
    for key in ("output_attentions", "logits_to_keep"):
        asked = kwargs.get(key)
        if isinstance(asked, Tensor) or asked:
            raise StrategyError(f"with axes.context {key} is not supported; leave it out")


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(one) for one in value)
    return isinstance(value, Tensor)


# Documents and padding, read off whole rows before positions are cut.
#
# What Transformers does with the same arguments on one device: without a mask, a document begins wherever a position is
# not the one before it plus one; with a mask, rows are one document and its zeros hide keys.


def documents_of(positions: Tensor, padding: Any, rows: int, length: int) -> tuple[Tensor, Tensor] | None:
    """(of queries, of keys): int64 [B, S] each, never falling along a row; None where every row is one document.

    `positions` [B or 1, S]; or [4, B, S] with those of the text first; [3, B, S] tell no documents. `padding` [B, S] or
    None. Raises StrategyError for any other mask, and for padding that is not at the end of rows.
    """
    if padding is not None:
        return _padded(padding, rows, length)
    if positions.dim() == 3:
        if positions.size(0) != 4:
            return None
        positions = positions[0]
    new = begins(positions)
    documents = new.long().cumsum(-1).expand(rows, -1)
    known = current_step().documents
    several = _any(new) if known is None else known
    return (documents, documents) if several else None


def _padded(padding: Any, rows: int, length: int) -> tuple[Tensor, Tensor] | None:
    if not isinstance(padding, Tensor) or tuple(padding.shape) != (rows, length):
        got = f"of shape {list(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
        raise StrategyError(
            f"with axes.context an attention mask has the shape of input_ids, [{rows}, {length}]; got one {got}"
        )
    hidden = padding == 0
    if not _any(hidden):
        return None
    if _any(hidden[:, :1]) or _any(hidden[:, :-1] & ~hidden[:, 1:]):
        raise StrategyError(
            "with axes.context an attention mask may hide the ends of rows only; pad rows on the right, or pack "
            "documents and tell them apart by position_ids"
        )
    return torch.zeros_like(hidden, dtype=torch.int64), hidden.long()


def _any(x: Tensor) -> bool:
    if is_fake(x):
        return False  # nothing is to be read from tensors without values, on which costs are worked out
    with one_device():
        return any(bool(mine.any()) for mine in each_rank(x).values())


# Rotary embeddings with length-dependent frequencies, computed from whole rows.
#
# With ``dynamic`` and ``longrope`` scaling Transformers reads the longest position off those that it is given, which
# after the cut differ from rank to rank.

_BY_LENGTH = ("dynamic", "longrope")


def apply_whole_rotary(decoder: nn.Module) -> None:
    """Let such embeddings see the whole rows' positions, and cut what they give."""
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind in _BY_LENGTH for kind in kinds):
            wrap(module, _whole)


def _whole(forward: Forward, x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
    here = running_positions()
    assert here is not None, "rotary embeddings are made in the decoder's own forward pass"
    cos, sin = forward(x, here.position_ids, *args, **kwargs)
    return here.split.cut(cos, -2), here.split.cut(sin, -2)
