"""The two sides of a verification, and the drivers that run the strategy's side."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from hyper_parallel import launch
from hyper_parallel.compat.dispatch import float64, widen
from hyper_parallel.compat.local_tensor import one_device, simulated_ranks
from hyper_parallel.compat.process_groups import gather_objects
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError, SimulationError, StrategyError, WorkersFailedError
from hyper_parallel.launch import Worker
from hyper_parallel.launch.stop import interruptible
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.loss.auxiliary_loss import asks_for_router_logits
from hyper_parallel.shard.model_structure import text_config
from hyper_parallel.shard.parallelize import Lowering, refusal_of_tokens
from hyper_parallel.step.build import compared_with_owner, fill_model, transformers_config, unsharded
from hyper_parallel.step.owner_refusals import Prepared
from hyper_parallel.step.pipeline_build import build_pipeline
from hyper_parallel.strategy import Precision, Strategy, recomputes
from hyper_parallel.verify.report import Report, compare, decided_in_float64, joined
from hyper_parallel.verify.step import (
    StepOutcome,
    Tensors,
    has_experts,
    pipeline_in_process,
    rows_to_verify,
    run_pipeline_step,
    run_step,
    unchecked,
)

Driver = Literal["auto", "local", "gloo"]

RESULT = "verify.json"
"""Name of the workers' report in the run's folder."""


def verify_file(config: RunConfig, driver: Driver = "auto") -> Report:
    """Compare one step of the declared run on one device and under its strategy.

    `driver`: "local" runs all ranks in this process, with FSDP lowered to traceable gathers, and those of a pipeline as
    threads that send through memory; "gloo" starts the workers, which run what `train` runs; "auto" starts them only
    for a model that simulated ranks cannot run. Raises what a run with this file would raise, and StrategyError when
    the strategy is that of one device.
    """
    _ = config.effective_strategy  # refuses axes that are open
    if config.strategy.axes.world == 1:
        raise StrategyError(
            "the strategy is that of one device: there is nothing to compare; set strategy.axes"
        )
    prepared, owner = _with_owner(config)
    config = _reduced(prepared.config)
    wide = _in_full_precision(config)
    note = "" if wide is config else ", in float32: rounded otherwise, tokens would choose other experts"
    config = wide
    if driver != "gloo":
        one, batch, model = _one_device(config, prepared)
        try:
            with _refused_as_training(config, model):
                report = against_simulated(config, model, batch, one, f"all ranks in one process{note}")
            return replace(report, owner=owner)
        except SimulationError:
            if driver == "local":
                raise
            note += ", for the ranks of one process cannot follow this model"
    code = launch.run(config, f"{__name__}:worker_main")
    if code != 0:
        raise WorkersFailedError(code, config.out)
    report = Report.from_json(json.loads((Path(config.out) / RESULT).read_text()))
    return replace(report, driver=report.driver + note, owner=owner)


def verify_one_device(config: RunConfig) -> str:
    """The owner check's verdict on a run, in words. Raises what a run with this file would raise."""
    return _with_owner(config)[1] or "nothing was compared: it reads images or sound"


def _with_owner(config: RunConfig) -> tuple[Prepared, str]:
    prepared = compared_with_owner(config, always=True)
    return prepared, " · ".join(f"{kind} {verdict}" for kind, verdict in prepared.verdicts.items())


def worker_main(config: RunConfig, worker: Worker) -> None:
    """The target of each worker of the "gloo" driver; rank 0 writes the report."""
    with interruptible():
        one, batch, model = _one_device(config)
        compared = against_pipeline if config.strategy.axes.pipeline > 1 else against_workers
        with _refused_as_training(config, model):
            report = compared(
                config,
                model,
                batch,
                one,
                f"{worker.world} workers over {worker.backend.collective}",
                worker.device,
            )
    if worker.rank == 0:
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).write_text(json.dumps(report.to_json(), indent=1))


@contextlib.contextmanager
def _refused_as_training(config: RunConfig, model: torch.nn.Module) -> Iterator[None]:
    """Inside, a step that does not run under the strategy raises the StrategyError with which `train` refuses it."""
    untouched, strategy = copy.deepcopy(model), config.effective_strategy.of_stage
    try:
        yield
    except HyperParallelError:
        raise
    # The model's own code, on tensors that the strategy split wrongly.
    except Exception as error:
        language: Any = text_config(untouched)
        refusal = refusal_of_tokens(untouched, strategy, int(language.vocab_size))
        if refusal is not None:
            raise StrategyError(refusal) from error
        raise


def against_simulated(
    config: RunConfig, model: torch.nn.Module, batch: Tensors, one: StepOutcome, driver: str
) -> Report:
    """One step of a model on the meta device under the file's strategy, all ranks in this process, against `one`.

    Raises what a run with this file would raise.
    """
    if config.strategy.axes.pipeline > 1:
        many = pipeline_in_process(config, model, batch, one.gradients)
        found = _compared(config, one, many, driver)
        return found if found.ok else _decided_by_a_stage(found, config, model, batch, one, many)
    again = copy.deepcopy(model)
    with _ranks(config):
        many = step_of(model, config, config.strategy, batch, "traceable", one.gradients)
    report = _compared(config, one, many, driver)
    return report if report.ok else _decided(report, config, again, batch, one, "traceable")


def against_workers(
    config: RunConfig,
    model: torch.nn.Module,
    batch: Tensors,
    one: StepOutcome,
    driver: str,
    device: torch.device | str = "cpu",
) -> Report:
    """The same on the processes of the default group. A collective: each of them calls it."""
    again = copy.deepcopy(model)
    many = step_of(model, config, config.strategy, batch, "fsdp", one.gradients, device)
    report = _compared(config, one, many, driver)
    handle = sharded(model)
    wrong = torch.tensor(0.0 if report.ok else 1.0, device=device)
    if handle.all_reduce(wrong, handle.mesh.names, "max") > 0:
        report = _decided(report, config, again, batch, one, "fsdp", device)
    return report


def against_pipeline(
    config: RunConfig,
    model: torch.nn.Module,
    batch: Tensors,
    one: StepOutcome,
    driver: str,
    device: torch.device | str = "cpu",
) -> Report:
    """The same for a pipeline: each rank compares what its stages hold, and all have the report of all."""
    config = unchecked(config)
    without_values = any(parameter.is_meta for parameter in model.parameters())
    built = build_pipeline(config, model, True, device)
    if without_values:
        fill_model(model, config, device)
    many = run_pipeline_step(model, built, config, batch, one.gradients)
    mine = replace(
        one,
        gradients={name: x for name, x in one.gradients.items() if name in many.values},
        values={name: x for name, x in one.values.items() if name in many.values},
    )
    found = joined(gather_objects(_compared(config, mine, many, driver)), one)
    return found if found.ok else replace(found, undecided="the stages of a pipeline are not run in float64")


def _decided_by_a_stage(
    report: Report,
    config: RunConfig,
    model: torch.nn.Module,
    batch: Tensors,
    one: StepOutcome,
    many: StepOutcome,
) -> Report:
    """A pipeline's report whose differences are judged by the same strategy without the pipeline: they are rounding
    where float64 finds that one right, and the pipeline is as near to it as it would have to be to one device."""
    strategy = config.strategy.of_stage
    plain = config.model_copy(update={"strategy": strategy})
    try:
        with _ranks(plain):
            stage = step_of(copy.deepcopy(model), plain, strategy, batch, "traceable", one.gradients)
    except SimulationError as error:
        return replace(report, undecided=str(error))
    if not _compared(config, stage, many, report.driver).ok:
        return replace(report, undecided="it differs from the same strategy without a pipeline too")
    apart = _compared(plain, one, stage, report.driver)
    decided = _decided(apart, plain, copy.deepcopy(model), batch, one, "traceable")
    return replace(report, float64=decided.float64, rounding=decided.rounding, undecided=decided.undecided)


def _decided(
    report: Report,
    config: RunConfig,
    model: torch.nn.Module,
    batch: Tensors,
    one: StepOutcome,
    lowering: Lowering,
    device: torch.device | str = "cpu",
) -> Report:
    """A report whose differences are judged by the same steps in float64."""
    strategy, again = config.strategy, copy.deepcopy(model)
    whole, data = _at_once(config, model)
    try:
        first = wide_step_of(again, whole, alone(strategy), batch, "traceable", one.gradients, data=data)
        with _ranks(config) if lowering == "traceable" else contextlib.nullcontext():
            second = wide_step_of(model, config, strategy, batch, lowering, one.gradients, device)
    except (RuntimeError, TypeError, ValueError) as error:  # an operation that has no float64
        return replace(report, undecided=" ".join(str(error).split())[:300])
    return decided_in_float64(report, one, (first, second))


def _ranks(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    world = config.strategy.axes.world
    return simulated_ranks(world) if world > 1 else contextlib.nullcontext()


def _reduced(config: RunConfig) -> RunConfig:
    """The run with the smallest equivalent batch: two micro-batches of one row if it accumulates gradients, else one,
    and in a pipeline two for each of its ranks if it has as many; and with the strategy's workers, whatever
    `launch.workers` says.
    """
    share, ranks = config.train.batch // config.strategy.axes.data, config.strategy.axes.pipeline
    micro = 1 if config.train.micro_batch in (None, share) else 2
    if ranks > 1:
        micro = min(share // config.micro_batch, 2 * ranks)
    train = config.train.model_copy(update={"batch": micro * config.strategy.axes.data, "micro_batch": 1})
    launched = config.launch.model_copy(update={"workers": None})
    return config.model_copy(update={"launch": launched, "train": train})


def _in_full_precision(config: RunConfig) -> RunConfig:
    """The run with float32 arithmetic if the model has experts: two sides with different rounding choose different
    experts where scores are close, and are both right.
    """
    if config.strategy.precision.compute == "float32" or not has_experts(transformers_config(config.model)):
        return config
    precision = config.strategy.precision.model_copy(update={"compute": "float32", "modules": {}})
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"precision": precision})})


def _compared(config: RunConfig, one: StepOutcome, many: StepOutcome, driver: str) -> Report:
    return compare(one, many, describe(config.strategy), driver, config.strategy.precision.compute)


def describe(strategy: Strategy) -> str:
    """A strategy in a few words: ``shard 2 · tensor_x 2 · sequence``."""
    names = ("pipeline", *strategy.axes.order, "expert")
    parts = [f"{axis} {size}" for axis in names if (size := strategy.axes.degree(axis)) > 1]
    if strategy.sequence:
        parts.append("sequence")
    if recomputes(strategy.memory):
        kind = "" if strategy.memory.recompute == "layer" else f" {strategy.memory.recompute}"
        count = strategy.memory.recompute_layers
        parts.append(f"recompute{kind}" + ("" if count is None else f" of {count} layers"))
    return " · ".join(parts)


def alone(strategy: Strategy) -> Strategy:
    """The strategy on one device: the same precision, without parallelism and without recomputation."""
    return Strategy(precision=strategy.precision)


def _one_device(
    config: RunConfig, prepared: Prepared | None = None
) -> tuple[StepOutcome, Tensors, torch.nn.Module]:
    """The reference, which computes the whole batch at once; the batch; and the model again, as it was before."""
    model, text = unsharded(config) if prepared is None else (prepared.model, prepared.text)
    untouched = copy.deepcopy(model)
    if has_experts(model.config):
        # One by one: Transformers' grouped product refuses widths on a CPU that are fine on a device, or once split.
        model.set_experts_implementation("eager")  # type: ignore[operator]
    batch = rows_to_verify(config, text)
    # The traceable lowering of nothing is the plain model, with or without a process group.
    whole, data = _at_once(config, model)
    one = step_of(model, whole, alone(config.strategy), batch, "traceable", None, data=data)
    return one, batch, untouched


def _at_once(config: RunConfig, model: torch.nn.Module) -> tuple[RunConfig, int]:
    """The run of one device, which computes the whole batch at once, and the data ranks whose rows it takes together.

    An auxiliary loss is that of a micro-batch of all data ranks, and another one for all rows at once.
    """
    balanced = asks_for_router_logits(model)
    micro, data = (config.micro_batch, config.strategy.axes.data) if balanced else (None, 1)
    changed = {"micro_batch": micro, "loss": config.train.loss.model_copy(update={"chunk": "none"})}
    return config.model_copy(update={"train": config.train.model_copy(update=changed)}), data


def step_of(
    model: torch.nn.Module,
    config: RunConfig,
    strategy: Strategy,
    batch: Tensors,
    lowering: Lowering,
    update_from: Tensors | None,
    device: torch.device | str = "cpu",
    *,
    data: int = 1,
) -> StepOutcome:
    """One step of a model under a strategy; on the meta device it gets the values of the run's seed or folder. `data`:
    as of `run_step`."""
    without_values = any(parameter.is_meta for parameter in model.parameters())
    # The report shows errors parameter by parameter instead of a refusal.
    shown = strategy.model_copy(update={"check": False})
    parallelize(model, shown, lowering=lowering, alone=strategy.axes.world == 1)
    if without_values:
        fill_model(model, config, device)
    return run_step(model.train(), config, batch, update_from, data=data)


def wide_step_of(
    model: torch.nn.Module,
    config: RunConfig,
    strategy: Strategy,
    batch: Tensors,
    lowering: Lowering,
    update_from: Tensors,
    device: torch.device | str = "cpu",
    *,
    data: int = 1,
) -> StepOutcome:
    """The same step from the same values, with float64 arithmetic throughout."""
    strategy = strategy.model_copy(update={"precision": Precision()})
    with float64():
        parallelize(model, strategy, lowering=lowering, alone=strategy.axes.world == 1)
    fill_model(model, config, device)
    widen(model)
    with one_device():
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    with float64():
        return run_step(model.train(), config, batch, update_from, data=data)
