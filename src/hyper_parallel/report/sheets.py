"""Formatted facts of a Timeline for the terminal and the page: figures, tables, the verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hyper_parallel.trace import Alive, Sum, Timeline, pattern
from hyper_parallel.units import format_bytes, format_count, format_duration

ROWS = 14
"""Maximum rows of a sheet whose names come from the model; further rows are summed into one."""

NONE = "–"

_BESIDE = "communication runs beside computation: what it costs is the exposed communication"


@dataclass(frozen=True)
class Sheet:
    """A small table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    """Number of leading columns with names; the others hold numbers."""
    note: str = ""
    drop: tuple[str, ...] = ()
    """Names of columns that a narrow terminal leaves out, the least important first."""

    def without(self, name: str) -> Sheet:
        """The same without the first column of that name."""
        at = self.columns.index(name)
        rows = tuple(row[:at] + row[at + 1 :] for row in self.rows)
        left = self.left - (at < self.left)
        return replace(self, columns=self.columns[:at] + self.columns[at + 1 :], rows=rows, left=left)


@dataclass(frozen=True)
class Fact:
    """One number with its label."""

    name: str
    value: str
    meaning: str = ""


def heading(timeline: Timeline) -> str:
    """A headline: predicted or measured, the device or cluster, and the source of the constants."""
    trace = timeline.trace
    where = timeline.cluster or timeline.device
    ranks = f"{trace.world} rank{'s' * (trace.world != 1)}"
    classes = f" in {len(trace.ops)} classes" if len(trace.ops) > 1 else ""
    title = f"{timeline.word} step of {ranks}{classes} on {where}"
    if timeline.device and timeline.device != where:
        title += f" ({timeline.device})"
    return title + (f"; constants: {timeline.source}" if timeline.source else "")


def facts(timeline: Timeline) -> list[Fact]:
    """The main figures."""
    masked, step = timeline.masked, timeline.step
    exposed = f"{_percent(_part(timeline.exposed, step))} of the step: nothing is computed, and only a collective runs"
    blocked, alone = (
        "1 − exposed / time in which collectives run",
        "(T_comp + T_comm − step) / T_comm, each alone",
    )
    computing = _percent(_part(timeline.computing, step))
    found = [Fact("step", format_duration(step), f"{timeline.word} seconds of the whole step")]
    if timeline.mfu is not None:
        found.append(Fact("MFU", _percent(timeline.mfu), "model FLOPs / (step · ranks · peak FLOP/s)"))
    found += [
        Fact("computing", computing, "of the step, a kernel runs; mean of all ranks"),
        Fact("exposed communication", format_duration(timeline.exposed), exposed),
        Fact("masked, by blocked time", _percent(masked.blocked), blocked),
        Fact("masked, end to end", _percent(masked.end_to_end), alone),
    ]
    for tier in timeline.trace.tiers:
        peak = timeline.peak_in(tier)
        has = timeline.capacity.get(tier)
        of = f" of {format_bytes(has)} ({_percent(peak.bytes / has)})" if has else ""
        if has and peak.bytes > has:
            of += ": it does not fit"
        place = f"on rank {peak.rank} at {format_duration(peak.time)}{of}"
        found.append(Fact(f"peak of {tier} memory", format_bytes(peak.bytes), place))
    return found


def sheets(timeline: Timeline) -> list[Sheet]:
    """The tables of time and of memory; empty ones are left out."""
    facts = [
        _balance(timeline),
        _classes(timeline),
        _sums("time by phase", "phase", timeline.by_phase(), timeline.step, ordered=True),
        _sums("time by module", "module", timeline.by_module(), timeline.step),
        _sums("time by kind of work", "kind", timeline.by_kind(), timeline.step),
        _axes(timeline),
        *(_kinds(timeline, tier) for tier in timeline.trace.tiers),
        *(_alive(timeline, tier) for tier in timeline.trace.tiers),
    ]
    return [sheet for sheet in facts if sheet.rows]


def task_facts(timeline: Timeline) -> list[Fact]:
    """The main figures of a Timeline whose ops are tasks of pipeline stages."""
    share = _percent(_part(timeline.computing, timeline.step))
    row = Fact(
        "in tasks",
        share,
        "of the step a task runs, including waits for collectives of the stage's mesh; mean of all ranks",
    )
    found = [fact for fact in facts(timeline) if not fact.name.startswith("masked")]
    return [row if fact.name == "computing" else fact for fact in found]


def task_sheets(timeline: Timeline) -> list[Sheet]:
    """The tables of a Timeline whose ops are tasks of pipeline stages: there are no kernels to count."""
    facts = [
        _balance(timeline),
        _sums("time by phase", "phase", timeline.by_phase(), timeline.step, ordered=True),
        *(_kinds(timeline, tier) for tier in timeline.trace.tiers),
        *(_alive(timeline, tier) for tier in timeline.trace.tiers),
    ]
    return [sheet for sheet in facts if sheet.rows]


def _balance(timeline: Timeline) -> Sheet:
    """The parts of a rank's step, which add up to it."""
    bubbles, step = timeline.bubbles, timeline.step
    parts = {
        "computing": timeline.computing,
        "exposed communication": bubbles.communication,
        "waiting: imbalance": bubbles.imbalance,
        "waiting: fill and drain": bubbles.fill_drain,
        "waiting: copies between tiers": bubbles.copies,
        "waiting: runtime": bubbles.runtime,
    }
    shown = step * 1e-9
    rows = [
        (name, format_duration(seconds), _percent(_part(seconds, step)))
        for name, seconds in parts.items()
        if seconds > shown or name in ("computing", "exposed communication")
    ]
    return Sheet(
        "where the step goes",
        ("on a rank, mean of all", "seconds", "of step"),
        (*rows, ("step", format_duration(step), _percent(1.0))),
        note="the rows add up to the step",
    )


def _classes(timeline: Timeline) -> Sheet:
    """The differences between rank classes."""
    trace = timeline.trace
    rows = []
    if len(trace.ops) > 1:
        for name, bubbles in timeline.bubbles_by_class.items():
            peak = timeline.peak_of(name)
            rows.append(
                (
                    name,
                    describe_ranks(timeline, name),
                    format_duration(timeline.step - bubbles.total),
                    format_duration(bubbles.communication),
                    format_duration(bubbles.imbalance),
                    format_duration(bubbles.fill_drain),
                    format_bytes(peak.bytes) if peak.bytes else NONE,
                )
            )
    columns = ("class", "ranks", "computing", "exposed", "imbalance", "fill and drain", "peak")
    return Sheet("rank classes", columns, tuple(rows), left=2, drop=("fill and drain", "imbalance"))


def _sums(title: str, what: str, found: Mapping[str, Sum], step: float, *, ordered: bool = False) -> Sheet:
    rows = list(found.items())
    if not ordered:
        rows.sort(key=lambda row: -row[1].total)
        if len(rows) > ROWS:
            rest = Sum()
            for _, one in rows[ROWS - 1 :]:
                rest += one
            rows = [*rows[: ROWS - 1], (f"{len(rows) - ROWS + 1} others", rest)]
    copies = any(one.copies for _, one in rows)
    columns = (
        what,
        "computing",
        "of step",
        "communicating",
        *(["copying"] if copies else []),
        "ops",
        "FLOPs",
    )
    return Sheet(
        title,
        columns,
        tuple(
            (
                name or "(none)",
                _duration(one.compute),
                _percent(_part(one.compute, step)) if one.compute else NONE,
                _duration(one.communication),
                *([_duration(one.copies)] if copies else []),
                f"{one.count:.0f}" if one.count == round(one.count) else f"{one.count:.1f}",
                format_count(one.flops) if one.flops else NONE,
            )
            for name, one in rows
        ),
        note=_BESIDE if any(one.communication for _, one in rows) and not ordered else "",
        drop=("ops", "FLOPs"),
    )


def _axes(timeline: Timeline) -> Sheet:
    rows = tuple(
        (axis or "(none)", _duration(one.communication), _percent(_part(one.communication, timeline.step)),
         f"{one.count:.0f}")
        for axis, one in sorted(timeline.by_axis().items(), key=lambda item: -item[1].communication)
    )  # fmt: skip
    return Sheet("collectives by axis", ("axis", "communicating", "of step", "calls"), rows)


def _kinds(timeline: Timeline, tier: str) -> Sheet:
    peak = timeline.peak_in(tier)
    counts = {str(kind): count for kind, count in peak.by_kind.items()}
    if counts:
        counts["sum"] = peak.bytes
    rows = [(name, format_bytes(count), _percent(_part(count, peak.bytes))) for name, count in counts.items()]
    title = f"{tier} memory at its peak"
    return Sheet(title, (f"rank {peak.rank}, {format_duration(peak.time)}", "bytes", "of peak"), tuple(rows))


def _alive(timeline: Timeline, tier: str) -> Sheet:
    """The largest storages at the peak; equal ones of different layers are one row."""
    groups: dict[tuple[str, str, str, str], list[Alive]] = {}
    for alive in timeline.peak_in(tier).alive:
        op = alive.op
        key = (pattern(alive.name), pattern(op.module) if op else "", op.part if op else "", alive.held.kind)
        groups.setdefault(key, []).append(alive)
    sizes = {key: sum(alive.held.bytes for alive in group) for key, group in groups.items()}
    largest = sorted(groups, key=lambda key: -sizes[key])
    rows = [
        (
            key[0],
            key[1] or NONE,
            key[2] or "before the step",
            key[3],
            str(len(groups[key])),
            format_bytes(sizes[key]),
        )
        for key in largest[:ROWS]
    ]
    if len(largest) > ROWS:
        rest = largest[ROWS:]
        count, size = sum(len(groups[key]) for key in rest), sum(sizes[key] for key in rest)
        rows.append((f"{len(rest)} others", NONE, NONE, NONE, str(count), format_bytes(size)))
    columns = ("made by", "module", "phase", "kind", "storages", "bytes")
    return Sheet(
        f"alive at the peak of {tier} memory", columns, tuple(rows), left=4, drop=("storages", "kind")
    )


def describe_ranks(timeline: Timeline, name: str) -> str:
    """The ranks of a class in short form: `0–7, 16`."""
    runs: list[list[int]] = []
    for rank in sorted(rank for rank, of in timeline.trace.classes.items() if of == name):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    ranges = [f"{first}–{last}" if last > first else str(first) for first, last in runs]
    return ", ".join(ranges[:3]) + (f", … ({timeline.trace.size(name)} ranks)" if len(ranges) > 3 else "")


def shown_together(timelines: Iterable[Timeline]) -> str:
    """`predicted`, `measured`, or `predicted and measured`."""
    return " and ".join(dict.fromkeys(timeline.word for timeline in timelines))


def _duration(seconds: float) -> str:
    return format_duration(seconds) if seconds else NONE


def _part(of: float, whole: float) -> float | None:
    return of / whole if whole else None


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}%"


SIMULATED = "simulated"


def word(timeline: Timeline) -> str:
    """How the numbers came about: simulated or measured."""
    return SIMULATED if timeline.predicted else timeline.word


def verdict(timeline: Timeline) -> str:
    """The sentence, with `simulated` or `measured` first."""
    sentence = f"{word(timeline)}: a step takes {format_duration(timeline.step)}"
    if timeline.mfu is not None:
        sentence += f", MFU {timeline.mfu:.1%}"
    has = timeline.capacity.get("device")
    peak = timeline.peak.bytes
    if has and peak:
        fits = "it fits into the device's memory" if peak <= has else "it DOES NOT FIT the device's memory"
        sentence += f"; {fits} ({format_bytes(peak)} of {format_bytes(has)})"
    return f"{sentence}; {_dominant(timeline)}" if timeline.step else sentence


def _dominant(timeline: Timeline) -> str:
    """The part that takes most of a rank's step, mean of all ranks."""
    bubbles = timeline.bubbles
    kinds = timeline.by_kind()
    # A task of a pipeline is no kernel, and holds the collectives of its stage.
    tasks = "task" in kinds
    computing = (
        "tasks of pipeline stages, with their own collectives"
        if tasks
        else "computation" + _most(kinds, "compute", ", mostly")
    )
    parts = {
        computing: timeline.computing,
        "exposed communication"
        + _most(timeline.by_axis(), "communication", ", mostly over"): bubbles.communication,
        "waiting for ranks that have more to compute": bubbles.imbalance,
        "filling and draining the pipeline": bubbles.fill_drain,
        "waiting for copies between memory tiers": bubbles.copies,
        "waiting for the host": bubbles.runtime,
    }
    largest = max(parts, key=lambda name: parts[name])
    return f"{parts[largest] / timeline.step:.0%} of it is {largest}"


def _most(found: Mapping[str, Sum], field: str, before: str) -> str:
    """The name with the largest sum of a field, behind a word; empty where there is none."""
    names = [name for name, one in found.items() if name not in ("", "none") and getattr(one, field)]
    if not names:
        return ""
    return f"{before} {max(names, key=lambda name: float(getattr(found[name], field)))}"
