"""From `split: auto` to roles with devices: the split that was chosen before, else one that is measured and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.launch.folder import RunFolder
from hyper_parallel.launch.roles.interface import Engine
from hyper_parallel.launch.run_lock import run_lock
from hyper_parallel.rl.controller.placement import HOST
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.controller.scorer import Scorer, scorer_of
from hyper_parallel.rl.controller.workers import engine_of
from hyper_parallel.rl.role_split import saved_split
from hyper_parallel.rl.role_split.candidates import Candidates, candidates_of, roles_of
from hyper_parallel.rl.role_split.choose import Choice, choose
from hyper_parallel.rl.role_split.measure import Measurement, Stopped

__all__ = ["Stopped", "choose_split", "plan_split", "resolved"]


def plan_split(
    config: RLConfig,
    *,
    folder: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    engine: Callable[[], Engine] | None = None,
    told: Callable[[str], None] = lambda line: None,
    host: str = HOST,
) -> Choice:
    """Choose the split of a run with `split: auto` and train nothing, but for a warm-up; the run will take it.

    Arguments and errors as of `rl.run.run`; Stopped besides.
    """
    prompts = Prompts(config)
    with run_lock(config.out), scorer_of(config, folder) as scorer:
        RunFolder(config.out).make()
        return choose_split(config, prompts, scorer, engine, folder=folder, stop=stop, told=told, host=host)


def resolved(config: RLConfig, choice: Choice) -> RLConfig:
    """The run with the devices of its roles."""
    return config.model_copy(update={"roles": roles_of(config, choice.layout)})


def choose_split(
    config: RLConfig,
    prompts: Prompts,
    scorer: Scorer,
    engine: Callable[[], Engine] | None,
    *,
    folder: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    told: Callable[[str], None] = lambda line: None,
    host: str = HOST,
) -> Choice:
    """The split of before, or one that is measured now and kept in the run's folder, which is locked. Raises as
    `Measurement`, `candidates_of` and `saved_split.read`."""
    found = saved_split.read(config)
    if found is not None:
        told(f"{found.line} (chosen before: {Path(config.out) / saved_split.SPLIT})")
        return found
    candidates = candidates_of(config)
    found, measured = _only(candidates), None
    if found is None:
        measured = Measurement(
            config,
            candidates,
            prompts,
            scorer,
            engine or (lambda: engine_of(config)),
            Recorder(config, told),
            stop,
            host,
        ).measured()
        found = choose(config, candidates, measured)
    saved_split.write(config, found, candidates, measured, folder)
    told(found.line)
    return found


def _only(candidates: Candidates) -> Choice | None:
    """The choice where there is one layout."""
    layouts = [one for one in (candidates.together, *candidates.apart) if one is not None]
    return Choice(layout=layouts[0], predictions=()) if len(layouts) == 1 else None
