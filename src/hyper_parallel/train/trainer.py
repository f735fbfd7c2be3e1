"""Trainer: builds, resumes, trains, evaluates, saves and samples."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint.durable import REFUSALS, explain
from hyper_parallel.config import RunConfig
from hyper_parallel.config.train import LossConfig
from hyper_parallel.data.export_assets import ends_of
from hyper_parallel.errors import CheckpointError, ConfigError, HyperParallelError, NonFiniteError
from hyper_parallel.launch import Worker, stop, stop_requested
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.shard import sharded
from hyper_parallel.shard.experts.load_balancing import by_layer, has_biases
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import Built, build, fill
from hyper_parallel.step.capture_train_step import state as state_of
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.profiling import Profiling
from hyper_parallel.step.recipe import Recipe, StepResult
from hyper_parallel.step.train_step import Stepper
from hyper_parallel.train.checkpoint_state import RunCheckpoints, RunState
from hyper_parallel.train.evaluate import Evaluation
from hyper_parallel.train.health import Health
from hyper_parallel.train.launch_workers import alone, run_on_workers
from hyper_parallel.train.meter import Meter
from hyper_parallel.train.progress import shown
from hyper_parallel.train.recovery import Recovery, WeightWatch
from hyper_parallel.train.reporter import Reporter
from hyper_parallel.train.sample import sample
from hyper_parallel.train.save_interval import SaveInterval
from hyper_parallel.train.summary import Summary

log = logging.getLogger(__name__)


class Trainer:
    """Trains what a run file declares, or a model of one's own with the rest of the file.

    A model that is given has values, the same on every rank, or is on the meta device; it is changed in place.
    """

    def __init__(self, config: RunConfig, model: nn.Module | None = None) -> None:
        self.config = config
        self._model = model

    def run(self, worker: Worker | None = None) -> Summary:
        """Train to the last step, or until asked to stop; the summary, equal on every rank.

        Without a `worker`, a strategy of one rank runs in this process; one of several starts its local workers
        (or joins those of torchrun) as the command does, for which the model must be the run file's.
        """
        if worker is None:
            world = self.config.effective_strategy.axes.world
            if world > 1:
                return run_on_workers(self.config, self._model)
            with alone(self.config) as worker:
                return self._run(worker)
        return self._run(worker)

    def _run(self, worker: Worker) -> Summary:
        out = Path(self.config.out)
        try:
            if worker.rank == 0:
                out.mkdir(parents=True, exist_ok=True)
            with stop.interruptible(), pulse.operation("preparing"):
                run = _Run(self.config, self._model, worker)
            return run.run()
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            raise explain(error, Path(error.filename or out)) from error


class _Run:
    """One run on one rank."""

    def __init__(self, config: RunConfig, model: nn.Module | None, worker: Worker) -> None:
        self.config, self.worker = config, worker
        self.built: Built = build(config, model, worker.device)
        self.model = self.built.model
        self.handle = sharded(self.model)
        wanted = config.train.sample
        # Now, so that a prompt that the chat template does not take costs no run.
        self.prompt = self.built.text.prompt(wanted.prompt) if wanted else []
        if config.train.router_bias_rate and not has_biases(self.model):
            raise ConfigError(
                f"train.router_bias_rate is {config.train.router_bias_rate}, but no router of "
                f"{type(self.model).__name__} has a bias to correct; leave it out"
            )
        try:
            with self.built.settling():
                fill(self.built, config, worker.device)
                self.recipe = Recipe.of(config, self.model)
            if self.built.budget is not None:
                known = state_of(self.handle, self.recipe.optimizer)
                self.built.budget.settle_others(
                    {name: tensor.detach() for name, (_, tensor) in known.items()}
                )
        except BaseException:
            if self.built.budget is not None:
                self.built.budget.close()
            raise
        self.checkpoints = RunCheckpoints(config, self.built, self.recipe.optimizer)
        self.state, self.start = RunState(), 0
        self.reporter = Reporter(config, leads=worker.rank == 0)
        train = config.train
        text, device = self.built.text, worker.device
        self.batches = Batches(text.train, text.order, train.batch, train.micro_batch, self.handle, device)
        self.evaluation = Evaluation(
            text.eval,
            train.eval.batches,
            train.batch,
            train.micro_batch,
            self.handle,
            device,
            LossConfig(chunk=train.loss.chunk),
        )
        self.tokens_per_step = train.batch * config.data.sequence
        compute = getattr(torch, config.effective_strategy.precision.compute)
        self.meter = Meter(
            self.tokens_per_step,
            self.built.flops.per_token(config.data.sequence),
            worker.world,
            worker.backend.peak_flops(compute),
        )
        self.stepper: Stepper | GraphStepper = Stepper(self.recipe)
        self.health = Health(self.model, self.batches, lambda batch: self.stepper.probe(batch))
        self.recovery = Recovery(train.on_nonfinite, self.health, self.checkpoints, train.batch)
        rollback = train.on_nonfinite == "rollback"
        self.weights = WeightWatch(self.health, self.checkpoints, self.reporter.note, rollback=rollback)
        self.interval = SaveInterval(config.checkpoint)
        self.eval_after: float | None = None
        self.stopping = False
        self.profiling: Profiling | None = None
        if train.profile is not None and worker.rank == 0:
            self.profiling = Profiling(
                train.profile,
                Path(config.out),
                worker,
                self.built.flops.per_token(config.data.sequence) * self.tokens_per_step,
                worker.backend.peak_flops(compute),
            )

    def run(self) -> Summary:
        try:
            with stop.interruptible(), pulse.operation("resuming"):
                self._resume()
            try:
                summary = self._train()
            finally:
                self.reporter.close_trackers()
            if self.built.budget is not None and not self.built.fresh:
                self.built.budget.bring_back()
        except BaseException as error:
            # What is being saved can be finished, so that a resume finds it, where no rank waits for a dead one:
            # every rank raises a HyperParallelError.
            if isinstance(error, HyperParallelError) or self.worker.world == 1:
                with contextlib.suppress(CheckpointError):
                    self.checkpoints.finish()
            raise
        finally:
            self.reporter.close()
            if self.built.budget is not None:
                self.built.budget.close()
        self.reporter.summary(summary)
        if dist.is_initialized():
            dist.barrier()  # whoever returns finds the files of the run complete
        return summary

    def _resume(self) -> None:
        """Go on from the newest checkpoint, and only then touch the files of the run that wrote it."""
        resumed, notes = self.checkpoints.resume()
        self.state = resumed or self.state
        self.start = self.state.step
        self.reporter.open(self.start)
        plans = self.built.budget.plans if self.built.budget is not None else []
        for note in (*plans, *notes):
            self.reporter.note(note)

    def _train(self) -> Summary:
        steps = self.config.train.steps
        if self.start >= steps:
            self.reporter.note(
                f"nothing left to train: step {self.start} of {steps} is done; raise train.steps to go on"
            )
        if self.state.eval_before is None and self.start == 0:
            with stop.interruptible():
                self.state.eval_before = self._evaluate()
        stopped = self._steps_and_recoveries()
        if not stopped and self.eval_after is None:
            self.eval_after = self._evaluate()
        with pulse.operation("sampling"):
            text = None if stopped or self.stopping else self._sample()
        with pulse.operation("saving"):
            checkpoint = self.checkpoints.finish()
        return self._summary(stopped, checkpoint, text)

    def _steps_and_recoveries(self) -> bool:
        """`_steps`, and again after each step that is not finite and does not end the run."""
        while True:
            try:
                return self._steps()
            except NonFiniteError as error:
                with pulse.operation("recovering"):
                    self.model.zero_grad(set_to_none=True)
                    self._recover(error)

    def _recover(self, error: NonFiniteError) -> None:
        step = self.state.step
        self.state, notes = self.recovery.after(error, self.state)
        state = self.state
        if state.step < step:
            self.reporter.reopen(state.step)
        for note in notes:
            self.reporter.note(note)
        self.reporter.log(state.step, {"skipped": float(state.skipped)})
        if state.step > step and (state.step == self.config.train.steps or self.interval.reached(state.step)):
            self._save()
            self.interval.saved()

    def _steps(self) -> bool:
        """All the steps that are left; whether the run was asked to stop before the last."""
        train, state = self.config.train, self.state
        if state.step >= train.steps:
            return False
        graphs = self.built.graphs
        stepper = (
            Stepper(self.recipe) if graphs is None else GraphStepper(self.recipe, graphs, self.profiling)
        )
        self.stepper = stepper
        state.consumed = state.leave_out(state.consumed, train.batch)
        # After a recovery there may be steps that are not saved.
        lossless = stop.interruptible() if state.step == self.start else contextlib.nullcontext()
        with lossless, pulse.operation("preparing"):
            stepper.begin(self.batches.load(state.step, state.consumed))
        for step in range(state.step, train.steps):
            done, last = step + 1, step + 1 == train.steps
            due = last or done % train.log_every == 0
            began, consumed = state.consumed, state.leave_out(state.consumed + train.batch, train.batch)
            self.meter.begin()
            with pulse.step(done):
                result = stepper.run(
                    load_next=None if last else functools.partial(self.batches.load, done, consumed),
                    memory=float(self.worker.backend.memory_allocated()) if due else 0.0,
                    requests=functools.partial(_requests, self.interval),
                )
            self.meter.end()
            for note in graphs.told() if graphs is not None else ():
                self.reporter.note(note)
            state.step, state.consumed = done, consumed
            state.tokens += self.tokens_per_step
            state.final_loss, state.grad_norm = result.loss, result.grad_norm
            if state.initial_loss is None:
                state.initial_loss = result.loss
            if due:
                with pulse.operation("recording"):
                    self._record(step, result)
            with pulse.operation("judging the weights"):
                self.weights.after_step(state, result, began)
            stopped = result.stop and not last
            saved = last or stopped or result.save or self.interval.reached(done)
            if result.save and not self.interval.elapsed():
                stop.save_served()
                self.reporter.note(f"saved step {done}, as asked")
            if saved:
                self._save()
                self.interval.saved()
            if last:
                # Behind the save: a forward pass may count something in a buffer.
                with pulse.operation("judging the weights"):
                    self.weights.after_last_step(state)
            if stopped:
                return self._stopped()
            if last or (train.eval.every and done % train.eval.every == 0):
                self._record_experts(done, result)
            if train.eval.every and done % train.eval.every == 0:
                loss = self._evaluate()
                self.eval_after = loss if last else None
                if self.stopping and not last:
                    if not saved:
                        self._save()
                    return self._stopped()
        return False

    def _save(self) -> None:
        with pulse.operation("saving"):
            self.checkpoints.save(self.state)

    def _stopped(self) -> bool:
        stop.request_stop()  # also where it was another rank that was asked
        self.reporter.note(
            f"stopped after step {self.state.step}, as asked; the same command goes on from there"
        )
        return True

    def _agree_to_stop(self) -> bool:
        """Whether some rank was asked to stop. A collective of the hosts, between steps."""
        asked = torch.tensor(float(stop_requested()))
        if self.worker.world > 1:
            dist.all_reduce(asked)
        self.stopping = asked.item() > 0
        return self.stopping

    def _record(self, step: int, result: StepResult) -> None:
        """Report `step`, counted from 0."""
        rates = self.meter.rates()
        record = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": self.config.train.optimizer.lr * self.recipe.schedule(step),
            "loss_tokens": float(result.tokens),
            "tokens": float(self.state.tokens),
            "memory": result.memory,
            **rates,
        }
        if self.built.budget is not None:
            record["memory_stall"] = self.built.budget.stalled()
        if result.expert_imbalance is not None:
            record["expert_imbalance"] = result.expert_imbalance
        self.reporter.step(step + 1, record, rates.get("seconds", float("nan")))

    def _record_experts(self, step: int, result: StepResult) -> None:
        if result.expert_loads is not None:
            self.reporter.experts(step, by_layer(self.handle, result.expert_loads))

    def _evaluate(self) -> float | None:
        """The held-out loss now, recorded; None when nothing is held out, and where the run is to stop first."""
        with pulse.operation("evaluating"):
            loss = self.evaluation.loss(self.model, self._agree_to_stop) if self.evaluation else None
        if loss is None:
            return None
        self.reporter.evaluation(self.state.step, loss)
        return loss

    def _sample(self) -> str | None:
        wanted = self.config.train.sample
        if not wanted or not wanted.tokens:
            return None
        text = sample(
            self.model,
            self.built.text.tokenizer,
            self.prompt,
            wanted.tokens,
            stops=ends_of(self.built.generation, self.built.text),
            sequence=self.config.data.sequence,
            device=self.worker.device,
            temperature=wanted.temperature,
            seed=self.config.seed,
            ends=self._agree_to_stop,
        )
        self.reporter.text(self.state.step, "sample", text)
        return text

    def _summary(self, stopped: bool, checkpoint: Path | None, text: str | None) -> Summary:
        state, rates = self.state, self.meter.overall()
        return Summary(
            out=self.config.out,
            steps=state.step,
            stopped=stopped,
            resumed_from=self.start or None,
            vocabulary=self._vocabulary(),
            parameters=sum(math.prod(p.layout.shape) for p in self.handle.parameters()),
            initial_loss=state.initial_loss,
            final_loss=state.final_loss,
            eval_before=state.eval_before,
            eval_after=self.eval_after,
            tokens=state.tokens,
            seconds=self.meter.seconds,
            tokens_per_second=rates.get("tokens_per_second"),
            mfu=rates.get("mfu"),
            checkpoint=str(shown(checkpoint)) if checkpoint is not None else None,
            sample=text,
            skipped=state.skipped,
        )

    def _vocabulary(self) -> int:
        return int((self.built.model_config or {}).get("vocab_size") or self.built.text.tokenizer.vocab_size)


def _requests(interval: SaveInterval) -> stop.Requests:
    """What this rank was asked, or wants: a checkpoint also when its time has come."""
    asked = stop.requests()
    return asked._replace(save=asked.save or interval.elapsed())
