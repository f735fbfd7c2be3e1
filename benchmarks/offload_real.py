"""What others do about memory, and what we do, as real steps on this machine. Part of `offload.py`.

Each contestant is a process of its own, so that none pays for another's allocations; they take steps in turns. All
train the same model on the same batch with one thread, and a step is all of it: forward, backward, norm, clipping,
update. Its peak is that of one step under an observer that knows no plan.

On a processor a copy to "the host" would stay in the same memory. So what is offloaded goes to an arena that is not
counted (`UnseenHost`), behind a link whose bandwidth is emulated: a copy is over when its bytes divided by the
bandwidth have passed since the copy before it in its direction. Flash is real: files read and written past the system's
cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import taken_seconds
from offload_saved import Emulated, SavedElsewhere
from processes import scratch
from shapes import NO_ENDS, Fields, llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from training import (
    Step,
    build,
    captured,
    engine_step,
    graph_inputs,
    recipe_of,
    runtime_of,
    settled,
    silent_host,
    step_batch,
)
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from harness.observer import Observer, UnseenHost
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import registry
from hyper_parallel.config.train import AdamWConfig
from hyper_parallel.graph import executable
from hyper_parallel.offloading import OffloadTier, build_problem
from hyper_parallel.offloading.schedule.offload_pass import planned
from hyper_parallel.offloading.tiers import FlashTier, Tier, measure
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.capture_train_step import state
from hyper_parallel.step.recipe import Recipe

ROWS, POSITIONS = 2, 512
ARENA = 4 << 30
"""Bytes that the host tier may take at most."""
LR = 1e-3
_WARM = 2
"""Steps after the observed one that are not timed."""


@dataclass(frozen=True)
class Contestant:
    """How steps are run."""

    kind: str
    """`eager`, `graph`, or a way of others: `save_on_cpu`, `ahead`, `wrapper`, `fsdp`."""
    recompute: bool = False
    budget: int | None = None
    flash: bool = False


@dataclass(frozen=True)
class Setting:
    """What all contestants have in common."""

    layers: int
    bandwidth: float
    """Of the emulated link, B/s each way."""
    folder: str
    """Of the flash tier."""
    cluster: str
    """The file of this machine's cluster, by which plans are made."""

    @property
    def fields(self) -> Fields:
        return llama(512, self.layers, 8, **NO_ENDS)


# The contestants.


Made = tuple[Step, list[Tensor], dict[str, Any]]
"""A step, which gives its loss; what is there before it; and what is known beforehand."""


def contestant(how: Contestant, setting: Setting, stack: contextlib.ExitStack) -> Made:
    if how.kind == "graph":
        return _graph(how, setting, stack)
    if how.kind == "fsdp":
        return _fsdp(setting, stack)
    recipe = recipe_of(_model(how, setting, "fsdp", "cpu"), LR)
    model: Any = recipe.model
    layers = list(model.model.layers)
    if how.kind == "wrapper":
        for (
            layer
        ) in layers:  # torch's `offload_wrapper` does this; it renames the parameters, and so is not used
            layer.forward = partial(_saving_on_cpu, layer.forward)
    run = engine_step("eager", recipe, lambda: recipe, _batch(recipe, setting))
    there = [tensor for _, tensor in state(recipe.handle, recipe.optimizer).values()]
    if how.kind not in ("save_on_cpu", "ahead"):
        return run, there, {}
    tier = _host(setting, stack)
    saved = SavedElsewhere(tier, layers, there, how.kind == "ahead")
    return (lambda: saved.step(run)), there, {"losses": [saved.step(run)]}  # which counts


def _saving_on_cpu(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return forward(*args, **kwargs)


def _fsdp(setting: Setting, stack: contextlib.ExitStack) -> Made:
    """FSDP2 with its `CPUOffloadPolicy`, on one worker. What it would move is on the processor already."""
    recipe = recipe_of(_model(Contestant("eager"), setting, "fsdp", "cpu"), LR)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**setting.fields))
    model.load_state_dict(recipe.model.state_dict())
    (micro,) = _batch(recipe, setting).micro
    del recipe
    meeting = stack.enter_context(scratch()) / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    usual = AdamWConfig()
    groups = [
        {"params": [one for one in model.parameters() if (one.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, usual.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=usual.betas, eps=usual.eps, foreach=False, fused=False)

    def run() -> float:
        logits = model(micro.input_ids, position_ids=micro.position_ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run, [parameter.to_local() for parameter in model.parameters()], {}


def _graph(how: Contestant, setting: Setting, stack: contextlib.ExitStack) -> Made:
    step = captured(_model(how, setting, "traceable", None), ROWS, POSITIONS)
    about: dict[str, Any] = {}

    def make() -> Recipe:
        return recipe_of(_model(how, setting, "traceable", "cpu"), LR)

    if how.budget is None:
        executor, recipe = executable(step), make()
        tensors = graph_inputs(recipe, _batch(recipe, setting))
    else:
        backend = registry.backend("cpu")
        tier = _host(setting, stack)
        if how.flash:
            tier = stack.enter_context(FlashTier(Path(setting.folder), backend))
        space = OffloadTier(tier.name, tier.capacity, *measure(tier, backend))
        found = planned(step, Cluster.load(setting.cluster), how.budget, (space,))
        runtime = runtime_of(found, {tier.name: tier})
        executor = executable(found.step, cache=runtime)
        _, tensors = settled(make, partial(_batch, setting=setting), runtime)
        about = {
            "budget": how.budget,
            "foreseen_peak": found.plan.peak,
            "foreseen_s": found.plan.seconds,
            "out_GB_s": space.out.bandwidth / 1e9,
            "back_GB_s": space.back.bandwidth / 1e9,
        }
    losses: list[float] = []

    def host(point: str, shown: Sequence[Tensor]) -> Tensor | None:
        if point == "load":
            losses.append(float(shown[0]))
        return silent_host(point, shown)

    def run() -> float:
        executor.run(tensors, host)
        return losses[-1]

    return run, list(tensors.values()), about


def _model(how: Contestant, setting: Setting, lowering: Lowering, values: str | None) -> nn.Module:
    strategy = hp.Strategy(memory={"recompute": "layer" if how.recompute else "none"})
    return build(setting.fields, strategy, lowering=lowering, values=values)


def _batch(recipe: Recipe, setting: Setting) -> StepBatch:
    return step_batch(recipe, ROWS, POSITIONS, setting.fields["vocab_size"])


def _host(setting: Setting, stack: contextlib.ExitStack) -> Tier:
    return Emulated(stack.enter_context(UnseenHost(registry.backend("cpu"), ARENA)), setting.bandwidth)


def bounds(setting: Setting) -> dict[str, int]:
    """What single operators of the step use, and its peak without a budget."""
    step = captured(_model(Contestant("graph"), setting, "traceable", None), ROWS, POSITIONS)
    problem = build_problem(step, Cluster.load(setting.cluster), 2**50, ())
    return {"working_set": problem.working_set, "peak": max(problem.profile())}


def serve(how: Contestant, setting: Setting) -> Iterator[Any]:
    """One contestant's process (`Stepping`): what an observed step and some that warm up show, then seconds of each."""
    with contextlib.ExitStack() as stack:
        run, there, about = contestant(how, setting, stack)
        with Observer(there) as observer:
            losses = [*about.pop("losses", []), run()]
        losses += [run() for _ in range(_WARM)]
        yield {**about, "peak": observer.peak, "losses": losses}
        while True:
            yield taken_seconds(run)
