"""Trainer: builds, resumes, trains, evaluates, saves and samples."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import nn

from hyper_parallel import compat
from hyper_parallel.checkpoint.durable import explained
from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData
from hyper_parallel.data.export_assets import ends_of
from hyper_parallel.errors import CheckpointError, HyperParallelError, LaunchError, WorkersFailedError
from hyper_parallel.launch import Worker, run, stop
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.launch.rendezvous import detect
from hyper_parallel.launch.run_folder import run_lock
from hyper_parallel.report.wait_line import announcing
from hyper_parallel.step.epochs import epochs_line
from hyper_parallel.train.checkpoint_state import RunState
from hyper_parallel.train.run_parts import RunParts
from hyper_parallel.train.sample import NextLogits, sample, window_logits
from hyper_parallel.train.step_loop import StepLoop, StopVote
from hyper_parallel.train.summary import Summary, shown


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
            world = self.config.effective_strategy.world
            if world > 1:
                return run_on_workers(self.config, self._model)
            with alone(self.config) as worker:
                return self._run(worker)
        return self._run(worker)

    def _run(self, worker: Worker) -> Summary:
        out = Path(self.config.out)
        with explained(out):
            if worker.rank == 0:
                out.mkdir(parents=True, exist_ok=True)
            screen = sys.stdout if worker.rank == 0 else None
            with stop.interruptible(), pulse.operation("preparing"), announcing(screen):
                run = _Run(RunParts.of(self.config, self._model, worker))
            return run.run()


class _Run:
    """One run on one rank: resumed, trained, sampled, summed up; closed however it ends."""

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._config = parts, parts.config  # with the steps of its epochs
        self._vote = StopVote(parts.worker.world)

    def run(self) -> Summary:
        parts = self._parts
        budget = parts.built.budget
        try:
            with stop.interruptible(), pulse.operation("resuming"):
                state = self._resume()
            try:
                summary = self._train(state)
            finally:
                parts.reporter.close_trackers()
            if budget is not None and not parts.built.fresh:
                budget.bring_back()
        except BaseException as error:
            # What is being saved can be finished, so that a resume finds it, where no rank waits for a dead one:
            # every rank raises a HyperParallelError.
            if isinstance(error, HyperParallelError) or parts.worker.world == 1:
                with contextlib.suppress(CheckpointError):
                    parts.checkpoints.finish()
            raise
        finally:
            parts.reporter.close()
            if budget is not None:
                budget.close()
        parts.reporter.summary(summary)
        if dist.is_initialized():
            dist.barrier()  # whoever returns finds the files of the run complete
        return summary

    def _resume(self) -> RunState:
        """Go on from the newest checkpoint, and only then touch the files of the run that wrote it."""
        parts = self._parts
        resumed, notes = parts.checkpoints.resume()
        state = resumed or RunState()
        parts.reporter.open(state.step)
        plans = parts.built.budget.plans if parts.built.budget is not None else []
        train, rows = self._config.train, parts.built.text.order.length
        lines = [epochs_line(train.epochs, rows, train.steps)] if train.epochs is not None else []
        for note in (*lines, *plans, *notes):
            parts.reporter.note(note)
        return state

    def _train(self, state: RunState) -> Summary:
        parts, steps, start = self._parts, self._config.train.steps, state.step
        loop = StepLoop(parts, state, self._vote)
        if start >= steps:
            key = "steps" if self._config.train.epochs is None else "epochs"
            parts.reporter.note(
                f"nothing left to train: step {start} of {steps} is done; raise train.{key} to go on"
            )
        if state.eval_before is None and start == 0:
            with stop.interruptible():
                state.eval_before = loop.evaluate()
        stopped = loop.run()
        if not stopped and loop.eval_after is None:
            loop.eval_after = loop.evaluate()
        with pulse.operation("sampling"):
            text = None if stopped or self._vote.stopping else self._sample(loop.state.step)
        with pulse.operation("saving"):
            checkpoint = parts.checkpoints.finish()
        state, rates = loop.state, parts.meter.overall()
        return Summary(
            out=self._config.out,
            steps=state.step,
            stopped=stopped,
            resumed_from=start or None,
            vocabulary=self._vocabulary(),
            parameters=sum(math.prod(p.layout.shape) for p in parts.handle.parameters()),
            initial_loss=state.initial_loss,
            final_loss=state.final_loss,
            eval_before=state.eval_before,
            eval_after=loop.eval_after,
            tokens=state.tokens,
            seconds=parts.meter.seconds,
            tokens_per_second=rates.get("tokens_per_second"),
            mfu=rates.get("mfu"),
            checkpoint=str(shown(checkpoint)) if checkpoint is not None else None,
            sample=text,
            conversations=parts.built.text.conversations,
            skipped=state.skipped,
            budget=None if parts.budget_meter is None else parts.budget_meter.use(),
            profile=getattr(parts.profiling or parts.traces, "written", None),
        )

    def _sample(self, step: int) -> str | None:
        parts, wanted = self._parts, self._config.train.sample
        if not wanted or not wanted.tokens:
            return None
        built, tokens, placeholders = parts.built, wanted.tokens, frozenset[int]()
        next_logits: NextLogits | None = None if built.pipeline is None else built.pipeline.next_logits
        if isinstance(built.text, MultimodalData):
            prompt = built.text.media_prompt(wanted.prompt)
            placeholders = frozenset(built.text.processor.placeholder_ids.values())
            next_logits = (
                window_logits(parts.model, parts.worker.device, prompt)
                if built.submodels is None
                else functools.partial(built.submodels.next_logits, prompt)
            )
            # Nothing of the prompt may leave the window, whose media stay.
            tokens = min(tokens, max(0, self._config.data.sequence - len(prompt.ids)))
        text = sample(
            parts.model,
            built.text.tokenizer,
            parts.prompt,
            tokens,
            stops=ends_of(built.generation, built.text),
            sequence=self._config.data.sequence,
            device=parts.worker.device,
            temperature=wanted.temperature,
            seed=self._config.seed,
            ends=self._vote,
            next_logits=next_logits,
            placeholders=placeholders,
        )
        parts.reporter.text(step, "sample", text)
        return text

    def _vocabulary(self) -> int:
        built = self._parts.built
        config = built.model_config or {}
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        return int(size or built.text.tokenizer.vocab_size)


# `Trainer.run` in a plain script: as the only worker, or as the parent or a member of several.


@contextlib.contextmanager
def alone(config: RunConfig) -> Iterator[Worker]:
    """This process as a run's only worker: Ctrl-C is a request to stop, no process group is made, and
    the run's folder is held. Raises LaunchError if another run holds it."""
    backend = compat.backend(config.launch.device)
    device = backend.device(0)
    backend.set_device(device)
    with run_lock(config.out), stop.listening((signal.SIGINT, signal.SIGTERM, stop.SAVE)):
        yield Worker(rank=0, local_rank=0, world=1, local_world=1, device=device, backend=backend)


_given: list[nn.Module] = []
"""The model that the script under a launcher gave; its worker is the same process."""


def run_on_workers(config: RunConfig, model: nn.Module | None) -> Summary:
    """Start the run's local workers, or join a launcher's, and wait; the summary that rank 0 left.

    Raises LaunchError when a model is given that processes started here would not have, or when the run fails.
    """
    if model is not None and detect(os.environ, config.launch.rendezvous) is None:
        raise LaunchError(
            f"a model of one's own cannot be handed to {config.effective_strategy.world} processes that are "
            "started here; start the script with torchrun, or set launch.workers=1"
        )
    _given[:] = [] if model is None else [model]
    code = run(config, f"{__name__}:main")
    if code != 0:
        raise WorkersFailedError(code, config.out)
    return Summary.read(config.out)


def main(config: RunConfig, worker: Worker) -> None:
    """Train as one of a run's workers: what each worker of the command or of a script runs."""
    Trainer(config, _given[0] if _given else None).run(worker)
