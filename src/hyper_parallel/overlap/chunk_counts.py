"""Chooses the number of chunks of each collective, by trials on a window of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyper_parallel.graph import StepGraph
from hyper_parallel.overlap.chunked_matmul import KINDS, WHOLE, Chunked, Chunks, patterns
from hyper_parallel.overlap.jobs import Priced, Prices, jobs_of
from hyper_parallel.overlap.layer_window import excerpt
from hyper_parallel.overlap.list_scheduling import arrange

_LAYERS = 2
_COUNTS = (2, 4, 8)
_PAYS = 0.995
"""Of the time of the layers, what must be left at most: less gained than that is noise of the model."""


def chunks_for(
    step: StepGraph, prices: Prices, sizes: Mapping[Any, int], together: int, window: float
) -> Chunks:
    """The pieces that pay, as far as a few layers tell; `together` and `window` as of `arrange`."""
    return Chunks(
        _best(excerpt(step, _LAYERS, "forward"), prices, sizes, together, window),
        _best(excerpt(step, _LAYERS, "backward"), prices, sizes, together, window),
    )


def _best(
    step: StepGraph,
    prices: Prices,
    sizes: Mapping[Any, int],
    together: int,
    window: float,
) -> Chunked:
    def seconds(pieces: Chunked) -> float:
        made = Chunks(pieces, pieces)(step) if pieces != WHOLE else step
        jobs = jobs_of(Priced.of(made, sizes), prices).jobs
        return arrange(jobs, window=window, together=together, slowdown=prices.slowdown).seconds

    there = {found.kind for found in patterns(step)}
    best, least = WHOLE, seconds(WHOLE)
    for kind in KINDS:
        if kind not in there:
            continue
        for count in _COUNTS:
            pieces = replace(best, **{kind: count})
            taken = seconds(pieces)
            if taken >= least * _PAYS:
                # Where fewer pieces do not pay, more of them cost more calls.
                break
            best, least = pieces, taken
    return best
