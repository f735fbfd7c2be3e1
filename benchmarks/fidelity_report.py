"""Predicted against measured on this machine: its calibration, and how errors are told."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from measure import RESULTS

from hyper_parallel.calibrate import Settings, calibrate
from hyper_parallel.cluster import Cluster


def calibrated(workers: int, keep: Path, given: str | None = None) -> Cluster:
    """This machine: an earlier measurement that is given, or one that is made and kept (no model is run)."""
    if given is not None:
        return Cluster.load(Path(given))
    settings = Settings(workers=workers, folder=RESULTS)
    cluster = calibrate(settings, lambda said: print(said, file=sys.stderr, flush=True))
    cluster.dump(keep)
    return cluster


def error(figure: Mapping[str, Any]) -> float:
    """Predicted over measured, less 1."""
    return float(figure["predicted"] / figure["measured"] - 1)


def errors(figures: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The mean and the largest of absolute errors, and of how many."""
    found = [abs(error(one)) for one in figures]
    return {"mean": statistics.mean(found), "worst": max(found), "cases": float(len(found))}
