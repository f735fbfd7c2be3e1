"""`roles: auto`: the devices of a run's roles, chosen by simulation of measured times and kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.config import yaml12
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.roles.engine import Engine
from hyper_parallel.launch.run_folder import RunFolder, run_lock
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import render
from hyper_parallel.rl.controller.prompts import Prompts
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.controller.scorer import Scorer
from hyper_parallel.rl.controller.scorer_kinds import scorer_of
from hyper_parallel.rl.controller.workers import HOST, engine_of
from hyper_parallel.rl.role_layouts import (
    Candidates,
    Measured,
    RoleLayout,
    candidates_of,
    on_layout,
    pass_law,
    roles_of,
    simulation_of,
)
from hyper_parallel.rl.role_measurement import Measurement, Stopped
from hyper_parallel.rl.simulator import LoopResult, ranked_splits, simulate_alternating
from hyper_parallel.units import format_seconds

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
    return on_layout(config, choice.layout)


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
    found = read_split(config)
    if found is not None:
        told(f"{found.line} (chosen before: {Path(config.out) / SPLIT})")
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
    write_split(config, found, candidates, measured, folder)
    told(found.line)
    return found


def _only(candidates: Candidates) -> Choice | None:
    """The choice where there is one layout."""
    layouts = [one for one in (candidates.together, *candidates.apart) if one is not None]
    return Choice(layout=layouts[0], predictions=()) if len(layouts) == 1 else None


WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A layout's simulated step."""

    layout: RoleLayout
    seconds: float
    generating: float
    """Share of the time in which an engine of the rollout works."""
    training: float
    """Share of the time in which the actor works."""
    staleness: float
    """Mean of trained groups, in optimizer updates."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layout that was chosen, and why."""

    layout: RoleLayout
    predictions: tuple[Prediction, ...]
    """The quickest first. Empty where nothing was measured, because there was only one layout."""

    @property
    def line(self) -> str:
        """What was chosen, what it takes, and what the next best takes."""
        if not self.predictions:
            return f"roles: {self.layout.words}; there is no other layout, and nothing was measured"
        first, *others = self.predictions
        beside = (
            f"; next best: {others[0].layout.words}, {format_seconds(others[0].seconds)}" if others else ""
        )
        return f"roles: {self.layout.words}, predicted {format_seconds(first.seconds)} a step{beside}"

    def table(self) -> str:
        """What was simulated; empty where nothing was."""
        if not self.predictions:
            return ""
        rows = tuple(
            (
                one.layout.words,
                f"{one.seconds:.4g}",
                f"{one.generating:.0%}",
                f"{one.training:.0%}",
                f"{one.staleness:.1f}",
            )
            for one in self.predictions
        )
        columns = ("Devices", "Seconds", "Rollout", "Actor", "Stale")
        note = (
            "Seconds: of a step. Rollout, Actor: share of the time in which they work.\n"
            "Stale: mean staleness of trained groups, in optimizer updates. Layouts that\n"
            "cannot be among the first two are left out."
        )
        sheet = Sheet("a step of each layout", columns, rows, note=note)
        return render("layouts, simulated from measured times", (), (sheet,), "predicted", WIDTH)


def choose(config: RLConfig, candidates: Candidates, measured: Measured) -> Choice:
    """Simulate the layouts whose times were measured; the quickest, of equals the one that takes turns."""
    found = list[Prediction]()
    if candidates.together is not None and measured.together is not None:
        setup = simulation_of(config, measured, engine=candidates.engine, together=True)
        found.append(_prediction(candidates.together, simulate_alternating(setup)))
    if measured.apart is not None:
        setup = simulation_of(config, measured, engine=candidates.engine, together=False)
        known = setup.train.measured
        splits = {
            (one.rollout, one.train): one
            for one in candidates.apart
            if len(known) > 1 or one.train in known  # one measurement tells nothing of other numbers
        }
        found += [
            _prediction(splits[one.rollout_devices, one.train_devices], one)
            for one in ranked_splits(setup, list(splits))
        ]
    found.sort(key=lambda one: one.seconds)
    return Choice(layout=found[0].layout, predictions=tuple(found))


def _prediction(layout: RoleLayout, result: LoopResult) -> Prediction:
    return Prediction(
        layout=layout,
        seconds=result.seconds,
        generating=result.generating,
        training=result.training,
        staleness=result.mean_staleness,
    )


# The chosen split, kept in the run's folder: `split.json` with the times, and `run.yaml`, the run with its roles.
#
# A run that goes on takes the split that was made and measures nothing. Who deletes `split.json` has it chosen anew.

SPLIT, RUN = "split.json", "run.yaml"
FORMAT = 1


def write_split(
    config: RLConfig, choice: Choice, candidates: Candidates, measured: Measured | None, folder: Path | None
) -> None:
    """`folder`: of the run file. Raises OSError."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_run(resolved(config, choice), folder, (choice.line, f"The times are in {SPLIT}."))
    publish(
        out / SPLIT, (json.dumps(_described(config, choice, candidates, measured), indent=1) + "\n").encode()
    )


def write_run(config: RLConfig, folder: Path | None, notes: Sequence[str] = ()) -> None:
    """Keep what a run does in its folder: a run file itself, with the commits of models of the Hub. Raises OSError."""
    data = config.model_dump(mode="json")
    for key in ("reward", "environment"):
        # A file of the user's is looked for beside the run file.
        if data["task"][key] is not None and ".py:" in data["task"][key]:
            data["task"][key] = str((folder or Path()).absolute() / data["task"][key])
    text = "".join(f"# {line}\n" for line in notes)
    publish(Path(config.out) / RUN, (text + yaml12.write(data)).encode())


def read_split(config: RLConfig) -> Choice | None:
    """What was chosen for this run; None where nothing was. Raises ConfigError for a file that cannot be read, or that
    does not go with the roles that are written now."""
    file = Path(config.out) / SPLIT
    if not file.is_file():
        return None
    anew = f"delete {file} to have it chosen anew (checkpoints are read on any devices)"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        devices = int(data["devices"])
        choice = Choice(
            layout=RoleLayout(**data["chosen"]),
            predictions=tuple(
                Prediction(**{**one, "layout": RoleLayout(**one["layout"])}) for one in data["predicted"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__}: {error}); {anew}") from error
    given = config.roles.devices or config.launch.workers
    if given is not None and given != devices:
        raise ConfigError(
            f"{file} splits {devices} devices, and this run has {given}; put the number back, or {anew}"
        )
    try:
        roles_of(config, choice.layout)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}: {anew}") from error
    return choice


def _described(
    config: RLConfig, choice: Choice, candidates: Candidates, measured: Measured | None
) -> dict[str, object]:
    rl = config.rl
    found: dict[str, object] = {
        "format": FORMAT,
        "devices": candidates.devices,
        "chosen": asdict(choice.layout),
        "staleness": rl.staleness,
        "order": rl.order,
        "source": "simulated from measured times",
        "predicted": [asdict(one) for one in choice.predictions],
    }
    if measured is not None:
        found["measured"] = asdict(measured)
        found["pass_law"] = {
            name: dict(zip(("pass_seconds", "sequence_seconds"), pass_law(times.waves), strict=True))
            for name, times in (("together", measured.together), ("apart", measured.apart))
            if times is not None
        }
    return found
