"""The simulator beside published training runs: python benchmarks/simulate_published.py

Rows of `fit_constants.published_runs` become run files: a model of the row's dimensions in the plainest family of
Transformers that has them, its degrees, micro-batches, recomputation and precision, and of its framework
(`published_pricing`, `published_machine`) whether attention, memory-bound operators and the loss are fused, which
attention kernel it has, whether a token is sent to a node once, what of a step is recorded graphs and what its host
launches, whether products add into sums of gradients, and whether a layer is computed again as a whole. Each is
captured and simulated on the row's machine, and set beside the measured seconds of a step and beside the closed forms.
All fitted constants are of other sources than the row's. What neither a kernel nor a collective takes, a step's fixed
seconds and the lag of the slowest device, is that of the closed forms too (`fixed`, `straggling`). A pipeline is
captured as `hyper-parallel simulate` captures it. Of other runs steps of few layers are captured, and what a period of
layers adds is taken for all (`_of_few_layers`):

    step(l, r) = step(b, 0) + (l − b) · (step(b + p, 0) − step(b, 0)) / p + r · (step(b + p, p) − step(b + p, 0)) / p

with l layers, of which r are computed again, p layers in a period, and b = p, at least 2, and the dense layers.

The rows were chosen by this rule before any was simulated, and by nothing else:

1. Candidates are rows with a measured step in bfloat16 or float16, without offload, whose strategy a run file can say,
   of models without other mixers of tokens than attention: a capture has those as the reference code writes them.
2. Of each (source, hardware, model, framework's profile) the candidate whose id has the lowest SHA-256.
3. Of each (source, hardware) at most `MOST` of these, those with the lowest SHA-256.

Rows whose step cannot be captured stay in the result with the reason, and count as chosen. A row takes seconds to a
minute; each is written to benchmarks/results/simulate_published.json when it is done, and rows that are there with the
same run file and machine are not simulated again (`--again` does so anyway), and docs/fidelity.md with it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from campaigns import Rows
from commandline import Again, run
from fit_constants.fit import solve
from fit_constants.published_runs import RECIPES, RUNS, TRANSCRIBED, Evidence, evidence
from pages import Benchmark, spaced, table
from published_machine import machine
from published_pricing import Pricing
from shapes import with_layers

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.planner.columns import SCHEDULES
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.csv_runs.cells import read, records
from hyper_parallel.planner.csv_runs.model_and_machine import shape_of
from hyper_parallel.planner.csv_runs.rows import RunRow, rows
from hyper_parallel.planner.framework_profiles import profile_of
from hyper_parallel.planner.metrics import Figures, disagreement, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import PIPELINES, planned_run_file
from hyper_parallel.planner.table import PRECISIONS, Table
from hyper_parallel.trace.simulated_error import SIMULATED
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

MOST = 8
SIXTEEN = ("bf16", "fp16")
ASKED = 0.12
"""Mean error that was asked for."""
MISS = 0.15
BOTH = ("predicted", "estimated")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chosen:
    """A published run."""

    row: RunRow
    shape: Shape
    table: Table
    """Its one row."""
    seconds: float
    """Measured."""
    closed: Figures
    """The closed forms' estimate of its step."""
    constants: Constants
    """Fitted on other sources than the row's."""

    @property
    def id(self) -> str:
        """Of its source and row."""
        return f"{self.row.source}:{self.row.id}"

    @property
    def pricing(self) -> Pricing:
        """How its step is priced."""
        recompute = self.closed.strategy["recompute"] == "full"
        return Pricing.of(self.table, self.row.profile, recompute=recompute)

    @property
    def machine(self) -> Cluster:
        """What it ran on."""
        return machine(self.table, self.constants, Cluster.preset(self.row.cluster), self.closed.devices)


def chosen() -> list[Chosen]:
    """The rows, by the rule of the module."""
    fit, unseen = evidence(RUNS, RECIPES), evidence(TRANSCRIBED)
    constants = held_out(fit)
    found = [
        *_candidates(fit, [*records(RUNS), *records(RECIPES)], constants),
        *_candidates(unseen, list(records(TRANSCRIBED)), constants),
    ]
    first: dict[tuple[str, ...], Chosen] = {}
    for one in sorted(found, key=_hash):
        first.setdefault((one.row.source, one.row.hardware, one.row.model, one.row.profile), one)
    groups = defaultdict[tuple[str, str], list[Chosen]](list)
    for one in first.values():  # by their hashes, too
        groups[one.row.source, one.row.hardware].append(one)
    return [one for group in sorted(groups) for one in groups[group][:MOST]]


def held_out(runs: Evidence) -> dict[str, Constants]:
    """By source of the runs that constants are fitted on, those of the other sources."""
    timed = runs.timed
    found = {}
    for source in np.unique(runs.sources[timed]):
        rest = timed & (runs.sources != source)
        found[str(source)] = solve(runs.table.take(rest), runs.seconds[rest], runs.groups[rest])
    return found


def _hash(one: Chosen) -> str:
    return hashlib.sha256(one.row.id.encode()).hexdigest()


def _candidates(
    runs: Evidence, given: Sequence[Mapping[str, str]], constants: Mapping[str, Constants]
) -> list[Chosen]:
    """`constants`: by source; those fitted on all where they have not seen the source."""
    table, told = rows(given)
    found = []
    for cells, row in zip(read(given), told, strict=True):
        if row.index is None or not runs.timed[row.index]:
            continue
        own = table.take(row.index)
        schedule = SCHEDULES[int(own.schedule[0])]
        if (
            PRECISIONS[int(own.precision[0])] not in SIXTEEN
            or own.state_on_host[0]
            or own.activations_on_host[0]
            or own.mixer_layers[0]
            or (own.pipeline[0] > 1 and schedule not in PIPELINES)
        ):
            continue
        shape = shape_of(cells, profile_of(cells.text("framework")))
        known = constants.get(row.source, fitted())
        closed = figures(own, estimate(own, known))[0]
        found.append(Chosen(row, shape, own, float(runs.seconds[row.index]), closed, known))
    return found


def run_file(one: Chosen) -> dict[str, Any]:
    """The run file of a published run."""
    table = one.table
    work = Workload(one.shape, int(table.batch[0]), int(table.sequence[0]), "bf16")
    asked = Question(workload=work, cluster=one.machine)
    data: dict[str, Any] = json.loads(json.dumps(planned_run_file(one.closed, asked).data))
    fields = data["model"]["config"]
    if fields["model_type"] == "gpt2":
        # The published shapes state no dropout, and the family's default is 0.1.
        fields |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        # The family's default writes GELU out as eight operators; frameworks have one kernel.
        fields["activation_function"] = "gelu_pytorch_tanh"
    # Frameworks compute all logits of a micro-batch at once; `train` takes few positions at a time.
    data["train"]["loss"] = {"chunk": "none"}
    # A framework makes one call of a collective, whose library goes level by level; with placement they are several.
    data["strategy"].pop("placement", None)
    # A float32 sum of gradients is what most frameworks have; others reduce in the dtype that they compute in.
    if table.gradient_bytes[0] < 4:
        data["strategy"]["precision"]["reduce"] = "bfloat16"
    if not table.flash[0]:
        data["model"]["attention"] = "eager"
    if one.closed.strategy["pipeline"] != 1 and data["strategy"]["memory"].get("shard") == "gradients":
        # Frameworks with ZeRO-2 in a pipeline reduce gradients once a step (MegaScale, arXiv 2402.15627, section 3.2);
        # `train` reduces those of each micro-batch, unless only the optimizer's state is split.
        data["strategy"]["memory"]["shard"] = "optimizer"
    if one.closed.strategy["pipeline"] == 1:
        data["strategy"]["overlap"] = {"schedule": "usual" if table.overlap_data[0] else "none"}
    return data


def simulated(one: Chosen, data: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """What the simulator says of a run."""
    given = one.closed.strategy
    told: dict[str, Any] = {
        "source": one.row.source,
        "hardware": one.row.hardware,
        "model": one.row.model,
        "framework": one.row.profile,
        "experts": one.shape.experts > 0,
        "sequence": int(one.table.sequence[0]),
        "spread": {name: given[name] for name in SHOWN if given[name] not in (1, 0, "none")},
        "measured": one.seconds,
    }
    begun = time.monotonic()
    try:
        parts = dict((_of_few_layers if given["pipeline"] == 1 else _parts)(one, data, cluster))
    except HyperParallelError as error:
        return {**told, "refused": str(error)}
    parts["fixed"] = one.constants.fixed
    slower = one.constants.straggling * float(np.log2(max(one.closed.devices / 8, 1.0)))
    parts["straggling"] = slower * sum(parts.values())
    took = time.monotonic() - begun
    return {**told, "predicted": sum(parts.values()), "parts": parts, "simulated_in": took}


def _parts(one: Chosen, data: Mapping[str, Any], cluster: Cluster) -> Mapping[str, float]:
    """Seconds of the step by part."""
    return one.pricing.parts(data, cluster, one.id)


def _of_few_layers(one: Chosen, data: Mapping[str, Any], cluster: Cluster) -> Mapping[str, float]:
    """The same without a pipeline, simulated with few of its layers."""
    config = data["model"]["config"]

    def of(layers: int, again: int | None) -> Mapping[str, float]:
        few = json.loads(json.dumps(data))
        fields, memory = with_layers(few["model"]["config"], layers), few["strategy"]["memory"]
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:layers]
        few["model"]["config"] = fields
        if again == 0:
            memory.pop("recompute_layers")
            memory["recompute"] = "none"
        elif again is not None:
            memory["recompute_layers"] = again
        return _parts(one, few, cluster)

    again = data["strategy"]["memory"].get("recompute_layers")
    layers = config.get("n_layer") or config["num_hidden_layers"]
    types = config.get("layer_types") or [""]
    period = next(p for p in range(1, len(types) + 1) if types[: len(types) - p] == types[p:])
    base = max(2, period) + config.get("first_k_dense_replace", 0)
    if layers <= base + period:
        return of(layers, again)
    least = 0 if again is not None else None
    low, high = of(base, least), of(base + period, least)
    found = _plus(low, high, low, (layers - base) / period)
    return _plus(found, of(base + period, period), high, again / period) if again else found


def _plus(
    base: Mapping[str, float], more: Mapping[str, float], fewer: Mapping[str, float], times: float
) -> dict[str, float]:
    """What `more` has beyond `fewer`, so many times, beside `base`."""
    return {
        name: base.get(name, 0.0) + times * (more.get(name, 0.0) - fewer.get(name, 0.0))
        for name in {*base, *more, *fewer}
    }


SHOWN = (
    *("replicate", "shard", "zero", "tensor_x", "pipeline", "virtual", "context", "expert", "micro"),
    "recompute",
)
"""What is shown of a strategy."""


def _most(one: Row, count: int) -> str:
    """The parts that take most of the simulated step."""
    parts = sorted(one["parts"].items(), key=lambda part: -part[1])[:count]
    return ", ".join(f"{kind} {seconds / one['predicted']:.0%}" for kind, seconds in parts)


def _errors(rows: Iterable[Row], key: str) -> list[float]:
    """With their signs. `key`: "predicted", which is simulated, or "estimated", by the closed forms."""
    return [one[key] / one["measured"] - 1 for one in rows]


def _off(one: Row) -> float:
    return abs(_errors([one], "predicted")[0])


def _line(name: str, one: Row) -> str:
    if "refused" in one:
        return f"{name:60s} {one['refused'][:150]}"
    simulated, closed = (_errors([one], key)[0] for key in BOTH)
    seconds = f"{one['measured']:9.3f} s {one['predicted']:9.3f} s {simulated:+7.1%} {closed:+7.1%}"
    return f"{name:60s} {seconds}  {_most(one, 6)}"


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """Errors by source, and every miss with what it comes from."""
    rows: Mapping[str, Row] = result["rows"]
    told = [one for one in rows.values() if "predicted" in one]
    misses = {name: one for name, one in rows.items() if "predicted" in one and _off(one) > MISS}
    groups = defaultdict[str, list[Row]](list)
    for one in told:
        groups[f"{one['source']}, {one['hardware']}"].append(one)
    kinds: dict[str, list[Row]] = {
        "without experts": [one for one in told if not one["experts"]],
        "with experts": [one for one in told if one["experts"]],
        "8,192 tokens a sequence or more": [one for one in told if one["sequence"] >= 8192],
        "pipelines": [one for one in told if "pipeline" in one["spread"]],
        "tensor": [one for one in told if "tensor_x" in one["spread"]],
        "ZeRO-3": [one for one in told if one["spread"].get("zero") == 3],
    }
    errors = [list(map(abs, _errors(told, key))) for key in BOTH]
    (mean, median), (closed, closed_median) = ((statistics.fmean(x), statistics.median(x)) for x in errors)
    yield from spaced(
        f"{len(told)} published runs simulated, of {result.get('chosen', len(rows))} that the rule chooses: mean "
        f"error of step time **{mean:.1%}** ({ASKED:.0%} was asked for), median {median:.1%}, {len(misses)} off by "
        f"more than {MISS:.0%}. The closed forms, whose constants have not seen the row's source: mean {closed:.1%}, "
        f"median {closed_median:.1%} of the same rows.",
        table(
            "Source, hardware | rows | simulated, median with its sign | mean error | closed forms, mean error",
            (_group(name, own) for name, own in [*sorted(groups.items()), *kinds.items()] if own),
        ),
        f"Every run that is off by more than {MISS:.0%}, with the classes of operators and collectives that take "
        "most of the simulated step, and where both predictors differ by more than 15%, what that comes from:",
        table(
            "Run | Model, framework | Strategy | simulated | closed forms | most of the simulated step | they differ",
            (_miss(name, misses[name]) for name in sorted(misses, key=lambda name: -_off(misses[name]))),
        ),
    )
    if refused := {name: one for name, one in rows.items() if "refused" in one}:
        yield from ("", "Not simulated, with the reason:", "")
        yield from (f"- {name}, {one['model']}: {one['refused']}" for name, one in refused.items())


def _group(name: str, rows: Sequence[Row]) -> tuple[object, ...]:
    signed = statistics.median(_errors(rows, "predicted"))
    means = (statistics.fmean(map(abs, _errors(rows, key))) for key in BOTH)
    return name, len(rows), f"{signed:+.1%}", *(f"{mean:.1%}" for mean in means)


def _miss(name: str, one: Row) -> tuple[str, ...]:
    spread = ", ".join(f"{axis} {degree}" for axis, degree in one["spread"].items())
    # The closed forms' parts of these names count as waiting.
    simulated = dict(one["parts"])
    simulated["waiting"] = sum(simulated.pop(name, 0.0) for name in ("waiting", "fixed", "straggling"))
    apart = disagreement(simulated, one["estimated_parts"])
    errors = (f"{_errors([one], key)[0]:+.0%}" for key in BOTH)
    return name, f"{one['model']}, {one['framework']}", spread, *errors, _most(one, 3), str(apart or "")


BENCHMARK = Benchmark("simulate_published", {"fidelity.md": page}, key="rows")


def main(
    only: Annotated[tuple[str, ...], "rows whose source, model or framework contains one of these"] = (),
    again: Again = False,
) -> None:
    """Choose, simulate, write."""
    rows = chosen()
    result = Rows(BENCHMARK, summary=lambda _: {"chosen": len(rows)})
    for one in rows:
        name = f"{one.id} {one.row.model} {one.row.profile}"
        if only and not any(wanted.lower() in name.lower() for wanted in only):
            continue
        data, cluster = run_file(one), one.machine.for_workers(one.closed.devices)
        inputs = f"{json.dumps(data, sort_keys=True)} {cluster} {one.pricing}"
        digest = hashlib.sha256(inputs.encode()).hexdigest()[:16]
        told = before = result.rows.get(one.id, {})
        if again or before.get("digest") != digest:
            told = {"digest": digest, **simulated(one, data, cluster)}
        # Estimated anew: that takes no time, and the closed forms may have changed.
        told = {**told, "estimated": one.closed.seconds, "estimated_parts": dict(one.closed.parts)}
        if told != before:
            result.add(one.id, told)
        print(_line(name, told), flush=True)
    if not only:
        result.rows = {one.id: result.rows[one.id] for one in rows}
    result.write()
    SIMULATED.write_text(json.dumps(residuals(result.rows.values()), indent=1) + "\n")


def residuals(told: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Quantiles of log(simulated / measured) for models without experts and with, each (source, hardware) weighing the
    same, and how many runs they are of."""
    found = {}
    timed = [one for one in told if one.get("predicted")]
    for kind, experts in (("dense", False), ("mixture", True)):
        rows = [one for one in timed if one["experts"] is experts]
        groups = Counter((one["source"], one["hardware"]) for one in rows)
        values = np.log([one["predicted"] / one["measured"] for one in rows])
        weights = np.array([1 / groups[one["source"], one["hardware"]] for one in rows])
        order = np.argsort(values)
        places = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
        low, high = np.interp((0.05, 0.95), places, values[order])
        found[kind] = {"low": round(float(low), 4), "high": round(float(high), 4), "runs": len(rows)}
    return found


if __name__ == "__main__":
    run(main)
