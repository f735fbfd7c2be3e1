"""The verdict on a step in one sentence: seconds, MFU, whether it fits, and what takes most of the time."""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel.trace import Sum, Timeline
from hyper_parallel.units import format_bytes, format_duration

SIMULATED = "simulated"


def word(timeline: Timeline) -> str:
    """How the numbers came about: simulated or measured."""
    return SIMULATED if timeline.predicted else timeline.word


def verdict(timeline: Timeline) -> str:
    """The sentence, with `simulated` or `measured` first."""
    told = f"{word(timeline)}: a step takes {format_duration(timeline.step)}"
    if timeline.mfu is not None:
        told += f", MFU {timeline.mfu:.1%}"
    has = timeline.capacity.get("device")
    peak = timeline.peak.bytes
    if has and peak:
        fits = "it fits into the device's memory" if peak <= has else "it DOES NOT FIT the device's memory"
        told += f"; {fits} ({format_bytes(peak)} of {format_bytes(has)})"
    return f"{told}; {_dominant(timeline)}" if timeline.step else told


def _dominant(timeline: Timeline) -> str:
    """What takes the largest part of a rank's step, mean of all ranks."""
    bubbles = timeline.bubbles
    kinds = timeline.by_kind()
    # A task of a pipeline has no kernels, and holds the collectives of its stage.
    tasks = not any(one.compute for kind, one in kinds.items() if kind != "none")
    computing = (
        "tasks of pipeline stages, with their own collectives"
        if tasks
        else "computation" + _most(kinds, "compute", ", mostly")
    )
    parts = {
        computing: timeline.computing,
        "exposed communication"
        + _most(timeline.by_axis(), "communication", ", mostly over"): bubbles.communication,
        "waiting for ranks that have more to compute": bubbles.imbalance,
        "filling and draining the pipeline": bubbles.fill_drain,
        "waiting for copies between memory tiers": bubbles.copies,
        "waiting for the host": bubbles.runtime,
    }
    largest = max(parts, key=lambda name: parts[name])
    return f"{parts[largest] / timeline.step:.0%} of it is {largest}"


def _most(found: Mapping[str, Sum], field: str, before: str) -> str:
    """The name with the largest sum of a field, behind a word; empty where there is none."""
    names = [name for name, one in found.items() if name not in ("", "none") and getattr(one, field)]
    if not names:
        return ""
    return f"{before} {max(names, key=lambda name: float(getattr(found[name], field)))}"
