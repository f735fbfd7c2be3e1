"""The loop over training steps: what happens between two steps, and how the loop goes on or ends.

After each step, in this order: its record is reported, the weights are judged, a checkpoint is saved where one is due,
the run stops where it was asked to, the held-out text is evaluated. A step that is not finite has updated nothing; the
run's recovery says how to go on (`train.recovery`).
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist

from hyper_parallel.errors import NonFiniteError
from hyper_parallel.launch import stop, stop_requested
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.shard.experts.loads import by_layer, rank_imbalance
from hyper_parallel.step.expert_balance import ExpertBalancer
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.recipe import StepResult
from hyper_parallel.step.train_step import Stepper
from hyper_parallel.train.checkpoint_state import RunState
from hyper_parallel.train.recovery import Health, Recovery, WeightWatch
from hyper_parallel.train.run_parts import RunParts, SaveInterval


class StepLoop:
    """The steps of one run, from where its state is to the last."""

    def __init__(self, parts: RunParts, state: RunState, vote: StopVote) -> None:
        self.state = state
        """How far the run is; another one after a rollback."""
        self.eval_after: float | None = None
        """The held-out loss after the last step, where it was evaluated there."""
        self._parts, self._vote, self._start = parts, vote, state.step
        self._train = parts.config.train
        self._stepper: Stepper | GraphStepper = Stepper(parts.recipe)
        health = Health(parts.model, parts.batches, lambda batch: self._stepper.probe(batch))
        how = self._train.on_nonfinite
        self._recovery = Recovery(how, health, parts.checkpoints, self._train.batch)
        rollback = how == "rollback"
        self._weights = WeightWatch(health, parts.checkpoints, parts.reporter.note, rollback=rollback)
        self._interval = parts.interval

    def run(self) -> bool:
        """All the steps that are left, and again after each that is not finite and does not end the run; whether the
        run was asked to stop before the last."""
        while True:
            try:
                return self._steps()
            except NonFiniteError as error:
                with pulse.operation("recovering"):
                    self._parts.model.zero_grad(set_to_none=True)
                    self._recover(error)

    def evaluate(self) -> float | None:
        """The held-out loss now, recorded; None when nothing is held out, and where the run is to stop first."""
        parts = self._parts
        with pulse.operation("evaluating"):
            loss = parts.held_out_loss(self._vote)
        if loss is not None:
            parts.reporter.evaluation(self.state.step, loss)
        return loss

    def _steps(self) -> bool:
        train, state, parts = self._train, self.state, self._parts
        if state.step >= train.steps:
            return False
        graphs = parts.built.graphs
        stepper = (
            Stepper(parts.recipe, parts.built.accumulate)
            if graphs is None
            else GraphStepper(parts.recipe, graphs, parts.profiling)
        )
        self._stepper = stepper
        state.consumed = state.leave_out(state.consumed, train.batch)
        # After a recovery there may be steps that are not saved.
        lossless = stop.interruptible() if state.step == self._start else contextlib.nullcontext()
        with lossless, pulse.operation("preparing"):
            stepper.begin(parts.batches.load(state.step, state.consumed))
        for step in range(state.step, train.steps):
            done, last = step + 1, step + 1 == train.steps
            due = last or done % train.log_every == 0
            began, consumed = state.consumed, state.leave_out(state.consumed + train.batch, train.batch)
            if parts.budget_meter is not None:
                parts.budget_meter.begin()
            parts.meter.begin()
            traced = contextlib.nullcontext() if parts.traces is None else parts.traces.step(done)
            with pulse.step(done), traced:
                result = stepper.run(
                    load_next=None if last else functools.partial(parts.batches.load, done, consumed),
                    memory=float(parts.worker.backend.memory_allocated()) if due else 0.0,
                    requests=functools.partial(_requests, self._interval),
                )
            positions = parts.batches.positions(began)
            seconds = parts.meter.end(positions)
            if parts.budget_meter is not None:
                parts.budget_meter.end(seconds)
            for note in graphs.told() if graphs is not None else ():
                parts.reporter.note(note)
            state.step, state.consumed = done, consumed
            state.tokens += positions
            state.final_loss, state.grad_norm = result.loss, result.grad_norm
            if state.initial_loss is None:
                state.initial_loss = result.loss
            if due:
                with pulse.operation("recording"):
                    self._record(step, result)
            if parts.balancer is not None:
                self._balance(parts.balancer, done, result)
            with pulse.operation("judging the weights"):
                self._weights.after_step(state, result, began)
            stopped = result.stop and not last
            saved = last or stopped or result.save or self._interval.reached(done)
            if result.save and not self._interval.elapsed():
                stop.save_served()
                parts.reporter.note(f"saved step {done}, as asked")
            if saved:
                self._save()
            if last:
                # Behind the save: a forward pass may count something in a buffer.
                with pulse.operation("judging the weights"):
                    self._weights.after_last_step(state)
            if stopped:
                return self._stopped()
            if last or (train.eval.every and done % train.eval.every == 0):
                self._record_experts(done, result)
            if train.eval.every and done % train.eval.every == 0:
                loss = self.evaluate()
                self.eval_after = loss if last else None
                if self._vote.stopping and not last:
                    if not saved:
                        self._save()
                    return self._stopped()
        return False

    def _recover(self, error: NonFiniteError) -> None:
        step, reporter = self.state.step, self._parts.reporter
        self.state, notes = self._recovery.after(error, self.state)
        state = self.state
        if state.step < step:
            reporter.reopen(state.step)
        for note in notes:
            reporter.note(note)
        reporter.log(state.step, {"skipped": float(state.skipped)})
        if state.step > step and (state.step == self._train.steps or self._interval.reached(state.step)):
            self._save()

    def _save(self) -> None:
        with pulse.operation("saving"):
            self._parts.checkpoints.save(self.state)
        self._interval.saved()

    def _stopped(self) -> bool:
        stop.request_stop()  # also where it was another rank that was asked
        self._parts.reporter.note(
            f"stopped after step {self.state.step}, as asked; the same command goes on from there"
        )
        return True

    def _record(self, step: int, result: StepResult) -> None:
        """Report `step`, counted from 0."""
        parts = self._parts
        rates = parts.meter.rates()
        record = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": self._train.optimizer.lr * parts.recipe.schedule(step),
            "loss_tokens": float(result.tokens),
            "tokens": float(self.state.tokens),
            "memory": result.memory,
            **rates,
        }
        if parts.budget_meter is not None:
            on_cpu = parts.worker.device.type == "cpu"
            record.update(parts.budget_meter.record(result.memory, on_cpu=on_cpu))
        if result.expert_imbalance is not None:
            record["expert_imbalance"] = result.expert_imbalance
        if result.expert_loads is not None and parts.handle.mesh.size("expert") > 1:
            record["expert_rank_imbalance"] = rank_imbalance(parts.handle, result.expert_loads)
        parts.reporter.step(step + 1, record, rates.get("seconds", float("nan")))

    def _balance(self, balancer: ExpertBalancer, done: int, result: StepResult) -> None:
        """Place experts anew after `done` steps, where it is time."""
        assert result.expert_loads is not None
        with pulse.operation("placing experts"):
            placed = balancer.after_step(result.expert_loads)
        if placed is not None:
            self._parts.reporter.note(f"step {done}: {placed}")
            self._parts.reporter.log(done, {"expert_bytes_moved": float(placed.moved)})

    def _record_experts(self, step: int, result: StepResult) -> None:
        if result.expert_loads is not None:
            self._parts.reporter.experts(step, by_layer(self._parts.handle, result.expert_loads))


def _requests(interval: SaveInterval) -> stop.Requests:
    """Requests to this rank, and its own: a checkpoint also when its time has come."""
    requests = stop.requests()
    return requests._replace(save=requests.save or interval.elapsed())


class StopVote:
    """The vote of one run to stop; every rank calls it at the same points."""

    def __init__(self, world: int) -> None:
        self._world = world
        self.stopping = False
        """How the last vote ended."""

    def __call__(self) -> bool:
        """Whether some rank was asked to stop. A collective of the hosts."""
        vote = torch.tensor(float(stop_requested()))
        if self._world > 1:
            dist.all_reduce(vote)
        self.stopping = vote.item() > 0
        return self.stopping
