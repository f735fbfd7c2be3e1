"""Model of a published run: dimensions from the row, the rest from the published model of that name."""

from __future__ import annotations

import re
from typing import Any

from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.planner.fit.csv_cells import Cells
from hyper_parallel.planner.profile import Profile
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


def shape_of(cells: Cells, profile: Profile) -> tuple[Shape, dict[str, str]]:
    """The shape that a row's run trained, and for each dimension that the row does not state what was taken.

    Raises ConfigError where layers, hidden size or heads are neither stated nor known of the model's name, and
    DataError for a cell that is no number.
    """
    name = cells.text("model")
    stated = _stated(cells)
    filled: dict[str, str] = {}
    model = known(_CUT.sub("", name)) if name else None
    if _HYBRID.search(name) and (model is None or stated.get("layers", model.layers) != model.layers):
        raise ConfigError(
            f"{name!r} has layers that are neither attention nor MLPs, and it is none of the published models of that "
            "kind; a row has no columns for the sizes of such layers"
        )
    if model is not None and not _agree(stated, model):
        filled["model"] = f"not the published {model.name}, whose dimensions differ: nothing is taken of it"
        model = None
    fields: dict[str, Any] = dict(stated)
    if model is not None:
        _take(fields, model, filled)
    missing = [field for field in ("layers", "hidden", "heads") if field not in fields]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} of the model {name!r} are not stated, and it is none of the published models; give "
            "the columns layers, hidden and heads"
        )
    _fill(fields, cells, profile, filled)
    return Shape(name=name or "?", **fields), filled


def sequence_of(cells: Cells, shape: Shape, filled: dict[str, str]) -> int:
    """Tokens of a sequence: as stated, or as long as the published model's, at most 8,192.

    Raises ConfigError where neither is known.
    """
    stated = cells.count("seq_len")
    if stated is not None:
        return stated
    if not shape.positions:
        raise ConfigError("the column seq_len is empty, and the model's sequence is not published; give it")
    taken = min(shape.positions, _LONGEST)
    filled["seq_len"] = f"{taken}, as the published model is trained on"
    return taken


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


def _take(fields: dict[str, Any], model: Shape, filled: dict[str, str]) -> None:
    """What the row leaves out, of the published model."""
    for column, field in _COLUMNS.items():
        if field not in fields:
            fields[field] = getattr(model, field)
            if fields[field]:
                filled[column] = f"{fields[field]}, of the published {model.name}"
    for field in _UNSTATED:
        if field not in fields:
            fields[field] = getattr(model, field)
    plain = fields["hidden"] // fields["heads"]
    if model.latent is not None:
        filled["latent attention"] = f"of the published {model.name}"
    elif model.head_dim != plain:
        filled["head_dim"] = f"{model.head_dim}, of the published {model.name}"
    if model.window:
        filled["window"] = f"{model.window} tokens in {model.windowed:.0%} of the layers, of {model.name}"
    if model.shared_ffn:
        filled["shared experts"] = f"{model.shared_ffn} features, of {model.name}"
    if model.mix is not None:
        mix = model.mix
        filled["layers"] = (
            f"{fields['layers']} of {model.name}: {mix.attending} with attention, {mix.mixing} with another mixer, "
            f"{mix.feeding} with an MLP or experts"
        )
    if model.dense_layers:
        # A model that was cut keeps its sorts of layers in proportion, and one of each.
        share = model.dense_layers * fields["layers"] / model.layers
        fields["dense_layers"] = min(model.dense_layers, max(1, round(share)))
        filled["dense layers"] = f"{fields['dense_layers']}, of {model.name}"


def _fill(fields: dict[str, Any], cells: Cells, profile: Profile, filled: dict[str, str]) -> None:
    """What neither the row nor a published model states: the usual, and the framework's default."""
    hidden, heads = fields["hidden"], fields["heads"]
    if "kv_heads" not in fields:
        fields["kv_heads"] = heads
        filled["kv_heads"] = f"{heads}, one for each head"
    if "head_dim" not in fields:
        if hidden % heads:
            raise ConfigError(
                f"hidden {hidden} is no multiple of heads {heads}; the size of a head is not known"
            )
        fields["head_dim"] = hidden // heads
    experts = bool(fields.get("experts"))
    if not fields.get("ffn") and not experts and not fields.get("mix"):
        fields["ffn"] = 4 * hidden
        filled["ffn"] = f"{4 * hidden}, four times hidden"
    if "gated" not in fields:
        fields["gated"] = fields.get("ffn", 0) != 4 * hidden
        usual = "an MLP without a gate has four times hidden features, this one other"
        filled["ffn_gated"] = f"1: {usual}" if fields["gated"] else "0, with four times hidden features"
    fields.setdefault("ffn", 0)
    if experts:
        _fill_experts(fields, filled)
    if "vocabulary" not in fields:
        fields["vocabulary"] = profile.defaults.vocabulary
        filled["vocab"] = f"{fields['vocabulary']}, the default of {profile.name}"
    if "tied" not in fields:
        fields["tied"] = _tied(fields, cells, filled)


def _fill_experts(fields: dict[str, Any], filled: dict[str, str]) -> None:
    if not fields.get("chosen"):
        raise DataError(
            "the column topk is empty, and experts is not; give the experts that a token goes through"
        )
    if not fields.get("expert_ffn"):
        fields["expert_ffn"] = fields["ffn"]
        filled["moe_ffn"] = f"{fields['ffn']}, the features of the column ffn"


def _tied(fields: dict[str, Any], cells: Cells, filled: dict[str, str]) -> bool:
    """Whether the head is the embedding: what comes nearer to the stated parameters, else as GPT's without gates."""
    billions = cells.number("params_b")
    totals = {tied: Shape(name="?", **{**fields, "tied": tied}).parameters for tied in (True, False)}
    # A total is rounded: where a head is less of it than that, it does not tell.
    if not billions or totals[False] < 1.01 * totals[True]:
        filled["tied"] = (
            f"{int(not fields['gated'])}: GPT's without gates tie head and embedding, later ones do not"
        )
        return not fields["gated"]
    tied = min(totals, key=lambda tied: abs(totals[tied] - billions * 1e9))
    filled["tied"] = f"{int(tied)}, which comes nearer to {billions:g} billion parameters"
    return tied
