"""Simulated generation with memory tiers on H100 and 910C: python benchmarks/generate_simulated.py

Each row is one workload on one cluster, simulated pass by pass with everything on the device and with a tier split,
by the same scheduler; passes are captured from the models' code. A row meets its aim if the device holds at least 26%
less, or 1.73 times the sessions or tokens fit it, and the run takes at most 1% longer. Dense decode is shown for what
it costs. Everything is simulated; no device is used. docs/inference-predictions.md is written from the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from commandline import run
from pages import Benchmark, table
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.estimate.generate_capture import captured_pass
from hyper_parallel.estimate.generate_predict import in_dtype
from hyper_parallel.estimate.generate_trace import SimulatedRun, simulate_run
from hyper_parallel.simulator.generation.choose_split import SplitQuestion, loads
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.pass_trace import simulated
from hyper_parallel.simulator.generation.tier_split import TierSplit
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import format_duration
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.transformers_config import to_config

LESS, MORE, LONGER = 0.26, 1.73, 0.01
"""What a row aims at: less device memory, more sessions in equal memory, and the most that it may take longer."""
GB = 2**30
RUN = ("seconds", "bound", "first_token", "between_tokens", "tokens_per_second", "passes")
"""What is kept of a simulated run as it is."""


@dataclass(frozen=True)
class Case:
    """A workload and what lies in the tier."""

    group: str
    model: str
    what: str
    work: dict[str, Any]
    inference: dict[str, Any]
    split: TierSplit


TENSOR = {"llama-3-8b": 1, "llama-3-70b": 8, "gemma-3-12b": 1, "deepseek-v3": 16}
"""Devices of a model, in tensor parallelism."""
IDLE = TierSplit(idle=True)
CONTEXTS = TierSplit(contexts=1.0)
Fields = dict[str, Any]


def requests(count: int, prompt: int, answer: int, **more: Any) -> Fields:
    return {"requests": count, "prompt_tokens": prompt, "answer_tokens": answer, **more}


def inference(batch: int, page: int, rows: int) -> Fields:
    return {"batch": batch, "page": page, "rows": rows}


def cases() -> Iterator[Case]:
    llamas = ("llama-3-8b", "llama-3-70b")
    for model in llamas:
        weights = TierSplit(layers=shape(model).layers)
        both = replace(weights, contexts=1.0)
        splits = {"weights": weights, "contexts": CONTEXTS, "weights and contexts": both}
        for thousands, (away, split) in product((32, 64, 128), splits.items()):
            work, several = requests(4, thousands * 1024, 1), inference(4, 4096, 16384)
            yield Case("prompts", model, f"4 prompts of {thousands}K, {away}", work, several, split)
        for away in ("contexts", "weights"):
            work, single = requests(1, 131072, 1), inference(1, 4096, 4096)
            yield Case("prompts", model, f"1 prompt of 128K, {away}", work, single, splits[away])
    turns = {"turns": 4, "message_tokens": 512, "idle_seconds": 60.0, "rate": 0.5}
    chat, usual = requests(64, 4096, 128, **turns), inference(16, 256, 2048)
    for model in llamas:
        yield Case("sessions", model, "64 conversations of 4 turns", chat, usual, IDLE)
    system = {"shared_tokens": 16384, "shared_prompts": 12, "rate": 1.0}
    shared, few = requests(96, 16384 + 512, 128, **system), inference(8, 256, 2048)
    yield Case("shared prompts", "llama-3-8b", "12 system prompts of 16K in turn", shared, few, IDLE)
    for (selected, again), batch in product(((2048, 0.9), (2048, 0.98), (4096, 0.9)), (1, 4)):
        work = requests(batch, 131072, 256, selected_tokens=selected, selected_again=again)
        sparse = inference(batch, 4096, max(4096, 4096 * batch))
        what = f"{batch} × 128K, {selected} selected, {again:.0%} of them again"
        yield Case("sparse attention", "llama-3-8b", what, work, sparse, IDLE)
    work, windowed = requests(8, 65536, 256), inference(8, 1024, 8192)
    what, split = "8 × 64K, pages behind windows", TierSplit(windows=True)
    yield Case("sliding windows", "gemma-3-12b", what, work, windowed, split)
    skews = ((1, 0.0, 8), (32, 0.0, 8), (32, 1.0, 8), (32, 2.0, 8), (32, 3.0, 8), (32, 3.0, 5))
    places = (("device", "fetched"), ("host", "computed there"))
    for (batch, skew, count), (how, there) in product(skews, places):
        work, settings = requests(batch, 512, 256, expert_skew=skew), inference(batch, 512, 2048)
        split = TierSplit(experts=count, experts_computed=how)  # type: ignore[arg-type]
        what = f"batch {batch}, skew {skew:g}, {count} of 16 experts {there}"
        yield Case("experts", "deepseek-v3", what, work, settings, split)
    work, settings = requests(32, 4096, 256), inference(32, 256, 2048)
    for model in llamas:
        quarter = TierSplit(layers=round(shape(model).layers * LESS))
        for away, split in (("26% of weights", quarter), ("contexts", CONTEXTS)):
            yield Case("dense decode", model, f"32 × 4K, {away}", work, settings, split)


@cache
def passes(model: str, tensor: int, expert: int) -> PassModel:
    fields = to_config(shape(model))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    axes = {"tensor": tensor, "expert": expert}
    return captured_pass(made, in_dtype(Strategy(version=1, axes=axes, check=False), made), model)


def row(case: Case, name: str) -> dict[str, Any]:
    """A case with everything on the device, and with its split."""
    tensor = TENSOR[case.model]
    model = passes(case.model, tensor, 16 if case.group == "experts" else 1)
    named = f"{name}x{tensor}"
    cluster = replace(Cluster.named(named).for_workers(tensor), name=named)
    work, settings = GenerationWorkload(**case.work), Inference(**case.inference)
    host = cluster.tier("host")
    whole = SplitQuestion(model, cluster, work, settings, float("inf"), {})
    tiers = replace(whole, tiers={"host": host.bytes / min(host.ranks, tensor)})
    found: dict[str, Any] = {}
    for which, question, split in (("here", whole, TierSplit()), ("away", tiers, case.split)):
        pricer = question.pricer(split)
        whole_run = simulate_run(pricer, work, settings, room=tiers.tiers["host"])
        prompt, answer = loads(work, settings, model.split)
        load = prompt if work.answer_tokens == 1 else answer
        cost = pricer.price(load)
        found[which] = {
            "device_bytes": device_bytes(question, split, whole_run, model),
            **{what: getattr(whole_run, what) for what in RUN},
            "pass": simulated(pricer, load).steady,
            "pass_bound": cost.bound,
            "limit": cost.limit,
            "link_bytes": whole_run.streamed + whole_run.fetched,
            "tier_bytes": question.footprint(split).of("host"),
        }
    here, away = found["here"], found["away"]
    scaled = "requests" if case.group in ("sessions", "shared prompts") else "prompt_tokens"
    more = None
    if case.group not in ("experts", "dense decode"):
        more = in_equal_memory(whole, tiers, case.split, scaled)
    slower, longer = (away[of] / here[of] - 1 for of in ("pass", "seconds"))
    less = 1 - away["device_bytes"] / here["device_bytes"]
    return {
        "group": case.group,
        "name": f"{case.model}, {case.what}",
        "cluster": cluster.name,
        "simulated": True,
        **found,
        "less": less,
        "longer": longer,
        "pass_longer": slower,
        "fits_without_tiers": here["device_bytes"] <= cluster.tier("device").bytes,
        "scaled": scaled,
        "times_in_equal_memory": more,
        "meets": max(longer, slower) <= LONGER and (less >= LESS or (more or 0) >= MORE),
    }


def in_equal_memory(whole: SplitQuestion, tiers: SplitQuestion, split: TierSplit, what: str) -> float:
    """How many times the requests, or the tokens of a prompt, the device holds with a split in what all of it
    takes without."""
    room = whole.footprint(TierSplit()).device
    low, high = 1.0, 16.0
    for _ in range(12):
        middle = (low + high) / 2
        work = tiers.work.model_copy(update={what: round(getattr(tiers.work, what) * middle)})
        if replace(tiers, work=work).footprint(split).device <= room:
            low = middle
        else:
            high = middle
    return low


def device_bytes(question: SplitQuestion, split: TierSplit, run: SimulatedRun, model: PassModel) -> float:
    """Bytes of the device: the pages that the run had, and everything else of the footprint."""
    parts = question.footprint(split).by_tier["device"]
    if split.contexts or split.windows or question.work.selected_tokens:
        return sum(parts.values())
    beside = sum(bytes_ for what, bytes_ in parts.items() if what not in ("contexts", "idle contexts"))
    return beside + model.held(run.cached)


def longer(share: float) -> str:
    """A share that something takes longer."""
    return f"{share:+.1%}" if share < 1 else f"{share + 1:.1f}×"


def page(result: Mapping[str, Any]) -> Iterator[str]:
    def cells(one: Mapping[str, Any]) -> Iterator[str]:
        here, away, more = one["here"], one["away"], one["times_in_equal_memory"]
        fits = "" if one["fits_without_tiers"] else " (does not fit)"
        yield from (one["name"], one["cluster"], f"{here['device_bytes'] / GB:.1f}{fits}")
        yield from (f"{away['device_bytes'] / GB:.1f}", f"{one['less']:.0%}")
        times = "–" if more is None else "≥ 16×" if more > 15.9 else f"{more:.1f}×"
        what = "" if more is None else " sessions" if one["scaled"] == "requests" else " context"
        yield f"{times}{what}"
        yield from (format_duration(away["pass"]), format_duration(away["pass_bound"]), away["limit"])
        yield from (longer(one["pass_longer"]), longer(one["longer"]), "yes" if one["meets"] else "no")

    rows = result["rows"]
    for group in dict.fromkeys(one["group"] for one in rows):
        yield from ("", f"**{group[0].upper()}{group[1:]}** (simulated)", "")
        yield from table(
            "Workload | Cluster | Device, GiB | With the tier | Less | In equal memory | Pass | Its bound | Limited by "
            "| Pass takes | Run takes | Meets",
            (tuple(cells(one)) for one in rows if one["group"] == group),
            "llrrrrrrlrrl",
        )
    yield ""
    yield f"{sum(one['meets'] for one in rows)} of {len(rows)} rows meet the aim."


BENCHMARK = Benchmark("generate_simulated", {"inference-predictions.md": page})


def main() -> None:
    rows = []
    for name, case in product(("h100", "cloudmatrix384"), cases()):
        rows.append(found := row(case, name))
        print(found["cluster"], found["name"], f"{found['longer']:+.2%}", flush=True)
    BENCHMARK.keep({"rows": rows})


if __name__ == "__main__":
    run(main)
