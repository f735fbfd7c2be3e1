"""A parallelized model under another trainer: row assignment and reduction of the ranks' values.

    world = pipeline · replicate · shard · context · tensor
    data ranks = replicate · shard
    loss ranks = data ranks · context

Ranks that differ in other axes than `replicate` and `shard` share a data index: they see the same rows. What they
compute of the loss is summed over the loss ranks; those along the tensor axes all have the same part.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from hyper_parallel import compat
from hyper_parallel.compat.collectives import device_type
from hyper_parallel.compat.process_groups import broadcast_text, gather_objects
from hyper_parallel.config import RunConfig, from_dict, load, load_strategy
from hyper_parallel.config.yaml12 import parse
from hyper_parallel.errors import ConfigError, DataError, HyperParallelError, IntegrationError
from hyper_parallel.integration.streamed_sharding import as_on_rank_0, parallelize_streamed
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto import choose, resolved
from hyper_parallel.planner.auto.machine import machine_of
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.lora_adapters import adapted_layers, adapters_of, without_adapters
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.shard.process_mesh import LOSS_AXES, ROW_AXES
from hyper_parallel.strategy import Strategy
from hyper_parallel.workload.workload import Adapter as PlannedAdapter

Given = Strategy | str | Path | Mapping[str, Any] | None
"""How a strategy may be given: itself, a dict, a YAML file (a strategy's or a run's), ``"auto"``, or nothing."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ParallelRun:
    """A spread model, and what a trainer's loop has to know of the ranks."""

    handle: ShardedModel

    @classmethod
    def over(
        cls,
        model: nn.Module,
        strategy: Strategy,
        *,
        device: torch.device | None = None,
        traceable: bool = False,
    ) -> ParallelRun:
        """Spread `model` in place, with rank 0's values on every rank; `traceable`: so that a graph can be made of it.

        `device`: where its pieces go; from elsewhere one tensor after the other goes there, never the whole model.

        Raises StrategyError where the strategy does not fit the model, IntegrationError where it does not fit the
        number of processes.
        """
        check_world(strategy, world_size())
        as_on_rank_0(model)
        lowering: Lowering = "traceable" if traceable else "fsdp"
        if device is not None and any(p.device.type != device.type for p in model.parameters()):
            return cls(parallelize_streamed(model, strategy, device, lowering=lowering))
        return cls(sharded(parallelize(model, strategy, lowering=lowering)))

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.handle.world

    @property
    def data_ranks(self) -> int:
        """How many shares of the batch there are: replicate · shard."""
        return self._size(ROW_AXES)

    @property
    def data_index(self) -> int:
        """The index of the share that this rank computes."""
        return self.handle.data_index

    @property
    def loss_ranks(self) -> int:
        """How many parts a loss is the sum of: replicate · shard · context."""
        return self._size(LOSS_AXES)

    def sum_of_data(self, x: Tensor) -> Tensor:
        """The sum over the shares of the batch of what each says of its rows, on every rank."""
        return self.handle.all_reduce(x, ROW_AXES)

    def sum_of_parts(self, x: Tensor) -> Tensor:
        """The whole loss, on every rank, from each one's part."""
        return self.handle.all_reduce(x, LOSS_AXES)

    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """[d0, ...] of each share of the batch, one after the other: [data_ranks · d0, ...]; a number counts as [1].

        Every rank gives the same shape.
        """
        x = x.reshape(1) if x.dim() == 0 else x.contiguous()
        gathered = x.to(torch.uint8) if x.dtype == torch.bool else x
        for name in reversed(ROW_AXES):
            gathered = self.handle.axes[name].gather(gathered, 0)
        return gathered.to(x.dtype)

    def gather_object(self, what: T) -> list[T]:
        """Gather an object of each share of the batch, in their order."""
        if self.world == 1:
            return [what]
        every = gather_objects(what)
        found: dict[int, T] = {}
        for rank in range(self.world):
            found.setdefault(self.handle.data_index_of(rank), every[rank])
        return [found[index] for index in range(self.data_ranks)]

    def check_same_rows(self, rows: Sequence[Tensor]) -> None:
        """See that ranks of one share of the batch were given the same `rows`; a collective.

        Raises DataError on every rank where some were not.
        """
        if self.world == self.data_ranks:
            return
        mine = [tuple(x.shape) for x in rows], [int(x.long().sum()) for x in rows]
        every = gather_objects(mine)
        first: dict[int, int] = {}
        for rank, theirs in enumerate(every):
            like = first.setdefault(self.handle.data_index_of(rank), rank)
            if theirs != every[like]:
                raise DataError(
                    f"ranks {like} and {rank} compute on the same rows, by the strategy's axes, but were given "
                    "different ones; a dataset or collator that draws random numbers must draw the same ones in every "
                    "process (seed it by args.seed, not by the rank)"
                )

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.handle.mesh.size(axis) for axis in axes)


@dataclass(frozen=True)
class ResolvedStrategy:
    """A strategy without open axes."""

    strategy: Strategy
    accumulation: int = 1
    """By what the steps of accumulation are multiplied, so that the global batch is that of plain data parallelism:
    1 unless the planner chose the axes."""


def strategy_of(
    given: Given, model: nn.Module, *, world: int, batch: int, length: int, rows: int | None = None
) -> ResolvedStrategy:
    """The strategy that was meant, for `world` ranks; a collective where the planner chooses it.

    None shards everything over all ranks. Only the planner hears of the rest: `batch` rows a step over all ranks,
    `rows` that one rank computes at once (left out: its even share), of `length` positions; 0 where that is not known.
    Raises ConfigError for a file or dict that is none, or that does not fit `world`.
    """
    strategy = read(given, world)
    if strategy.open:
        strategy = planned(AutoRequest(strategy, model, batch, rows or max(1, batch // world), length), world)
        return ResolvedStrategy(strategy, world // strategy.axes.data)
    check_world(strategy, world)
    return ResolvedStrategy(strategy)


def check_world(strategy: Strategy, world: int) -> None:
    """Raise IntegrationError where the axes do not multiply to the number of processes."""
    axes = strategy.axes
    if axes.world == world:
        return
    raise IntegrationError(
        f"the strategy's axes multiply to {axes.world} ({axes.product or 'no axis'}), and there "
        f"{'is 1 process' if world == 1 else f'are {world} processes'}; start {axes.world} "
        f"(torchrun --nproc-per-node {axes.world} …), or make the axes multiply to {world}"
    )


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def read(given: Given, world: int) -> Strategy:
    """The strategy that was written; it may have open axes. Raises ConfigError for a file or dict that is none."""
    if isinstance(given, Strategy):
        return given
    if given is None:
        return Strategy(axes={"shard": world})
    if isinstance(given, Mapping):
        return _of_dict(dict(given))
    if given == "auto":
        return Strategy.model_validate("auto")
    return _of_file(Path(given))


def _of_dict(given: dict[str, Any]) -> Strategy:
    try:
        return Strategy.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(at) for at in one['loc']) or 'strategy'}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()
        )
        raise IntegrationError(f"strategy: {problems}") from None


def _of_file(path: Path) -> Strategy:
    """A strategy's own file, or the strategy of a run file."""
    if not path.is_file():
        raise IntegrationError(
            f"strategy: there is no file {path}; give a Strategy, a dict, the path of a strategy or run file, or 'auto'"
        )
    content = parse(path.read_text(encoding="utf-8"), str(path))
    of_a_run = isinstance(content, dict) and not {"model", "data", "train"}.isdisjoint(content)
    return load(path).strategy if of_a_run else load_strategy(path)


# `strategy="auto"` inside another trainer.
#
# Rank 0 looks at the machine, asks, simulates the best few and tells all ranks (`auto`). What it is asked is a run file
# made for the purpose: the model's config, the global batch, the length of rows, and whatever the strategy leaves open.

log = logging.getLogger(__name__)

_calls = itertools.count()


@dataclass(frozen=True)
class AutoRequest:
    """A question to the planner."""

    strategy: Strategy
    """With open axes."""
    model: nn.Module
    batch: int
    """Rows of a step, over all ranks."""
    rows: int
    """Rows that a rank computes at once."""
    length: int
    """Positions of a row."""


def planned(request: AutoRequest, world: int) -> Strategy:
    """The strategy that rank 0 chooses, on every rank; a collective.

    Raises IntegrationError, on every rank, for a model that has no config, rows of unknown length, and where nothing
    fits.
    """
    config: Any = getattr(without_adapters(request.model), "config", None)
    if config is None or request.length < 1:
        lacks = "no Transformers config" if config is None else "rows whose length is not known beforehand"
        raise IntegrationError(
            f"strategy: auto plans by the model's config and the length of rows, and there is {lacks}; write the axes"
        )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        run = _run(request, folder)
        if world == 1:
            found = _chosen(run, world)
        else:
            text = _chosen(run, world) if dist.get_rank() == 0 else None
            found = broadcast_text(f"hyper_parallel/integration/strategy/{next(_calls)}", text)
        chosen = json.loads(found)
        if "error" in chosen:
            raise IntegrationError(chosen["error"])
        return resolved(run, chosen["laid"]).strategy


def _run(request: AutoRequest, folder: str) -> RunConfig:
    strategy = request.strategy.model_dump(mode="json")
    if "pipeline" in request.strategy.axes.open:
        # The trainer's own loop runs the steps, and it runs no stages.
        strategy.pop("pipeline", None)
        strategy["chosen"] = [key for key in strategy["chosen"] if not key.startswith("pipeline.")]
        strategy["axes"] = {axis: degree for axis, degree in strategy["axes"].items() if axis != "pipeline"}
    return from_dict(
        {
            "version": 1,
            "out": folder,
            "model": {"path": folder, "adapter": _adapter(request.model)},
            # Only how long rows are is read of it.
            "data": {"train": "python-stdlib", "sequence": request.length},
            "train": {"batch": request.batch, "micro_batch": request.rows},
            "strategy": strategy,
        },
        source="strategy",
    )


def _adapter(model: nn.Module) -> dict[str, Any] | None:
    """The section `model.adapter` of a model with adapters; None without them, or for layers unknown to the planner."""
    layers = list(adapted_layers(model))
    names = sorted({name.rpartition(".")[2] for name, _ in layers})
    ranks = {adapter.a.out_features for _, layer in layers for adapter in adapters_of(layer)}
    if not ranks:
        return None
    try:
        PlannedAdapter(max(ranks), tuple(names))
    except ConfigError as error:
        log.info("strategy: every parameter counts as trained: %s", error)
        return None
    return {"rank": max(ranks), "targets": names}


def _chosen(run: RunConfig, world: int) -> str:
    """The choice of rank 0, or the error, as JSON."""
    device = torch.device(device_type() if world > 1 else compat.backend("auto").name)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    worker = Worker(0, 0, world, local, device, compat.backend(device.type))
    try:
        with _script_unseen():
            found = choose(run, machine_of(run, worker, _say), world, _say)
    except HyperParallelError as error:
        return json.dumps({"error": str(error)})
    for line in found.lines:
        _say(line)
    return json.dumps({"laid": found.laid})


@contextlib.contextmanager
def _script_unseen() -> Iterator[None]:
    """Inside, processes that are started do not run the user's script first, which need not guard its main part."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _say(text: str) -> None:
    log.info("strategy: %s", text)
    print(f"strategy: {text}", flush=True)  # noqa: T201
