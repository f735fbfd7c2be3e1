"""Residuals of held-out published runs by cell, and the interval that covers nine of ten runs of a new cell.

A *cell* is a source's runs of one kind of model on one kind of hardware (`cells_of`): its runs resemble each other in
authors, framework, cluster and model, so that the cell, not the run, is what a new question is another draw of. The
interval is a conformal one with cells as the units that are exchanged (Lee, Barber and Willett, *Distribution-free
inference with hierarchical data*, arXiv 2306.06342, section 3):

    s = |log(estimate / measured)| / w            score of a held-out run
    q = the least score up to which (1 − α) (K + 1) of K cells lie, a run as 1 / runs of its cell    `conformal`

w is by how much the interval is wider where few other sources have runs of the kind (`error_interval.widening`). Of a
run of one more cell, exchangeable with the K, the estimate is within exp(± q w) with a probability of 1 − α or more.
The 1 in K + 1 stands for the new cell, of which nothing is known; where α (K + 1) < 1, that is from eight cells down at
90%, no finite q has the guarantee, and the largest score stands for it.

So 90% needs nine cells of a sort, of which it is then the largest score. Dense models have nine and ten on Ampere and
Hopper, every other kind has fewer on each generation of devices. Quantiles are therefore of models without experts and
with, over all hardware, and what is known of the hardware enters by w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fit_constants.published_runs import Evidence
from hyper_parallel.planner.error_interval import KINDS, LEVEL, Runs, kinds, widening
from hyper_parallel.planner.table import Array, Table


def cells_of(evidence: Evidence) -> NDArray[np.str_]:
    """Source, kind of model and hardware of each run, `S04, mixture, B200`."""
    models, _, _ = kinds(evidence.table)
    names = zip(evidence.sources, models, evidence.hardware, strict=True)
    return np.array([", ".join(map(str, name)) for name in names])


@dataclass(frozen=True)
class Residuals:
    """Scores of held-out runs whose times count, as the module has them.

    Where facts are open, a score is of the nearest estimate that some answer to them gives: what they explain is no
    residual.
    """

    scores: Array
    sources: NDArray[np.str_]
    cells: NDArray[np.str_]
    mixture: NDArray[np.bool_]

    @classmethod
    def of(cls, evidence: Evidence, between: tuple[Array, Array], runs: Sequence[Runs]) -> Residuals:
        """Of the rows whose times count. `between`: seconds with open facts for a step, and against it, by constants
        that have not seen the row's source. `runs`: what is published, by which intervals are widened; a row's own
        source does not count for it."""
        rows = evidence.timed
        fastest, slowest = (side[rows] for side in between)
        measured, table = evidence.seconds[rows], evidence.table.take(rows)
        wider = widening(table, runs, evidence.sources[rows])
        scores = np.abs(np.log(np.clip(measured, fastest, slowest) / measured)) / wider
        mixture = np.broadcast_to(table.experts > 0, table.n)
        return cls(scores, evidence.sources[rows], cells_of(evidence)[rows], mixture)

    def quantile(self, kind: str, without: str = "") -> float:
        """q of a kind's cells, without those of one source."""
        others = self.sources != without
        rows = others & (self.mixture == (kind == "mixture"))
        # Without runs of a kind, those of the other tell of it.
        rows = rows if rows.any() else others
        return conformal(self.scores[rows], self.cells[rows])

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which rows are within the interval that cells of other sources make."""
        held = np.zeros(self.scores.size, bool)
        for kind in KINDS:
            for source in np.unique(self.sources):
                rows = (self.sources == source) & (self.mixture == (kind == "mixture"))
                if rows.any():
                    held[rows] = self.scores[rows] <= self.quantile(kind, without=str(source))
        return held


def conformal(scores: Array, cells: NDArray[np.str_]) -> float:
    """The least score q for which LEVEL of one more run's scores are at most q; each cell weighs the same."""
    _, index, counts = np.unique(cells, return_inverse=True, return_counts=True)
    order = np.argsort(scores)
    sums = np.cumsum((1.0 / counts[index])[order])
    # Sums of fractions: a cell whose runs count for one in all may end a little below it.
    place = int(np.searchsorted(sums, LEVEL * (counts.size + 1) - 1e-9))
    return float(scores[order][min(place, scores.size - 1)])


def collected(t: Table, sources: NDArray[np.str_]) -> list[Runs]:
    """The runs of a table, by source and kind."""
    devices, sequence = (np.broadcast_to(column, t.n) for column in (t.devices, t.sequence))
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for row, (source, model, device, format) in enumerate(zip(sources, *kinds(t), strict=True)):
        found.setdefault((str(source), str(model), str(device), str(format)), []).append(row)
    return [
        Runs(*key, rows=len(rows), devices=float(devices[rows].max()), sequence=float(sequence[rows].max()))
        for key, rows in sorted(found.items())
    ]
