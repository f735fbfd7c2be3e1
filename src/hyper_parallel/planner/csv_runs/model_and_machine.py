"""Model, machine and experts' dispatch of a published run: what its row states, the rest from published models, presets
and the framework's recipes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.presets import names, peak_flops
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.planner.columns import Profile
from hyper_parallel.planner.csv_runs.cells import Cells
from hyper_parallel.planner.framework_profiles import (
    MEGATRON_BRIDGE_MIXTURES,
    MEGATRON_BRIDGE_NVL72,
    MEGATRON_BRIDGE_RECIPES,
)
from hyper_parallel.planner.table import of_cluster
from hyper_parallel.workload.published import known
from hyper_parallel.workload.shape import Shape

_CUT = re.compile(r"-L\d+$")
"""Ends the name of a model that was trained with fewer layers than it has."""

_HYBRID = re.compile(r"nemotron[-_ ]?(3[-_ ](nano|super|ultra)|h\b)|mamba|jamba|zamba", re.IGNORECASE)
"""Models with other token mixers than attention, whose sizes a row has no columns for."""

_LONGEST = 8192
"""A model is seldom trained on more tokens a sequence than this, even if it is made for more."""

_COLUMNS = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn",
    "vocab": "vocabulary",
    "experts": "experts",
    "topk": "chosen",
    "moe_ffn": "expert_ffn",
}
"""Columns of a row, and the dimension of a Shape that each states."""

_UNSTATED = (
    "head_dim",
    "latent",
    "shared_ffn",
    "dense_layers",
    "window",
    "windowed",
    "tied",
    "gated",
    "positions",
    "expert_groups",
    "chosen_groups",
    "gate",
    "expert_hidden",
    "expert_bias",
    "mix",
    "vectors",
)
"""Dimensions that a published model has and a row's columns have not."""


def shape_of(cells: Cells, profile: Profile) -> Shape:
    """The shape that a row's run trained.

    Raises ConfigError where layers, hidden size or heads are neither stated nor known of the model's name, and
    DataError for a cell that is no number.
    """
    name = cells.text("model")
    stated = _stated(cells)
    model = known(_CUT.sub("", name)) if name else None
    if _HYBRID.search(name) and (model is None or stated.get("layers", model.layers) != model.layers):
        raise ConfigError(
            f"{name!r} has layers that are neither attention nor MLPs, and it is none of the published models of that "
            "kind; a row has no columns for the sizes of such layers"
        )
    if model is not None and not _agree(stated, model):
        cells.filled["model"] = (
            f"not the published {model.name}, whose dimensions differ: nothing is taken of it"
        )
        model = None
    fields: dict[str, Any] = dict(stated)
    if model is not None:
        _take(fields, model, cells)
    missing = [field for field in ("layers", "hidden", "heads") if field not in fields]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} of the model {name!r} are not stated, and it is none of the published models; give "
            "the columns layers, hidden and heads"
        )
    _fill(fields, cells, profile)
    return Shape(name=name or "?", **fields)


def sequence_of(cells: Cells, shape: Shape) -> int:
    """Tokens of a sequence: as stated, or as long as the published model's, at most 8,192.

    Raises ConfigError where neither is known.
    """
    stated = cells.count("seq_len")
    if stated is not None:
        return stated
    if not shape.positions:
        raise ConfigError("the column seq_len is empty, and the model's sequence is not published; give it")
    return cells.take("seq_len", min(shape.positions, _LONGEST), "as the published model is trained on")


def _stated(cells: Cells) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for column, field in _COLUMNS.items():
        value = cells.count(column, least=0 if column in ("experts", "topk", "moe_ffn", "ffn") else 1)
        if value is not None:
            fields[field] = value
    if fields.get("experts") == 1:
        # One expert, which all tokens go through, is how some tables write a model without experts.
        fields |= {"experts": 0, "chosen": 0, "expert_ffn": 0}
    gated = cells.count("ffn_gated", least=0)
    if gated is not None:
        if gated > 1:
            raise cells.malformed("ffn_gated", "0 or 1")
        fields["gated"] = bool(gated)
    return fields


def _agree(stated: dict[str, Any], model: Shape) -> bool:
    """Whether what a row states can be the published model; layers may be fewer, and features or groups differ."""
    same = all(
        stated.get(field, getattr(model, field)) == getattr(model, field) for field in ("hidden", "heads")
    )
    return same and (not stated.get("experts") or model.experts > 0)


def _take(fields: dict[str, Any], model: Shape, cells: Cells) -> None:
    """What the row leaves out, of the published model."""
    published = f"of the published {model.name}"
    for column, field in _COLUMNS.items():
        if field not in fields:
            fields[field] = getattr(model, field)
            if fields[field]:
                cells.take(column, fields[field], published)
    for field in _UNSTATED:
        if field not in fields:
            fields[field] = getattr(model, field)
    plain = fields["hidden"] // fields["heads"]
    if model.latent is not None:
        cells.filled["latent attention"] = published
    elif model.head_dim != plain:
        cells.take("head_dim", model.head_dim, published)
    if model.window:
        cells.filled["window"] = (
            f"{model.window} tokens in {model.windowed:.0%} of the layers, of {model.name}"
        )
    if model.shared_ffn:
        cells.filled["shared experts"] = f"{model.shared_ffn} features, of {model.name}"
    if model.mix is not None:
        mix = model.mix
        cells.filled["layers"] = (
            f"{fields['layers']} of {model.name}: {mix.attending} with attention, {mix.mixing} with another mixer, "
            f"{mix.feeding} with an MLP or experts"
        )
    if model.dense_layers:
        # A model that was cut keeps its sorts of layers in proportion, and one of each.
        share = model.dense_layers * fields["layers"] / model.layers
        dense = min(model.dense_layers, max(1, round(share)))
        fields["dense_layers"] = cells.take("dense layers", dense, f"of {model.name}")


def _fill(fields: dict[str, Any], cells: Cells, profile: Profile) -> None:
    """What neither the row nor a published model states: the usual, and the framework's default."""
    hidden, heads = fields["hidden"], fields["heads"]
    if "kv_heads" not in fields:
        fields["kv_heads"] = cells.take("kv_heads", heads, "one for each head")
    if "head_dim" not in fields:
        if hidden % heads:
            raise ConfigError(
                f"hidden {hidden} is no multiple of heads {heads}; the size of a head is not known"
            )
        fields["head_dim"] = hidden // heads
    experts = bool(fields.get("experts"))
    if not fields.get("ffn") and not experts and not fields.get("mix"):
        fields["ffn"] = cells.take("ffn", 4 * hidden, "four times hidden")
    if "gated" not in fields:
        fields["gated"] = fields.get("ffn", 0) != 4 * hidden
        usual = "an MLP without a gate has four times hidden features, this one other"
        cells.filled["ffn_gated"] = f"1: {usual}" if fields["gated"] else "0, with four times hidden features"
    fields.setdefault("ffn", 0)
    if experts:
        _fill_experts(fields, cells)
    if "vocabulary" not in fields:
        why = f"the default of {profile.name}"
        fields["vocabulary"] = cells.take("vocab", profile.defaults.vocabulary, why)
    if "tied" not in fields:
        fields["tied"] = _tied(fields, cells)


def _fill_experts(fields: dict[str, Any], cells: Cells) -> None:
    if not fields.get("chosen"):
        raise DataError(
            "the column topk is empty, and experts is not; give the experts that a token goes through"
        )
    if not fields.get("expert_ffn"):
        fields["expert_ffn"] = cells.take("moe_ffn", fields["ffn"], "the features of the column ffn")


def _tied(fields: dict[str, Any], cells: Cells) -> bool:
    """Whether the head is the embedding: what comes nearer to the stated parameters, else as GPT's without gates."""
    billions = cells.number("params_b")
    totals = {tied: Shape(name="?", **{**fields, "tied": tied}).parameters for tied in (True, False)}
    # A total is rounded: where a head is less of it than that, it does not tell.
    if not billions or totals[False] < 1.01 * totals[True]:
        tied = not fields["gated"]
        cells.filled["tied"] = f"{int(tied)}: GPT's without gates tie head and embedding, later ones do not"
        return tied
    tied = min(totals, key=lambda tied: abs(totals[tied] - billions * 1e9))
    return bool(cells.take("tied", int(tied), f"which comes nearer to {billions:g} billion parameters"))


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

_FABRIC = re.compile(r"(infiniband)|\b(?:shared paths|roce|ethernet|efa)\b", re.IGNORECASE)
"""Words of a network; without them `Link.shared_paths` is as the preset's."""

_WATTS = {"a100": 400, "a100-40gb": 400, "h100": 700, "h200": 700, "h800": 700, "b200": 1000}
"""What a device may draw, of its maker's datasheet."""


def machine(cells: Cells) -> tuple[str, Mapping[str, float]]:
    """The preset's name, and the table's columns of the machine.

    Raises ConfigError, with the nearest name, for a machine without published figures.
    """
    name = preset_of(cells.text("hardware"))
    columns = dict(_columns(name))
    _form(cells, name, columns)
    if found := re.search(r"(\d+) ?(gib|gb)\b", cells.text("hardware").lower()):
        # The same device is sold with more memory and with less.
        columns["capacity"] = int(found[1]) * (2.0**30 if found[2] == "gib" else 1e9)
    _limited(cells, name, columns)
    node = cells.count("devices_per_node")
    if node is None:
        cells.take("devices_per_node", f"{columns['node']:g}", f"of the preset {name}")
    elif columns["supernode"] == 1 or columns["supernode"] % node == 0:
        columns["node"] = float(node)
    rate = network_rate(cells.text("interconnect"), columns["node"])
    if rate is None:
        network = f"{columns['network_rate'] / 1e9:g} GB/s a device"
        cells.take("interconnect", network, f"of the preset {name}")
    else:
        if columns["supernode"] == 1:
            columns["supernode_rate"] = rate
        columns["network_rate"] = rate
    if words := _FABRIC.search(cells.text("interconnect")):
        columns["shared_paths"] = float(words[1] is None)
    return name, columns


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


def _form(cells: Cells, name: str, columns: dict[str, float]) -> None:
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
        cells.take("interconnect", f"{columns['host_rate'] / 1e9:g} GB/s in the node", "of PCI Express")


def _limited(cells: Cells, name: str, columns: dict[str, float]) -> None:
    """A device that may draw less power than its maker's has a slower clock: power goes with the clock times the square
    of the voltage, and the voltage with the clock, so that the clock goes with the cube root."""
    text = cells.text("hardware").lower()
    found = re.search(r"\b(\d{3,4}) ?w\b", text)
    if found and (usual := _WATTS.get(name)) and int(found[1]) < usual:
        share = (int(found[1]) / usual) ** (1 / 3)
        for peak in ("peak16", "peak8", "peak4"):
            columns[peak] *= share
        cells.filled["hardware"] = f"{share:.0%} of the clock, for {found[1]} W of {usual}"
    if name == "h100" and "hbm2e" in text:
        columns["hbm"] = 2.4e12


@cache
def _columns(name: str) -> Mapping[str, float]:
    return of_cluster(Cluster.preset(name))


# How a run dispatches tokens to experts, as its row or its framework's recipes state it.
#
# A row says so in the framework's name, in the notes (words of `cells.WORDS`), or in the notes' options `etp`. What
# neither says is the profile's, and open where that is.

_STATED: tuple[tuple[str, dict[str, float]], ...] = (
    (r"deep[-_ ]?ep|hybrid[-_ ]?ep", {"dedup": 1.0}),
    (r"all[-_ ]?to[-_ ]?all|allgather", {"dedup": 0.0}),
    (r"(a2a|1f1b|ep)[-_ ]overlap", {"overlap_expert": 1.0}),
    (r"\bno (a2a|1f1b|ep)[-_ ]overlap", {"overlap_expert": 0.0}),
    (r"forced?[-_ ]balanc|balanced gate", {"even": 1.0}),
    # NeMo AutoModel's fake gate computes no router, and its dispatchers have moe_permute_fusion.
    (r"balanced gate", {"fused_routing": 1.0}),
    # Megatron's --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split.
    (r"loss in split", {"balanced": 1.0}),
    # Experts with a capacity have static shapes: the host waits for no counts.
    (r"\(token ?drop\)", {"even": 1.0, "graphs": 1.0}),
    (r"recorded graphs", {"graphs": 1.0}),
    # An all-to-all whose experts have no capacity waits in each layer for counts, and nothing recorded runs ahead.
    (r"^(?!.*token ?drop).*all[-_ ]?to[-_ ]?all.*recorded graphs", {"graphs": 0.0}),
    (r"\bno recorded graphs", {"graphs": 0.0}),
    # Megatron's --moe-router-fusion, with --moe-permute-fusion.
    (r"fused router", {"fused_routing": 1.0}),
    (r"no tp overlap", {"overlap_tensor": 0.0}),
)
"""What words say; later ones add to earlier ones."""


def profile_of_mixture(profile: Profile, shape: Shape, supernode: float) -> Profile:
    """The profile that recipes of mixtures have on a machine, for a framework whose recipes differ by machine."""
    if profile is not MEGATRON_BRIDGE_RECIPES or not shape.experts:
        return profile
    return MEGATRON_BRIDGE_NVL72 if supernode > 1 else MEGATRON_BRIDGE_MIXTURES


def stated(cells: Cells) -> dict[str, float]:
    """The columns of dispatch that a row states in words."""
    words = f"{cells.text('framework')}; {cells.text('notes')}".lower()
    found: dict[str, float] = {}
    for pattern, columns in _STATED:
        if re.search(pattern, words):
            found |= columns
    return found


def expert_tensor(cells: Cells, profile: Profile, shape: Shape, tensor: int, ranks: int) -> int:
    """Ranks that split an expert's features; `ranks` are those of a pipeline stage by the degree of `ep`."""
    option = cells.option("etp")
    if not shape.experts or (option and not option.isdigit()):
        return 1
    if option:
        return max(1, int(option)) if ranks % max(1, int(option)) == 0 else 1
    taken = tensor if profile.defaults.expert_tensor == "tensor" and ranks % tensor == 0 else 1
    if taken > 1:
        cells.take("etp", taken, f"as tensor parallelism: the default of {profile.name}")
    return taken
