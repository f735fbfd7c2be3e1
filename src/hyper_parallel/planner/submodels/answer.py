"""The best allocations of a multimodal model as text, JSON, sentences, and a run file that `train` accepts as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config import RunConfig, from_dict, yaml12
from hyper_parallel.planner.submodels.search import Allocations, Found
from hyper_parallel.planner.submodels.sizes import (
    Sizes,
    Task,
    colocated_bytes,
    copies,
    encoder_bytes,
    language_bytes,
    micro_batches,
)
from hyper_parallel.report.sheets import Fact, Sheet
from hyper_parallel.report.table import answer, render, wrapped
from hyper_parallel.units import format_bytes, format_duration

WORD = "simulated"
_KINDS = 16
"""Kinds of micro-batches whose plans a run keeps."""


@dataclass(frozen=True)
class Answer:
    """What was found for a model on a cluster."""

    title: str
    """The model and its rows."""
    cluster: str
    found: Allocations
    length: int
    """Positions of a row."""

    @property
    def verdict(self) -> str:
        """The choice and what it saves, in a sentence."""
        found = self.found
        chosen = found.chosen
        names = ["parts on devices of their own", "one mesh for all parts"]
        other = found.colocated if chosen is found.disjoint else found.disjoint
        if chosen is found.colocated:
            names.reverse()
        best = f"{names[0]} ({chosen.sizes}): a step of {format_duration(chosen.seconds)}"
        if other.sizes is None:
            return f"{best}, {WORD}; for {names[1]} no sizes fit the memory and divide the rows"
        saved = 1 - chosen.seconds / other.seconds
        return (
            f"{best}, {saved:.1%} shorter than {names[1]} ({format_duration(other.seconds)}, {other.sizes}); "
            f"{WORD}"
        )

    def notes(self) -> list[str]:
        """What to know about the figures."""
        task, found = self.found.task, self.found
        notes = [
            "simulated with the costs of captured graphs, in bfloat16 with decoder layers recomputed; memory is "
            f"estimated, and may take 90% of a device; mean of {len(task.steps)} steps"
        ]
        sizes = found.disjoint.sizes
        if sizes is not None:
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
            kinds = {key for step in found.disjoint.steps for key in map(_key, step.kinds)}
            if len(kinds) > _KINDS:
                notes.append(
                    f"parts on devices of their own have {len(kinds)} kinds of micro-batches, and a run keeps the "
                    f"plans of {_KINDS}: each new one takes seconds; give rows fewer numbers or sizes of media"
                )
        return notes

    def short(self, width: int) -> str:
        """The verdict and the chosen allocation's figures. The first word is `simulated`."""
        task, chosen = self.found.task, self.found.chosen
        assert chosen.sizes is not None, "an answer has an allocation that fits"
        fullest = max(memory_of_parts(task, chosen.sizes).values())
        lines = [
            ("devices", f"{allocation(task, chosen.sizes)}; {chosen.sizes.devices} of {task.devices} used"),
            ("step", f"{format_duration(chosen.seconds)}, {chosen.bubbles:.1%} of all devices' time idle"),
            ("memory", f"{format_bytes(fullest)} of {format_bytes(task.capacity)} a device, estimated"),
            ("next", "--out run.yaml (for train), --details (parts, memory), --html page.html"),
        ]
        verdict = self.verdict.replace(f", {WORD}", "").removesuffix(f"; {WORD}")
        return answer(f"{WORD}: {self.title} on {self.cluster}: {verdict}", lines, width)

    def text(self, width: int) -> str:
        """All of it for the terminal."""
        facts = [Fact("chosen", "", self.verdict)]
        text = render(
            f"{WORD} allocation of {self.title} on {self.cluster}",
            facts,
            [self.sheet(), self.parts()],
            WORD,
            width,
        )
        return text + "".join(wrapped(f"note: {note}", width) + "\n" for note in self.notes())

    def sheet(self) -> Sheet:
        """The allocations side by side."""
        rows = []
        for name, one in self.named():
            if one.sizes is None:
                rows.append((name, "no sizes fit the memory and divide the rows", "–", "–", "–", "–"))
                continue
            fullest = max(memory_of_parts(self.found.task, one.sizes).values())
            rows.append(
                (
                    name,
                    allocation(self.found.task, one.sizes),
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

    def parts(self) -> Sheet:
        """Memory of each part."""
        rows = []
        for name, one in self.named():
            if one.sizes is not None:
                for part, need in memory_of_parts(self.found.task, one.sizes).items():
                    rows.append((name, part, format_bytes(need), f"{need / self.found.task.capacity:.0%}"))
        columns = ("", "part", "a device", "of what it may take")
        return Sheet("memory (estimated)", columns, tuple(rows), left=2)

    def named(self) -> list[tuple[str, Found]]:
        """Both, by name."""
        return [("disjoint", self.found.disjoint), ("colocated", self.found.colocated)]

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds and bytes. An allocation that does not fit is null."""
        task = self.found.task
        made: dict[str, Any] = {
            "verdict": self.verdict,
            "cluster": self.cluster,
            "devices": task.devices,
            "batch": task.batch,
            "sequence": self.length,
            "chosen": next(name for name, one in self.named() if one is self.found.chosen),
            "units_per_row": {
                each.name: sum(row[at] for rows in task.steps for row in rows)
                / (len(task.steps) * task.batch)
                for at, each in enumerate(task.costs.encoders)
            },
            "notes": self.notes(),
        }
        for name, one in self.named():
            made[name] = None if one.sizes is None else self._figures(one, one.sizes)
        return made

    def _figures(self, one: Found, sizes: Sizes) -> dict[str, Any]:
        return {
            "simulated_step_seconds": one.seconds if math.isfinite(one.seconds) else None,
            "idle_share": one.bubbles,
            "rows_at_once": sizes.rows * sizes.data,
            "language": {"data": sizes.data, "tensor": sizes.tensor, "pipeline": sizes.pipeline},
            "encoders": dict(
                zip((each.name for each in self.found.task.costs.encoders), sizes.encoders, strict=False)
            ),
            "memory_shard": sizes.shard,
            "estimated_bytes": memory_of_parts(self.found.task, sizes),
            "tried": one.tried,
        }


def allocation(task: Task, sizes: Sizes) -> str:
    """Devices and axes of each part, in words."""
    degrees = {"data": sizes.data, "tensor": sizes.tensor, "pipeline": sizes.pipeline}
    text = " · ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 device"
    if not sizes.encoders:
        return f"all parts {text}, shard: {sizes.shard}"
    encoders = [
        f"{each.name} {count}" for each, count in zip(task.costs.encoders, sizes.encoders, strict=True)
    ]
    return ", ".join([*encoders, f"language {text}"])


def memory_of_parts(task: Task, sizes: Sizes) -> dict[str, float]:
    """Part to the bytes of a device that has it."""
    if not sizes.encoders:
        return {"all parts": colocated_bytes(task, sizes)}
    count = micro_batches(task.batch, sizes)
    found = {each.name: encoder_bytes(task, sizes, at, count) for at, each in enumerate(task.costs.encoders)}
    return {**found, "language": language_bytes(task, sizes, count)}


def _key(kind: Any) -> tuple[Any, ...]:
    return (kind.placement, kind.costs)


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


def allocated_run_file(config: RunConfig, answer: Answer) -> tuple[str, list[str]]:
    """The text of the run file of the better allocation, and notes on what was changed in it besides the strategy."""
    notes: list[str] = []
    task, sizes = answer.found.task, answer.found.chosen.sizes
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
    head = [f"Written by hyper-parallel plan for {answer.cluster}.", f"Simulated: {answer.verdict}.", *notes]
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
