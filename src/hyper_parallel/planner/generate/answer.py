"""Answer of a plan of generation, and the file that simulate --generate reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hyper_parallel.config import yaml12
from hyper_parallel.planner.answer import Answer, OutputFile
from hyper_parallel.planner.generate.search import GenerationPlan, GenerationPlans
from hyper_parallel.report.sheets import NONE, Sheet
from hyper_parallel.simulator.generation.tier_split import TierSplit
from hyper_parallel.simulator.simulate import source_of
from hyper_parallel.units import format_bytes, format_duration

WORD = "estimated"
_MIB = 1 << 20


def answer_of(
    found: GenerationPlans, model: Mapping[str, Any] | str = "", cluster: str = "", top: int = 10
) -> Answer:
    """The answer with the best `top` plans. Of the plan's file: `model`, its section or a published name, and
    `cluster`, as a command names it."""
    question, best = found.question, found.best
    choice, run = best.choice, best.choice.run
    answers = best.work.answer_tokens > 1
    machine = f"{question.devices} × {question.cluster.title}"
    latency = f"first token {format_duration(run.first_token)}"
    latency += f", a pass of prompts {format_duration(run.prompt_pass.seconds)}"
    limit = f"a pass of prompts by {run.prompt_pass.limit}"
    if answers:
        latency += f", a pass of answers {format_duration(run.answer_pass.seconds)}"
        limit += f"; of answers by {run.answer_pass.limit}"
    where = "all on the device" if choice.split == TierSplit() else f"away from it, {away(choice.split)}"
    sentences = list(_sentences(best))
    return Answer(
        word=WORD,
        verdict=f"{WORD}: {question.shape.name} on {machine} generates {best.tokens_per_second:,.0f} tokens/s with "
        f"{axes(best)}; it fits.",
        lines=[
            (
                "requests",
                f"{best.settings.batch:,} at once, contexts of up to {best.work.context:,} tokens",
            ),
            ("latency", latency),
            ("limit", limit),
            ("memory", f"{format_bytes(choice.footprint.device)} a device; {where}"),
            *([("slow", choice.reason)] if choice.reason else []),
            ("next", "--out plan.yaml (for simulate --generate), --details (other plans)"),
        ],
        heading=f"{WORD} generation with {question.shape.name} on {machine}; constants: "
        f"{source_of(question.cluster)}",
        sheets=[_sheet(found, top)],
        sentences=sentences,
        data={
            "estimated": True,
            "cluster": question.cluster.name,
            "source": source_of(question.cluster),
            "devices": question.devices,
            "workload": question.work.model_dump(),
            "tried": found.tried,
            "says": sentences,
            "plans": [_data(plan) for plan in found.plans[:top]],
        },
        file=lambda: OutputFile(file_text(best, model), (), "simulate", f" --generate --cluster {cluster}"),
    )


def _sheet(found: GenerationPlans, top: int) -> Sheet:
    """The best plans, a row each."""
    columns = ("axes", "passes", "away", "tokens/s", "prompt pass", "bound", "answer pass", "bound", "device")
    return Sheet(
        f"the best of {found.tried} plans",
        (*columns, "slower"),
        tuple(_row(plan) for plan in found.plans[:top]),
        left=3,
        drop=("bound", "bound", "slower", "passes", "prompt pass", "answer pass"),
        note="bound: what no implementation beats, for the bytes that must be read, FLOPs, the link and collectives; "
        "slower: than with everything on the device, if it held that",
    )


def _sentences(best: GenerationPlan) -> Iterator[str]:
    """The sentences on what the best plan rests on."""
    choice, run, split = best.choice, best.choice.run, best.model.split
    yield (
        f"{best.settings.batch:,} requests at once on each of {split} group{'s' * (split > 1)} of ranks, "
        f"contexts of up to {best.work.context:,} tokens; first token of a prompt alone "
        f"{format_duration(run.first_token)}"
    )
    answers = f", one of answers by {run.answer_pass.limit}" if best.work.answer_tokens > 1 else ""
    yield f"a pass of prompts is limited by {run.prompt_pass.limit}{answers}"
    if best.hidden and best.work.answer_tokens > 1:
        yield (
            f"of the bytes that a dense decode reads, at most {best.hidden:.1%} hide behind memory reads on the "
            f"link to {next(iter(best.question.tiers))}"
        )
    whole, held = choice.whole_footprint.device, choice.footprint.device
    if choice.split != TierSplit():
        yield (
            f"the device holds {format_bytes(held)} in place of {format_bytes(whole)}, {1 - held / whole:.0%} less, in "
            f"{choice.slower:+.1%} of the time"
        )
    for tier, parts in choice.footprint.by_tier.items():
        yield f"{tier}: {', '.join(f'{name} {format_bytes(size)}' for name, size in parts.items())}"
    if choice.reason:
        yield f"SLOW: {choice.reason}"
    if any(layer.attention and layer.attention.latent for layer in best.model.kinds):
        yield "latents are attended to as they are cached (absorbed weights)"


def away(split: TierSplit) -> str:
    """The parts that lie away from the device, briefly."""
    parts = []
    if split.layers:
        parts.append(f"{split.layers} layers' weights")
    if split.experts:
        parts.append(
            f"{split.experts} experts ({'computed there' if split.experts_computed == 'host' else 'fetched'})"
        )
    if split.contexts:
        parts.append(f"{split.contexts:.0%} of contexts")
    if split.idle:
        parts.append("idle")
    return f"{split.tier}: {', '.join(parts)}" if parts else "–"


def axes(plan: GenerationPlan) -> str:
    """Degrees above 1."""
    named = (("replicate", plan.replicate), ("tensor", plan.tensor), ("expert", plan.expert))
    return " · ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "one device"


def _row(plan: GenerationPlan) -> tuple[str, ...]:
    run = plan.choice.run
    return (
        axes(plan),
        f"{plan.settings.rows} of {plan.settings.page}",
        away(plan.choice.split),
        f"{plan.tokens_per_second:,.0f}",
        format_duration(run.prompt_pass.seconds),
        format_duration(run.prompt_pass.bound),
        *(
            (format_duration(run.answer_pass.seconds), format_duration(run.answer_pass.bound))
            if plan.work.answer_tokens > 1
            else (NONE, NONE)
        ),
        format_bytes(plan.choice.footprint.device),
        f"{max(0.0, plan.choice.slower):.1%}",
    )


def _data(plan: GenerationPlan) -> dict[str, Any]:
    """One plan as plain data. Times are seconds, memory is bytes; all are estimated."""
    choice, run = plan.choice, plan.choice.run
    return {
        "axes": {"replicate": plan.replicate, "tensor": plan.tensor, "expert": plan.expert},
        "inference": _inference(plan),
        "split": {name: getattr(choice.split, name) for name in _SPLIT},
        "tokens_per_second": plan.tokens_per_second,
        "first_token": run.first_token,
        "seconds": run.seconds,
        "bound": run.bound,
        "prompt_pass": {name: getattr(run.prompt_pass, name) for name in _PASS},
        "answer_pass": {name: getattr(run.answer_pass, name) for name in _PASS},
        "memory": {tier: dict(parts) for tier, parts in choice.footprint.by_tier.items()},
        "device_bytes": choice.footprint.device,
        "device_bytes_without_tiers": choice.whole_footprint.device,
        "hidden_share": plan.hidden,
        "slower": choice.slower,
        "fast": choice.fast,
        "reason": choice.reason,
    }


_SPLIT = ("tier", "layers", "experts", "experts_computed", "contexts", "idle", "windows")
_PASS = ("seconds", "bound", "limit")


def _inference(plan: GenerationPlan) -> dict[str, int]:
    return {"batch": plan.settings.batch, "page": plan.settings.page, "rows": plan.settings.rows}


def file_text(plan: GenerationPlan, model: Mapping[str, Any] | str) -> str:
    """The plan as a file for `simulate --generate`. `model`: its section, or a published name."""
    degrees = (("replicate", plan.replicate), ("tensor", plan.tensor), ("expert", plan.expert))
    strategy: dict[str, Any] = {"axes": {name: degree for name, degree in degrees if degree > 1}}
    if plan.choice.split != TierSplit():
        tiers = {
            tier: f"{int(size) // _MIB}MiB" for tier, size in plan.question.tiers.items() if tier != "pool"
        }
        if "pool" in plan.question.tiers:
            tiers["pool"] = f"{int(plan.question.tiers['pool'] * plan.model.world) // _MIB}MiB"
        strategy["memory"] = {"device": f"{int(plan.question.device) // _MIB}MiB", **tiers}
    default = type(plan.work)()
    data = {
        "version": 1,
        "model": model,
        "strategy": strategy,
        "inference": _inference(plan),
        "workload": {
            name: value for name, value in plan.work.model_dump().items() if value != getattr(default, name)
        },
    }
    device = format_bytes(plan.choice.footprint.device)
    figures = (
        f"{plan.tokens_per_second:,.0f} tokens/s, {device} on each device; away: {away(plan.choice.split)}"
    )
    return f"# {WORD}: {figures}\n{yaml12.write(data)}"
