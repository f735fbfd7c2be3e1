"""The two systems of `pipeline.py`: the same stages and weights under our runtime and torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shapes import NO_ENDS, Fields, llama
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from training import build, micro_batch, recipe_of
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.config.train import LossConfig
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_graph import Partition, partition
from hyper_parallel.layout import Mesh
from hyper_parallel.program import DeviceGroup
from hyper_parallel.program.build import Schedule
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.interpreter import Interpreter, stages_on, summed
from hyper_parallel.runtime.rank_transfers import ProcessTransfers
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.schedule import named_schedule
from hyper_parallel.shard.loss import cross_entropy_sum
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import capture_micro_batch
from hyper_parallel.step.micro_batch import MICRO_FIELDS


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    sequence: int
    micro_batches: int
    rows: int = 1
    """Of a micro-batch."""
    vocabulary: int = 2048

    @property
    def fields(self) -> Fields:
        options = {"vocabulary": self.vocabulary, "positions": self.sequence, "tie_word_embeddings": False}
        return llama(self.hidden, self.layers, max(2, self.hidden // 64), **options, **NO_ENDS)


PEERS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Schedules of torch.distributed.pipelining by the names of ours."""


class Stage(nn.Module):
    """Layers of a Llama as a stage of torch.distributed.pipelining, as the model's own `forward` runs them."""

    def __init__(self, model: LlamaForCausalLM, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList(layers)
        self.rotary_emb = model.model.rotary_emb
        self.norm = model.model.norm if last else None
        self.lm_head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        rotary = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


class Theirs:
    """torch.distributed.pipelining, with its stages of this rank."""

    def __init__(
        self, peer: Any, model: LlamaForCausalLM, schedule: Schedule, rank: int, data: MicroBatch
    ) -> None:
        """`schedule`: ours of the same name, for the ranks that its stages lie on; `data`: the step's, whole."""
        count = schedule.stages
        layers = list(model.model.layers)
        mine = [at for at, home in enumerate(schedule.placement) if home == rank]
        self._stages = stages = [
            PipelineStage(Stage(model, part, at == 0, at == count - 1), at, count, torch.device("cpu"))
            for at in mine
            for part in [layers[at * len(layers) // count : (at + 1) * len(layers) // count]]
        ]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy_sum(logits.flatten(0, -2), labels.flatten()) / data.labels.numel()

        several = peer not in (ScheduleGPipe, Schedule1F1B)
        given = stages if several else stages[0]
        self._schedule = peer(given, schedule.micro_batches, loss, scale_grads=False)
        self._named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if any(parameter is one for stage in stages for one in stage.submod.parameters())
        }
        self._first, self._last, self._data = 0 in mine, count - 1 in mine, data
        self._losses: list[Tensor] = []

    def step(self) -> None:
        """All micro-batches forward and back; the gradients of the step before are dropped first."""
        for parameter in self._named.values():
            parameter.grad = None
        self._losses = []
        given = (self._data.input_ids,) if self._first else ()
        if self._last:
            self._schedule.step(*given, target=self._data.labels, losses=self._losses, return_outputs=False)
        else:
            self._schedule.step(*given, return_outputs=False)

    def gradients(self) -> Mapping[str, Tensor]:
        """Of the last step, by the names of the parameters."""
        return {name: one.grad for name, one in self._named.items() if one.grad is not None}

    def loss(self) -> float | None:
        """Of the last step; None where another rank computes it."""
        return float(sum(one.detach() for one in self._losses)) if self._last else None

    def order(self) -> list[str]:
        """The actions of a step in the order in which this rank runs them, named as ours name them."""
        ran: list[str] = []
        changed = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")

        def noted(stage: PipelineStage, name: str) -> Callable[..., Any]:
            function = getattr(stage, name)

            def run(micro_batch: int, *args: Any, **given: Any) -> Any:
                whole = given.get("full_backward", True)
                kind = {"forward_one_chunk": "F", "backward_one_chunk": "B" if whole else "I"}.get(name, "W")
                ran.append(f"{kind}{stage.stage_index}.{micro_batch}")
                return function(micro_batch, *args, **given)

            return run

        for stage in self._stages:
            for name in changed:
                setattr(stage, name, noted(stage, name))
        self.step()
        for stage in self._stages:
            for name in changed:
                delattr(stage, name)
        return ran


class Ours:
    """hyper_parallel.runtime, likewise."""

    def __init__(
        self, cut: Partition, schedule: Schedule, state: Mapping[str, Tensor], rank: int, data: MicroBatch
    ) -> None:
        groups = [DeviceGroup(Mesh(("shard", 1)), (at,), f"stage {at}") for at in range(schedule.ranks)]
        program = pipeline_program(cut, schedule, groups)
        stages = stages_on(program, cut, groups[rank].name)
        self._runners = {stage.number: StageRunner(stage, state) for stage in stages}
        transfers = ProcessTransfers(rank, deadline=120.0)
        self._run = Interpreter(program, cut, rank, transfers, torch.device("cpu"), self._runners)
        self._run.compare()
        step, tokens = torch.tensor(0), torch.tensor(float(data.labels.numel()))
        parts = {f"micro.{name}": getattr(data, name).chunk(schedule.micro_batches) for name in MICRO_FIELDS}
        self._batches = [
            {"step": step, "tokens": tokens, **{name: chunks[at] for name, chunks in parts.items()}}
            for at in range(schedule.micro_batches)
        ]

    def step(self) -> None:
        for runner in self._runners.values():
            runner.begin({})
        self._run.run(self._batches)

    def gradients(self) -> Mapping[str, Tensor]:
        return summed(runner.gradients for runner in self._runners.values())

    def loss(self) -> float | None:
        total = summed(runner.totals for runner in self._runners.values()).get("loss")
        return None if total is None else float(total)


System = Ours | Theirs


class Pairs:
    """Both systems of one model on this rank, for one schedule after the other."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self._case, self._rank, self._world = case, rank, world
        begun = time.perf_counter()
        # Their stage returns its logits whole, so ours computes them whole.
        recipe = recipe_of(build(case.fields, alone=True), loss=LossConfig(chunk="none"), clip=None)
        self._step = capture_micro_batch(recipe, case.rows, case.sequence, case.micro_batches)
        self.captured_s = time.perf_counter() - begun
        torch.manual_seed(0)
        self._model = LlamaForCausalLM(LlamaConfig(**case.fields))
        self._data = micro_batch(case.rows * case.micro_batches, case.sequence, case.vocabulary)
        self._cuts: dict[int, Partition] = {}

    def of(self, name: str) -> tuple[Ours, Theirs, Schedule]:
        case, model = self._case, self._model
        state = {f"parameter.{name}": one.detach() for name, one in model.named_parameters()}
        state |= {f"buffer.{name}": one for name, one in model.named_buffers()}
        schedule = named_schedule(name, self._world, case.micro_batches)
        stages = schedule.stages
        if stages not in self._cuts:
            homes = {f"model.layers.{at}": at * stages // case.layers for at in range(case.layers)}
            self._cuts[stages] = partition(self._step, by_modules(homes), stages)
        ours = Ours(self._cuts[stages], schedule, state, self._rank, self._data)
        return ours, Theirs(PEERS[name], model, schedule, self._rank, self._data), schedule
