"""The tables of docs/offload.md, "Comparison with the alternatives", from the results of `offload.py`.

For a part that was not run yet the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ROWS = (1, 4)
"""Rows of the simulated workloads."""


def lines(kept: Mapping[str, Any]) -> Iterator[str]:
    """The lines of all parts; for a part that was not run, a line that says so."""
    for part, (what, table) in _TABLES.items():
        if part in kept:
            yield from table(kept[part])
        else:
            yield from (f"Not run yet: {what}.", "")


def _simulated(found: Mapping[str, Any]) -> Iterator[str]:
    missing = [str(rows) for rows in ROWS if rows not in [one["rows"] for one in found["workloads"]]]
    if missing:
        yield f"Not run yet: the simulated step of {' and '.join(missing)} rows."
        yield ""
    for one in found["workloads"]:
        yield (
            f"Simulated: one H100, a link of {one['link_B_s'] / 1e9:.1f} GB/s each way, {one['rows']} × "
            f"{one['sequence']:,} tokens, {one['layers']} layers, no limit on the device's memory."
        )
        yield ""
        yield "| | Peak | Step | Ours, holding no more |"
        yield "|---|---|---|---|"
        seconds = {point["budget"]: point["seconds"] for point in one["ours"]}
        for name, point in one["others"].items():
            below = one["below"][name]
            ours = f"{seconds[below['budget']]:.3f} s" if "budget" in below else "none"
            yield f"| {name} | {_gib(point['peak'])} | {point['seconds']:.3f} s | {ours} |"
        known = {point["peak"] for point in one["others"].values()}
        for point in one["ours"]:
            if point["budget"] not in known:
                yield f"| a budget of {_gib(point['budget'])} | {_gib(point['peak'])} | | {point['seconds']:.3f} s |"
        yield ""
        yield _verdict(one["below"])
        yield ""


def _real(found: Mapping[str, Any]) -> Iterator[str]:
    rows, below = found["rows"], found["below"]
    others = [row["name"] for row in rows if not row["ours"]]
    yield (
        f"Measured: a Llama of {found['layers']} layers on a CPU, one thread; the link to the memory that is not "
        f"counted is emulated at {found['emulated_bandwidth'] / 2**20:.0f} MiB/s each way, flash is a real disk. "
        f"{len(others)} alternatives and {len(rows) - len(others)} of our plans alternate, {len(rows[0]['seconds'])} "
        "steps each; times are medians. The last column compares each with our best plan that holds no more: the "
        "median of the paired ratios and its 95% interval."
    )
    yield ""
    yield "| | Peak | Step | | Ours, holding no more, takes |"
    yield "|---|---|---|---|---|"
    for row in rows:
        one = below.get(row["name"])
        ours = f"{one['ratio']:.2f} × ({one['low']:.2f} to {one['high']:.2f}): {one['by']}" if one else ""
        yield f"| {row['name']} | {row['peak'] / 2**20:.1f} MiB | {row['median_s']:.3f} s | {row['note']} | {ours} |"
    yield ""
    yield _verdict(below)
    alone = [name for name in others if name not in below]
    if alone:
        yield f"None of our plans that were run holds as little as: {'; '.join(alone)}."
    if found["same_bits"]:
        yield "The losses of our steps equal those of eager ones bit for bit."
    else:
        yield "The losses of our steps do **not** equal those of eager ones bit for bit."
    yield ""


def _ascend(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| On eight 910C | Peak, simulated | Step, simulated | Step, published |"
    yield "|---|---|---|---|"
    for name, run in found.items():
        if isinstance(run, dict):
            for row in run["rows"]:
                published = f"{row['published_s']:.2f} s" if row["published_s"] else ""
                yield f"| {name}, {row['name']} | {_gib(row['peak'])} | {row['simulated_s']:.2f} s | {published} |"
            yield (
                f"| {name}, of the baseline's time | | {run['simulated_ratio']:.2f} | {run['published_ratio']:.2f} |"
            )
    yield ""


_TABLES = {
    "real": ("the real steps", _real),
    "simulated": ("the simulated steps on an H100", _simulated),
    "ascend": ("the simulated steps on eight 910C", _ascend),
}


def _verdict(below: Mapping[str, Mapping[str, Any]]) -> str:
    above = [name for name, one in below.items() if not one["on_or_below"]]
    if not above:
        return (
            "Ours lies on or below the point of every alternative."
            if below
            else "Ours is compared with no alternative."
        )
    return f"Ours lies above the point of: {', '.join(above)}."


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
