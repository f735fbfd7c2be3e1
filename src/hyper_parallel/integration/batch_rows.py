"""A Trainer's batch for a parallelized model: shifted labels, document boundaries from positions.

    labels of Rows at a position  =  the token after it        (a Trainer's labels are those of the position itself)

A mask that hides only the ends of rows is dropped: under causal attention nothing that bears loss sees them. One that
numbers documents, 1 1 2 2 2 0, becomes positions that begin anew, 0 1 0 1 2 …, by which every axis keeps documents
apart. Positions that begin anew beside a mask of ones leave documents together, as Transformers does. Lengths that the
axes cannot divide are padded at the end with labels that bear no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from hyper_parallel.errors import IntegrationError
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.loss import IGNORED
from hyper_parallel.shard.packed_documents import several_documents
from hyper_parallel.shard.row_length import length_multiple

_READ = frozenset({"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"})
_OF_DOCUMENTS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "return_loss"}
)
"""What collators tell beside position_ids, which say as much, and what is no input of a model's own."""


@dataclass(frozen=True)
class Rows:
    """Rows as a spread model takes them; B rows of S positions."""

    input_ids: Tensor
    """int64 [B, S]."""
    labels: Tensor | None
    """int64 [B, S], shifted: the label at a position is the token after it; -100 bears no loss."""
    position_ids: Tensor | None
    """int64 [B, S]; None where each row counts from 0."""
    several: bool
    """Whether some row may hold several documents."""
    rest: dict[str, Any]
    """What else the model takes: a mask that has to stay, pixel_values."""
    length: int
    """How many positions there were before rows were padded; logits of more are of padding."""


def rows_of(
    inputs: Mapping[str, Any], handle: ShardedModel, pad: int = 0, *, length: int | None = None
) -> Rows:
    """What a Trainer's collator gave, as rows for `handle`'s model.

    `pad`: the token that padding is filled with. `length`: pad to so many positions; left out, to the next multiple
    that the axes can divide. Raises IntegrationError for a mask that cannot be honoured on these axes.
    """
    input_ids: Tensor = inputs["input_ids"]
    rest = {key: value for key, value in inputs.items() if key not in _READ | _OF_DOCUMENTS}
    positions: Tensor | None = inputs.get("position_ids")
    mask = inputs.get("attention_mask")
    apart = True
    if isinstance(mask, Tensor) and mask.dim() == 2:
        # Beside a mask that numbers none, Transformers looks for no documents in the positions: they see each other.
        apart = bool((mask > 1).any())
        if apart:
            positions = positions if positions is not None else positions_of(mask)
        elif _hides_only_ends(mask):
            mask = None
        else:
            _may_hide(handle)
            rest["attention_mask"] = mask
    elif mask is not None:
        rest["attention_mask"] = mask
    if positions is not None and positions.dim() != 2:
        # One for each of several kinds of position (height, width, time): the model reads them itself.
        rest["position_ids"], positions = positions, None
    several = apart and positions is not None and several_documents(positions)
    rows = Rows(input_ids, shifted(inputs), positions, several, rest, input_ids.size(1))
    return _lengthened(rows, pad, length or _up(input_ids.size(1), length_multiple(handle.plan)))


def shifted(inputs: Mapping[str, Any]) -> Tensor | None:
    """int64 [B, S]: at each position the label of the next; `shift_labels` where a collator shifted them already."""
    if inputs.get("shift_labels") is not None:
        already: Tensor = inputs["shift_labels"]
        return already
    labels: Tensor | None = inputs.get("labels")
    return None if labels is None else padded(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


def positions_of(documents: Tensor) -> Tensor:
    """int64 [B, S]: positions that begin anew with each document of int [B, S], whose numbers change between them."""
    at = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    begins = documents.diff(dim=-1, prepend=documents[:, :1] - 1) != 0
    return at - at.masked_fill(~begins, 0).cummax(-1).values


def _hides_only_ends(mask: Tensor) -> bool:
    seen = mask != 0
    return bool((seen[:, 1:] <= seen[:, :-1]).all()) and bool(seen[:, 0].all())


def _may_hide(handle: ShardedModel) -> None:
    if handle.mesh.size("context") > 1:
        raise IntegrationError(
            "the attention mask hides positions that are not at the ends of rows (padding on the left?), which "
            "axes.context cannot tell apart; set tokenizer.padding_side = 'right'"
        )


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _lengthened(rows: Rows, pad: int, length: int) -> Rows:
    more = length - rows.length
    if more == 0:
        return rows
    rest = dict(rows.rest)
    for key, value in rest.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or value.size(1) != rows.length:
            continue
        if value.dim() > 2 or key not in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            raise IntegrationError(
                f"rows of {rows.length} positions have to be padded to {length}, and nothing says how to pad "
                f"{key} {list(value.shape)}; let the collator pad to a multiple (pad_to_multiple_of)"
            )
        rest[key] = padded(value, (0, more))
    positions = rows.position_ids
    if positions is not None:
        after = torch.arange(1, more + 1, device=positions.device)
        positions = torch.cat([positions, positions[:, -1:] + after], 1)
    labels = None if rows.labels is None else padded(rows.labels, (0, more), value=IGNORED)
    return Rows(
        padded(rows.input_ids, (0, more), value=pad), labels, positions, rows.several, rest, rows.length
    )
