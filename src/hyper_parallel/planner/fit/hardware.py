"""Hardware of a published run: preset by name, nodes and network from the row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.presets import names, peak_flops
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.fit.csv_cells import Cells
from hyper_parallel.planner.table import of_cluster

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"h800", "h800"),
    (r"h200", "h200"),
    (r"h20\b", "h20"),
    (r"h100", "h100"),
    (r"a800", "a800"),
    (r"a100.*40 ?gb?\b", "a100-40gb"),
    (r"a100|ampere", "a100"),
    (r"v100", "v100"),
    (r"mi300x", "mi300x"),
    (r"910c|cloudmatrix|atlas 900 a3", "cloudmatrix384"),
    (r"910b|atlas (800t|900) a2", "910b"),
    (r"950|superpod", "atlas950"),
)
"""The first pattern that is found in a device's name, in lower case, decides."""

_PCIE_FORMS = {"a100": "NVIDIA A100 PCIe", "a100-40gb": "NVIDIA A100 PCIe", "h100": "NVIDIA H100 PCIe"}
"""Presets whose card for PCI Express has a name by which its peak is known."""

_RATE = r"(\d+(?:\.\d+)?)\s*([GgTt])([Bb](?:ps|/s|it/s)?)?(?![A-Za-z0-9])"
"""A number, a prefix, and a unit of bits or bytes."""

_INSIDE = re.compile(r"nvlink|nvswitch|hccs|pcie", re.IGNORECASE)

_WATTS = {"a100": 400, "a100-40gb": 400, "h100": 700, "h200": 700, "h800": 700, "b200": 1000}
"""What a device may draw, of its maker's datasheet."""


def machine(cells: Cells) -> tuple[str, Mapping[str, float], dict[str, str]]:
    """The preset's name, the table's columns of the machine, and the source of what the row did not give.

    Raises ConfigError, with the nearest name, for a machine without published figures.
    """
    name = preset_of(cells.text("hardware"))
    columns = dict(_columns(name))
    filled: dict[str, str] = {}
    _form(cells, name, columns, filled)
    if found := re.search(r"(\d+) ?(gib|gb)\b", cells.text("hardware").lower()):
        # The same device is sold with more memory and with less.
        columns["capacity"] = int(found[1]) * (2.0**30 if found[2] == "gib" else 1e9)
    _limited(cells, name, columns, filled)
    node = cells.count("devices_per_node")
    if node is None:
        filled["devices_per_node"] = f"{columns['node']:g}, of the preset {name}"
    elif columns["supernode"] == 1 or columns["supernode"] % node == 0:
        columns["node"] = float(node)
    rate = network_rate(cells.text("interconnect"), columns["node"])
    if rate is None:
        filled["interconnect"] = f"{columns['network_rate'] / 1e9:g} GB/s a device, of the preset {name}"
    else:
        if columns["supernode"] == 1:
            columns["supernode_rate"] = rate
        columns["network_rate"] = rate
    return name, columns, filled


def preset_of(hardware: str) -> str:
    """The preset of a device as published runs write it, `H100-80GB-SXM`. Raises ConfigError for another one.

    >>> preset_of("Ascend 910B (Atlas 900 A2 PODc)")
    '910b'
    """
    text = hardware.lower().replace("_", "-")
    for pattern, name in _PATTERNS:
        if re.search(pattern, text):
            return name
    if not text:
        raise ConfigError("the column hardware is empty; give the device's name, such as H100")
    near = difflib.get_close_matches(re.split(r"[\s(,]", text)[0], names(), n=1, cutoff=0.5)
    hint = f"; the nearest of the published machines is {near[0]!r}" if near else ""
    raise ConfigError(
        f"nothing is published of the device {hardware!r} that a estimate could stand on{hint}; known are "
        f"{', '.join(names())}"
    )


def network_rate(interconnect: str, node: float) -> float | None:
    """B/s of a device on the network, one way, where words such as `800 Gb/s per node` or `8x200G` say it.

    A capital B means bytes: `8x50 GB/s` is as much as `8x400 Gb/s`, eight adapters of 400 gigabits.

    >>> network_rate("NVLink; inter-node 800 Gb/s per node", 8)
    12500000000.0
    >>> network_rate("InfiniBand 8x50 GB/s", 8) == network_rate("8x400G NIC per node", 8)
    True
    """
    parts = re.split(r"[;,]", interconnect)
    # What is said of the links inside a node is not the network's.
    text = ";".join(part for part in parts if not _INSIDE.search(part) or "inter-node" in part)
    if found := re.search(rf"(\d+)\s*[x×]\s*{_RATE}", text):
        return int(found[1]) * _bytes(found[2], found[3], found[4]) / node
    if found := re.search(rf"{_RATE}\s*(?:(?:per|a|/)\s*)?[\w-]*\s*node\b", text):
        return _bytes(*found.groups()) / node
    if found := re.search(rf"{_RATE}\s*[\w-]*\s*(?:per|a|/)\s*(?:[gGnN][pP][uU]|device|rank)", text):
        return _bytes(*found.groups())
    return None


def _bytes(number: str, prefix: str, unit: str | None) -> float:
    """B/s of a rate; a rate without a unit, `400G`, is in bits as adapters are named."""
    times = 1e12 if prefix.upper() == "T" else 1e9
    return float(number) * times / (1 if unit and unit.startswith("B") else 8)


def _form(cells: Cells, name: str, columns: dict[str, float], filled: dict[str, str]) -> None:
    """Correct the columns for a PCI Express card: another peak, and without NVLink the host's rate in the node."""
    text = cells.text("hardware").lower()
    if "pcie" not in text or name not in _PCIE_FORMS:
        return
    device = _PCIE_FORMS[name]
    peak16 = peak_flops(device, "bfloat16")
    peak8 = peak_flops(device, "float8_e4m3fn")
    assert peak16 is not None, "a form's peak is published"
    columns["peak16"] = peak16
    columns["peak8"] = columns["peak4"] = peak8 or peak16
    if "nvlink" not in cells.text("interconnect").lower():
        columns["node_rate"] = columns["host_rate"]
        filled["interconnect"] = f"{columns['host_rate'] / 1e9:g} GB/s in the node, of PCI Express"


def _limited(cells: Cells, name: str, columns: dict[str, float], filled: dict[str, str]) -> None:
    """A device that may draw less power than its maker's has a slower clock: power goes with the clock times the square
    of the voltage, and the voltage with the clock, so that the clock goes with the cube root."""
    text = cells.text("hardware").lower()
    found = re.search(r"\b(\d{3,4}) ?w\b", text)
    if found and (usual := _WATTS.get(name)) and int(found[1]) < usual:
        share = (int(found[1]) / usual) ** (1 / 3)
        for peak in ("peak16", "peak8", "peak4"):
            columns[peak] *= share
        filled["hardware"] = f"{share:.0%} of the clock, for {found[1]} W of {usual}"
    if name == "h100" and "hbm2e" in text:
        columns["hbm"] = 2.4e12


@cache
def _columns(name: str) -> Mapping[str, float]:
    return of_cluster(Cluster.preset(name))
