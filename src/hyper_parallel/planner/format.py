"""Formats strategies and metrics for tables, explanations and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hyper_parallel.planner.metrics import Figures
from hyper_parallel.units import format_bytes, format_count, format_duration, format_interval
from hyper_parallel.workload.workload import Workload

Strategy = Mapping[str, float | str]
"""The columns of a strategy; codes by name."""

AXES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline", "expert")

MEANING = {
    "products": "matrix products of layers",
    "attention": "attention's core, and recurrences of other token mixers",
    "elementwise": "norms, activations, residuals",
    "again": "computed once more in the backward pass",
    "head": "embedding, head and loss",
    "tensor": "collectives of tensor axes that nothing hides",
    "expert": "tokens on their way to experts and back, not hidden",
    "context": "keys and values, or heads, passed between ranks, not hidden",
    "gathers": "weights gathered beyond what computation hides",
    "launches": "the device waits for the host to launch kernels",
    "uneven": "the slowest stage beyond the mean stage",
    "bubble": "stages wait for the first and last micro-batches",
    "sends": "messages between stages that nothing hides",
    "gradients": "reduction of gradients that nothing hides",
    "optimizer": "the update",
    "host": "copies from and to the host that nothing hides",
    "fixed": "what does not depend on the step's size",
    "straggling": "waiting for the slowest of many devices",
}
"""What the parts of a step are; `planner.cost_model.step` has the formulas."""


ON_HOST = {"state_on_host": "state", "activations_on_host": "activations", "weights_on_host": "weights"}
"""What a share of may lie in the host's memory, by column."""


def axes(strategy: Strategy) -> str:
    """`shard 16 · tensor_x 8 · pipeline 16`: degrees above 1, in the order of a Strategy."""
    return " · ".join(f"{axis} {strategy[axis]}" for axis in AXES if strategy[axis] != 1) or "one device"


def settings(strategy: Strategy) -> str:
    """All that a strategy says beside degrees: how stages, shards, sequences and memory are dealt with."""
    words = []
    if strategy["pipeline"] != 1:
        words.append(schedule(strategy))
    words.append(f"micro {strategy['micro']}")
    if strategy["zero"]:
        words.append(f"ZeRO-{strategy['zero']}")
    if strategy["sequence_parallel"] and strategy["tensor_y"] == 1:
        words.append("sequence")
    if strategy["context"] != 1:
        words.append(str(strategy["method"]))
    words.append(recompute(strategy))
    moved = [
        what if strategy[name] == 1 else f"{float(strategy[name]):.0%} of {what}"
        for name, what in ON_HOST.items()
        if strategy[name]
    ]
    if moved:
        words.append(f"{joined(moved)} on host")
    return ", ".join(words)


def schedule(strategy: Strategy) -> str:
    """A pipeline's schedule, with how many parts of the model a rank has where that is several."""
    virtual = strategy["virtual"]
    return str(strategy["schedule"]) + (f" × {virtual}" if virtual != 1 else "")


def recompute(strategy: Strategy) -> str:
    """What is computed again, and in how many of the layers."""
    kind, share = strategy["recompute"], float(strategy["recomputed"])
    if kind == "none" or not share:
        return "keep all"
    return f"recompute {kind}" + (f" {share:.0%}" if share < 1 else "")


def order(strategy: Strategy) -> str:
    """The axes above 1 from neighbouring ranks outwards."""
    data = ("shard", "replicate")
    above = {
        name: any(strategy[axis] != 1 for axis in (data if name == "data" else (name,)))
        for name in str(strategy["order"]).split()
    }
    return " < ".join(name for name, there in above.items() if there)


def seconds(figures: Figures) -> str:
    """`12.3 s, 90%: 10.9–14.1`"""
    return f"{format_duration(figures.seconds)}, 90%: {between(figures)}"


def between(figures: Figures) -> str:
    """`10.9–14.1`: the interval in the unit of the seconds."""
    return format_interval(figures.seconds, figures.between)


def memory(figures: Figures) -> str:
    """`71.2 GiB of 80.0 GiB`"""
    return f"{format_bytes(figures.peak)} of {format_bytes(figures.capacity)}"


def largest(parts: Mapping[str, float], share: float = 0.002) -> list[tuple[str, float]]:
    """Parts above a share of their sum, the largest first."""
    least = share * sum(parts.values())
    return sorted(((name, part) for name, part in parts.items() if part > least), key=lambda one: -one[1])


def signed(share: float) -> str:
    """`+3.1%`"""
    return f"{share:+.1%}".replace("-", "−")


def joined(words: Iterable[str]) -> str:
    """`a, b and c`"""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def trained(work: Workload) -> str:
    """The weights that a step trains where that is not the model alone, to follow its parameters; else empty."""
    if work.adapter is not None:
        targets = ", ".join(work.adapter.targets)
        own = format_count(work.trained_parameters)
        return f"; frozen in {work.adapter.base}, {own} trained in adapters of rank {work.adapter.rank} on {targets}"
    if work.prediction_modules:
        modules = "a module" if work.prediction_modules == 1 else f"{work.prediction_modules} modules"
        return f"; {format_count(work.trained_parameters)} with {modules} for one token more each"
    return ""
