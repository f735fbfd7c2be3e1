"""Consequences of the owner check for a run: refusals, and whether documents share rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.data import TrainingData
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.report.wait_line import waiting
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.model_structure import is_transformers
from hyper_parallel.shard.owner_check import Comparison, Kind
from hyper_parallel.shard.owner_check.check import refuse_dependent, remember, verdicts
from hyper_parallel.shard.parallelize import on_simulated_ranks
from hyper_parallel.shard.region_check.check import SKIP, checks, vocabulary_of

log = logging.getLogger(__name__)

Verdicts = dict[Kind, Comparison]


@dataclass(frozen=True)
class Prepared:
    """A run's model before any strategy, its data, and what the owner check found."""

    config: RunConfig
    """`data.pack` is decided."""
    model: nn.Module
    text: TrainingData
    verdicts: Verdicts
    """Empty where nothing was compared."""


def against_owner(
    config: RunConfig,
    model: nn.Module,
    text: TrainingData,
    load: Callable[[RunConfig], TrainingData],
    *,
    always: bool = False,
) -> Prepared:
    """Compare a run's model with its owner, and decide `data.pack` where the file leaves it open. A collective.

    `load`: loads the data of a changed run. `always`: compare also where `strategy.check` is false, which refuses
    nothing and changes nothing. Raises ConfigError for a run that would compute something else than the owner.
    """
    refuses = checks(config.effective_strategy)
    if text.media or not (refuses or always):
        return Prepared(config, model, text, {})
    kinds: tuple[Kind, ...] = ("loss", "rows", "length", "padding")
    if text.train.several or text.eval.several:
        kinds = (*kinds, "packing")
    vocabulary = None if vocabulary_of(model) is not None else text.tokenizer.vocab_size
    with waiting("comparing the loss with the model's own, on a small copy of it"):
        found = verdicts(model, kinds, on_simulated_ranks, vocabulary=vocabulary)
    remember(model, found)
    if not refuses:
        return Prepared(config, model, text, found)
    refuse_unlike(config, model, found)
    packing, name = found.get("packing"), type(without_adapters(model)).__name__
    if packing is not None and packing.verdict == "right":
        return Prepared(config, model, text, found)
    padding = found["padding"]
    if is_transformers(model) and padding.verdict == "differs":
        raise ConfigError(
            f"a document that has its own row, filled up to data.sequence, depends in {name} on what fills it "
            f"({padding.detail}), so that rows cannot be made of documents of different lengths ({SKIP})"
        )
    if is_transformers(model) and padding.verdict == "not applicable":
        raise ConfigError(
            f"whether {name} computes rows of documents as its owner does could not be checked: {padding.detail} "
            f"({SKIP})"
        )
    if packing is None:
        return Prepared(config, model, text, found)
    if packing.verdict == "not applicable":
        return _unknown(config, model, text, found, load)
    reason = f"documents that share a row would depend on each other in {name}"
    if config.data.pack:
        raise ConfigError(f"data.pack: {reason} ({packing.detail}); set data.pack: false ({SKIP})")
    log.warning("%s, so each has its own row (data.pack: false)", reason)
    data = config.data.model_copy(update={"pack": False})
    config = config.model_copy(update={"data": data})
    return Prepared(config, model, load(config), found)


def _unknown(
    config: RunConfig,
    model: nn.Module,
    text: TrainingData,
    found: Verdicts,
    load: Callable[[RunConfig], TrainingData],
) -> Prepared:
    """A run whose documents may depend on each other in a row, since nothing could be compared."""
    name, why = type(without_adapters(model)).__name__, found["packing"].detail
    reason = f"whether documents that share a row stay apart in {name} could not be checked: {why}"
    if config.data.pack and is_transformers(model):
        raise ConfigError(f"data.pack: {reason}; set data.pack: false ({SKIP})")
    if config.data.pack:
        log.warning("%s", reason)
        return Prepared(config, model, text, found)
    log.warning("%s; each has its own row (data.pack: false)", reason)
    config = config.model_copy(update={"data": config.data.model_copy(update={"pack": False})})
    return Prepared(config, model, load(config), found)


def refuse_unlike(config: RunConfig, model: nn.Module, found: Verdicts) -> None:
    """Raise ConfigError for another loss than the model's own, StrategyError for rows that depend on each other."""
    strategy, name = config.effective_strategy, type(without_adapters(model)).__name__
    loss = found["loss"]
    if not loss.right:
        raise ConfigError(
            f"{name}: the loss that is trained here is not the model's own, model(input_ids, labels=…): {loss.detail}; "
            f"train it with its own loss in a loop of your own ({SKIP})"
        )
    refuse_dependent(model, found["rows"], strategy, config.micro_batches)
    longest, parts = found["length"].positions, strategy.axes.data > 1 or config.micro_batches > 1
    if longest is not None and parts and config.data.sequence > longest:
        raise StrategyError(
            f"the rotary factors of {name} follow the longest row that is computed with a row, once it has more than "
            f"{longest} positions, and data ranks and micro-batches see some rows each; set data.sequence to at most "
            f"{longest}, or axes.shard and axes.replicate to 1 without train.micro_batch ({SKIP})"
        )
