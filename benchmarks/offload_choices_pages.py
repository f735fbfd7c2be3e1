"""The tables of docs/recomputation.md and docs/host-update.md, from the results of `offload_choices.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COPIES, UPDATES, AGAIN, ALL = "copies alone", "updates on the host", "recomputation and order", "all"
"""What a plan may do, beside copies."""

_Row = Mapping[str, Any]
_Case = Mapping[str, _Row]
"""A link and a budget: each kind of choice that was planned there."""


def again(kept: Mapping[str, Any]) -> Iterator[str]:
    """What recomputation and another order gain, with updates on the device."""
    cases = _cases(kept["rows"])
    yield f"{_setting(kept)} Updates run on the device."
    yield ""
    yield "| Link each way | Budget | Copies alone | With these choices | Saved |"
    yield "|---|---|---|---|---|"
    for case in cases:
        saved = ""
        if COPIES in case and AGAIN in case:
            saved = f"{1 - case[AGAIN]['step_s'] / case[COPIES]['step_s']:.0%}"
        yield f"| {_where(case)} | {_seconds(case, COPIES)} | {_seconds(case, AGAIN)} | {saved} |"
    yield ""
    yield from _ending(kept, COPIES, AGAIN)


def updates(kept: Mapping[str, Any]) -> Iterator[str]:
    """What updates on the host gain, alone and together with the other choices."""
    cases, count = _cases(kept["rows"]), kept["parameters"]
    yield _setting(kept)
    yield ""
    yield "| Link each way | Budget | Copies alone | and updates there | Other choices | and updates there |"
    yield "|---|---|---|---|---|---|"
    for case in cases:
        cells = (_seconds(case, name) + _apart(case, name) for name in (COPIES, UPDATES, AGAIN, ALL))
        yield f"| {_where(case)} | {' | '.join(cells)} |"
    yield ""
    yield f"In brackets: how many of the {count} parameters are updated there, on the host."
    missed = [_place(case) for case in cases if _misses(case)]
    if missed:
        yield (
            f"At {'; '.join(missed)} all choices together come to a slower step than some of them: a search tries a "
            "few graphs of many, and missed the best."
        )
    yield from _ending(kept, UPDATES, ALL)


def _setting(kept: Mapping[str, Any]) -> str:
    return (
        f"Simulated: the step of a Llama of 8B's shape on one H100, alone on its host ({kept['nodes']:,} nodes, "
        f"{kept['peak_gib']:.1f} GiB at its peak, {kept['without_a_budget_s']:.3f} s without a budget)."
    )


def _ending(kept: Mapping[str, Any], *names: str) -> Iterator[str]:
    """How long planning took, and how much of the benchmark was run."""
    for name in names:
        took = [row["planning_s"] for row in kept["rows"] if row["choices"] == name]
        if took:
            yield f"Planning with {_CALLED[name]} took {min(took):.1f} to {max(took):.1f} s of a processor."
    if len(kept["rows"]) < kept["of"]:
        yield f"So far {len(kept['rows'])} of the benchmark's {kept['of']} plans were made."
    yield "([Result](../benchmarks/results/offload_choices.json) of `python benchmarks/offload_choices.py`.)"


_CALLED = {
    COPIES: "copies alone",
    UPDATES: "updates on the host as the only choice",
    AGAIN: "these choices",
    ALL: "all of them",
}


def _cases(rows: Sequence[_Row]) -> list[_Case]:
    found: dict[tuple[float, float], dict[str, _Row]] = {}
    for row in rows:
        found.setdefault((row["link_gib_s"], row["budget_gib"]), {})[row["choices"]] = row
    return list(found.values())


def _misses(case: _Case) -> bool:
    """Whether fewer choices gave a quicker step, by more than rounding shows."""
    return ALL in case and min(one["step_s"] for one in case.values()) < case[ALL]["step_s"] - 5e-4


def _place(case: _Case) -> str:
    row = next(iter(case.values()))
    return f"{row['link_gib_s']} GiB/s and {row['budget_gib']:.1f} GiB"


def _where(case: _Case) -> str:
    return _place(case).replace(" and ", " | ")


def _seconds(case: _Case, name: str) -> str:
    return f"{case[name]['step_s']:.3f} s" if name in case else "not run yet"


def _apart(case: _Case, name: str) -> str:
    count = case[name]["updates_on_host"] if name in case else 0
    return f" ({count})" if count else ""
