"""Parts of a multimodal model on a device: seconds and bytes as linear functions of their work, and rows of a step that
have as much of it.

    encoder     constant + slope · units         a unit is an image or a recording of mean size
    language    constant + slope · rows          of a micro-batch, by tensor degree; all rows have the same length

A part without work costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Times = tuple[float, float, float]
"""Seconds of a forward pass, of gradients of inputs and of gradients of weights."""


@dataclass(frozen=True)
class Line:
    """constant + slope · size, at least 0; 0 where the size is 0.

    >>> Line.through((1, 3.0), (2, 5.0))(4)
    9.0
    """

    constant: float
    slope: float

    def __call__(self, size: float) -> float:
        return max(0.0, self.constant + self.slope * size) if size else 0.0

    @classmethod
    def through(cls, one: tuple[float, float], other: tuple[float, float]) -> Line:
        """Through two points; through the origin and one where both have the same size."""
        if one[0] == other[0]:
            return cls(0.0, one[1] / one[0])
        slope = (other[1] - one[1]) / (other[0] - one[0])
        return cls(one[1] - slope * one[0], slope)


Passes = tuple[Line, Line, Line]
"""As `Times`."""


def seconds_of(passes: Passes, size: float) -> Times:
    """Seconds of each pass."""
    forward, before, after = (one(size) for one in passes)
    return forward, before, after


@dataclass(frozen=True)
class EncoderCosts:
    """An encoder, by units, on one device."""

    name: str
    modules: tuple[str, ...]
    passes: Passes
    saved: Line
    """Bytes of a micro-batch that wait for its backward pass."""
    workspace: Line
    """Bytes besides, at most, while a pass runs."""
    features: float
    """Bytes of a unit's features, which the language model takes."""
    parameters: int

    def seconds(self, units: float) -> Times:
        """Times of a rank's units."""
        return seconds_of(self.passes, units)


@dataclass(frozen=True)
class LanguageCosts:
    """The language model, by rows, on each rank of a tensor group; mappings are by tensor degree."""

    layers: Mapping[int, Passes]
    """All layers."""
    head: Mapping[int, Passes]
    """What the last stage of a pipeline has besides: head and loss."""
    saved: Mapping[int, Line]
    """Bytes of all layers that wait for the backward pass of a micro-batch."""
    workspace: Mapping[int, Line]
    """Bytes besides, at most, while a pass runs."""
    recomputed: Mapping[int, Line]
    """Bytes that each layer has again in the backward pass, and in a stage of a pipeline until that pass ends."""
    depth: int
    """Layers."""
    parameters: int
    border: float = 0.0
    """Bytes of a row that go from a stage of a pipeline to the next one."""
    outside: int = 0
    """Of the parameters, those outside the layers: embedding and head."""

    def stages(self, rows: float, tensor: int, pipeline: int) -> list[Times]:
        """By stage of a pipeline whose layers are even."""
        layers = seconds_of(self.layers[tensor], rows)
        ends = seconds_of(self.head[tensor], rows)
        even = (layers[0] / pipeline, layers[1] / pipeline, layers[2] / pipeline)
        return [*[even] * (pipeline - 1), added(even, ends)]


@dataclass(frozen=True)
class ModelCosts:
    """The parts of a model."""

    encoders: Sequence[EncoderCosts]
    language: LanguageCosts


def added(one: Times, other: Times) -> Times:
    """Pass by pass."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


# Rows of a step for data ranks that must have as much in every micro-batch: alike ones together, and copies.
#
# Submodels on devices of their own compute graphs of fixed sizes, so that the data ranks of a part take rows with as
# many images, of the same sizes. What has no partner is computed once more, by a rank whose copy bears no loss.

T = TypeVar("T")


def with_partners(
    rows: Sequence[T], amount: Callable[[T], Any], ranks: int, size: int
) -> list[tuple[T, bool]]:
    """Rows and whether they bear loss, in the order in which micro-batches of `size` rows are cut from them: those with
    most first, and every `ranks` of them, which divide `size`, with the same `amount`."""
    found: list[tuple[T, bool]] = []
    for _, alike in itertools.groupby(sorted(rows, key=amount, reverse=True), key=amount):
        found += [(row, True) for row in alike]
        found += [(found[-1][0], False)] * (-len(found) % ranks)
    return found + [(found[-1][0], False)] * (-len(found) % size)
