"""One rank of `pipeline.py`: the same stages and weights under our runtime and torch.distributed.pipelining."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pipeline_timing import Effort, System, measured
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
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_graph import Partition, partition
from hyper_parallel.layout import Mesh
from hyper_parallel.program import DeviceGroup
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.runtime.transfers import ProcessTransfers
from hyper_parallel.schedule import named_schedule
from hyper_parallel.schedule.schedule import Schedule
from hyper_parallel.shard.loss import cross_entropy_sum
from hyper_parallel.step.capture_micro_batch import capture_micro_batch
from hyper_parallel.step.lr_schedule import schedule as lr_schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe


@dataclass(frozen=True)
class Case:
    """A model and its step."""

    hidden: int
    layers: int
    sequence: int
    micro_batches: int
    rows: int = 1
    """Of a micro-batch."""
    vocabulary: int = 2048

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=max(2, self.hidden // 64),
            num_key_value_heads=max(2, self.hidden // 64) // 2,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )


@dataclass(frozen=True)
class Peer:
    """A schedule of torch.distributed.pipelining and ours of the same name."""

    name: str
    theirs: Any
    stages_per_rank: int


PEERS = {
    "gpipe": Peer("gpipe", ScheduleGPipe, 1),
    "1f1b": Peer("1f1b", Schedule1F1B, 1),
    "interleaved-1f1b": Peer("interleaved-1f1b", ScheduleInterleaved1F1B, 2),
    "zb-h1": Peer("zb-h1", ScheduleInterleavedZeroBubble, 1),
    "zb-v": Peer("zb-v", ScheduleZBVZeroBubble, 2),
    "dualpipev": Peer("dualpipev", ScheduleDualPipeV, 2),
}


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


@dataclass(frozen=True)
class Data:
    """A step's batch, whole."""

    ids: Tensor
    labels: Tensor

    @classmethod
    def of(cls, case: Case) -> Data:
        rows = case.rows * case.micro_batches
        drawn = torch.randint(
            case.vocabulary, (rows, case.sequence + 1), generator=torch.Generator().manual_seed(0)
        )
        return cls(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())

    @property
    def tokens(self) -> int:
        return self.labels.numel()


class Theirs:
    """torch.distributed.pipelining."""

    def __init__(
        self, case: Case, peer: Peer, model: LlamaForCausalLM, schedule: Schedule, rank: int, data: Data
    ) -> None:
        """`schedule`: ours of the same name, for the ranks that its stages lie on."""
        count = schedule.stages
        layers = list(model.model.layers)
        mine = [at for at, home in enumerate(schedule.placement) if home == rank]
        self._stages = stages = [
            PipelineStage(
                Stage(
                    model,
                    layers[at * len(layers) // count : (at + 1) * len(layers) // count],
                    at == 0,
                    at == count - 1,
                ),
                at,
                count,
                torch.device("cpu"),
            )
            for at in mine
        ]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy_sum(logits.flatten(0, -2), labels.flatten()) / data.tokens

        several = peer.theirs not in (ScheduleGPipe, Schedule1F1B)
        self._schedule = peer.theirs(
            stages if several else stages[0], case.micro_batches, loss, scale_grads=False
        )
        self._named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if any(parameter is one for stage in stages for one in stage.submod.parameters())
        }
        self._first, self._last, self._data = 0 in mine, count - 1 in mine, data
        self._losses: list[Tensor] = []

    def step(self) -> None:
        """As `System.step`."""
        for parameter in self._named.values():
            parameter.grad = None
        self._losses = []
        given = (self._data.ids,) if self._first else ()
        if self._last:
            self._schedule.step(*given, target=self._data.labels, losses=self._losses, return_outputs=False)
        else:
            self._schedule.step(*given, return_outputs=False)

    def gradients(self) -> Mapping[str, Tensor]:
        """As `System.gradients`."""
        return {name: one.grad for name, one in self._named.items() if one.grad is not None}

    def loss(self) -> float | None:
        """As `System.loss`."""
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
    """hyper_parallel.runtime."""

    def __init__(
        self, cut: Partition, schedule: Schedule, state: Mapping[str, Tensor], rank: int, data: Data
    ) -> None:
        groups = [DeviceGroup(Mesh(("shard", 1)), (at,), f"stage {at}") for at in range(schedule.ranks)]
        program = pipeline_program(cut, schedule, groups)
        self._run = Interpreter(program, cut, state, rank, ProcessTransfers(rank, deadline=120.0))
        self._run.compare()
        positions = torch.arange(data.ids.size(1)).repeat(data.ids.size(0) // schedule.micro_batches, 1)
        rows = torch.arange(data.ids.size(0))
        tokens = torch.tensor(float(data.tokens))
        self._batches = [
            {
                "micro.input_ids": ids,
                "micro.labels": labels,
                "micro.position_ids": positions,
                "micro.rows": of,
                "step": torch.tensor(0),
                "tokens": tokens,
            }
            for ids, labels, of in zip(
                *(one.chunk(schedule.micro_batches) for one in (data.ids, data.labels, rows)), strict=True
            )
        ]
        self._values: Any = None

    def step(self) -> None:
        """As `System.step`."""
        self._values = None
        self._values = self._run.run(self._batches)

    def gradients(self) -> Mapping[str, Tensor]:
        """As `System.gradients`."""
        found: Mapping[str, Tensor] = self._values.gradients
        return found

    def loss(self) -> float | None:
        """As `System.loss`."""
        total = self._values.totals.get("loss")
        return None if total is None else float(total)


def captured(case: Case) -> StepGraph:
    """One micro-batch of the case's model, without weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(case.config)
    hp.parallelize(model, hp.Strategy(), lowering="traceable", alone=True)
    recipe = Recipe(
        model,
        hp.sharded(model),
        build_optimizer(model, AdamWConfig()),
        lr_schedule(ScheduleConfig(name="constant"), 1),
        # Their stage returns its logits whole, so ours computes them whole.
        loss=LossConfig(chunk="none"),
    )
    return capture_micro_batch(recipe, case.rows, case.sequence, case.micro_batches)


def differences(ours: System, theirs: System) -> dict[str, float]:
    """Of the loss, and the largest of a gradient's elements over that gradient's largest."""
    mine, other = ours.gradients(), theirs.gradients()
    assert mine.keys() == other.keys(), sorted(mine.keys() ^ other.keys())
    worst = max(float((mine[name] - other[name]).abs().max() / other[name].abs().max()) for name in mine)
    a, b = ours.loss(), theirs.loss()
    assert (a is None) == (b is None)
    loss = 0.0 if a is None or b is None else abs(a - b)
    found = torch.tensor([worst, loss])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"gradient": float(found[0]), "loss": float(found[1])}


def peaks(ours: System, theirs: System) -> dict[str, float]:
    """The most bytes of tensors over what was there before the step, of the rank with most; gradients included."""
    from allocations import Allocations

    found: dict[str, float] = {}
    for name, system in (("ours", ours), ("theirs", theirs)):
        system.step()
        gc.collect()
        held = [*system.gradients().values()]
        count = Allocations(held)
        del held
        system.step()
        most = torch.tensor(float(count.most))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = float(most)
    return found


def worker(
    rank: int,
    world: int,
    port: int,
    case: Case,
    names: Sequence[str],
    effort: Effort,
    answers: Any,
) -> None:
    """`pipeline.py`'s rank; rank 0 answers, by the schedule's name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    begun = time.perf_counter()
    step = captured(case)
    seconds = time.perf_counter() - begun
    torch.manual_seed(0)
    model = LlamaForCausalLM(case.config)
    state = {f"parameter.{name}": one.detach() for name, one in model.named_parameters()}
    state |= {f"buffer.{name}": one for name, one in model.named_buffers()}
    data = Data.of(case)
    cuts: dict[int, Partition] = {}
    result: dict[str, Any] = {}
    for name in names:
        peer = PEERS[name]
        schedule = named_schedule(name, world, case.micro_batches)
        stages = schedule.stages
        if stages not in cuts:
            homes = {f"model.layers.{at}": at * stages // case.layers for at in range(case.layers)}
            cuts[stages] = partition(step, by_modules(homes), stages)
        ours = Ours(cuts[stages], schedule, state, rank, data)
        theirs = Theirs(case, peer, model, schedule, rank, data)
        both: tuple[System, System] = (ours, theirs)
        for _ in range(3):  # warm-up
            for system in both:
                system.step()
        same = theirs.order() == [str(action) for action in schedule.orders[rank]]
        everyone = [False] * world
        dist.all_gather_object(everyone, same)
        result[name] = {
            "same_order": all(everyone),
            "difference": differences(*both),
            "captured_s": seconds,
        }
        if not effort.blocks:
            result[name]["peak_bytes"] = peaks(*both)
        else:
            result[name]["blocks"] = measured(*both, rank, world, effort, len(result))
    if rank == 0:
        answers.put(result)
    dist.barrier()
    dist.destroy_process_group()
