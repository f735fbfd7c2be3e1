"""The rows of a run with images or sound, as its model takes them, and how much each encoder has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hyper_parallel.data import MultimodalData
from hyper_parallel.errors import ConfigError
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.submodel_run import SubmodelBatches

_READ = 256
"""Rows that are looked at for the sizes of media."""


@dataclass(frozen=True)
class Encoder:
    """Modules beside the language model that the same inputs reach."""

    name: str
    modules: tuple[str, ...]
    inputs: frozenset[str]
    """Floating-point inputs of the model."""


class MediaRows:
    """The rows of a run as its model takes them."""

    def __init__(self, data: MultimodalData, model: nn.Module, batch: int) -> None:
        """Raises ConfigError for rows without media."""
        self._rows, self._batches = data.train, SubmodelBatches(data, batch, model)
        self.length = self._batches.positions(0) // batch
        self.count = len(data.train)
        self._sizes: dict[int, dict[str, int]] = {}
        self._only = ""
        """The one floating-point input of a model of one kind of media: its sizes are known without reading rows."""
        order = sorted(range(self.count), key=lambda row: data.train.cost(row).values)
        self.fewest, self.most = order[0], order[-1]
        if not data.train.cost(self.most).values:
            raise ConfigError(
                "data.train: no row has an image or a recording; there are no encoders to place"
            )

    def micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        """As `hp.submodels` captures it."""
        given = dict(self._batches.inputs({"row": torch.tensor(list(rows))}))
        ids, positions = given.pop("input_ids"), given.pop("position_ids")
        return MicroBatch(ids, ids.clone(), positions, torch.arange(len(rows)), extra=given)

    def sizes(self, row: int) -> dict[str, int]:
        """Numbers of each floating-point input of a row."""
        if self._only:
            values = self._rows.cost(row).values
            return {self._only: values} if values else {}
        if row not in self._sizes:
            given = self.micro_batch([row]).extra
            self._sizes[row] = {name: one.numel() for name, one in given.items() if one.is_floating_point()}
        return self._sizes[row]

    def values(self, row: int, encoder: Encoder) -> int:
        """Numbers that an encoder reads of a row."""
        own = self.sizes(row)
        return sum(own.get(name, 0) for name in encoder.inputs)

    def scale(self, encoders: Sequence[Encoder]) -> list[float]:
        """Numbers of a unit of each encoder: of a mean image or recording."""
        found = []
        for one in encoders:
            rows = [row for row in range(min(self.count, _READ)) if self.values(row, one)]
            alone = [row for row in rows if len(self.sizes(row)) == 1] or rows or [self.most]
            values = sum(self.values(row, one) for row in alone)
            found.append(values / sum(max(1, self._rows.cost(row).media) for row in alone))
        return found

    def units(self, row: int, encoders: Sequence[Encoder], scale: Sequence[float]) -> tuple[float, ...]:
        """Of each encoder, of a row."""
        return tuple(self.values(row, one) / each for one, each in zip(encoders, scale, strict=True))

    def extremes(self, encoder: Encoder) -> tuple[int, int]:
        """The rows with least, but some, and with most for an encoder."""
        rows = [row for row in (*range(min(self.count, _READ)), self.most) if self.values(row, encoder)]

        def size(row: int) -> int:
            return self.values(row, encoder)

        return min(rows, key=size, default=self.most), max(rows, key=size, default=self.most)
