"""Prediction of a run: its Timeline, memory fit and assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.graph import Kind, Lifetime
from hyper_parallel.report import table
from hyper_parallel.report.pipeline import PipelineFigures
from hyper_parallel.report.sheets import heading, task_facts, task_sheets, verdict
from hyper_parallel.report.table import render, wrapped
from hyper_parallel.step.build import on_meta, transformers_config
from hyper_parallel.step.multimodal import refuse_media_model
from hyper_parallel.step.out_of_memory import remedies
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Peak, Timeline
from hyper_parallel.trace.simulated_error import simulated_between
from hyper_parallel.trace.timeline import step_parts
from hyper_parallel.units import format_bytes, format_count, format_duration, format_interval


def has_experts(model: nn.Module) -> bool:
    """Whether a model is a mixture of experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def micro_batch(config: RunConfig) -> int:
    """Sequences that a rank computes at once."""
    return config.micro_batch


def count_micro_batches(config: RunConfig) -> int:
    """Micro-batches of a step on each rank."""
    share = config.train.batch // config.effective_strategy.axes.data
    return share // config.micro_batch


def model_of(config: RunConfig, notes: list[str]) -> nn.Module:
    """The run's model on the meta device. Needs no data: the vocabulary is the config's, or what `data.tokenizer` asks
    for, which `notes` then tells."""
    hf: Any = transformers_config(config.model)
    refuse_media_model(hf, "the simulator")
    given = config.model.config
    if given is not None and "vocab_size" not in given:
        if config.data.tokenizer.path is not None:
            raise ConfigError(
                "model.config.vocab_size: is left out, and inspect reads no tokenizer; write the vocabulary's size"
            )
        hf.vocab_size = config.data.tokenizer.trained_size
        notes.append(f"the vocabulary is taken to have data.tokenizer.vocab_size = {hf.vocab_size} tokens")
    if given is not None and "pad_token_id" not in given:
        hf.pad_token_id = None
    return on_meta(hf, config)


@dataclass(frozen=True)
class Prediction:
    """What one step of a run would take."""

    timeline: Timeline
    strategy: Strategy
    parameters: int
    """Of the whole model."""
    tokens: int
    """Of a step, all ranks together."""
    sequence: int
    micro_batch: int
    """Rows that a rank computes at once."""
    head: str | None = None
    """The module that gives the logits."""
    notes: tuple[str, ...] = ()
    """What was assumed, a sentence each."""
    pipeline: PipelineFigures | None = None
    """Of a run with `axes.pipeline`, whose Timeline is of its tasks."""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """Of such a run, the seconds of its stages' passes by part."""
    mixture: bool = False
    """Whether the model is a mixture of experts."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by class of operators, exposed collective and cause of waiting (`trace.timeline`)."""
        return step_parts(self.timeline, self.tasks)

    @property
    def between(self) -> tuple[float, float]:
        """Seconds between which 90% of measured steps lie, by published runs that were simulated."""
        return simulated_between(self.timeline.step, self.mixture)

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.tokens / self.timeline.step / self.timeline.trace.world

    @property
    def capacity(self) -> float | None:
        """Bytes of a device's memory; None where the cluster does not tell."""
        return self.timeline.capacity.get("device")

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None where that is not known."""
        return None if self.capacity is None else self.timeline.peak.bytes <= self.capacity

    @property
    def remedies(self) -> list[str]:
        """Keys of the run file that would make it fit, that which helps most first; none where it fits."""
        if self.fits is not False:
            return []
        return remedies(*_alive(self.timeline.peak), self.strategy, self.head, self.micro_batch)

    def text(self, width: int = 120) -> str:
        """What the terminal is shown."""
        timeline, trace = self.timeline, self.timeline.trace
        peak = format_bytes(timeline.peak.bytes)
        shown = _pipeline_text(timeline, self.pipeline, width) if self.pipeline else table(timeline, width)
        lines: list[str] = []
        lines.append(
            f"simulated: {format_count(self.parameters)} parameters, {format_count(self.tokens)} tokens a step in "
            f"{trace.micro_batches} micro-batch{'es' * (trace.micro_batches != 1)} of {self.micro_batch} × "
            f"{self.sequence}; predicted {format_duration(timeline.step)} a step "
            f"(90%: {format_interval(timeline.step, self.between)}), "
            f"{self.tokens_per_second:,.0f} tokens/s on each device"
        )
        if self.pipeline:
            lines.append(self.pipeline.line())
        if self.fits:
            lines.append(f"it fits: predicted peak {peak} of {format_bytes(self.capacity or 0)}")
        elif self.fits is False:
            lines.append(
                f"IT DOES NOT FIT: predicted peak {peak} of {format_bytes(self.capacity or 0)} on each device"
            )
            lines += [f"  would help: {remedy}" for remedy in self.remedies]
        lines += [f"note: {note}" for note in self.notes]
        told = [wrapped(line, width, "    " if line.startswith("  ") else "  ") for line in lines]
        return "\n".join([wrapped(verdict(timeline), width), "", shown.rstrip(), "", *told])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data. Times are seconds, memory is bytes; all are predicted."""
        timeline = self.timeline
        masked = timeline.masked
        bubbles = timeline.bubbles
        return {
            "predicted": timeline.predicted,
            "cluster": timeline.cluster,
            "device": timeline.device,
            "source": timeline.source,
            "ranks": timeline.trace.world,
            "axes": {axis: self.strategy.axes.degree(axis) for axis in self._axes},
            "parameters": self.parameters,
            "tokens": self.tokens,
            "micro_batches": timeline.trace.micro_batches,
            "step": timeline.step,
            "interval": list(self.between),
            "tokens_per_second_per_device": self.tokens_per_second,
            "mfu": timeline.mfu,
            "computing": timeline.computing,
            "communicating": timeline.communicating,
            "exposed": timeline.exposed,
            "masked": {"blocked": masked.blocked, "end_to_end": masked.end_to_end},
            "waiting": {
                "imbalance": bubbles.imbalance,
                "fill_drain": bubbles.fill_drain,
                "copies": bubbles.copies,
                "runtime": bubbles.runtime,
            },
            "memory": {
                "peak": timeline.peak.bytes,
                "by_kind": timeline.peak_by_kind(),
                "device": self.capacity,
                "fits": self.fits,
                "remedies": self.remedies,
            },
            "phases": {name: one.total for name, one in timeline.by_phase().items()},
            "modules": {name: one.total for name, one in timeline.by_module().items()},
            "kinds": {name: one.total for name, one in timeline.by_kind().items()},
            "axes_communicating": {name: one.communication for name, one in timeline.by_axis().items()},
            **({"pipeline": self.pipeline.to_json()} if self.pipeline else {}),
            "notes": list(self.notes),
        }

    @property
    def _axes(self) -> tuple[str, ...]:
        return (*(("pipeline",) if self.pipeline else ()), *self.strategy.axes.order, "expert")


def _pipeline_text(timeline: Timeline, pipeline: PipelineFigures, width: int) -> str:
    """Figures and tables of a Timeline of tasks, which has no operators."""
    tables = [*pipeline.sheets(), *task_sheets(timeline)]
    return render(heading(timeline), task_facts(timeline), tables, timeline.word, width)


def _alive(peak: Peak) -> tuple[list[Lifetime], dict[Kind, int]]:
    """What is alive at a peak, as lifetimes."""
    found: list[Lifetime] = []
    kinds: Counter[Kind] = Counter()
    for alive in peak.alive:
        op, held = alive.op, alive.held
        module, phase = (op.module, op.phase) if op else ("", "")
        found.append(Lifetime(held.storage, held.bytes, held.kind, 0, 0, held.name or None, module, phase))
        kinds[held.kind] += held.bytes
    return found, kinds
