"""Answer of a plan of generation: a table, sentences, JSON, and the file that simulate --generate reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.config import yaml12
from hyper_parallel.planner.generate.search import GenerationAnswer, GenerationPlan
from hyper_parallel.report.sheets import NONE, Sheet
from hyper_parallel.report.table import answer as report
from hyper_parallel.report.table import render, wrapped
from hyper_parallel.simulator.generation.tier_split import TierSplit
from hyper_parallel.simulator.simulate import source_of
from hyper_parallel.units import format_bytes, format_duration

_MIB = 1 << 20


def short(answer: GenerationAnswer, width: int = 80) -> str:
    """The verdict and its figures. The first word is `estimated`."""
    question, best = answer.question, answer.best
    where = question.cluster.name or question.cluster.source
    choice, run = best.choice, best.choice.run
    verdict = (
        f"estimated: {question.shape.name} on {question.devices} × {where} generates "
        f"{best.tokens_per_second:,.0f} tokens/s with {axes(best)}; it fits."
    )
    answers = (
        f", a pass of answers {format_duration(run.answer_pass.seconds)}"
        if best.work.answer_tokens > 1
        else ""
    )
    lines = [
        (
            "requests",
            f"{best.settings.batch:,} at once, contexts of up to {best.work.context:,} tokens",
        ),
        (
            "latency",
            f"first token {format_duration(run.first_token)}, a pass of prompts "
            f"{format_duration(run.prompt_pass.seconds)}{answers}",
        ),
        ("limit", _limits(best)),
        ("memory", f"{format_bytes(choice.footprint.device)} a device; {_where(choice.split)}"),
        *([("slow", choice.reason)] if choice.reason else []),
        ("next", "--out plan.yaml (for simulate --generate), --details (other plans)"),
    ]
    return report(verdict, lines, width)


def _where(split: TierSplit) -> str:
    return f"away from it, {away(split)}" if split != TierSplit() else "all on the device"


def _limits(best: GenerationPlan) -> str:
    run = best.choice.run
    answers = f"; of answers by {run.answer_pass.limit}" if best.work.answer_tokens > 1 else ""
    return f"a pass of prompts by {run.prompt_pass.limit}{answers}"


def text(answer: GenerationAnswer, top: int = 10, width: int = 140) -> str:
    """For the terminal. The first word is `estimated`."""
    question = answer.question
    where = question.cluster.name or question.cluster.source
    head = (
        f"estimated generation with {question.shape.name} on {question.devices} × {where}; constants: "
        f"{source_of(question.cluster)}"
    )
    rows = [_row(plan) for plan in answer.plans[:top]]
    sheet = Sheet(
        f"the best of {answer.tried} plans",
        (
            "axes",
            "passes",
            "away",
            "tokens/s",
            "prompt pass",
            "bound",
            "answer pass",
            "bound",
            "device",
            "slower",
        ),
        tuple(rows),
        left=3,
        drop=("bound", "bound", "slower", "passes", "prompt pass", "answer pass"),
        note="bound: what no implementation beats, for the bytes that must be read, FLOPs, the link and collectives; "
        "slower: than with everything on the device, if it held that",
    )
    lines = [render(head, [], [sheet], "estimated", width).rstrip(), ""]
    lines += [wrapped(sentence, width) for sentence in sentences(answer)]
    return "\n".join(lines)


def sentences(answer: GenerationAnswer) -> list[str]:
    """What the best plan rests on."""
    best = answer.best
    choice, run = best.choice, best.choice.run
    found = [
        f"{best.settings.batch:,} requests at once on each of {best.model.split} "
        f"group{'s' * (best.model.split > 1)} of ranks, "
        f"contexts of up to {best.work.context:,} tokens; first token of a prompt alone "
        f"{format_duration(run.first_token)}",
        f"a pass of prompts is limited by {run.prompt_pass.limit}"
        + (f", one of answers by {run.answer_pass.limit}" if best.work.answer_tokens > 1 else ""),
    ]
    if best.hidden and best.work.answer_tokens > 1:
        found.append(
            f"of the bytes that a dense decode reads, at most {best.hidden:.1%} hide behind memory reads on the "
            "link to "
            f"{next(iter(best.question.tiers))}"
        )
    whole, held = choice.whole_footprint.device, choice.footprint.device
    if choice.split != TierSplit():
        found.append(
            f"the device holds {format_bytes(held)} in place of {format_bytes(whole)}, {1 - held / whole:.0%} less, in "
            f"{choice.slower:+.1%} of the time"
        )
    for tier, parts in choice.footprint.by_tier.items():
        told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        found.append(f"{tier}: {told}")
    if choice.reason:
        found.append(f"SLOW: {choice.reason}")
    if any(layer.attention and layer.attention.latent for layer in best.model.kinds):
        found.append("latents are attended to as they are cached (absorbed weights)")
    return found


def away(split: TierSplit) -> str:
    """What lies away from the device, briefly."""
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


def to_json(answer: GenerationAnswer, top: int = 10) -> dict[str, Any]:
    """Plain data. Times are seconds, memory is bytes; all are estimated."""
    return {
        "estimated": True,
        "cluster": answer.question.cluster.name,
        "source": source_of(answer.question.cluster),
        "devices": answer.question.devices,
        "workload": answer.question.work.model_dump(),
        "tried": answer.tried,
        "says": sentences(answer),
        "plans": [plan_json(plan) for plan in answer.plans[:top]],
    }


def plan_json(plan: GenerationPlan) -> dict[str, Any]:
    """One plan."""
    choice, run, split = plan.choice, plan.choice.run, plan.choice.split
    return {
        "axes": {"replicate": plan.replicate, "tensor": plan.tensor, "expert": plan.expert},
        "inference": {"batch": plan.settings.batch, "page": plan.settings.page, "rows": plan.settings.rows},
        "split": {
            "tier": split.tier,
            "layers": split.layers,
            "experts": split.experts,
            "experts_computed": split.experts_computed,
            "contexts": split.contexts,
            "idle": split.idle,
            "windows": split.windows,
        },
        "tokens_per_second": plan.tokens_per_second,
        "first_token": run.first_token,
        "seconds": run.seconds,
        "bound": run.bound,
        "prompt_pass": {
            "seconds": run.prompt_pass.seconds,
            "bound": run.prompt_pass.bound,
            "limit": run.prompt_pass.limit,
        },
        "answer_pass": {
            "seconds": run.answer_pass.seconds,
            "bound": run.answer_pass.bound,
            "limit": run.answer_pass.limit,
        },
        "memory": {tier: dict(parts) for tier, parts in choice.footprint.by_tier.items()},
        "device_bytes": choice.footprint.device,
        "device_bytes_without_tiers": choice.whole_footprint.device,
        "hidden_share": plan.hidden,
        "slower": choice.slower,
        "fast": choice.fast,
        "reason": choice.reason,
    }


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
        "inference": {"batch": plan.settings.batch, "page": plan.settings.page, "rows": plan.settings.rows},
        "workload": {
            name: value for name, value in plan.work.model_dump().items() if value != getattr(default, name)
        },
    }
    choice = plan.choice
    head = (
        f"# estimated: {plan.tokens_per_second:,.0f} tokens/s, {format_bytes(choice.footprint.device)} on each "
        "device; away: "
        f"{away(choice.split)}\n"
    )
    return head + yaml12.write(data)
