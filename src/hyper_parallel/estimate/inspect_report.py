"""Report of an inspection, as a table and as JSON."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from hyper_parallel.estimate.step_figures import LAYERS, Calls, Resident
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import natural_width, sheet_text
from hyper_parallel.shard.plan import Plan
from hyper_parallel.units import format_bytes, format_count


@dataclass(frozen=True)
class ModuleRow:
    """One parameter of a module pattern, or a module that has none and saves activations. Bytes are those of all the
    modules that the pattern stands for."""

    module: str
    """The module's name, `*` for the index of a layer; empty for the model itself."""
    count: int
    """How many modules the pattern stands for."""
    parameter: str
    """The parameter's own name; empty for a module without one."""
    layout: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Bytes saved for the backward pass that were made in the module; told once, with its first parameter."""


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one step of one kind, over one axis."""

    axis: str
    level: str
    """The link levels that the groups span; empty where no axis is placed."""
    kind: str
    count: int
    bytes: int
    """Bytes that the rank receives from others."""


@dataclass(frozen=True)
class Inspection:
    """What one rank of a run keeps and sends. All figures are bytes."""

    world: int
    axes: dict[str, int]
    rank: int
    parameters: int
    """Elements of the whole model."""
    rows: list[ModuleRow]
    gathered: int
    """The most that is alive of weights that were gathered or cast."""
    transient: int
    """The most that is alive of activations and temporaries, above the saved activations."""
    peak: int | None
    """The most that is alive at once, inputs and buffers included; None where the step cannot be captured, and in a
    pipeline whose schedule is not simulated."""
    collectives: list[CollectiveRow]
    micro_batches: int
    micro_batch: int
    sequence: int
    kinds: list[int]
    """How many layers there are of each kind."""
    whole: bool
    """All layers were captured; otherwise a few of each kind."""
    balanced: bool
    """Tokens are taken to spread evenly over experts."""
    notes: list[str]
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    """What the peak consists of, where the step is in the order of training."""
    ordered_on: str | None = None
    """The cluster for which collectives are ordered as training orders them; None: they are in the order of the model's
    code, which the peak is of."""

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of the rank, by what they are for."""
        sums = {
            column: sum(getattr(row, column) for row in self.rows)
            for column in ("parameters", "gradients", "optimizer", "activations")
        }
        return {**sums, "gathered": self.gathered, "transient": self.transient}

    @property
    def total(self) -> int:
        """The sum of the totals: they do not all reach their most at once, so it bounds the peak from above."""
        return sum(self.totals.values())

    def to_json(self) -> dict[str, Any]:
        """JSON-able, with totals and explanations."""
        return {
            **asdict(self),
            "totals": self.totals,
            "total": self.total,
            "explanations": self.explanations(),
        }

    def explanations(self) -> list[str]:
        """What is exact, what is measured how, and what was assumed."""
        how = (
            "all layers captured"
            if self.whole
            else f"{LAYERS} and {LAYERS + 1} layers of each of {len(self.kinds)} kinds "
            f"({', '.join(map(str, self.kinds))} layers) captured, and the rest added: layers of one kind cost the same"
        )
        peak = ", peak (the most at once)" if self.ordered_on is None and self.peak is not None else ""
        ordered = []
        if self.ordered_on is not None:
            ordered = [
                f"peak: of the order in which training runs the step on {self.ordered_on}, as simulate predicts it"
            ]
        elif self.peak is not None:
            ordered = [
                "training gathers weights early and begins reductions late, so that its peak differs: --cluster NAME "
                "gives the peak that simulate predicts there"
            ]
        lines = [
            "exact: parameters, gradients and optimizer state, which are inputs of the step's graph",
            "measured on that graph, as simulate captures it, in the order of the model's code: activations (what "
            "the backward pass uses of the forward pass), gathered (the most that is alive of gathered or cast "
            f"weights), transient (the most that is alive beyond the activations){peak} and "
            f"collectives (a call for each tensor; training joins those of a layer); {how}",
            "assumed: every sequence is one document; several in a sequence add a mask unless context splits them"
            + ("; tokens spread evenly over experts" if self.balanced else ""),
            "the sum bounds the peak of the order of the model's code from above: not all of it is there at once; "
            "allocators and libraries add to both",
        ]
        return [*lines, *ordered, *self.notes]

    def table(self, width: int = 150) -> str:
        """For people, at most `width` columns wide."""
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=width)
        degrees = " · ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1) or "one device"
        console.print(
            f"{format_count(self.parameters)} parameters on {self.world} ranks ({degrees}), as rank {self.rank} sees "
            f"it: {self.micro_batches} micro-batches of {self.micro_batch} × {self.sequence} tokens a step",
            markup=False,
        )
        for sheet in (*self._modules(width), self._memory()):
            console.print(sheet_text(sheet, width), markup=False)
        console.print(
            sheet_text(self._calls(), width) if self.collectives else "no collectives", markup=False
        )
        for line in self.explanations():
            console.print(f"- {line}", markup=False)
        return out.getvalue()

    def _modules(self, width: int) -> Iterator[Sheet]:
        """Layouts and bytes of modules, beside each other where there is room for it."""
        named, sized, shown = [], [], ""
        for row in self.rows:
            name = "″" if row.module == shown and shown else row.module or "(model)"
            shown = row.module
            held = (row.parameters, row.gradients, row.optimizer, row.activations)
            named.append((name, str(row.count), row.parameter or "–", row.layout or "–"))
            sized.append(tuple(format_bytes(size) if size else "–" for size in held))
        names = ("module", "×", "parameter", "layout")
        sizes = ("parameters", "gradients", "optimizer", "activations")
        rows = tuple((*one, *other) for one, other in zip(named, sized, strict=True))
        whole = Sheet("", (*names, *sizes), rows, left=len(names))
        if natural_width(whole) <= width:
            yield whole
            return
        yield Sheet("", names, tuple(named), left=len(names))
        of_both = tuple(
            (f"{one[0]} {one[2]}" if one[2] != "–" else one[0], *other)
            for one, other in zip(named, sized, strict=True)
        )
        yield Sheet("", ("module and parameter", *sizes), of_both)

    def _memory(self) -> Sheet:
        rows = [(what, format_bytes(size)) for what, size in self.totals.items()]
        rows.append(("sum", format_bytes(self.total)))
        if self.peak is not None:
            order = "as the code is written" if self.ordered_on is None else f"ordered for {self.ordered_on}"
            rows.append((f"peak, {order}", format_bytes(self.peak)))
        rows += [(f"  {kind}", format_bytes(size)) for kind, size in self.peak_by_kind.items() if size]
        return Sheet("", ("on this rank", "bytes"), tuple(rows))

    def _calls(self) -> Sheet:
        rows = tuple(
            (call.axis, call.level or "–", call.kind, str(call.count), format_bytes(call.bytes))
            for call in self.collectives
        )
        return Sheet("", ("axis", "level", "collective", "calls", "received"), rows, left=3)


def collapsed(name: str, layers: str | None) -> str:
    """A module's or parameter's name with `*` for the index of its layer."""
    if layers is None or not name.startswith(f"{layers}."):
        return name
    _, dot, rest = name[len(layers) + 1 :].partition(".")
    return f"{layers}.*{dot}{rest}"


def parameter_rows(
    model: nn.Module,
    plan: Plan,
    resident: Iterable[tuple[str, Resident]],
    saved: Counter[str],
    modules: Collection[str] | None = None,
) -> list[ModuleRow]:
    """One row for each parameter of each module pattern, in the model's order.

    `resident`: names of parameters with what the rank keeps of them, one that stands for several as often. `modules`:
    those that the rank computes, for a stage of a pipeline; all when left out.
    """
    order: dict[str, int] = {}
    for name, _ in model.named_modules():
        if modules is not None and name not in modules:
            continue
        pattern = collapsed(name, plan.layers)
        order[pattern] = order.get(pattern, 0) + 1
    found: dict[tuple[str, str, str], list[Resident]] = {}
    for name, one in resident:
        module, _, own = name.rpartition(".")
        layout = str(plan.parameters[name].layout)
        found.setdefault((collapsed(module, plan.layers), own, layout), []).append(one)
    by_module: dict[str, list[tuple[str, str]]] = {}
    for module, own, layout in found:
        by_module.setdefault(module, []).append((own, layout))
    rows = []
    for module, count in order.items():
        activations = saved[module]
        for own, layout in by_module.get(module, []):
            ones = found[module, own, layout]
            rows.append(
                ModuleRow(
                    module,
                    len(ones),
                    own,
                    layout,
                    parameters=sum(one.parameter for one in ones),
                    gradients=sum(one.gradient for one in ones),
                    optimizer=sum(one.optimizer for one in ones),
                    activations=activations,
                )
            )
            activations = 0
        if activations:
            rows.append(ModuleRow(module, count, "", "", 0, 0, 0, activations))
    assert sum(row.activations for row in rows) == saved.total()
    return rows


def collective_rows(calls: Calls) -> list[CollectiveRow]:
    """One row for each axis, level and kind, the most bytes first."""
    keys = {key[:3] for key in calls}
    rows = [CollectiveRow(*key, calls[(*key, "count")], calls[(*key, "bytes")]) for key in keys]
    return sorted(rows, key=lambda row: (-row.bytes, row.axis, row.level, row.kind))
