"""From a run file to an Inspection: the exact part on the whole model, the measured part on a few layers of each kind.

Layers of one kind cost the same, so for everything that is measured and adds up (bytes saved, calls, bytes sent), with
n layers of a kind:

    f(n) = f(1) + (n − 1) · (f(2) − f(1))

The peak's excess over what is saved is that of the last layers and the loss, and does not grow with n.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

from hyper_parallel.compat.fake_process_group import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.activation_memory import Measured, measure
from hyper_parallel.estimate.memory_report import Inspection, collective_rows, parameter_rows
from hyper_parallel.estimate.resident_memory import count_micro_batches, gathered_by, resident_bytes_of
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.layer_kinds import layer_kinds, with_layers
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.step.build import on_meta, transformers_config
from hyper_parallel.strategy import Strategy


def inspect_run(
    config: RunConfig,
    rank: int = 0,
    *,
    model: nn.Module | None = None,
    lowering: Lowering = "fsdp",
    whole: bool = False,
) -> Inspection:
    """What `rank` keeps and sends in one step of a run, without its workers, its data and its weights.

    `model`: on the meta device, in place of the one that the file describes. `lowering` as in `parallelize`; training
    uses "fsdp". `whole`: run all layers, not one and two of each kind.

    Raises ConfigError or StrategyError.
    """
    strategy = config.effective_strategy
    world = strategy.axes.world
    if not 0 <= rank < world:
        raise ConfigError(f"--rank: {rank} is none of the {world} ranks, 0 to {world - 1}, of the strategy")
    notes: list[str] = []
    plain = model if model is not None else model_of(config, notes)
    plan = make_plan(plain, strategy)
    kinds = layer_kinds(plain, plan, strategy)
    gathered = gathered_by(plain, plan, strategy, rank)
    measured = _measured(plain, plan, config, kinds, rank, lowering, whole)
    parameters = sum(p.numel() for p in plain.parameters())
    with fake_ranks(world, rank):
        parallelize(plain, strategy, lowering="traceable")
        handle = sharded(plain)
        rows = parameter_rows(plain, plan.layers, resident_bytes_of(handle, config, rank), measured.saved)
    return Inspection(
        world=world,
        axes={axis: strategy.axes.degree(axis) for axis in (*strategy.axes.order, "expert")},
        rank=rank,
        parameters=parameters,
        rows=rows,
        gathered=gathered,
        over=measured.over,
        collectives=collective_rows(measured.calls),
        micro_batches=count_micro_batches(config),
        micro_batch=micro_batch(config),
        sequence=config.data.sequence,
        lowering=lowering,
        kinds=[len(kind) for kind in kinds],
        whole=whole or not kinds,
        balanced=bool(plan.experts),
        notes=notes,
    )


def micro_batch(config: RunConfig) -> int:
    """Sequences that a rank computes at once."""
    return config.train.micro_batch or config.train.batch // config.effective_strategy.axes.data


def model_of(config: RunConfig, notes: list[str]) -> nn.Module:
    """The run's model on the meta device. Needs no data: the vocabulary is the config's, or what `data.tokenizer` asks
    for, which `notes` then tells."""
    hf: Any = transformers_config(config.model)
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


def _measured(
    model: nn.Module,
    plan: Plan,
    config: RunConfig,
    kinds: list[list[int]],
    rank: int,
    lowering: Lowering,
    whole: bool,
) -> Measured:
    strategy = config.effective_strategy

    def run(smaller: nn.Module, strategy: Strategy) -> Measured:
        with fake_ranks(strategy.axes.world, rank), warnings.catch_warnings():
            # What FSDP2 has to say of a layer's output is said in training, and here of no use.
            warnings.simplefilter("ignore", UserWarning)
            parallelize(smaller, strategy, lowering=lowering)
            return measure(smaller, config, micro_batch(config))

    if whole or not kinds:
        return run(copy.deepcopy(model), strategy)
    # The last of each kind, so that the last layer is the model's.
    ends = [kind[-1] for kind in kinds]
    once = run(*with_layers(model, plan, strategy, sorted(ends)))
    total = once
    for kind in kinds:
        if len(kind) > 1:
            twice = run(*with_layers(model, plan, strategy, sorted([*ends, kind[-2]])))
            total = total.plus(twice, once, len(kind) - 1)
    return total
