"""Rows of a CSV of training runs, with defaults filled in and unsupported rows named.

Empty cells are filled with what the row's framework does by default (`planner.framework_profiles`), what is published
of its model and of its machine, and arithmetic: the ranks that see different data are devices / (tensor · pipeline ·
context). Each such cell is named with what was taken. A row that cannot be is unsupported, with the reason; nothing
here raises for what stands in a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.planner.columns import Profile, code
from hyper_parallel.planner.csv_runs.cells import Cells, read
from hyper_parallel.planner.csv_runs.model_and_machine import (
    expert_tensor,
    machine,
    profile_of_mixture,
    sequence_of,
    shape_of,
    stated,
)
from hyper_parallel.planner.framework_profiles import MEGATRON_LM, TORCHTITAN, TORCHTITAN_COMPILED, profile_of
from hyper_parallel.planner.table import COLUMNS, PRECISIONS, SPREAD, Table, of_profile, of_workload
from hyper_parallel.workload.published import known, of_published
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Adapter, Precision, Workload


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One row of the CSV, as it was read."""

    line: int
    """Of the file; the header is line 1."""
    id: str
    source: str
    model: str
    hardware: str
    framework: str
    profile: str = ""
    """The framework's profile."""
    cluster: str = ""
    """The preset of its machine."""
    filled: Mapping[str, str] = field(default_factory=dict)
    """By column: what was taken for an empty cell, and from where."""
    unsupported: str = ""
    """Why there is no estimate; empty where there is."""
    index: int | None = None
    """The row of the table; None where it is unsupported."""


def rows(runs: str | Path | Iterable[Mapping[str, object]]) -> tuple[Table, list[RunRow]]:
    """The table of the runs that can be estimated, and a Row for each run, in the file's order.

    `runs`: a CSV file, or records of the same columns. What was measured is dropped before anything is read. Raises
    DataError for a file that is no such CSV.
    """
    columns: list[Mapping[str, float]] = []
    found = []
    for cells in read(runs):
        row, made = _row(cells, len(columns))
        found.append(row)
        if made is not None:
            columns.append(made)
    table = Table(**{name: np.array([made[name] for made in columns], dtype=np.float64) for name in COLUMNS})
    return table, found


def _row(cells: Cells, index: int) -> tuple[RunRow, Mapping[str, float] | None]:
    profile = profile_of(cells.text("framework"))
    if profile is TORCHTITAN and "8" in cells.text("precision"):
        profile = TORCHTITAN_COMPILED  # its 8-bit products are made for torch.compile, and slow without
    kept = {
        "line": cells.line,
        "id": cells.text("row_id"),
        "source": cells.text("source_id"),
        "model": cells.text("model"),
        "hardware": cells.text("hardware"),
        "framework": cells.text("framework"),
        "profile": profile.name,
    }
    try:
        cluster, made = _columns(cells, profile)
    except (ConfigError, DataError) as error:
        return RunRow(**kept, unsupported=str(error)), None  # type: ignore[arg-type]
    return RunRow(**kept, cluster=cluster, filled=cells.filled, index=index), made  # type: ignore[arg-type]


def _columns(cells: Cells, profile: Profile) -> tuple[str, Mapping[str, float]]:
    """The preset and the columns. Raises ConfigError or DataError for a row that is none."""
    if cells.extra:
        raise DataError(f"line {cells.line} has {cells.extra} cells more than the header has columns")
    cluster, notes = machine(cells)
    shape = shape_of(cells, profile)
    profile = profile_of_mixture(profile, shape, notes["supernode"])
    sequence = sequence_of(cells, shape)
    if (packed := cells.option("packed")).isdigit():
        # Tokens attend to their own piece of the sequence alone, in the mean to half of it.
        shape = replace(shape, window=max(1, int(packed) // 2), windowed=1.0)
    spread = _spread(cells, profile, shape, notes["node"])
    precision = _precision(cells, cluster, profile)
    batch = spread.pop("batch")
    adapter = _adapter(cells)
    modules = 0 if adapter else _prediction_modules(cells, shape, profile)
    workload = Workload(shape, int(batch), sequence, precision, adapter=adapter, prediction_modules=modules)
    facts = of_profile(profile) | (stated(cells) if shape.experts else {})
    if spread["pipeline"] > 1 and spread["zero"] == 3 and profile.defaults.gathered_in_pipelines:
        # What is split between steps only: the float32 parameters, which count as the optimizer's state.
        spread["zero"] = 1.0
        facts |= {"weight_bytes": 2.0, "state_bytes": facts["state_bytes"] + facts["weight_bytes"]}
    if cells.option("mp_mode") == "PURE":
        # Composer's FSDP reduces gradients in the dtype that it computes in.
        facts["gradient_bytes"] = 2.0
    if cluster == "v100" or (profile is MEGATRON_LM and "selective" in cells.text("recompute").lower()):
        # FlashAttention has no kernels for Volta; and Megatron's selective recomputation (arXiv 2205.05198) computes
        # again what FlashAttention would never have stored.
        facts["flash"] = 0.0
    return cluster, {**of_workload(workload), **notes, **facts, **SPREAD, **spread}


def _spread(cells: Cells, profile: Profile, shape: Shape, node: float) -> dict[str, float]:
    """The columns of how a run is spread, and `batch`."""
    degrees = {}
    for column in ("tp", "pp", "cp"):
        degrees[column] = cells.count(column) or cells.take(column, 1, "not split")
    model = math.prod(degrees.values())
    devices, data = cells.count("n_devices"), cells.count("dp")
    if devices is None:
        if data is None:
            raise ConfigError("the column n_devices is empty; give the number of devices")
        devices = cells.take("n_devices", data * model, "dp · tp · pp · cp")
    if devices % model:
        raise ConfigError(
            f"{devices} devices are no multiple of tp · pp · cp = {degrees['tp']} · {degrees['pp']} · {degrees['cp']}; "
            "mend the row's degrees"
        )
    if data is not None and data * model != devices:
        why = f"n_devices / (tp · pp · cp), and not {data}, which contradicts them"
        cells.take("dp", devices // model, why)
    data = devices // model
    zero, shard = _zero(cells, profile, data, node)
    micro, batch = _batch(cells, data, zero)
    expert = _expert(cells, shape, devices // degrees["pp"])
    fields = {
        "devices": devices,
        "batch": batch,
        "micro": micro,
        "tensor_x": degrees["tp"],
        "pipeline": degrees["pp"],
        "context": degrees["cp"],
        "replicate": data // shard,
        "shard": shard,
        "zero": zero,
        "expert": expert,
        "expert_tensor": expert_tensor(
            cells, profile, shape, degrees["tp"], devices // degrees["pp"] // expert
        ),
        "sequence_parallel": _sequence_parallel(cells, profile, degrees["tp"]),
        **_pipeline(cells, profile, shape, degrees["pp"]),
        **_recompute(cells, profile, shape, degrees["pp"]),
        **_offload(cells),
    }
    return {name: float(value) for name, value in fields.items()}


def _zero(cells: Cells, profile: Profile, data: int, node: float) -> tuple[int, int]:
    """The level of ZeRO, and over how many of the ranks that see different data."""
    fsdp = cells.text("fsdp").upper()
    if fsdp.replace(".", "").isdigit():
        group = cells.count("fsdp", least=0) or 0
        if group > 1:
            return 3, group if data % group == 0 else data
        if group == 1:
            return 3, data
    elif fsdp in ("FULL_SHARD", "TRUE", "YES", "FULLY_SHARD"):
        return 3, data
    elif fsdp == "HYBRID_SHARD":
        return 3, math.gcd(data, int(min(node, data)))
    elif fsdp == "SHARD_GRAD_OP":
        return 2, data
    elif fsdp not in ("", "NO_SHARD", "FALSE", "NO", "NONE"):
        raise cells.malformed(
            "fsdp", "0, a number of ranks, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD"
        )
    zero = cells.count("zero", least=0)
    named = re.search(r"zero[-_ ]?([0-3])|fsdp", cells.text("framework").lower())
    if zero is None and named and not fsdp:
        zero = cells.take("zero", int(named[1] or 3), "of the framework's name")
    if zero is None:
        # Where a row says that its FSDP is off, the framework's default of it is no default.
        zero = profile.defaults.zero if not fsdp or profile.defaults.zero < 3 else 0
        cells.take("zero", zero, f"the default of {profile.name}")
    if zero > 3:
        raise cells.malformed("zero", "0, 1, 2 or 3")
    return (zero, data) if zero else (0, 1)


def _batch(cells: Cells, data: int, zero: int) -> tuple[int, int]:
    """Sequences of a micro-batch, and of a step."""
    batch, micro, times = cells.count("gbs"), cells.count("mbs"), cells.count("grad_accum")
    if batch is None:
        if micro is None or times is None:
            raise ConfigError("the column gbs is empty; give the sequences of a step")
        batch = cells.take("gbs", data * micro * times, "dp · mbs · grad_accum")
    if batch < data:
        raise ConfigError(
            f"a batch of {batch} sequences leaves some of {data} data-parallel ranks without one"
        )
    if micro is None and times:
        micro = cells.take("mbs", max(1, batch // (data * times)), "gbs / (dp · grad_accum)")
    elif micro is None and zero == 3:
        micro = cells.take("mbs", batch // data, "one micro-batch, as is usual with ZeRO-3")
    elif micro is None:
        micro, cells.filled["mbs"] = 1, "1"
    if micro * data > batch:
        why = f"all that a batch of {batch} has for each of {data} ranks, and not {micro}"
        micro = cells.take("mbs", batch // data, why)
    return micro, batch


def _expert(cells: Cells, shape: Shape, ranks: int) -> int:
    """Ranks over which experts are spread; `ranks` are those of a pipeline stage."""
    if not shape.experts:
        return 1
    stated = cells.count("ep") or cells.take("ep", 1, "not split")
    most = math.gcd(math.gcd(stated, ranks), shape.experts)
    if most != stated:
        cells.filled["ep"] = (
            f"{most}: {stated} divides neither a stage's {ranks} ranks nor {shape.experts} experts"
        )
    return most


def _sequence_parallel(cells: Cells, profile: Profile, tensor: int) -> int:
    stated = cells.count("sp", least=0)
    if tensor == 1:
        return 0
    if stated is None:
        stated = int(profile.defaults.sequence_parallel)
        cells.take("sp", stated, f"the default of {profile.name}")
    return min(stated, 1)


def _pipeline(cells: Cells, profile: Profile, shape: Shape, stages: int) -> dict[str, float]:
    """Parts of a rank and the schedule. Interleaved stages are of two layers where that divides, else of one."""
    words = cells.text("pp_schedule").lower()
    virtual = cells.count("vp")
    usual = words or profile.defaults.schedule
    if stages == 1:
        return {"virtual": 1, "schedule": code("schedule", "1f1b")}
    if virtual is None:
        virtual = 1
        if "interleaved" in usual:
            layers = math.ceil(shape.layers / stages)
            virtual = layers // 2 if layers % 2 == 0 else layers
            cells.take("vp", virtual, f"interleaved stages of {layers // virtual} layers")
    names = {
        "gpipe": "gpipe",
        "zb-h1": "zb-h1",
        "zbh1": "zb-h1",
        "zb-v": "zb-v",
        "zbv": "zb-v",
        "dualpipe": "dualpipe",
    }
    found = next((name for word, name in names.items() if word in usual), None)
    if found is None:
        found = "interleaved" if virtual > 1 else "1f1b"
    if not words:
        cells.filled["pp_schedule"] = found
    return {"virtual": virtual, "schedule": code("schedule", found)}


def _recompute(cells: Cells, profile: Profile, shape: Shape, stages: int) -> dict[str, float]:
    """What is computed again, and in which share of the layers."""
    words = cells.text("recompute").lower()
    share = 1.0
    if not words:
        kind = cells.take("recompute", profile.defaults.recompute, f"the default of {profile.name}")
    elif found := re.search(r"recompute-num-layers[ =](\d+)", words):
        kind = "full"
        if "uniform" not in words:
            # Megatron's block method computes the first layers of each stage again.
            share = min(1.0, int(found[1]) / max(1, math.ceil(shape.layers / stages)))
    elif re.match(r"(full|layers?|true)\b", words):
        kind = "full"
    elif re.match(r"(none|no|false|0)\b", words):
        kind = "none"
    elif words.startswith("save_qkv_proj"):
        kind, share = "full", _beside_projections(shape)
    elif again := _of_modules(shape, words):
        kind, share = "full", again
    elif "selective" in words or "core_attn" in words:
        kind = "selective"
    else:
        kind = "none"
        cells.filled["recompute"] = (
            f"none: {words} are small parts of a layer, and no formula here describes them"
        )
    if kind == "selective" and profile.defaults.selective:
        kind, share = "full", profile.defaults.selective
    return {"recompute": code("recompute", kind), "recomputed": share}


def _of_modules(shape: Shape, words: str) -> float:
    """The share of the layers' products that is in the modules of Megatron's `recompute_modules` that `words` names.

    0 where they name none that has products: `layernorm`, `moe_act` and `core_attn`, which a fused kernel leaves little
    of, are small parts of a layer.
    """
    names = set(re.split(r"[,+ ]+", words))
    routed = shape.chosen * (shape.expert_hidden or shape.hidden) * shape.expert_ffn
    parts = {
        "moe": shape.expert_layers * shape.matrices * (routed + shape.hidden * shape.shared_ffn),
        "mlp": (shape.mlp_layers - shape.expert_layers) * shape.dense,
    }
    if shape.latent is not None:
        latent = shape.latent
        queries, keys = latent.query_rank * (latent.plain + latent.rotary), latent.plain + latent.value
        parts["mla_up_proj"] = shape.attention_layers * shape.heads * (queries + latent.key_rank * keys)
    layers = shape.active_parameters - (2 - shape.tied) * shape.vocabulary * shape.hidden
    return sum(size for name, size in parts.items() if name in names) / layers


def _beside_projections(shape: Shape) -> float:
    """The share of a dense layer's products that MaxText's policy `save_qkv_proj` computes again.

    It keeps queries, keys and values; and XLA leaves out the MLP's last product, whose result no gradient needs.
    """
    queries = shape.heads * shape.head_dim
    again = queries + (1 + shape.gated) * shape.ffn
    return again / (again + queries + 2 * shape.kv_heads * shape.head_dim + shape.ffn)


def _offload(cells: Cells) -> dict[str, float]:
    words = cells.text("offload").lower()
    if words in ("", "none", "no", "0", "false"):
        return {}
    optimizer = any(word in words for word in ("optim", "adam", "state"))
    activations = "activ" in words
    if not optimizer and not activations:
        raise cells.malformed("offload", "none, or the words optimizer or activations")
    return {"state_on_host": float(optimizer), "activations_on_host": float(activations)}


def _adapter(cells: Cells) -> Adapter | None:
    """The adapter that is trained in place of the whole model; None where that is."""
    if not re.search("lora", cells.option("task"), re.IGNORECASE):
        return None
    if rank := cells.option("rank"):
        if not rank.isdigit():
            raise cells.malformed("notes", "rank= with a whole number")
        return Adapter(int(rank))
    cells.filled["adapter"] = (
        "rank 32 on queries, keys and values, the default of NeMo's recipes; 16-bit frozen weights"
    )
    return Adapter(32, ("qkv",))


def _prediction_modules(cells: Cells, shape: Shape, profile: Profile) -> int:
    """Modules that predict one token more, which recipes of Megatron-Bridge and NeMo 2 train with the models that have
    them, unless a row says that its run did not."""
    model = known(shape.name)
    without = re.search(r"w/o mtp", cells.text("notes"), re.IGNORECASE)
    if model is None or without or not re.match(r"megatron-bridge|nemo$", profile.name):
        return 0
    modules = of_published(model.name)
    return cells.take("prediction modules", modules, f"of the published {model.name}") if modules else 0


def _precision(cells: Cells, cluster: str, profile: Profile) -> Precision:
    """The precision of products."""
    words = cells.text("precision").lower().replace("_", "-")
    if not words:
        return cells.take("precision", profile.defaults.precision, f"the default of {profile.name}")
    if "fp4" in words:
        return "nvfp4"
    if "fp8" in words:
        if "mx" in words:
            return "mxfp8"
        if "alt-recipe" in words:
            # The other scaling of the two that a release prints: by block, in hardware on Blackwell alone.
            scaled: Precision = "mxfp8" if cluster.startswith(("b", "gb")) else "fp8"
            return cells.take("precision", scaled, "the other granularity of the release")
        return "fp8"
    for word, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16")):
        if word in words:
            return "bf16" if name == "bf16" else "fp16"
    if words in ("fp32", "float32", "tf32"):
        return "fp32"
    raise cells.malformed("precision", f"one of {', '.join(PRECISIONS)}, or words that hold one")
