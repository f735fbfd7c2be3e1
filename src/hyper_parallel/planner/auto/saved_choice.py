"""The chosen strategy, saved in the run's folder so that a resumed run keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.config import RunConfig, yaml12
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.auto.resolved import Overrides, resolved

STRATEGY_FILE = "strategy.yaml"
_CHECKPOINTS = "checkpoints"


def write(out: Path, laid: Overrides, lines: Sequence[str]) -> None:
    """Write what was chosen, with lines that tell of it as comments. Raises OSError."""
    text = "".join(f"# {line}\n" for line in lines) + yaml12.write({"version": 1, **laid})
    publish(out / STRATEGY_FILE, text.encode())


def saved_choice(config: RunConfig, world: int) -> tuple[Overrides | None, str]:
    """What the run that this one resumes chose, None where it does not hold any more or there is none; and what to say
    of it."""
    out = Path(config.out)
    file = out / STRATEGY_FILE
    if not config.checkpoint.resume or not file.is_file() or not _resumes(out):
        return None, ""
    try:
        laid = read(file)
        then = resolved(config, laid).strategy.axes.world
    except (ConfigError, OSError, KeyError, TypeError) as error:
        return None, f"{file} does not go with this run any more, so it is planned anew: {error}"
    if then != world:
        return None, f"{file} is for {then} workers and there are {world}, so the run is planned anew"
    if not _agree(config, laid):
        return None, f"{file} is not what the run file writes now, so the run is planned anew"
    return laid, f"as the run that it resumes ({file})"


def read(file: Path) -> dict[str, Any]:
    """What `write` wrote. Raises ConfigError, OSError."""
    data = yaml12.parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(data, dict) or not {"train", "strategy"} <= data.keys():
        raise ConfigError("it has no sections train and strategy")
    return {"train": data["train"], "strategy": data["strategy"]}


def _resumes(out: Path) -> bool:
    folder = out / _CHECKPOINTS
    return folder.is_dir() and any(folder.iterdir())


def _agree(config: RunConfig, laid: Overrides) -> bool:
    """Whether what was chosen then leaves alone what the run file writes now."""
    axes, then = config.strategy.axes, resolved(config, laid)
    written = [axis for axis in ("pipeline", *axes.order, "expert") if axis not in axes.open]
    micro = config.train.micro_batch
    return all(then.strategy.axes.degree(axis) == axes.degree(axis) for axis in written) and (
        micro is None or micro == then.train.micro_batch
    )
