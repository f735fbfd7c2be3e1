"""Batches of a training loop of the user's own, as this rank's micro-batches.

A batch is what the model takes, a dict of tensors [B, ...] of this data rank, or a list of such dicts, one for each
micro-batch. Labels are those that Transformers' own loss takes: ``labels`` of the positions themselves, or
``shift_labels`` of the tokens after them; -100 bears no loss. With L(x) the loss of a token,

    loss = Σ L / T,      T = valid tokens of all micro-batches on all ranks

so that loss and gradients are those of one device, whatever the number of tokens in each micro-batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.errors import DataError, IntegrationError
from hyper_parallel.integration.batch_rows import Rows, rows_of, shifted
from hyper_parallel.integration.trainer_pipeline import not_taken
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.forward import several_documents
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.pipeline import agree_on_rows

Batch = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
"""A step's rows of this data rank: tensors by name, or a list of micro-batches of such tensors."""


def micro_batches_of(batch: Batch, rows: int | None) -> list[Mapping[str, Tensor]]:
    """The micro-batches of a batch: those of the list, or pieces of `rows` rows; all rows at once for None.

    Raises DataError for a batch without rows, or whose tensors cannot be cut so.
    """
    if not isinstance(batch, Mapping):
        if not batch or not all(isinstance(one, Mapping) and "input_ids" in one for one in batch):
            raise DataError("a batch is a dict of tensors with 'input_ids', or a list of such micro-batches")
        return list(batch)
    if "input_ids" not in batch or batch["input_ids"].dim() != 2 or not batch["input_ids"].numel():
        raise DataError("a batch needs 'input_ids', int64 [B, S], with at least one row")
    count = batch["input_ids"].size(0)
    if rows is None or rows == count:
        return [batch]
    if count % rows:
        raise DataError(f"{count} rows are no whole number of micro-batches of {rows} rows (micro_batch)")
    other = next((name for name, one in batch.items() if one.dim() == 0 or one.size(0) != count), None)
    if other is not None:
        raise DataError(
            f"{other!r} is {list(batch[other].shape)}, and cannot be cut into micro-batches by its first dim, as "
            f"{count} rows are; give a list of micro-batches"
        )
    parts = ({name: one[at : at + rows] for name, one in batch.items()} for at in range(0, count, rows))
    return list(parts)


def holds_documents(rows: Mapping[str, Tensor]) -> bool:
    """Whether some row holds several documents: by its positions, or by a mask that numbers them."""
    mask, positions = rows.get("attention_mask"), rows.get("position_ids")
    if mask is not None:
        return bool((mask > 1).any())
    return positions is not None and positions.dim() == 2 and several_documents(positions)


def whole_rows(batch: Batch) -> dict[str, Tensor]:
    """All rows of a step for submodels, whose labels are shifted. Raises DataError for a mask that hides positions
    before the ends of rows."""
    parts = micro_batches_of(batch, None)
    names = parts[0].keys()
    if any(one.keys() != names for one in parts):
        raise DataError("the micro-batches of a list have tensors of the same names")
    rows = {name: torch.cat([one[name] for one in parts]) for name in names}
    labels = shifted(rows)
    if labels is None:
        raise DataError(_UNLABELLED)
    mask = rows.pop("attention_mask", None)
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any() or (mask > 1).any()):
        raise DataError(
            "attention_mask hides positions before the ends of rows, or numbers documents, which submodels do not see; "
            "pad on the right, and give position_ids that begin anew"
        )
    return {**{name: one for name, one in rows.items() if name != "shift_labels"}, "labels": labels}


_UNLABELLED = (
    "a batch needs 'labels' (of the positions themselves) or 'shift_labels' (of the tokens after them)"
)


class LoopRows:
    """Batches of one rank of a parallelized model. Every rank gives batches of the same shapes at the same time."""

    def __init__(
        self, handle: ShardedModel, device: torch.device | str, micro_batch: int | None, pad: int = 0
    ) -> None:
        """`micro_batch`: rows of a micro-batch, None for all; `pad`: the token of padding."""
        self._handle, self._device, self._pad, self._each = handle, torch.device(device), pad, micro_batch
        self.documents = False
        """Whether rows may hold several documents: once some did, all are computed so, which is right for one too."""
        self.captured = False
        """Whether steps run from graphs, which take tokens, positions and labels alone."""
        self.documents_refused: str | None = None
        """Why rows of several documents are refused; None where they are not."""

    def load(self, batch: Batch, step: int) -> tuple[StepBatch, Tensor]:
        """This rank's share of `step`, and the valid tokens of the step over all ranks, fp32 []. A collective.

        Raises DataError, on all ranks, for rows that cannot be computed, or of other shapes than another rank's.
        """
        problem, rows = None, list[Rows]()
        try:
            rows = [rows_of(one, self._handle, self._pad) for one in micro_batches_of(batch, self._each)]
            problem = self._problem(rows)
        except (DataError, IntegrationError) as error:
            problem = str(error)
        shapes = [] if problem else [(one.input_ids.size(0), one.input_ids.size(1)) for one in rows]
        alike = len(set(shapes)) <= 1
        count = sum(size for size, _ in shapes)
        length = shapes[0][1] if shapes and alike else zlib.crc32(repr(shapes).encode()) >> 8
        labels = [] if problem else [one.labels for one in rows if one.labels is not None]
        valid = int(sum(valid_tokens(one) for one in labels))
        tokens, documents = agree_on_rows(
            self._handle,
            (count, length),
            f"{count} rows of {' + '.join(str(one) for _, one in ([*shapes][:1] if alike else shapes))} positions",
            self._device,
            several=self.documents or any(one.several for one in rows),
            valid=valid,
            problem=problem,
        )
        if not tokens:
            raise DataError("no token of the rows bears loss; check that labels are not all -100")
        self.documents = documents
        first = self._handle.data_index * count
        micro: list[MicroBatch] = []
        for one in rows:
            micro.append(self._micro(one, first))
            first += one.input_ids.size(0)
        mine = torch.tensor(float(valid), device=self._device)
        everywhere = list(range(count * self._handle.strategy.axes.data))
        return StepBatch(step, everywhere, micro, mine), torch.tensor(tokens, device=self._device)

    def _micro(self, rows: Rows, first: int) -> MicroBatch:
        count, length = rows.input_ids.shape
        positions = rows.position_ids
        if positions is None and not rows.rest:
            positions = torch.arange(length).repeat(count, 1)
        assert rows.labels is not None, "rows without labels are refused"
        return MicroBatch(
            rows.input_ids.to(self._device),
            rows.labels.to(self._device),
            None if positions is None else positions.to(self._device),
            torch.arange(first, first + count, device=self._device),
            several=self.documents,
            extra={name: _on(one, self._device) for name, one in rows.rest.items()},
        )

    def _problem(self, rows: Sequence[Rows]) -> str | None:
        """Why these micro-batches cannot be computed, in words."""
        if any(one.labels is None for one in rows):
            return _UNLABELLED
        shapes = {tuple(one.input_ids.shape) for one in rows}
        if len({count for count, _ in shapes}) > 1:
            return "the micro-batches of a list have equal numbers of rows"
        if any(one.labels is not None and one.labels.shape != one.input_ids.shape for one in rows):
            return "labels are int64 [B, S], as input_ids are"
        if any(not one.several and _begins_anew(one) for one in rows):
            return (
                "position_ids begin anew beside an attention_mask that numbers no documents, so that Transformers "
                "leaves the documents together; leave the mask out to keep them apart"
            )
        if self.documents_refused is not None and any(one.several for one in rows):
            return self.documents_refused
        rest = {name: value for one in rows for name, value in one.rest.items()}
        place = self._handle.pipeline
        if place is not None and rest:
            return not_taken(rest)
        if self.captured and rest:
            return (
                f"{', '.join(sorted(rest))} in the batch cannot be given to a captured step, which takes tokens, "
                'positions and labels; call hp.step(..., engine="eager")'
            )
        if place is not None and len(shapes) > 1:
            return "the micro-batches of a pipeline have one length; pad them to it"
        if place is not None and len(rows) < len(place.groups):
            return (
                f"a batch of {len(rows)} micro-batches, and a pipeline of {len(place.groups)} stages needs as many; "
                "give more rows, or a smaller micro_batch"
            )
        return None


def _begins_anew(rows: Rows) -> bool:
    return rows.position_ids is not None and several_documents(rows.position_ids)


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
