"""Costs of the encoders and the language model of a run on a cluster, from graphs of the unmodified model's own code.

Encoders are found by the model's structure: modules beside the language model (`shard.vision_and_audio_towers`) that
the same floating-point inputs reach, such as a tower of images and its projector. They are captured whole, for a row
with few media and one with many; the language model with two layers of each kind, for one row and for two, under each
tensor degree that divides it. Seconds and bytes between and beyond these sizes lie on a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.estimate.submodel_capture import (
    LANGUAGE,
    CapturedParts,
    captured_parts,
    inputs_of_modules,
)
from hyper_parallel.shard.model_structure import is_transformers, layers_or_refuse
from hyper_parallel.shard.vision_and_audio_towers import towers_of
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.build import unsharded
from hyper_parallel.step.submodel_run import SubmodelBatches
from hyper_parallel.strategy import Strategy
from hyper_parallel.workload.submodels import EncoderCosts, LanguageCosts, Line, ModelCosts, Passes

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


DEGREES = (1, 2, 4, 8)
"""Of the language model's tensor axis."""
STEPS = 4
"""Of the run's order, whose rows are simulated."""
_BF16 = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class SubmodelWork:
    """A run's model and rows."""

    costs: ModelCosts
    steps: Sequence[Sequence[tuple[float, ...]]]
    """[step][row][encoder]: units, of which the mean row with media has as many as it has images and recordings."""
    length: int
    """Positions of each row."""
    largest: tuple[float, ...]
    """The most units of each encoder in a row."""


def submodel_work(config: RunConfig, cluster: Cluster, devices: int, say: Say) -> SubmodelWork:
    """Price the parts of a run's model on a cluster, and read how much media its rows have.

    Raises ConfigError for rows without media and for a model without encoders, DataError for rows that cannot be read.
    """
    say("reading rows")
    plain, data = unsharded(config.model_copy(update={"strategy": Strategy()}))
    if not isinstance(data, MultimodalData):
        raise ConfigError(
            "data.train has no rows with images or sound, so that there are no encoders to place; plan the language "
            "model with `hyper-parallel plan --model`"
        )
    model = plain.to(torch.bfloat16)
    layers, modules = layers_or_refuse(model, "allocating submodels")
    rows = MediaRows(data, model, config.train.batch)
    say("finding encoders")
    encoders = _encoders(model, rows)
    scale = rows.scale(encoders)
    steps = [
        [
            rows.units(row, encoders, scale)
            for row in data.order.rows(step * config.train.batch, config.train.batch)
        ]
        for step in range(STEPS)
    ]
    named = {one.name: one.modules for one in encoders}
    capture = _Capture(model, cluster, named, rows)
    priced = []
    for at, one in enumerate(encoders):
        say(f"capturing {one.name}")
        priced.append(_encoder(capture, one, at, rows, encoders, scale))
    language = _language(capture, layers, modules, devices, say)
    costs = ModelCosts(tuple(priced), language)
    largest = tuple(rows.units(rows.extremes(one)[1], encoders, scale)[at] for at, one in enumerate(encoders))
    return SubmodelWork(costs, steps, rows.length, largest)


def _encoders(model: nn.Module, rows: MediaRows) -> list[Encoder]:
    """Modules beside the language model that the same inputs reach."""
    names = {id(module): name for name, module in model.named_modules()}
    towers = [names[id(one)] for one in towers_of(model)] if is_transformers(model) else []
    if not towers:
        raise ConfigError(
            f"model: {type(model).__name__} has no encoder beside its language model; plan it with "
            "`hyper-parallel plan --model`"
        )
    kinds: dict[frozenset[str], int] = {}
    for row in [rows.most, *range(min(rows.count, 64))]:
        kinds.setdefault(frozenset(rows.sizes(row)), row)
    found: dict[str, frozenset[str]] = dict.fromkeys(towers, frozenset())
    for inputs, row in kinds.items():
        if inputs:
            for name, reached in inputs_of_modules(model, rows.micro_batch([row]), towers).items():
                found[name] |= reached
    groups: dict[frozenset[str], list[str]] = {}
    for module, own in found.items():
        # What joins several inputs belongs to the language model.
        if own and not any(other < own for other in found.values() if other):
            groups.setdefault(own, []).append(module)
    made: list[Encoder] = []
    for inputs, modules in groups.items():
        name = modules[0].rpartition(".")[2]
        if name in {LANGUAGE, *(one.name for one in made)}:
            name = modules[0].replace(".", "_")
        made.append(Encoder(name, tuple(modules), inputs))
    return made


@dataclass
class _Capture:
    """Captures parts, each set of rows and degree once."""

    model: nn.Module
    cluster: Cluster
    encoders: Mapping[str, tuple[str, ...]]
    rows: MediaRows

    def __call__(self, rows: Sequence[int], tensor: int = 1) -> CapturedParts:
        micro = self.rows.micro_batch(rows)
        return captured_parts(self.model, micro, self.cluster, self.encoders, tensor=tensor)


def _encoder(
    capture: _Capture,
    one: Encoder,
    at: int,
    rows: MediaRows,
    encoders: Sequence[Encoder],
    scale: Sequence[float],
) -> EncoderCosts:
    sized = []
    for row in dict.fromkeys(rows.extremes(one)):
        parts = capture([row])
        units = rows.units(row, encoders, scale)[at]
        memory = parts.memory(one.name)
        working = max(memory.peaks[:2]) - memory.saved
        sized.append((units, parts.seconds(one.name), memory.saved, working, parts.sent(one.name)))
    (first, *_), last = sized, sized[-1]
    if first[0] == last[0]:
        last = first
    passes = [Line.through((first[0], first[1][each]), (last[0], last[1][each])) for each in range(3)]
    return EncoderCosts(
        name=one.name,
        modules=one.modules,
        passes=(passes[0], passes[1], passes[2]),
        saved=Line.through((first[0], first[2]), (last[0], last[2])),
        workspace=Line.through((first[0], first[3]), (last[0], last[3])),
        features=last[4] / last[0],
        parameters=_parameters(capture.model, one.modules),
    )


def _language(
    capture: _Capture, layers: str, modules: nn.ModuleList, devices: int, say: Say
) -> LanguageCosts:
    model: Any = capture.model
    hidden = model.config.get_text_config(decoder=True).hidden_size
    border = float(_BF16 * hidden * capture.rows.length)
    inside, head, workspace, recomputed = {}, {}, {}, {}
    row = capture.rows.fewest
    for tensor in DEGREES:
        if tensor > devices:
            break
        say(f"capturing the language model, tensor {tensor}")
        try:
            found = [capture([row] * count, tensor) for count in (1, 2)]
        except StrategyError:
            # A degree that does not divide heads or features.
            continue
        one, two = found
        inside[tensor] = _passes([parts.seconds(LANGUAGE, parts.layers) for parts in found])
        head[tensor] = _passes([parts.seconds(LANGUAGE, _outside(parts)) for parts in found])
        again = [
            max(0, m.left - m.saved) / len(one.layer_weights) for m in (p.memory(LANGUAGE) for p in found)
        ]
        recomputed[tensor] = Line.through((1, again[0]), (2, again[1]))
        base = [
            m.saved - rows * border * len(one.layer_weights) + max(m.peaks[:2]) - max(m.saved, m.left)
            for rows, m in ((1, one.memory(LANGUAGE)), (2, two.memory(LANGUAGE)))
        ]
        workspace[tensor] = Line.through((1, max(0.0, base[0])), (2, max(0.0, base[1])))
    depth, own = len(modules), [name for names in capture.encoders.values() for name in names]
    total = sum(one.numel() for one in model.parameters()) - _parameters(model, own)
    return LanguageCosts(
        layers=inside,
        head=head,
        saved=dict.fromkeys(inside, Line(0.0, border * depth)),
        workspace=workspace,
        recomputed=recomputed,
        depth=depth,
        parameters=total,
        border=border,
        outside=total - _parameters(model, [layers]),
    )


def _outside(parts: CapturedParts) -> Callable[[str], float]:
    return lambda module: float(not parts.layers(module))


def _passes(sized: Sequence[Sequence[float]]) -> Passes:
    """Of one row and of two."""
    one, two = sized
    found = [Line.through((1, a), (2, b)) for a, b in zip(one, two, strict=True)]
    return found[0], found[1], found[2]


def _parameters(model: nn.Module, modules: Sequence[str]) -> int:
    known = {id(one): one for name in modules for one in model.get_submodule(name).parameters()}
    return sum(one.numel() for one in known.values())
