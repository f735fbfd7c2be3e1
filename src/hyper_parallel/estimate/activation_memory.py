"""Activation memory and communication of one step, measured on fake tensors as one rank.

The model's own forward and backward pass runs, with every wrapper and collective of the strategy; only the arithmetic
is left out. *Saved* is every byte alive at the end of the forward pass that does not come from weights alone: it is
there because autograd keeps it. The *peak* adds what is alive at the worst moment until the end of the backward pass,
the gradients that parameters end up with excepted, which are told apart.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.collectives import Collective, counting
from hyper_parallel.compat.fake_process_group import fake_mode, make_fake
from hyper_parallel.compat.storage_tracker import Kind, Storages
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.resident_memory import count_micro_batches
from hyper_parallel.graph.step_context import StepContext
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.packed_documents import documents_known
from hyper_parallel.step.optimizer import build_optimizer

Calls = Counter[tuple[str, str, str, str]]
"""(axis, link levels, kind, "count" or "bytes") to how much."""


@dataclass
class Measured:
    """What one rank saves and sends. Figures of models with other numbers of layers can be added and scaled."""

    saved: Counter[str] = field(default_factory=Counter)
    """Module pattern to the bytes that it leaves alive at the end of the forward pass."""
    over: int = 0
    """Bytes of the peak above what is saved."""
    calls: Calls = field(default_factory=Counter)
    """Of one step, the optimizer's included."""

    def plus(self, more: Measured, fewer: Measured, times: int) -> Measured:
        """This and `times` what is in `more` and not in `fewer`: what one layer more costs."""

        def sums(here: Counter[Any], more: Counter[Any], fewer: Counter[Any]) -> Counter[Any]:
            keys = {**here, **more, **fewer}
            return Counter({key: here[key] + times * (more[key] - fewer[key]) for key in keys})

        return Measured(
            sums(self.saved, more.saved, fewer.saved),
            max(self.over, more.over),
            sums(self.calls, more.calls, fewer.calls),
        )


def measure(model: nn.Module, config: RunConfig, rows: int) -> Measured:
    """One step of a model that was parallelized on the meta device, `rows` sequences a micro-batch.

    Inside `fake_ranks`. Every sequence is taken to be one document.
    """
    handle, names = sharded(model), AxisNames(sharded(model))
    patterns = _Patterns(model, handle.plan.layers)
    mode = fake_mode()
    make_fake(model, mode)
    model.train()
    with mode, StepContext(even_load=1.0).installed(), documents_known(several=False):
        with counting() as calls:
            measured = _memory(model, handle, config, rows, patterns)
        # With all of ZeRO a micro-batch sends what it sends, whatever came before it.
        last = names.sorted(calls) if handle.strategy.memory.shard == "parameters" else None
        if last is None:
            model.zero_grad(set_to_none=True)
        measured.calls = _step(model, handle, config, rows, names, last)
    return measured


def _memory(
    model: nn.Module, handle: ShardedModel, config: RunConfig, rows: int, patterns: _Patterns
) -> Measured:
    storages = Storages(patterns.here)
    with storages:
        batch = _Batch.of(config, rows)
        storages.give((p.local for p in handle.parameters()), Kind.WEIGHT)
        storages.give(model.buffers(), Kind.CONSTANT)
        storages.give(batch.tensors, Kind.ACTIVATION)
        with handle.micro_batch(seed=config.seed, rows=batch.rows, last=True):
            with patterns.followed():
                loss = batch.loss(model, config)
            early = _early_gradients(loss, handle)
            saved: Counter[str] = Counter()
            for record in storages.kept(early):
                saved[record.made_by] += record.bytes
            loss.backward()
        gradients = [p.grad for p in handle.parameters() if p.grad is not None]
        return Measured(saved, storages.peak([*gradients, *early]) - saved.total())


def _early_gradients(loss: torch.Tensor, handle: ShardedModel) -> list[torch.Tensor]:
    """The gradients of weights that a loss in chunks takes in the forward pass: told apart, as other gradients are."""
    here = handle.coordinate
    shapes = {planned.computed.local_shape(here) for planned in handle.plan.parameters.values()}
    nodes: list[Any] = [loss.grad_fn]
    # The loss's own arithmetic and what wraps the root are a few nodes.
    for _ in range(8):
        node = nodes.pop(0) if nodes else None
        given = getattr(node, "gradients", None)
        if given is not None:
            return [gradient for gradient in given if tuple(gradient.shape) in shapes]
        nodes += [after for after, _ in node.next_functions] if node is not None else []
    return []


def _step(
    model: nn.Module,
    handle: ShardedModel,
    config: RunConfig,
    rows: int,
    names: AxisNames,
    last: Calls | None,
) -> Calls:
    """The collectives of a step. Of its micro-batches the first, one in the middle and the last are run; where `last`
    is known, only the first, which is then like those in the middle."""
    micro = count_micro_batches(config)
    total: Calls = Counter(last) if last is not None else Counter()
    run = min(micro - 1, 1) if last is not None else min(micro, 3)
    for index in range(run):
        is_last = last is None and index == run - 1
        with counting() as calls:
            batch = _Batch.of(config, rows)
            with handle.micro_batch(seed=config.seed, rows=batch.rows, last=is_last):
                batch.loss(model, config).backward()
        alike = micro - 1 if last is not None else micro - 2
        times = alike if last is not None or (index > 0 and not is_last) else 1
        for key, much in names.sorted(calls).items():
            total[key] += much * times
    with counting() as calls:
        handle.grad_norm()
        # The small vector that a training step reduces: loss, tokens, stop flag, memory.
        handle.all_reduce(torch.zeros(4), handle.mesh.names)
        build_optimizer(model, config.train.optimizer).step(1.0)
    return total + names.sorted(calls)


@dataclass(frozen=True)
class _Batch:
    """A micro-batch of fake rows."""

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, config: RunConfig, rows: int) -> _Batch:
        length = config.data.sequence
        positions = torch.arange(length).expand(rows, length)
        return cls(torch.zeros(rows, length, dtype=torch.int64), positions, torch.arange(rows))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.ids, self.positions, self.rows)

    def loss(self, model: nn.Module, config: RunConfig) -> torch.Tensor:
        tokens = float(config.train.batch * config.data.sequence)
        return causal_lm_loss(model, self.ids, self.ids, self.positions, tokens, config.train.loss)


class _Patterns:
    """Which module's forward is running, by its pattern: `model.layers.*.mlp` for every layer's."""

    def __init__(self, model: nn.Module, layers: str | None) -> None:
        self._names = {module: collapsed(name, layers) for name, module in model.named_modules()}
        self._stack: list[str] = []

    def here(self) -> str:
        """The innermost one."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, forward passes are noted."""

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(self._names.get(module, self.here()))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._stack.pop()

        before = nn.modules.module.register_module_forward_pre_hook(enter)
        after = nn.modules.module.register_module_forward_hook(leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()


def collapsed(name: str, layers: str | None) -> str:
    """A module's or parameter's name with `*` for the index of its layer."""
    if layers is None or not name.startswith(f"{layers}."):
        return name
    _, dot, rest = name[len(layers) + 1 :].partition(".")
    return f"{layers}.*{dot}{rest}"


class AxisNames:
    """Which axis, on which link levels, a group of ranks belongs to."""

    def __init__(self, handle: ShardedModel) -> None:
        self._handle = handle
        mesh, axes = handle.mesh, handle.axes
        strategy = handle.strategy
        self._cluster = Cluster.of(strategy) if strategy.placement.given else None
        names = [
            *mesh.names,
            mesh.storage,
            mesh.tensor,
            *(name for name, _ in mesh.folds if mesh.size("expert") > 1),
            mesh.joint("replicate", mesh.storage),
        ]
        self._groups: dict[tuple[int, ...], str] = {}
        for name in names:
            if mesh.size(name) > 1:
                mine = next(ranks for ranks in axes.devices.groups(name) if axes.rank in ranks)
                self._groups.setdefault(mine, name)
        for name in (mesh.storage, mesh.tensor):
            axes[name]  # FSDP2's groups are those of the storage's axes
        self._by_group = {axis.group: name for name, axis in axes.made().items() if axis.size > 1}

    def sorted(self, calls: list[Collective]) -> Calls:
        """Count and bytes received, by axis, link levels and kind."""
        found: Calls = Counter()
        for call in calls:
            key = (self._axis(call), self._levels(call.ranks), call.kind)
            found[(*key, "count")] += 1
            found[(*key, "bytes")] += call.bytes_received
        return found

    def _axis(self, call: Collective) -> str:
        known = self._by_group.get(call.group)
        if known is None and call.size == self._handle.mesh.world:
            return "all ranks"
        known = known or self._groups.get(tuple(sorted(call.ranks)))
        if known is not None:
            return known
        # A part of an axis: one level of several.
        around = [(len(ranks), name) for ranks, name in self._groups.items() if set(call.ranks) <= set(ranks)]
        return min(around)[1] if around else f"{call.size} ranks"

    def _levels(self, ranks: tuple[int, ...]) -> str:
        return " · ".join(self._cluster.spans(ranks)) if self._cluster is not None else ""
