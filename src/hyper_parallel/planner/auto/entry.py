"""Worker entry of a run with open axes: agree on the strategy, keep it in the run's folder, then train."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.compat.process_groups import broadcast_text
from hyper_parallel.config import RunConfig, yaml12
from hyper_parallel.errors import ConfigError, HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.launch.stop import interruptible
from hyper_parallel.planner.auto.candidates import simulated
from hyper_parallel.planner.auto.choose import Choice, choose
from hyper_parallel.planner.auto.machine import machine_of
from hyper_parallel.planner.auto.measure_candidates import tried
from hyper_parallel.planner.auto.open_axes import Overrides, resolved
from hyper_parallel.planner.solve import TIE
from hyper_parallel.step.build import transformers_config
from hyper_parallel.step.multimodal import refuse_media_model
from hyper_parallel.train.trainer import main as train
from hyper_parallel.units import format_duration

log = logging.getLogger(__name__)

TRIES = 6
"""Strategies that are tried where the file does not say how many, on processors: a step is short there, and what was
tried leaves nothing behind. On accelerators nobody has measured what trials take."""
TRIES_SECONDS = 120.0
"""That all trials take at most, where the file does not say."""
SHARE = 0.5
"""Share of the memory up to which candidates are built together and stepped alternately; else one at a time."""
PROCESS = 320 * 2**20
"""Bytes that the process of a trial takes on the host beside the step's own."""
_KEY = "hyper_parallel/strategy"


def main(config: RunConfig, worker: Worker) -> None:
    """Train what `config` declares, with the strategy that rank 0 chooses."""
    with interruptible():
        config = together(config, worker)
    train(config, worker)


def together(config: RunConfig, worker: Worker) -> RunConfig:
    """The run with its strategy, the same on every rank. Each raises what rank 0 finds wrong."""
    text = None
    if worker.rank == 0:
        try:
            found = _choices(config, worker)
            message = {
                "choices": [asdict(one) for one in found],
                "at_once": _fit_at_once(config, worker, found),
            }
            text = json.dumps(message)
        except HyperParallelError as error:
            text = json.dumps({"error": str(error)})
    message = json.loads(broadcast_text(_KEY, text))
    if "error" in message:
        raise ConfigError(message["error"])
    choices = [Choice(one["laid"], one["name"], tuple(one["lines"])) for one in message["choices"]]
    runs = [resolved(config, one.laid) for one in choices]
    best, more = 0, []
    if len(runs) > 1:
        say = _say if worker.rank == 0 else lambda _: None
        limit = config.strategy.tries_seconds or TRIES_SECONDS
        within = " within the memory budget" if config.strategy.memory.device is not None else ""
        say(f"trying {len(runs)} strategies{within}, for at most {limit:.0f} s (strategy.tries_seconds)")
        seconds = tried(runs, worker, at_once=message["at_once"], seconds=limit, say=say)
        best = min(range(len(runs)), key=lambda at: (choices[at].weighted(seconds[at] or math.inf), at))
        more = [_beside(choices, seconds, best)]
    if worker.rank == 0 and choices[best].lines:
        _write(config, choices[best].laid, [*choices[best].lines, *more])
    return runs[best]


def _choices(config: RunConfig, worker: Worker) -> list[Choice]:
    """What rank 0 finds: the run's strategy, or some among which a trial finds the quickest. One that was kept has no
    lines."""
    # Before the machine is measured.
    refuse_media_model(transformers_config(config.model), "the planner")
    laid, note = saved_choice(config, worker.world)
    if note:
        _say(note)
    if laid is not None:
        return [Choice(laid, "", ())]
    count = config.strategy.tries
    if count is None:
        count = TRIES if worker.backend.name == "cpu" else 0
    # Simulating a budget plans it, as a trial does: where one tells, the other need not.
    simulate = None if config.strategy.memory.device is not None and count > 1 else simulated
    found = choose(config, machine_of(config, worker, _say), worker.world, _say, simulate)
    return [replace(found, close=()), *found.close[: max(count - 1, 0)]]


def _fit_at_once(config: RunConfig, worker: Worker, found: Sequence[Choice]) -> bool:
    """Whether there is memory for the trials of all choices together."""
    memory = config.strategy.memory
    if memory.pool is not None or memory.flash is not None:
        return False  # one capacity, which each of them may fill
    on_cpu = worker.backend.name == "cpu"
    beside = PROCESS if on_cpu else 0
    room = worker.backend.memory_total() * SHARE / (worker.local_world if on_cpu else 1)
    return sum(one.peak + beside for one in found) <= room


def _beside(choices: Sequence[Choice], seconds: Sequence[float | None], best: int) -> str:
    """The result of a trial, in a line."""
    took = ["not measured" if one is None else format_duration(one) for one in seconds]
    others = "; ".join(
        f"{one.name}: {took[at]}"
        for at, one in sorted(enumerate(choices), key=lambda pair: seconds[pair[0]] or math.inf)
        if at != best
    )
    least = "it took the least"
    if seconds[best] is not None and any(one is not None and one < (seconds[best] or 0.0) for one in seconds):
        least = f"a pipeline was no more than {TIE:.0%} faster"
    return f"of {len(choices)} that were tried, {least}: {took[best]} a step; {others}"


def _write(config: RunConfig, laid: Overrides, lines: Sequence[str]) -> None:
    """Say what was chosen, and write it to the run's folder."""
    for line in lines:
        _say(line)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_choice(out, laid, lines)


def _say(text: str) -> None:
    """On the terminal, which rank 0 has, and in its log."""
    log.info("strategy: %s", text)
    print(f"strategy: {text}", flush=True)  # noqa: T201


STRATEGY_FILE = "strategy.yaml"
_CHECKPOINTS = "checkpoints"


def write_choice(out: Path, laid: Overrides, lines: Sequence[str]) -> None:
    """Write what was chosen, with lines that tell of it as comments. Raises OSError."""
    text = "".join(f"# {line}\n" for line in lines) + yaml12.write({"version": 1, **laid})
    publish(out / STRATEGY_FILE, text.encode())


def saved_choice(config: RunConfig, world: int) -> tuple[Overrides | None, str]:
    """The choice of the run that this one resumes, None where it does not hold any more or there is none; and what to
    say of it."""
    out = Path(config.out)
    file = out / STRATEGY_FILE
    checkpoints = out / _CHECKPOINTS
    resumes = config.checkpoint.resume and checkpoints.is_dir() and any(checkpoints.iterdir())
    if not resumes or not file.is_file():
        return None, ""
    try:
        laid = read_choice(file)
        then = resolved(config, laid).strategy.axes.world
    except (ConfigError, OSError, KeyError, TypeError) as error:
        return None, f"{file} does not go with this run any more, so it is planned anew: {error}"
    if then != world:
        return None, f"{file} is for {then} workers and there are {world}, so the run is planned anew"
    if not _agree(config, laid):
        return None, f"{file} is not what the run file writes now, so the run is planned anew"
    return laid, f"as the run that it resumes ({file})"


def read_choice(file: Path) -> dict[str, Any]:
    """The choice that `write_choice` wrote. Raises ConfigError, OSError."""
    data = yaml12.parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(data, dict) or not {"train", "strategy"} <= data.keys():
        raise ConfigError("it has no sections train and strategy")
    return {"train": data["train"], "strategy": data["strategy"]}


def _agree(config: RunConfig, laid: Overrides) -> bool:
    """Whether what was chosen then leaves alone what the run file writes now."""
    axes, then = config.strategy.axes, resolved(config, laid)
    written = [axis for axis in ("pipeline", *axes.order, "expert") if axis not in axes.open]
    micro = config.train.micro_batch
    return all(then.strategy.axes.degree(axis) == axes.degree(axis) for axis in written) and (
        micro is None or micro == then.train.micro_batch
    )
