"""The tables of docs/offload.md, "Beside the alternatives", from the results of `offload.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/offload.md"
BEGIN, END = "<!-- written by benchmarks/offload.py -->", "<!-- end -->"


def fill(kept: Mapping[str, Any], page: Path = PAGE) -> None:
    """Put the tables of the parts that there are between the page's marks."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    lines = [line for part, table in _TABLES.items() if part in kept for line in table(kept[part])]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END, 1)[1]}")


def _simulated(found: Mapping[str, Any]) -> Iterator[str]:
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
    yield (
        f"Measured: a Llama of {found['layers']} layers on a processor, one thread; the link to the memory that is not "
        f"counted is emulated at {found['emulated_bandwidth'] / 2**20:.0f} MiB/s each way, flash is a real disk."
    )
    yield ""
    yield "| | Peak | Step | |"
    yield "|---|---|---|---|"
    for row in found["rows"]:
        yield f"| {row['name']} | {row['peak'] / 2**20:.1f} MiB | {row['median_s']:.3f} s | {row['note']} |"
    yield ""
    yield _verdict(found["below"])
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


_TABLES = {"real": _real, "simulated": _simulated, "ascend": _ascend}


def _verdict(below: Mapping[str, Mapping[str, Any]]) -> str:
    above = [name for name, one in below.items() if not one["on_or_below"]]
    if not above:
        return "Ours lies on or below every other's point."
    return f"Ours lies above: {', '.join(above)}."


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
