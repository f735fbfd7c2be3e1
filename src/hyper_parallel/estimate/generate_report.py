"""Report of a predicted generation: a table and JSON, each prediction beside its read-volume bound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.generate import GenerationRun
from hyper_parallel.estimate.generate_trace import SimulatedRun
from hyper_parallel.report.sheets import Fact, Sheet
from hyper_parallel.report.table import render, wrapped
from hyper_parallel.simulator.generation.choose_split import SplitChoice, SplitQuestion
from hyper_parallel.simulator.generation.pass_cost import PassCost
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.pass_trace import SimulatedPasses
from hyper_parallel.simulator.generation.tier_split import Footprint, TierSplit
from hyper_parallel.simulator.simulate import source_of
from hyper_parallel.trace import Timeline
from hyper_parallel.units import format_bytes, format_count, format_duration


@dataclass(frozen=True)
class GenerationPrediction:
    """What generation would take. Everything is simulated."""

    config: GenerationRun
    cluster: Cluster
    model: PassModel
    question: SplitQuestion
    choice: SplitChoice
    prompt: SimulatedPasses
    answer: SimulatedPasses
    run: SimulatedRun
    notes: tuple[str, ...] = ()
    """What was assumed, a sentence each."""

    @property
    def timeline(self) -> Timeline:
        """Of passes that generate."""
        return self.answer.timeline

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.run.tokens_per_second * self.model.split

    @property
    def footprint(self) -> Footprint:
        """Bytes of a rank by tier."""
        return self.choice.footprint

    def text(self, width: int = 120) -> str:
        """What the terminal is shown."""
        run, work = self.run, self.config.workload
        where = self.cluster.name or self.cluster.source
        ranks = f"{self.model.world} rank{'s' * (self.model.world > 1)}"
        first = f"simulated generation on {ranks} of {where}; constants: {source_of(self.cluster)}"
        figures = [
            Fact(
                "first token",
                format_duration(run.first_token),
                f"median of {work.answers:,} requests; 90% within {format_duration(run.first_token_p90)}",
            ),
            Fact(
                "between tokens", format_duration(run.between_tokens), "median of a request's further tokens"
            ),
            Fact(
                "tokens",
                f"{self.tokens_per_second:,.0f}/s",
                f"{self.tokens_per_second / self.model.world:,.0f}/s on each device; whole run "
                f"{format_duration(run.seconds)} in {run.passes:,} passes",
            ),
            Fact(
                "bound",
                f"{run.bound / run.seconds:.0%}",
                f"of the run that no implementation saves: {format_duration(run.bound)}, mostly {self.limit}",
            ),
            Fact(
                "peak of device memory",
                format_bytes(self.footprint.device),
                f"of {format_bytes(self.question.device)}; everything on the device: "
                f"{format_bytes(self.choice.whole_footprint.device)}",
            ),
            Fact(
                "link",
                f"{min(1.0, run.linked / run.seconds):.0%}",
                f"of the time in use: {format_bytes(run.streamed + run.fetched)} to the device, "
                f"{format_bytes(run.stored)} of idle contexts from it",
            ),
        ]
        tables = [_passes(self), _memory(self)]
        shown = render(first, figures, tables, "simulated", width).rstrip()
        lines: list[str] = []
        lines.append(f"away from the device: {split_line(self.choice.split, self.model)}")
        if not self.choice.fits:
            lines.append(f"IT DOES NOT FIT: {self.choice.reason}")
        elif self.choice.reason:
            lines.append(f"SLOW: {self.choice.reason}")
        if run.shared:
            lines.append(
                f"{format_count(run.shared)} of {format_count(run.prompt_tokens)} prompt tokens were computed before"
            )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([shown, "", *(wrapped(line, width) for line in lines)])

    @property
    def limit(self) -> str:
        """What decides the bound of most of the run."""
        return max(self.run.limits, key=lambda name: self.run.limits[name])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data. Times are seconds, memory is bytes; all are simulated."""
        return {
            "simulated": True,
            "cluster": self.cluster.name,
            "source": source_of(self.cluster),
            "ranks": self.model.world,
            "workload": self.config.workload.model_dump(),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_device": self.tokens_per_second / self.model.world,
            "run": asdict(self.run),
            "prompt_pass": pass_json(self.choice.run.prompt_pass, self.prompt.steady),
            "answer_pass": pass_json(self.choice.run.answer_pass, self.answer.steady),
            "memory": {tier: dict(parts) for tier, parts in self.footprint.by_tier.items()},
            "device_bytes": self.footprint.device,
            "device_bytes_without_tiers": self.choice.whole_footprint.device,
            "budget": self.question.device,
            "fits": self.choice.fits,
            "fast": self.choice.fast,
            "slower": self.choice.slower,
            "reason": self.choice.reason,
            "split": asdict(self.choice.split),
            "notes": list(self.notes),
        }


def pass_json(cost: PassCost, seconds: float) -> dict[str, Any]:
    """A pass: simulated seconds beside its bound."""
    return {
        "seconds": seconds,
        "bound": cost.bound,
        "limit": cost.limit,
        "read_bytes": cost.read,
        "copied_bytes": cost.copied,
        "reading": cost.reading,
        "computing": cost.computing,
        "linking": cost.linking,
        "collectives": cost.collectives,
    }


def split_line(split: TierSplit, model: PassModel) -> str:
    """What lies where, in words."""
    parts = []
    if split.layers:
        parts.append(f"weights of {split.layers} of {len(model.order)} layers, streamed in each pass")
    if split.experts:
        how = "computed there" if split.experts_computed == "host" else "fetched when chosen"
        parts.append(f"{split.experts} of {model.local_experts} experts of each layer, {how}")
    if split.contexts:
        parts.append(f"{split.contexts:.0%} of running contexts, streamed in each pass")
    if split.idle:
        parts.append("idle contexts and unused shared prompts")
    if split.windows and any(layer.attention and layer.attention.window for layer in model.kinds):
        parts.append("pages that windows have passed")
    return f"{'; '.join(parts)} in {split.tier}" if parts else "nothing"


def _passes(found: GenerationPrediction) -> Sheet:
    rows = []
    choice = found.choice
    parts = [("prompts", choice.run.prompt_load, choice.run.prompt_pass, found.prompt)]
    if found.config.workload.answer_tokens > 1:
        parts.append(("answers", choice.run.answer_load, choice.run.answer_pass, found.answer))
    for name, load, cost, sim in parts:
        rows.append(
            (
                name,
                f"{load.tokens:,}",
                f"{load.pieces[0].first:,}",
                format_duration(sim.steady),
                format_duration(cost.bound),
                cost.limit,
                format_bytes(cost.read),
                format_bytes(cost.copied),
            )
        )
    return Sheet(
        "one pass, beside its bound",
        ("pass", "tokens", "behind", "seconds", "bound", "limit", "read", "copied"),
        tuple(rows),
        drop=("copied", "behind"),
        note="read: bytes of weights and contexts that the pass must read; copied: over the link; behind: cached "
        "tokens of each request",
    )


def _memory(found: GenerationPrediction) -> Sheet:
    rows = []
    for tier, parts in found.footprint.by_tier.items():
        for part, size in parts.items():
            rows.append((tier, part, format_bytes(size)))
        rows.append((tier, "together", format_bytes(found.footprint.of(tier))))
    return Sheet("memory of a rank by tier", ("tier", "what", "bytes"), tuple(rows), left=2)
