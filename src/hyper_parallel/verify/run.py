"""The two sides of a verification, and the drivers that run the strategy's side."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from hyper_parallel import launch
from hyper_parallel.compat.local_tensor import simulated_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import StrategyError, WorkersFailedError
from hyper_parallel.launch import Worker
from hyper_parallel.shard import parallelize
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.strategy import Strategy
from hyper_parallel.train.build import fill_model, transformers_config, unsharded
from hyper_parallel.verify.families import EXPERT_COUNTS
from hyper_parallel.verify.report import Report, compare
from hyper_parallel.verify.step import StepOutcome, Tensors, rows_to_verify, run_step

Driver = Literal["local", "gloo"]

RESULT = "verify.json"
"""Where the workers leave their report, in the run's folder."""


def verify_file(config: RunConfig, driver: Driver = "local") -> Report:
    """One step of what the file declares, on one device and on its strategy, compared.

    `driver`: "local" runs all ranks in this process, with FSDP lowered to traceable gathers; "gloo" starts the
    workers, which run what `train` runs. Raises what a run with this file would raise, and StrategyError when the
    strategy is that of one device.
    """
    _ = config.effective_strategy  # refuses axes that are open
    if config.strategy.axes.world == 1:
        raise StrategyError(
            "the strategy is that of one device: there is nothing to compare; set strategy.axes"
        )
    config = _reduced(config)
    wide = _in_full_precision(config)
    said = "" if wide is config else ", in float32: rounded otherwise, tokens would choose other experts"
    config = wide
    if driver == "local":
        one, batch, model = _one_device(config)
        with simulated_ranks(config.strategy.axes.world):
            many = step_of(model, config, config.strategy, batch, "traceable", one.gradients)
        return _compared(config, one, many, f"all ranks in one process{said}")
    code = launch.run(config, f"{__name__}:worker_main")
    if code != 0:
        raise WorkersFailedError(code, config.out)
    report = Report.from_json(json.loads((Path(config.out) / RESULT).read_text()))
    return replace(report, driver=report.driver + said)


def worker_main(config: RunConfig, worker: Worker) -> None:
    """What each worker of the "gloo" driver runs; rank 0 leaves the report."""
    one, batch, model = _one_device(config)
    many = step_of(model, config, config.strategy, batch, "fsdp", one.gradients, worker.device)
    if worker.rank == 0:
        report = _compared(config, one, many, f"{worker.world} workers over {worker.backend.collective}")
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).write_text(json.dumps(report.to_json(), indent=1))


def _reduced(config: RunConfig) -> RunConfig:
    """The file with the smallest batch that does all that its own does: two micro-batches of one row where it
    accumulates, else one; and with its workers, whatever `launch.workers` says."""
    share = config.train.batch // config.strategy.axes.data
    micro = 1 if config.train.micro_batch in (None, share) else 2
    train = config.train.model_copy(update={"batch": micro * config.strategy.axes.data, "micro_batch": 1})
    launched = config.launch.model_copy(update={"workers": None})
    return config.model_copy(update={"launch": launched, "train": train})


def _in_full_precision(config: RunConfig) -> RunConfig:
    """The file with float32 arithmetic where experts are chosen: two sides that round otherwise choose other experts
    where scores are close, and are both right."""
    if config.strategy.precision.compute == "float32" or not has_experts(transformers_config(config.model)):
        return config
    precision = config.strategy.precision.model_copy(update={"compute": "float32", "modules": {}})
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"precision": precision})})


def has_experts(model: object) -> bool:
    """Whether a Transformers config describes mixture-of-experts layers."""
    return any(getattr(model, key, None) for key in EXPERT_COUNTS)


def _compared(config: RunConfig, one: StepOutcome, many: StepOutcome, driver: str) -> Report:
    return compare(one, many, describe(config.strategy), driver, config.strategy.precision.compute)


def describe(strategy: Strategy) -> str:
    """A strategy in a few words: ``shard 2 · tensor_x 2 · sequence``."""
    names = (*strategy.axes.order, "expert")
    parts = [f"{axis} {size}" for axis in names if (size := strategy.axes.degree(axis)) > 1]
    if strategy.sequence:
        parts.append("sequence")
    if strategy.memory.recompute == "layer":
        parts.append("recompute")
    return " · ".join(parts)


def alone(strategy: Strategy) -> Strategy:
    """The strategy on one device: the same precision, nothing spread, and everything kept that is computed."""
    return Strategy(precision=strategy.precision)


def _one_device(config: RunConfig) -> tuple[StepOutcome, Tensors, torch.nn.Module]:
    """The reference, which computes the whole batch at once; the batch; and the model again, as it was before."""
    model, text = unsharded(config)
    untouched = copy.deepcopy(model)
    batch = rows_to_verify(config, text)
    at_once = {"micro_batch": None, "loss": config.train.loss.model_copy(update={"chunk": "none"})}
    whole = config.model_copy(update={"train": config.train.model_copy(update=at_once)})
    # The traceable lowering of nothing is the plain model, with or without a process group.
    return step_of(model, whole, alone(config.strategy), batch, "traceable", None), batch, untouched


def step_of(
    model: torch.nn.Module,
    config: RunConfig,
    strategy: Strategy,
    batch: Tensors,
    lowering: Lowering,
    update_from: Tensors | None,
    device: torch.device | str = "cpu",
) -> StepOutcome:
    """One step of a model under a strategy; on the meta device it gets the values of the run's seed or folder."""
    without_values = any(parameter.is_meta for parameter in model.parameters())
    parallelize(model, strategy, lowering=lowering, alone=strategy.axes.world == 1)
    if without_values:
        fill_model(model, config, device)
    return run_step(model.train(), config, batch, update_from)
