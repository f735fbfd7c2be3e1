"""Answer with the best allocations of a multimodal model, and a run file that `train` accepts as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.config import RunConfig, from_dict, yaml12
from hyper_parallel.planner.answer import Answer, OutputFile
from hyper_parallel.planner.submodels.page import page_of
from hyper_parallel.planner.submodels.search import Allocations, BestSizes
from hyper_parallel.planner.submodels.sizes import WORD, Sizes, Task, allocation, copies, memory_of_parts
from hyper_parallel.report.sheets import NONE, Fact, Sheet
from hyper_parallel.units import format_bytes, format_duration

_KINDS = 16
"""Kinds of micro-batches whose plans a run keeps."""


def answer_of(
    found: Allocations, title: str, cluster: str, length: int, file: Callable[[], OutputFile] | None = None
) -> Answer:
    """The answer for a model on a cluster: `title` is the model and its rows, of `length` positions."""
    task, chosen = found.task, found.chosen
    assert chosen.sizes is not None, "an answer has an allocation that fits"
    verdict, notes = verdict_of(found), notes_of(found)
    fullest = max(memory_of_parts(task, chosen.sizes).values())
    short = verdict.replace(f", {WORD}", "").removesuffix(f"; {WORD}")
    sheets = [_allocations(found), _memory(found)]

    return Answer(
        word=WORD,
        verdict=f"{WORD}: {title} on {cluster}: {short}",
        lines=[
            ("devices", f"{allocation(task, chosen.sizes)}; {chosen.sizes.devices} of {task.devices} used"),
            ("step", f"{format_duration(chosen.seconds)}, {chosen.bubbles:.1%} of all devices' time idle"),
            ("memory", f"{format_bytes(fullest)} of {format_bytes(task.capacity)} a device, estimated"),
            ("next", "--out run.yaml (for train), --details (parts, memory), --html page.html"),
        ],
        heading=f"{WORD} allocation of {title} on {cluster}",
        facts=[Fact("chosen", "", verdict)],
        sheets=sheets,
        sentences=[f"note: {note}" for note in notes],
        data=_data(found, cluster, length, verdict, notes),
        file=file,
        drawn=lambda: page_of(found, f"{title} on {cluster}", verdict, notes, sheets),
    )


def verdict_of(found: Allocations) -> str:
    """The choice and what it saves, in a sentence."""
    chosen = found.chosen
    names = ["parts on devices of their own", "one mesh for all parts"]
    other = found.colocated if chosen is found.disjoint else found.disjoint
    if chosen is found.colocated:
        names.reverse()
    best = f"{names[0]} ({chosen.sizes}): a step of {format_duration(chosen.seconds)}"
    if other.sizes is None:
        return f"{best}, {WORD}; for {names[1]} no sizes fit the memory and divide the rows"
    saved = 1 - chosen.seconds / other.seconds
    return f"{best}, {saved:.1%} shorter than {names[1]} ({format_duration(other.seconds)}, {other.sizes}); {WORD}"


def notes_of(found: Allocations) -> list[str]:
    """Notes on the figures."""
    task = found.task
    notes = [
        "simulated with the costs of captured graphs, in bfloat16 with decoder layers recomputed; memory is "
        f"estimated, and may take 90% of a device; mean of {len(task.steps)} steps"
    ]
    sizes = found.disjoint.sizes
    if sizes is None:
        return notes
    share = sum(copies(sizes, rows) for rows in task.steps) / len(task.steps)
    if share:
        notes.append(
            f"parts on devices of their own compute {share:.0%} of their rows twice, without loss: data ranks "
            "need as much media as each other, and some rows have no partner; rows with fewer numbers and "
            "sizes of media, or larger batches, have more partners"
        )
    idle = task.devices - sizes.devices
    if idle:
        notes.append(f"parts on devices of their own leave {idle} of {task.devices} devices unused")
    kinds = {(kind.placement, kind.costs) for step in found.disjoint.steps for kind in step.kinds}
    if len(kinds) > _KINDS:
        notes.append(
            f"parts on devices of their own have {len(kinds)} kinds of micro-batches, and a run keeps the "
            f"plans of {_KINDS}: each new one takes seconds; give rows fewer numbers or sizes of media"
        )
    return notes


def _allocations(found: Allocations) -> Sheet:
    """The allocations side by side."""
    rows = []
    for name, one in found.named:
        if one.sizes is None:
            rows.append((name, "no sizes fit the memory and divide the rows", *[NONE] * 4))
            continue
        fullest = max(memory_of_parts(found.task, one.sizes).values())
        rows.append(
            (
                name,
                allocation(found.task, one.sizes),
                f"{one.sizes.rows * one.sizes.data}",
                format_duration(one.seconds),
                f"{one.bubbles:.1%}",
                format_bytes(fullest),
            )
        )
    columns = ("", "devices", "rows at once", "step", "idle", "fullest device")
    drop = ("rows at once", "idle")
    return Sheet(
        "allocations", columns, tuple(rows), left=2, drop=drop, note="idle: share of all devices' time"
    )


def _memory(found: Allocations) -> Sheet:
    """Memory of each part."""
    rows = []
    for name, one in found.named:
        if one.sizes is not None:
            for part, need in memory_of_parts(found.task, one.sizes).items():
                rows.append((name, part, format_bytes(need), f"{need / found.task.capacity:.0%}"))
    columns = ("", "part", "a device", "of what it may take")
    return Sheet("memory (estimated)", columns, tuple(rows), left=2)


def _data(
    found: Allocations, cluster: str, length: int, verdict: str, notes: Sequence[str]
) -> dict[str, Any]:
    """Plain data; seconds and bytes. An allocation that does not fit is null."""
    task = found.task
    data: dict[str, Any] = {
        "verdict": verdict,
        "cluster": cluster,
        "devices": task.devices,
        "batch": task.batch,
        "sequence": length,
        "chosen": next(name for name, one in found.named if one is found.chosen),
        "units_per_row": {
            each.name: sum(row[at] for rows in task.steps for row in rows) / (len(task.steps) * task.batch)
            for at, each in enumerate(task.costs.encoders)
        },
        "notes": list(notes),
    }
    for name, one in found.named:
        data[name] = None if one.sizes is None else _figures(task, one, one.sizes)
    return data


def _figures(task: Task, one: BestSizes, sizes: Sizes) -> dict[str, Any]:
    return {
        "simulated_step_seconds": one.seconds if math.isfinite(one.seconds) else None,
        "idle_share": one.bubbles,
        "rows_at_once": sizes.rows * sizes.data,
        "language": {"data": sizes.data, "tensor": sizes.tensor, "pipeline": sizes.pipeline},
        "encoders": dict(zip((each.name for each in task.costs.encoders), sizes.encoders, strict=False)),
        "memory_shard": sizes.shard,
        "estimated_bytes": memory_of_parts(task, sizes),
        "tried": one.tried,
    }


_PRECISION = {"param": "float32", "compute": "bfloat16", "reduce": "float32"}
_AXES = (
    "axes",
    "submodels",
    "placement",
    "pipeline",
    "context",
    "sequence",
    "tries",
    "tries_seconds",
    "cluster",
    "chosen",
)
"""Keys of a strategy that say where its parts lie, or leave that to the planner."""


def allocated_run_file(config: RunConfig, found: Allocations, cluster: str) -> tuple[str, list[str]]:
    """The text of the run file of the better allocation, and notes on what was changed in it besides the strategy."""
    notes: list[str] = []
    task, sizes = found.task, found.chosen.sizes
    assert sizes is not None, "an answer has an allocation that fits"
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    strategy = {key: value for key, value in (data.get("strategy") or {}).items() if key not in _AXES}
    strategy["memory"] = {"shard": sizes.shard, "recompute": "layer"}
    strategy.setdefault("precision", _PRECISION)
    if strategy["precision"].get("compute") != "bfloat16":
        notes.append("the run computes in another dtype than bfloat16, in which steps were simulated")
    strategy |= _parts(task, sizes)
    data["strategy"] = strategy
    train = {
        key: value for key, value in (data.get("train") or {}).items() if key not in ("compile", "profile")
    }
    train["micro_batch"] = sizes.rows * sizes.data if sizes.encoders else sizes.rows
    train["engine"] = "graph" if sizes.encoders else "eager"
    data["train"] = train
    launch = {key: value for key, value in (data.get("launch") or {}).items() if key != "workers"}
    data["launch"] = {**launch, "workers": sizes.devices}
    from_dict(data, source="the planned run file")
    head = [f"Written by hyper-parallel plan for {cluster}.", f"Simulated: {verdict_of(found)}.", *notes]
    return "".join(f"# {line}\n" for line in head) + yaml12.write(data), notes


def _parts(task: Task, sizes: Sizes) -> dict[str, Any]:
    """The sections of the strategy that say where parts lie."""
    degrees = {"pipeline": sizes.pipeline, "shard": sizes.data, "tensor": sizes.tensor}
    axes = {name: degree for name, degree in degrees.items() if degree > 1}
    if not sizes.encoders:
        return {"axes": axes}
    encoders = {
        each.name: {"modules": list(each.modules), "axes": {"shard": count}}
        for each, count in zip(task.costs.encoders, sizes.encoders, strict=True)
    }
    return {"submodels": {**encoders, "language": {"axes": axes}}}
