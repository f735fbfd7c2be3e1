"""Error interval of an estimate: covers 90% of measured runs of its kind.

    seconds in [s₁ · exp(−w q), s₀ · exp(w q)]                                                           `between`

w is by how much the interval is wider where few published runs are of the question's kind, or none (`widening`); in
most questions it is 1. q is a conformal quantile of the errors of published runs, |log(estimate / measured)| over their
own w, each of a source that was held out while constants were fitted. Every cell, a source's runs of one kind of model
on one kind of hardware, weighs the same, and q covers 90% of the runs of one more cell that is like them
(`fit_constants.residuals`). It is written beside the constants, for models with experts and without (`KINDS`), since
the former are harder to estimate. What open facts explain of a run is no error.

s₀ and s₁ are the estimate with every fact that the framework leaves open against it, and for it
(`cost_model.step.open_facts`). Both are the estimate where nothing is open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.planner.columns import ARCHITECTURES
from hyper_parallel.planner.constants import FITTED
from hyper_parallel.planner.cost_model.step import Estimate
from hyper_parallel.planner.table import PRECISIONS, Array, Table

LEVEL = 0.9
"""Of steps, within the interval of their estimate."""
KINDS = ("dense", "mixture")
"""Models without experts, and with."""


@cache
def quantiles() -> dict[str, float]:
    """q by kind."""
    found = json.loads(FITTED.read_text())["quantiles"]
    return {kind: float(found[kind]) for kind in KINDS}


def between(t: Table, estimates: Estimate) -> tuple[Array, Array]:
    """Seconds that nine of ten steps with such estimates take at least and at most."""
    found = quantiles()
    half = np.where(t.experts > 0, found["mixture"], found["dense"]) * widening(t)
    return estimates.fastest * np.exp(-half), estimates.slowest * np.exp(half)


# Which published runs an estimate rests on: how many are of the question's kind, and what follows for its interval.
#
# A question's kind has five aspects (`aspects`); a published run counts for
#
# | aspect | runs that count |
# |---|---|
# | model | of models of one sort: dense, mixture of experts, hybrid, with adapters |
# | device | of that sort, on devices of one generation |
# | format | of any sort, in one format of products |
# | devices | of that sort, on a quarter of the devices or more |
# | sequence | of that sort, with a quarter of the tokens of a sequence or more |
#
# With n the sources of the aspect that has the fewest, an interval is wider by
#
#     w(n) = 2 for n = 0,  √(1 + 1/n) for n = 1 and 2,  1 from three sources on                            `WIDER`
#
# in the logarithm. √(1 + 1/n) is by how much the spread of one more source about the mean of n exceeds that of a source
# about the true mean; from three sources on the quantiles of errors, which are of many sources, hold it. The 2 is a
# choice, fixed before any interval was computed with it. Quantiles are of errors over w of their own row, its source
# left out (`fit_constants.residuals`), so that nine of ten rows stay within intervals that are made of them.

NEAR = 4.0
"""Factor up to which a run on fewer devices, or with shorter sequences, is evidence for a question."""
WIDER = (2.0, math.sqrt(2), math.sqrt(1.5), 1.0)
"""How much wider an interval is for none, one, two and more sources."""

MODELS = {
    "dense": "models without experts",
    "mixture": "mixtures of experts",
    "hybrid": "hybrid models",
    "adapter": "adapters",
}
_DEVICES = {
    "volta": "Volta",
    "ampere": "Ampere",
    "hopper": "Hopper",
    "blackwell": "Blackwell",
    "blackwell-ultra": "Blackwell Ultra",
    "ascend": "Ascend",
    "other": "such a device",
}
_FORMATS = {
    "bf16": "16 bits",
    "fp16": "16 bits",
    "fp8": "FP8",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "fp32": "32 bits",
}


@dataclass(frozen=True)
class Runs:
    """Published runs of one source, of one kind."""

    source: str
    model: str
    """A key of MODELS."""
    device: str
    format: str
    rows: int
    devices: float
    """The most that one of them ran on."""
    sequence: float
    """The longest of them."""


@dataclass(frozen=True)
class Aspect:
    """The published runs that count for one aspect of a question's kind."""

    name: str
    of: str
    """What they are runs of, `mixtures of experts on Hopper`."""
    sources: int
    rows: int


@dataclass(frozen=True)
class Support:
    """The published runs that an estimate rests on."""

    aspects: tuple[Aspect, ...]

    @property
    def wider(self) -> float:
        """By how much the interval is wider, in its logarithm; 1: it is not."""
        return WIDER[min(self.aspects[0].sources, *(one.sources for one in self.aspects), len(WIDER) - 1)]

    @property
    def sentence(self) -> str:
        """One plain line."""
        if self.wider == 1.0:
            model, device, format, *_ = self.aspects
            alike = (
                f"rests on {model.rows:,} published runs of {model.of}, {device.rows:,} of them {device.of}"
            )
            return f"{alike}; {format.rows:,} of any model are {format.of}"
        few = min(one.sources for one in self.aspects)
        scarce = next(one for one in self.aspects if one.sources == few)
        # What an aspect's runs are of, its model included.
        whole = {"model": scarce.of, "format": f"any model {scarce.of}"}
        what = whole.get(scarce.name, f"{self.aspects[0].of} {scarce.of}")
        if few == 0:
            return f"no published run of {what}: interval widened {self.wider:.2g} times"
        sources = "1 source" if few == 1 else f"{few} sources"
        found = f"of {what} there are {scarce.rows:,} published runs, of {sources}"
        return f"{found}: interval widened {self.wider:.2g} times"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `wider` is of the logarithm."""
        return {
            "sentence": self.sentence,
            "wider": self.wider,
            "aspects": [asdict(one) for one in self.aspects],
        }


def kinds(t: Table) -> tuple[NDArray[np.str_], NDArray[np.str_], NDArray[np.str_]]:
    """Model, device and format of each row."""
    model = np.where(t.experts > 0, "mixture", "dense")
    model = np.where(t.mixer_layers > 0, "hybrid", model)
    model = np.where(t.frozen > 0, "adapter", model)
    device = np.array(ARCHITECTURES)[t.architecture.astype(np.intp)]
    format = np.array([_FORMATS[name] for name in PRECISIONS])[t.precision.astype(np.intp)]
    return np.broadcast_to(model, t.n), np.broadcast_to(device, t.n), np.broadcast_to(format, t.n)


@cache
def published() -> tuple[Runs, ...]:
    """The published runs whose times constants are fitted on or held against, as `benchmarks/published.py` wrote
    them."""
    return tuple(Runs(**one) for one in json.loads(FITTED.read_text())["runs"])


def support(t: Table, runs: Sequence[Runs] | None = None, without: str = "") -> Support:
    """The published runs that the estimate of a table's only row rests on. `without`: a source that does not count."""
    assert t.n == 1, "one row"
    key = tuple(str(one[0]) for one in kinds(t))
    return _support(
        key, float(t.devices[0]), float(t.sequence[0]), published() if runs is None else runs, without
    )


def widening(t: Table, runs: Sequence[Runs] | None = None, sources: NDArray[np.str_] | None = None) -> Array:
    """By how much each row's interval is wider; `sources`: of the rows, which do not count for themselves. [n]"""
    known = published() if runs is None else runs
    devices, sequence = (np.broadcast_to(column, t.n) for column in (t.devices, t.sequence))
    own = np.full(t.n, "") if sources is None else sources
    keys = list(zip(*kinds(t), devices, sequence, own, strict=True))
    found = {
        key: _support(tuple(map(str, key[:3])), float(key[3]), float(key[4]), known, str(key[5])).wider
        for key in set(keys)
    }
    return np.array([found[key] for key in keys])


def _support(
    key: tuple[str, ...], devices: float, sequence: float, runs: Sequence[Runs], without: str
) -> Support:
    model, device, format = key
    others = [one for one in runs if one.source != without]
    alike = [one for one in others if one.model == model]
    aspects = (
        ("model", MODELS[model], alike),
        ("device", f"on {_DEVICES[device]}", [one for one in alike if one.device == device]),
        ("format", f"in {format}", [one for one in others if one.format == format]),
        (
            "devices",
            f"on {devices / NEAR:,.0f} devices or more",
            [one for one in alike if one.devices * NEAR >= devices],
        ),
        (
            "sequence",
            f"of {sequence / NEAR:,.0f} tokens a sequence or more",
            [one for one in alike if one.sequence * NEAR >= sequence],
        ),
    )
    return Support(
        tuple(
            Aspect(name, of, len({one.source for one in counted}), sum(one.rows for one in counted))
            for name, of, counted in aspects
        )
    )
