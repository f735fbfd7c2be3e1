"""Every causal language model of the installed Transformers under eight strategies: right or refused, never wrong.

    python benchmarks/attack_models.py [--families a b] [--strategies a b] [--resume] [--workers 2]

A family is the default config of its class with sizes cut (`harness.small_models`). A cell is one training
step on simulated ranks, or on processes where a model cannot be simulated, every gradient against one device; what the
check before training refuses is refused. The result and its table are written after each family, so that `--resume`
goes on where a run ended, and `--families` and `--strategies` run some anew. Exits with 1 when a cell is wrong, ends in
a traceback, or hangs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import transformers
from campaigns import Rows, in_processes, limited, one_line
from commandline import run
from measure import quiet
from pages import Benchmark

from harness import equivalence as matrix
from harness import run_ranks
from harness.small_models import causal_families, small_fields
from hyper_parallel.errors import HyperParallelError, SimulationError, StrategyError
from hyper_parallel.shard.parallelize import check_tokens
from hyper_parallel.verify.run import against_pipeline, against_workers
from hyper_parallel.verify.step import has_experts

LIMIT_S = 180
"""A cell that takes longer hangs."""

ROWS, LENGTH = 2, 32
_line = functools.partial(one_line, most=10_000)

STRATEGIES: dict[str, dict[str, Any]] = {
    "shard 2": {"axes": {"shard": 2}},
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 4 sequence": {"axes": {"tensor": 4}, "sequence": True},
    "tensor 2 × 2": {"axes": {"tensor_x": 2, "tensor_y": 2}},
    "ring 2": {"axes": {"context": 2}, "context": {"method": "ring"}},
    "ulysses 2": {"axes": {"context": 2}, "context": {"method": "ulysses"}},
    "expert 2": {"axes": {"shard": 2, "expert": 2}},
    "pipeline 2": {"axes": {"pipeline": 2}},
    "16 ranks": {"axes": {"shard": 2, "context": 2, "tensor": 4}, "sequence": True},
}
"""The last one is a product: two data ranks, two of positions, four of features with the sequence split too, over which
experts fold by two where there are any."""

_ARITHMETIC = re.compile(
    r"(cannot be split|does not divide|which it does not|must divide|not divisible|is no multiple|divides neither)"
)
"""A refusal that says that the numbers do not come out: another degree or another length would be taken."""

_MARKS = {"right": "✓", "arithmetic": "÷", "refused": "–", "WRONG": "**wrong**", "traceback": "**crash**"}


def attacked(family: str, strategies: Iterable[str] = ()) -> dict[str, Any]:
    """The cells of a family, all of them or under the strategies named, as the result file has them."""
    began = time.monotonic()
    fields = small_fields(family)
    batch = matrix.draw_batch(fields, ROWS, LENGTH)
    device = "meta"
    try:
        try:
            one = matrix.one_device(fields, {}, batch, {"batch": ROWS}, LENGTH)
        except StrategyError:  # not all values are drawn by the model's own code: it is built with them
            device = "cpu"
            one = matrix.one_device(fields, {}, batch, {"batch": ROWS}, LENGTH, device)
        experts = has_experts(matrix.build_model(fields).config)
    except Exception as error:
        return {"no_reference": f"{type(error).__name__}: {_line(error)}", "cells": {}}
    cells = {}
    for name, strategy in STRATEGIES.items():
        if (strategies and name not in strategies) or ("expert" in strategy["axes"] and not experts):
            continue
        if name == "16 ranks" and experts:
            strategy = {**strategy, "axes": {**strategy["axes"], "expert": 2}}
        start = time.monotonic()
        with limited(LIMIT_S):
            made = _outcome(functools.partial(_cell, fields, strategy, batch, one, device))
            if made["outcome"] in ("WRONG", "traceback"):
                made = _checked(fields, strategy, device) or made
        cells[name] = {**made, "seconds": round(time.monotonic() - start, 1)}
    return {"fields": fields, "cells": cells, "seconds": round(time.monotonic() - began, 1)}


def _cell(fields: Mapping[str, Any], strategy: Mapping[str, Any], batch: Any, one: Any, device: str) -> Any:
    pipeline = "pipeline" in strategy["axes"]
    train = {"batch": ROWS, **({"micro_batch": 1} if pipeline else {})}
    config = matrix.family_config(fields, strategy, train, LENGTH)
    if not pipeline:
        with contextlib.suppress(SimulationError):
            return matrix.run_cell(config, matrix.build_model(fields, device), batch, one)
    return _by_processes(config, fields, device, batch, one)


def _by_processes(config: Any, fields: Mapping[str, Any], device: str, batch: Any, one: Any) -> Any:
    """The report of real workers over gloo. Raises what rank 0 raises."""
    world = config.strategy.axes.world
    limit = LIMIT_S + 30 * world
    with limited(limit):
        found = run_ranks(_rank, world, config, dict(fields), device, batch, one, timeout=limit)[0]
    if isinstance(found, Exception):
        raise found
    return found


def _rank(
    rank: int, world: int, config: Any, fields: Mapping[str, Any], device: str, batch: Any, one: Any
) -> Any:
    quiet(threads=1)
    try:
        model: Any = matrix.build_model(fields, device)
        compared = against_workers
        if config.strategy.axes.pipeline > 1:
            compared = against_pipeline
            with contextlib.suppress(ValueError):  # as in `train`: one by one, experts cannot be captured
                model.set_experts_implementation("grouped_mm")
        return compared(config, model, batch, one, f"{world} processes over gloo")
    except Exception as error:
        return error


def _outcome(cell: Any) -> dict[str, Any]:
    try:
        report = cell()
    except HyperParallelError as refusal:
        kind = "arithmetic" if _ARITHMETIC.search(str(refusal)) else "refused"
        return {"outcome": kind, "detail": _line(refusal)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next((f for f in reversed(frames) if "hyper_parallel" in f.filename), frames[-1])
        told = _line(error)[-200:]
        where = f"{Path(at.filename).name}:{at.lineno}"
        return {"outcome": "traceback", "detail": f"{where}: {type(error).__name__}: {told}"}
    worst = max(p.gradient for p in report.parameters)
    detail = "; ".join(report.failures[:3])
    return {"outcome": "right" if report.ok else "WRONG", "error": float(f"{worst:.2g}"), "detail": detail}


def _checked(
    fields: Mapping[str, Any], strategy: Mapping[str, Any], device: str, rows: int = ROWS
) -> dict[str, Any] | None:
    """What the check before training says of a cell that is wrong, which simulated ranks go without; None when it lets
    the strategy pass."""
    declared = matrix.family_config(fields, strategy, {"batch": rows}, LENGTH).strategy
    try:
        check_tokens(matrix.build_model(fields, device), declared, fields["vocab_size"])
    except HyperParallelError as refusal:
        return {"outcome": "refused", "detail": _line(refusal)}
    return None


def counted(found: Mapping[str, Any]) -> dict[str, Any]:
    """How many cells came to what; the share of right ones is of those whose numbers come out."""
    outcomes = collections.Counter(c["outcome"] for f in found.values() for c in f["cells"].values())
    judged = sum(outcomes.values()) - outcomes["arithmetic"]
    return {
        "families": sum(bool(f["cells"]) for f in found.values()),
        "cells": sum(outcomes.values()),
        **{outcome: outcomes[outcome] for outcome in _MARKS},
        "right_share": round(outcomes["right"] / judged, 3) if judged else 0.0,
    }


def page(result: Mapping[str, Any]) -> Iterator[str]:
    counts, found = result["counts"], result["families"]
    yield (
        f"{counts['families']} of the {result['of']} families of Transformers {result['transformers']}, "
        f"{counts['cells']} cells: "
        f"{counts['right']} right, {counts['arithmetic']} refused because heads or lengths do not divide, "
        f"{counts['refused']} refused for another reason, {counts['WRONG']} wrong, {counts['traceback']} crashes. "
        f"Of those whose numbers divide, {counts['right_share']:.0%} are right."
    )
    yield ""
    yield "✓ right, ÷ heads or lengths do not divide, – refused, · no experts."
    yield ""
    yield "| | " + " | ".join(STRATEGIES) + " |"
    yield "|---" * (len(STRATEGIES) + 1) + "|"
    for family, of in sorted(found.items()):
        if cells := of["cells"]:
            row = [_MARKS[cells[name]["outcome"]] if name in cells else "·" for name in STRATEGIES]
            yield f"| {family} | " + " | ".join(row) + " |"
    left = {family: of["no_reference"] for family, of in sorted(found.items()) if "no_reference" in of}
    if left:
        yield ""
        told = ", ".join(f"{family} ({why})" for family, why in left.items())
        yield f"Not run, since one device does not train them here: {told}."


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"transformers": transformers.__version__, "of": len(causal_families()), "counts": counted(found)}


BENCHMARK = Benchmark("attack_models", {"families.md": page}, key="families")


def main(
    families: Annotated[tuple[str, ...], "only these"] = (),
    strategies: Annotated[tuple[str, ...], tuple(STRATEGIES)] = (),
    resume: Annotated[bool, "only families without a result"] = False,
    workers: int = 2,
) -> bool:
    """Run the families; whether a cell is wrong or crashes."""
    rows = Rows(BENCHMARK, again=not (resume or families or strategies), summary=summary)
    wanted = families or causal_families()
    if resume:
        wanted = list(rows.missing(wanted))
    attack = functools.partial(attacked, strategies=strategies)
    cases = in_processes(attack, wanted, workers, begin=functools.partial(quiet, threads=1))
    for done, (family, of) in enumerate(cases, 1):
        before = rows.rows.get(family, {}).get("cells", {}) if strategies else {}
        rows.rows[family] = {**of, "cells": {**before, **of["cells"]}}
        rows.rows = dict(sorted(rows.rows.items()))
        rows.write()
        told = " ".join(f"{name}: {cell['outcome']}," for name, cell in of["cells"].items())
        print(f"{done} of {len(wanted)}: {family}: {told or of.get('no_reference')}", flush=True)
        for name, cell in of["cells"].items():
            if cell["outcome"] in ("WRONG", "traceback"):
                print(f"    {name}: {cell['detail']}", flush=True)
    counts = counted(rows.rows)
    print(counts)
    return bool(counts["WRONG"] or counts["traceback"])


if __name__ == "__main__":
    run(main)
