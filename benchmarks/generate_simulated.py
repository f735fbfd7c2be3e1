"""Simulated generation with memory tiers on H100 and 910C: python benchmarks/generate_simulated.py

Each row is one workload on one cluster, simulated pass by pass with everything on the device and with a tier split,
by the same scheduler; passes are captured from the models' code. A row meets its aim if the device holds at least 26%
less, or 1.73 times the sessions or tokens fit it, and the run takes at most 1% longer. Dense decode is shown for what
it costs. Everything is simulated; no device is used. `--only` names cases. docs/inference-predictions.md is written
from the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from measure import write
from pages import DOCS, put
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.generation_workload import GenerationWorkload
from hyper_parallel.config.inference import Inference
from hyper_parallel.estimate.generate_capture import captured_pass
from hyper_parallel.estimate.generate_predict import in_dtype
from hyper_parallel.estimate.generate_trace import SimulatedRun, simulate_run
from hyper_parallel.simulator.generation.choose_split import SplitQuestion
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.pass_trace import simulated
from hyper_parallel.simulator.generation.tier_split import TierSplit
from hyper_parallel.simulator.generation.whole_run import loads
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import format_duration
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.to_config import to_config

PAGE = DOCS / "inference-predictions.md"
LESS, MORE, LONGER = 0.26, 1.73, 0.01
"""What a row aims at: less device memory, more sessions in equal memory, and the most that it may take longer."""
GB = 2**30


@dataclass(frozen=True)
class Case:
    """A workload and what lies in the tier."""

    group: str
    name: str
    model: str
    tensor: int
    work: dict[str, Any]
    inference: dict[str, Any]
    split: TierSplit
    expert: int = 1


def cases(tensor70: int) -> Iterator[Case]:
    """All rows."""
    prompts = {"batch": 4, "page": 4096, "rows": 16384}
    for model, tensor in (("llama-3-8b", 1), ("llama-3-70b", tensor70)):
        layers = shape(model).layers
        splits = {
            "weights": TierSplit(layers=layers),
            "contexts": TierSplit(contexts=1.0),
            "weights and contexts": TierSplit(layers=layers, contexts=1.0),
        }
        for tokens in (32768, 65536, 131072):
            work = {"requests": 4, "prompt_tokens": tokens, "answer_tokens": 1}
            for away, split in splits.items():
                name = f"{model}, 4 prompts of {tokens // 1024}K, {away}"
                yield Case("prompts", name, model, tensor, work, prompts, split)
        one = {"batch": 1, "page": 4096, "rows": 4096}
        work = {"requests": 1, "prompt_tokens": 131072, "answer_tokens": 1}
        yield Case(
            "prompts", f"{model}, 1 prompt of 128K, contexts", model, tensor, work, one, splits["contexts"]
        )
        yield Case(
            "prompts", f"{model}, 1 prompt of 128K, weights", model, tensor, work, one, splits["weights"]
        )
    chat = {
        "requests": 64,
        "prompt_tokens": 4096,
        "answer_tokens": 128,
        "turns": 4,
        "message_tokens": 512,
        "idle_seconds": 60.0,
        "rate": 0.5,
    }
    usual = {"batch": 16, "page": 256, "rows": 2048}
    yield Case(
        "sessions",
        "llama-3-8b, 64 conversations of 4 turns",
        "llama-3-8b",
        1,
        chat,
        usual,
        TierSplit(idle=True),
    )
    yield Case(
        "sessions",
        "llama-3-70b, 64 conversations of 4 turns",
        "llama-3-70b",
        tensor70,
        chat,
        usual,
        TierSplit(idle=True),
    )
    shared = {
        "requests": 96,
        "prompt_tokens": 16384 + 512,
        "answer_tokens": 128,
        "shared_tokens": 16384,
        "shared_prompts": 12,
        "rate": 1.0,
    }
    few = {"batch": 8, "page": 256, "rows": 2048}
    yield Case(
        "shared prompts",
        "llama-3-8b, 12 system prompts of 16K in turn",
        "llama-3-8b",
        1,
        shared,
        few,
        TierSplit(idle=True),
    )
    for selected, again in ((2048, 0.9), (2048, 0.98), (4096, 0.9)):
        for batch in (1, 4):
            work = {
                "requests": batch,
                "prompt_tokens": 131072,
                "answer_tokens": 256,
                "selected_tokens": selected,
                "selected_again": again,
            }
            name = f"llama-3-8b, {batch} × 128K, {selected} selected, {again:.0%} of them again"
            sparse = {"batch": batch, "page": 4096, "rows": max(4096, 4096 * batch)}
            yield Case("sparse attention", name, "llama-3-8b", 1, work, sparse, TierSplit(idle=True))
    windowed = {"requests": 8, "prompt_tokens": 65536, "answer_tokens": 256}
    yield Case(
        "sliding windows",
        "gemma-3-12b, 8 × 64K, pages behind windows",
        "gemma-3-12b",
        1,
        windowed,
        {"batch": 8, "page": 1024, "rows": 8192},
        TierSplit(windows=True),
    )
    for batch, skew, count in (
        (1, 0.0, 8),
        (32, 0.0, 8),
        (32, 1.0, 8),
        (32, 2.0, 8),
        (32, 3.0, 8),
        (32, 3.0, 5),
    ):
        for how in ("device", "host"):
            work = {"requests": batch, "prompt_tokens": 512, "answer_tokens": 256, "expert_skew": skew}
            split = TierSplit(experts=count, experts_computed=how)  # type: ignore[arg-type]
            there = "computed there" if how == "host" else "fetched"
            name = f"deepseek-v3, batch {batch}, skew {skew:g}, {count} of 16 experts {there}"
            yield Case(
                "experts",
                name,
                "deepseek-v3",
                16,
                work,
                {"batch": batch, "page": 512, "rows": 2048},
                split,
                expert=16,
            )
    work = {"requests": 32, "prompt_tokens": 4096, "answer_tokens": 256}
    settings = {"batch": 32, "page": 256, "rows": 2048}
    for model, tensor in (("llama-3-8b", 1), ("llama-3-70b", tensor70)):
        layers = shape(model).layers
        for away, split in (
            ("26% of weights", TierSplit(layers=round(layers * 0.26))),
            ("contexts", TierSplit(contexts=1.0)),
        ):
            yield Case("dense decode", f"{model}, 32 × 4K, {away}", model, tensor, work, settings, split)


@cache
def passes(model: str, tensor: int, expert: int) -> PassModel:
    """A model's pass, captured."""
    fields = to_config(shape(model))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    axes = {"tensor": tensor, "expert": expert}
    return captured_pass(made, in_dtype(Strategy(version=1, axes=axes, check=False), made), model)


def row(case: Case, name: str) -> dict[str, Any]:
    """A case with everything on the device, and with its split."""
    model = passes(case.model, case.tensor, case.expert)
    cluster = replace(
        Cluster.named(f"{name}x{case.tensor}").for_workers(case.tensor), name=f"{name}x{case.tensor}"
    )
    work, settings = GenerationWorkload(**case.work), Inference(**case.inference)
    host = cluster.tier("host")
    whole = SplitQuestion(model, cluster, work, settings, float("inf"), {})
    tiers = replace(whole, tiers={"host": host.bytes / min(host.ranks, case.tensor)})
    found: dict[str, Any] = {}
    for which, question, split in (("here", whole, TierSplit()), ("away", tiers, case.split)):
        pricer = question.pricer(split)
        run = simulate_run(pricer, work, settings, room=tiers.tiers["host"])
        prompt, answer = loads(work, settings, model.split)
        load = prompt if work.answer_tokens == 1 else answer
        cost = pricer.price(load)
        found[which] = {
            "device_bytes": device_bytes(question, split, run, model),
            "seconds": run.seconds,
            "bound": run.bound,
            "pass": simulated(pricer, load).steady,
            "pass_bound": cost.bound,
            "limit": cost.limit,
            "first_token": run.first_token,
            "between_tokens": run.between_tokens,
            "tokens_per_second": run.tokens_per_second,
            "passes": run.passes,
            "link_bytes": run.streamed + run.fetched,
            "tier_bytes": question.footprint(split).of("host"),
        }
    here, away = found["here"], found["away"]
    scaled = "requests" if case.group in ("sessions", "shared prompts") else "prompt_tokens"
    more = (
        in_equal_memory(whole, tiers, case.split, scaled)
        if case.group not in ("experts", "dense decode")
        else None
    )
    slower = away["pass"] / here["pass"] - 1
    less, longer = 1 - away["device_bytes"] / here["device_bytes"], away["seconds"] / here["seconds"] - 1
    fits = here["device_bytes"] <= cluster.tier("device").bytes
    return {
        "group": case.group,
        "name": case.name,
        "cluster": cluster.name,
        "simulated": True,
        **found,
        "less": less,
        "longer": longer,
        "pass_longer": slower,
        "fits_without_tiers": fits,
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
    parts = dict(question.footprint(split).by_tier["device"])
    contexts, idle = parts.pop("contexts", 0.0), parts.pop("idle contexts", 0.0)
    if split.contexts or split.windows or question.work.selected_tokens:
        return sum(parts.values()) + contexts + idle
    return sum(parts.values()) + model.held(run.cached)


NONE = "–"


def longer(share: float) -> str:
    """A share that something takes longer."""
    return f"{share:+.1%}" if share < 1 else f"{share + 1:.1f}×"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = []
    for group in dict.fromkeys(one["group"] for one in rows):
        lines += [
            "",
            f"**{group[0].upper()}{group[1:]}** (simulated)",
            "",
            "| Workload | Cluster | Device, GiB | With the tier | Less | In equal memory | Pass | Its bound | "
            "Limited by | Pass takes | "
            "Run takes | Meets |",
            "|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|---|",
        ]
        for one in rows:
            if one["group"] != group:
                continue
            here, away = one["here"], one["away"]
            fits = "" if one["fits_without_tiers"] else " (does not fit)"
            more = one["times_in_equal_memory"]
            times = NONE if more is None else "≥ 16×" if more > 15.9 else f"{more:.1f}×"
            what = "" if more is None else " sessions" if one["scaled"] == "requests" else " context"
            lines.append(
                f"| {one['name']} | {one['cluster']} | {here['device_bytes'] / GB:.1f}{fits} | "
                f"{away['device_bytes'] / GB:.1f} | "
                f"{one['less']:.0%} | {times}{what} | {format_duration(away['pass'])} | "
                f"{format_duration(away['pass_bound'])} | {away['limit']} | "
                f"{longer(one['pass_longer'])} | {longer(one['longer'])} | {'yes' if one['meets'] else 'no'} |"
            )
    met = sum(one["meets"] for one in rows)
    lines += ["", f"{met} of {len(rows)} rows meet the aim."]
    return "\n".join(lines).strip()


def main() -> None:
    """Simulate the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="Groups of rows.")
    parser.add_argument("--clusters", nargs="+", default=["h100", "cloudmatrix384"])
    parser.add_argument("--print", action="store_true", help="Print the rows, and write nothing.")
    asked = parser.parse_args()
    rows = []
    for name in asked.clusters:
        for case in cases(8):
            if asked.only and case.group not in asked.only:
                continue
            rows.append(found := row(case, name))
            print(
                f"{found['cluster']:>18} {found['name']:<70} -{found['less']:.0%} {found['longer']:+.2%} "
                f"{'yes' if found['meets'] else 'no'}",
                flush=True,
            )
    if asked.print or asked.only:
        print(table(rows))
        return
    write("generate_simulated", {"rows": rows})
    put(PAGE, "generate_simulated.py", table(rows).splitlines())


if __name__ == "__main__":
    main()
