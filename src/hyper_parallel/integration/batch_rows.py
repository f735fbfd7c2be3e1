"""A Trainer's batch for a parallelized model: shifted labels, document boundaries, few lengths, and the last batch.

    labels of Rows at a position  =  the token after it        (a Trainer's labels are those of the position itself)

A mask that hides only the ends of rows is dropped: under causal attention nothing that bears loss sees them. One that
numbers documents, 1 1 2 2 2 0, becomes positions that begin anew, 0 1 0 1 2 …, by which every axis keeps documents
apart. Positions that begin anew beside a mask of ones leave documents together, as Transformers does. Lengths that the
axes cannot divide are padded at the end with labels that bear no loss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.parallel_run import ParallelRun
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.forward import several_documents
from hyper_parallel.shard.loss import IGNORED
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.units import round_up

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
    """The batch of a Trainer's collator, as rows for `handle`'s model.

    `pad`: the token that padding is filled with. `length`: pad to this number of positions; left out, to the next
    multiple that the axes can divide. Raises IntegrationError for a mask that cannot be honoured on these axes.
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
        elif not _hides_only_ends(mask):
            if handle.mesh.size("context") > 1:
                raise IntegrationError(
                    "the attention mask hides positions that are not at the ends of rows (padding on the left?), which "
                    "axes.context cannot tell apart; set tokenizer.padding_side = 'right'"
                )
            rest["attention_mask"] = mask
    elif mask is not None:
        rest["attention_mask"] = mask
    if positions is not None and positions.dim() != 2:
        # One for each of several kinds of position (height, width, time): the model reads them itself.
        rest["position_ids"], positions = positions, None
    several = apart and positions is not None and several_documents(positions)
    rows = Rows(input_ids, shifted(inputs), positions, several, rest, input_ids.size(1))
    return _lengthened(rows, pad, length or round_up(input_ids.size(1), length_multiple(handle.plan)))


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


# Few lengths of rows inside another trainer: plans are made for shapes, and rows of a trainer have many lengths.
#
# All ranks pad to the longest row of any of them, and further, to one of few lengths:
#
#     known length if one is at least n and at most 1.5 · n, else the next of 2^k and 1.5 · 2^k;
#     once MOST lengths are known, the least of them that is at least n
#
# The first length is taken as it is: rows that are all of one length are not padded.

MOST = 8
"""Lengths from which on no shorter one is added."""


class FewLengths:
    """The lengths to which the ranks of a model have padded rows so far."""

    def __init__(self, handle: ShardedModel, known: Sequence[int] = ()) -> None:
        """`known`: lengths for which there are plans already."""
        self._handle, self.known = handle, list(known)

    def length(self, longest: int) -> int:
        """To how many positions rows of at most `longest` are padded now, the same on every rank; a collective.

        A multiple of what the axes can divide.
        """
        length_tensor = torch.tensor([longest], dtype=torch.int64, device=self._handle.device)
        wanted = int(self._handle.over_all_ranks(length_tensor, "max"))
        found = length_of(wanted, self.known, length_multiple(self._handle.plan))
        if found not in self.known:
            self.known.append(found)
        return found


def length_of(wanted: int, known: Sequence[int], multiple: int = 1) -> int:
    """The module's rule, for `wanted` positions when these lengths are `known`; a multiple of `multiple`."""
    rounded = round_up(wanted, multiple)
    fits = [length for length in known if length >= rounded]
    if fits and (min(fits) <= 1.5 * rounded or len(known) >= MOST):
        return min(fits)
    if not known:
        return rounded
    power = 1 << (rounded - 1).bit_length()
    step = power * 3 // 4 if rounded <= power * 3 // 4 else power
    return round_up(step, multiple)


# The last batch of an epoch, which Accelerate fills up with rows that the epoch has had.
#
# One process has a short last batch. Over ranks every one gets as many rows as before, some of them a second time. In
# training these are taken out; a rank without a row of this batch then keeps them, in a batch that does not count.

log = logging.getLogger(__name__)
_LABELS = ("labels", "shift_labels")


class NoRows(dict[str, Any]):
    """The batch of a rank without rows; its loss does not count."""


def new_rows(state: Any, share: int, rows: int) -> int | None:
    """How many of the `rows` that a share of the batch has were not there before; None where that is all.

    `state`: Accelerate's GradientState, right after the batch was read.
    """
    if not state.end_of_dataloader or state.remainder <= 0:
        return None
    return min(max(int(state.remainder) - share * rows, 0), rows)


def shortened(batch: Mapping[str, Any], kept: int | None, rows: int) -> Mapping[str, Any]:
    """A batch of `rows` rows without those that were there before."""
    if kept is None or kept == rows:
        return batch
    if kept:
        return {key: value[:kept] if _by_row(value, rows) else value for key, value in batch.items()}
    masked = {key: torch.full_like(batch[key], IGNORED) for key in _LABELS if _bears_tokens(batch.get(key))}
    return NoRows({**batch, **masked})


def check_rows(batch: Mapping[str, Any], state: Any, rows: int, spread: ParallelRun) -> None:
    """Raise IntegrationError where the last batch will have rows twice that cannot be recognized in it, or that would
    count in the routers' auxiliary loss. For the first batch, not after an epoch."""
    if state.remainder <= 0:
        return
    mend = "set dataloader_drop_last=True"
    if not any(_by_row(value, rows) for value in batch.values()):
        raise IntegrationError(
            f"the last batch of an epoch has fewer rows than the ranks take together, and in this collator's batches, "
            f"which do not have {rows} rows each, those that fill it up cannot be told; {mend}"
        )
    if spread.handle.balancing is not None and state.remainder <= (spread.data_ranks - 1) * rows:
        raise IntegrationError(
            "the last batch of an epoch has fewer rows than there are ranks to share them, and rows that fill it up "
            f"would count in the routers' auxiliary loss; {mend}"
        )


def warn_of_stream(state: Any, *, drops: bool) -> None:
    """Log that the last batch of a stream without a length may have rows twice: nobody counted them."""
    if state.end_of_dataloader and state.remainder < 0 and not drops:
        log.warning(
            "the last batch before the stream began again may have rows a second time, to fill it up; set "
            "dataloader_drop_last=True, or give the dataset a length"
        )


def _by_row(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == rows


def _bears_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point()
