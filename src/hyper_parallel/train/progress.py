"""Progress on rank 0: a live line, log lines, a summary."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyper_parallel.train.summary import Summary
from hyper_parallel.units import format_bytes, format_count, format_seconds

_LINES = 20
"""About how many lines a whole run prints where there is no terminal."""
_QUIET_S = 30.0
"""Without a terminal, the longest time without a line."""
_REFRESH_S = 0.1


class Progress:
    """The run as a person follows it. Nothing here is computed on ranks other than 0."""

    def __init__(self, start: int, steps: int, console: Console | None = None) -> None:
        self._console = (
            console if console is not None else Console(file=sys.stdout, highlight=False, soft_wrap=True)
        )
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._printed = self._drawn = time.monotonic()
        self._first = start + 1
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def step(self, step: int, record: Mapping[str, float], eta: float) -> None:
        """The state after `step` updates; `eta` in seconds to the last one."""
        now = time.monotonic()
        last = step == self._steps
        if self._live is not None:
            if last or now - self._drawn >= _REFRESH_S:
                self._drawn = now
                self._console.width = self._width()
                shown = line(step, self._steps, record, eta, self._console.width)
                self._live.update(Text(shown, no_wrap=True), refresh=True)
        elif last or step == self._first or step % self._every == 0 or now - self._printed >= _QUIET_S:
            self._printed = now
            self.note(line(step, self._steps, record, eta))

    def _width(self) -> int:
        # Asked each time: workers hear of no change of the terminal's size.
        try:
            return os.get_terminal_size(self._console.file.fileno()).columns or self._console.width
        except (OSError, ValueError):
            return self._console.width

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after `step` updates."""
        self.note(f"step {step}: held-out loss {loss:.4f}")

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, summary: Summary, trackers: list[str], file: str, epochs: float | None = None) -> None:
        """The table at the end, the sample, and the commands to try next. `file` is the run file to go on with;
        `epochs`: those of a run that is declared in them."""
        self.close()
        table = Table(box=None, show_header=False, pad_edge=False)
        for label, text in summary.rows():
            table.add_row(Text(label, style="bold"), Text(text, overflow="fold"))
        self._console.print()
        self._console.print(table)
        if summary.sample is not None:
            self._console.print(Text("\nsample", style="bold"))
            self.note(summary.sample)
        self._console.print(Text("\nnext", style="bold"))
        for command in _commands(summary, trackers, file, epochs):
            self.note(f"  {command}")


def line(step: int, steps: int, record: Mapping[str, float], eta: float, width: int | None = None) -> str:
    """One step as text: what a record holds, in the order of interest; with `width` only what fits into it."""
    cells = {
        "step": f"step {step:{len(str(steps))}d}/{steps}",
        "loss": f"loss {record['loss']:.4f}",
        "grad": f"grad {record['grad_norm']:.3f}",
        "lr": f"lr {record['lr']:.2e}",
    }
    if "tokens_per_second" in record:
        cells["rate"] = f"{format_count(record['tokens_per_second'])} tok/s"
    if "mfu" in record:
        cells["mfu"] = f"MFU {record['mfu']:.1%}"
    if "memory_budget" in record:
        cells["budget"] = f"device {_of(record['memory_peak'], record['memory_budget'])}"
        if "memory_process" in record:
            cells["memory"] = f"process {format_bytes(record['memory_process'])}"
    elif record.get("memory"):
        cells["memory"] = format_bytes(record["memory"])
    if step < steps and math.isfinite(eta):
        cells["eta"] = f"ETA {format_seconds(eta)}"
    for cell in ("memory", "lr", "mfu", "grad", "rate", "budget", "eta"):
        if width is None or len("  ".join(cells.values())) <= width:
            break
        cells.pop(cell, None)
    return "  ".join(cells.values())


def _of(part: float, whole: float) -> str:
    """`96.2 of 100.0 MiB`: the unit once, where both have the same."""
    shown, unit = format_bytes(part).split(" ")
    of = format_bytes(whole)
    return f"{shown} of {of}" if of.endswith(f" {unit}") else f"{shown} {unit} of {of}"


def command_path(name: str) -> str:
    """A command as a user can type it here: by its path where its environment is not on the search path."""
    mine = Path(sys.prefix) / "bin" / name
    found = shutil.which(name)
    if not mine.exists() or (found is not None and Path(found).resolve() == mine.resolve()):
        return name
    return shlex.quote(str(shown(mine)))


def shown(path: Path) -> Path:
    """A path relative to where the command was run, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _commands(summary: Summary, trackers: list[str], file: str, epochs: float | None) -> list[str]:
    longer = f" train.steps={summary.steps * 2}" if epochs is None else f" train.epochs={epochs * 2:g}"
    more = "" if summary.stopped else longer
    commands = [f"{command_path('hyper-parallel')} train {shlex.quote(file)}{more}"]
    if summary.checkpoint is not None:
        target = shlex.quote(f"{summary.out}/export")
        if summary.sample is not None:
            run = shlex.quote(summary.out)
            asking = "--chat 'your question'" if summary.conversations else "--prompt 'your text'"
            commands.append(f"{command_path('hyper-parallel')} generate {run} {asking}")
        commands.append(f"{command_path('hyper-parallel')} export {shlex.quote(summary.checkpoint)} {target}")
    if "tensorboard" in trackers:
        commands.append(f"{command_path('tensorboard')} --logdir {shlex.quote(f'{summary.out}/tensorboard')}")
    return commands
