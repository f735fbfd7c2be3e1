"""Batches of a rank: its rows of the global batch, in micro-batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyper_parallel.data import Order, Rows
from hyper_parallel.data.order import dealt
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.forward import several_documents
from hyper_parallel.shard.loss import IGNORED, valid_tokens
from hyper_parallel.shard.model_structure import is_transformers
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.shard.vision_and_audio_towers import towers_of


@dataclass(frozen=True)
class MicroBatch:
    """What a rank computes at once; int64 [B, S] tensors on its device."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    """None where the model makes them itself, as those of images do."""
    rows: Tensor
    """int64 [B]: the index in the step's global batch of each row; random numbers are a function of it."""
    several: bool | None = None
    """Whether some row may hold several documents; None where nobody looked."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """What else the model takes, by keyword: ``pixel_values``."""


@dataclass(frozen=True)
class StepBatch:
    """A rank's share of one step."""

    step: int
    """Counted from 0."""
    rows: list[int]
    """The rows of the data in the whole step, over all ranks, in order."""
    micro: list[MicroBatch]
    tokens: Tensor
    """Valid tokens of this rank's share: zero-dim fp32 on its device."""


def share_of(handle: ShardedModel, count: int) -> slice:
    """The rows of a batch of `count` that this rank computes: contiguous, in the order of the data ranks."""
    ranks = handle.mesh.size("replicate") * handle.mesh.size("shard")
    assert count % ranks == 0, f"{count} rows over {ranks} data ranks"
    share = count // ranks
    return slice(handle.data_index * share, (handle.data_index + 1) * share)


def rows_beside(handle: ShardedModel, count: int, at: int, micro: int) -> list[int]:
    """The rows of a batch of `count` that all data ranks compute while this one computes `micro` from `at` on."""
    share = share_of(handle, count)
    size, first = share.stop - share.start, at - share.start
    return [start + first + i for start in range(0, count, size) for i in range(micro)]


class Batches:
    """The training data as one rank sees it, a pure function of the number of rows consumed before.

    Every micro-batch says that it may hold several documents if any row of the text does, so that all steps of all
    ranks are computed in the same way, by either engine.
    """

    def __init__(
        self,
        text: Rows,
        order: Order,
        batch: int,
        micro_batch: int | None,
        handle: ShardedModel,
        device: torch.device,
        *,
        balance: bool = True,
    ) -> None:
        """`balance`: rows are dealt (`data.order`)."""
        self._text, self._order, self._batch, self._device = text, order, batch, device
        self._handle, self._multiple = handle, length_multiple(handle.plan)
        self._several = text.several
        self._share = share_of(handle, batch)
        self._micro = micro_batch or self._share.stop - self._share.start
        self._balance, self._encoder = balance, _encoder_work(handle)
        # A step's rows are asked for when it is loaded and when it is counted.
        self._dealt = functools.lru_cache(maxsize=2)(self._arranged)

    def load(self, step: int, consumed: int) -> StepBatch:
        """The batch of `step`, before which `consumed` rows were consumed."""
        given, places = self._dealt(consumed)
        rows = [given[place] for place in places]
        micro = [
            load_rows(
                self._text,
                rows[at : at + self._micro],
                places[at : at + self._micro],
                self._device,
                self._several,
                self._length(rows, at),
            )
            for at in self._micro_batches
        ]
        tokens = torch.stack([valid_tokens(m.labels) for m in micro]).sum().float()
        return StepBatch(step, given, micro, tokens)

    def positions(self, consumed: int) -> int:
        """Positions of the batch before which `consumed` rows were consumed, over all ranks, padding included."""
        given, places = self._dealt(consumed)
        rows = [given[place] for place in places]
        each = self._batch // len(self._micro_batches)
        return sum(each * self._length(rows, at) for at in self._micro_batches)

    def _arranged(self, consumed: int) -> tuple[list[int], list[int]]:
        """The rows of a step, and their places in the order in which the data ranks compute them; the same on all
        ranks."""
        rows = self._order.rows(consumed, self._batch)
        # Rows of text alone are alike.
        if not self._balance or not self._encoder:
            return rows, list(range(len(rows)))
        ranks = self._batch // (self._share.stop - self._share.start)
        return rows, dealt([self._text.work(row, self._encoder) for row in rows], ranks, self._micro)

    @property
    def _micro_batches(self) -> range:
        return range(self._share.start, self._share.stop, self._micro)

    def _length(self, rows: list[int], at: int) -> int:
        beside = rows_beside(self._handle, self._batch, at, self._micro)
        return self._text.positions([rows[one] for one in beside], self._multiple)


def _encoder_work(handle: ShardedModel) -> float:
    """What encoders do for a position that stands for media, of what the language model does for one: by their
    parameters."""
    if not is_transformers(handle.model):
        return 0.0
    inside = {id(one) for tower in towers_of(handle.model) for one in tower.parameters()}
    sizes = [(id(one.parameter) in inside, math.prod(one.layout.shape)) for one in handle.parameters()]
    encoder, language = (sum(size for held, size in sizes if held is which) for which in (True, False))
    return encoder / max(1, language)


def filled_up(rows: dict[str, Tensor], missing: int) -> dict[str, Tensor]:
    """Rows [B, ...] by name, and `missing` copies of the first one that bear no loss."""
    if not missing:
        return rows
    filled = {name: torch.cat([one, one[:1].expand(missing, *one.shape[1:])]) for name, one in rows.items()}
    filled["labels"][-missing:] = IGNORED
    return filled


def load_rows(
    text: Rows,
    rows: list[int],
    places: Sequence[int],
    device: torch.device,
    several: bool | None = None,
    length: int | None = None,
) -> MicroBatch:
    """`rows` of `text` on `device`, which stand at these `places` of their global batch.

    `several`: whether they are to be computed as rows of several documents; None to look. `length`: their positions,
    which must suffice; None for the longest of them.
    """
    batch = {name: one.to(device) for name, one in text.batch(rows, length).items()}
    positions = batch.pop("position_ids", None)
    if several is None:
        several = positions is not None and several_documents(positions)
    return MicroBatch(
        input_ids=batch.pop("input_ids"),
        labels=batch.pop("labels"),
        position_ids=positions,
        rows=torch.tensor(places, device=device),
        several=several,
        extra=batch,
    )
