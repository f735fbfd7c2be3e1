"""Run of reinforcement learning: groups of workers, warm-up, the loop, evaluation, checkpoints, and recovery."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.durable import explained
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import RewardError
from hyper_parallel.launch.roles.engine import Engine
from hyper_parallel.launch.run_folder import RunFolder, run_lock
from hyper_parallel.proc import room_for_files
from hyper_parallel.rl.controller.controller import Controller, LoopState
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.recorder import BatchReport, Recorder, shown
from hyper_parallel.rl.controller.recovery import LOST, Recovery
from hyper_parallel.rl.controller.scorer import Accuracy, Scorer, evaluate
from hyper_parallel.rl.controller.scorer_kinds import ModelScorer, scorer_of
from hyper_parallel.rl.controller.warm_up import warm_up
from hyper_parallel.rl.controller.workers import HOST, RoleGroup, WeightSync, do, engine_of, groups_of
from hyper_parallel.rl.queue import StalenessQueue
from hyper_parallel.rl.role_split import Stopped, choose_split, resolved, write_run
from hyper_parallel.rl.sample import Sample
from hyper_parallel.units import format_seconds

REFERENCE = "reference"
"""The folder of the reference model in a run's folder, where the policy was warmed up before."""


@dataclass(frozen=True, kw_only=True)
class RLSummary:
    """What came of a run."""

    out: str
    steps: int = 0
    stopped: bool
    resumed_from: int | None = None
    before: Accuracy | None = None
    """Of held-out prompts, before the first step."""
    after: Accuracy | None = None
    seconds: float = 0.0
    """Of this start, without the workers'."""
    tokens: int = 0
    """Drawn in what was trained."""
    restarts: int = 0
    """Of groups of workers that were lost."""
    failed_rewards: int = 0
    checkpoint: str | None = None
    profile: str | None = None
    """The folder of the actor's traces, once they are there."""


def run(
    config: RLConfig,
    *,
    folder: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    engine: Callable[[], Engine] | None = None,
    told: Callable[[str], None] = lambda line: None,
    host: str = HOST,
) -> RLSummary:
    """Run what a file declares. `folder`: of the file, where a reward's file is looked for. `stop`: asked between
    steps. `engine`: who starts the workers, instead of `roles.engine`. `told`: is given lines about the run. `host`:
    whose operations the groups have.

    Raises ConfigError, DataError, StrategyError and the like for what the file asks for, GroupError where workers were
    lost more often than `roles.restarts`.
    """
    room_for_files(sum(len(plan.devices) for plan in groups_of(config)) if not config.roles.open else 1)
    prompts = Prompts(config)
    with explained(Path(config.out)), run_lock(config.out), scorer_of(config, folder) as scorer:
        RunFolder(config.out).make()
        if config.roles.open:
            try:
                choice = choose_split(
                    config, prompts, scorer, engine, folder=folder, stop=stop, told=told, host=host
                )
            except Stopped:
                return RLSummary(out=config.out, stopped=True)
            config = resolved(config, choice)
        else:
            write_run(config, folder)
        with (
            (engine or functools.partial(engine_of, config))() as workers,
            contextlib.closing(Recorder(config, told)) as recorder,
        ):
            return _Run(config, prompts, scorer, workers, recorder, stop, host).run()


class _Run:
    def __init__(
        self,
        config: RLConfig,
        prompts: Prompts,
        scorer: Scorer,
        engine: Engine,
        recorder: Recorder,
        stop: Callable[[], bool],
        host: str,
    ) -> None:
        self._config, self._prompts, self._scorer = config, prompts, scorer
        self._recorder, self._stop = recorder, stop
        plans = groups_of(config)
        workers = len({device for plan in plans for device in plan.devices})
        recorder.note(
            "starting "
            + ", ".join(
                f"{plan.name} ({len(plan.devices)} worker{'s' * (len(plan.devices) > 1)})" for plan in plans
            )
        )
        self._groups = [RoleGroup(engine, config, plan, workers, host) for plan in plans]
        self._actor = self._groups[0]
        self._rollouts = [one for one in self._groups if one.has("rollout")]
        self._reference = next((one for one in self._groups if one.has("reference")), None)
        if isinstance(scorer, ModelScorer):
            scorer.attach(next(one for one in self._groups if one.has("reward")))
        self._weights = WeightSync(config, self._actor, self._rollouts)
        self._saved_at = 0
        self._saved_time = time.monotonic()
        self._controller: Controller | None = None
        self._before: Accuracy | None = None
        self._recovery = Recovery(config, self._groups, self._weights, self, recorder.note)

    def run(self) -> RLSummary:
        for one in self._groups:
            one.wait_ready()
        found = self._actor.ask(0, "resume")
        began = time.monotonic()
        before = None
        if found is None:
            state, queue = LoopState(), self._new_queue()
            if self._config.warmup is not None:
                warm_up(
                    self._config, self._actor, self._rollouts[0], self._weights, self._prompts, self._scorer,
                    self._recorder,
                )  # fmt: skip
            self._save(state, queue)
        else:
            state, queue, before = self._restored(found)
            if state.step:
                self._recorder.note(f"resumed at step {state.step}")
        if not state.step and self._config.warmup is not None and self._reference is not None:
            self._write_reference(anew=found is None)
        self.load_reference()
        self._recorder.open(state.step)
        resumed = state.step or None
        for one in self._rollouts:
            self._weights.connect(one, state.step)
            self._weights.now(one, state.version, state.step)
        self._before = before if before is not None else self._evaluated(state)
        self._controller = self._new_controller(state, queue)
        while True:
            try:
                stopped = self._loop()
                after, checkpoint = self._finished(stopped)
                break
            except LOST as error:
                self._recovery.recover(error)
        state = self._controller.state
        return RLSummary(
            out=self._config.out,
            steps=state.step,
            stopped=stopped,
            resumed_from=resumed,
            before=self._before,
            after=after,
            seconds=time.monotonic() - began,
            tokens=state.tokens,
            restarts=sum(one.restarts for one in self._groups),
            failed_rewards=self._scorer.failed,
            checkpoint=checkpoint,
            profile=self._traces,
        )

    @property
    def _traces(self) -> str | None:
        folder = Path(self._config.out) / "profile"
        asked = self._config.roles.actor.profile is not None
        return str(folder) if asked and any(folder.glob("rank-*.json")) else None

    def _loop(self) -> bool:
        """Train to the end; whether it was stopped before. Raises `LOST`."""
        controller, rl, every = self.controller, self._config.rl, self._config.eval.every
        while controller.state.step < rl.steps and not self._stop():
            step = controller.state.step
            due = self._next_save(step)
            until = rl.steps if not every else min(rl.steps, (step // every + 1) * every)
            try:
                controller.run(min(until, due), self._stop)
            except RewardError:
                self._recorder.samples(controller.state.step + 1, controller.batch)
                raise
            now = controller.state.step
            if now >= due and now < rl.steps:
                self._save(controller.state, controller.queue)
            if every and now % every == 0 and now < rl.steps:
                self._evaluated(controller.state)
        return controller.state.step < rl.steps

    def _finished(self, stopped: bool) -> tuple[Accuracy | None, str | None]:
        """Evaluate and save at the end; the accuracy and the checkpoint's path. Raises `LOST`."""
        state = self.controller.state
        after = self._evaluated(state) if not stopped and state.step else None
        self._save(state, self.controller.queue)
        return after, self._actor.ask(state.step, "saved")

    @property
    def controller(self) -> Controller:
        """The loop; another one after a restart of the actor."""
        assert self._controller is not None
        return self._controller

    def resume(self) -> LoopState:
        """The actor's workers are new: go on from the newest checkpoint."""
        found = self._actor.ask(self.controller.state.step, "resume")
        assert found is not None, "saved before the first step"
        state, queue, _ = self._restored(found)
        self._scorer.begin_anew()
        self._controller = self._new_controller(state, queue)
        self._recorder.open(state.step)
        return state

    def _new_controller(self, state: LoopState, queue: StalenessQueue[list[Sample]]) -> Controller:
        return Controller(
            self._config, self._groups, self._weights, self._prompts, self._scorer, state, queue, self._trained
        )  # fmt: skip

    def _new_queue(self) -> StalenessQueue[list[Sample]]:
        rl = self._config.rl
        return StalenessQueue(
            batch=rl.prompts, updates=rl.minibatches, staleness=rl.staleness, order=rl.order
        )

    def _trained(self, report: BatchReport) -> None:
        self._recorder.batch(report, {one.name: one.busy_s for one in self._groups})

    def _evaluated(self, state: LoopState) -> Accuracy | None:
        """With the weights of now, which the rollout may not have yet."""
        if not self._prompts.held_out:
            return None
        first, step = self._rollouts[0], state.step
        if first.version != state.version:
            self._weights.connect(first, step)
            self._weights.now(first, state.version, step)
        found = evaluate(self._config, first, self._prompts.held_out, self._scorer, step)
        self._recorder.evaluation(step, found)
        return found

    def _next_save(self, step: int) -> int:
        settings, last = self._config.checkpoint, self._config.rl.steps
        if (every := settings.every_steps) is not None:
            return min(last, (step // every + 1) * every)
        if (seconds := settings.every_seconds) is not None:
            return step + 1 if time.monotonic() - self._saved_time > seconds else min(last, step + 10)
        return last

    def _save(self, state: LoopState, queue: StalenessQueue[list[Sample]]) -> None:
        """All groups are idle."""
        rows = self._controller.rows_under_way if self._controller is not None else []
        before = self._before
        told = {
            "state": {**asdict(state), "again": sorted({*state.again, *rows})},
            "queue": queue.state(lambda samples: [asdict(one) for one in samples]),
            "before": asdict(before) if before is not None else None,
        }
        self._actor.call([do("save", step=state.step, state=told)], state.step).result()
        self._saved_time = time.monotonic()

    def _restored(
        self, found: dict[str, Any]
    ) -> tuple[LoopState, StalenessQueue[list[Sample]], Accuracy | None]:
        state = LoopState(**found["state"])
        queue: StalenessQueue[list[Sample]] = StalenessQueue.from_state(
            found["queue"], lambda samples: [Sample.from_json(one) for one in samples]
        )
        for ticket in queue.running:
            queue.fail(ticket)
        before = found["before"]
        return state, queue, Accuracy(**before) if before is not None else None

    def _write_reference(self, *, anew: bool) -> None:
        """The policy after the warm-up. `anew`: not of a start before, such as that of `roles: auto`."""
        if not anew and (Path(self._config.out) / REFERENCE).is_dir():
            return
        path = self._actor.ask(0, "saved")
        self._actor.ask(0, "export", checkpoint=path, folder=str(Path(self._config.out) / REFERENCE))

    def load_reference(self) -> None:
        folder = Path(self._config.out) / REFERENCE
        if self._reference is not None and folder.is_dir():
            self._reference.ask(0, "load_reference", folder=str(folder))


def summary_lines(summary: RLSummary) -> list[str]:
    """What came of a run, and what to do next."""
    found = []
    if summary.before is not None and summary.after is not None:
        for name in ("sampled", "greedy"):
            before, after = getattr(summary.before, name), getattr(summary.after, name)
            found.append(f"held-out reward, {name + ':':8} {shown(before)} → {shown(after)}")
    found.append(
        f"{summary.steps} steps, {summary.tokens:,} tokens trained, in {format_seconds(summary.seconds)}"
        + (f"; groups of workers started again: {summary.restarts}" if summary.restarts else "")
    )
    if summary.failed_rewards:
        found.append(
            f"{summary.failed_rewards} rewards could not be computed (failed_rewards in metrics.jsonl)"
        )
    if summary.profile is not None:
        found.append(
            f"traces: {summary.profile}, one for each of the actor's workers (they open in ui.perfetto.dev)"
        )
    if summary.stopped:
        found.append("stopped; run the same command again: it goes on from the checkpoint")
    elif summary.checkpoint is not None:
        found.append(f'next: hyper-parallel generate {shlex.quote(summary.out)} --prompt "..."')
    return found
