"""Summary of a run, as values and as text."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.units import format_bytes, format_count, format_duration, format_seconds

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


@dataclass(frozen=True, kw_only=True)
class BudgetUse:
    """The use of a budget on one rank. Bytes; rates are means over the steps of this run."""

    budget: int
    """Of device memory (`strategy.memory.device`)."""
    peak: int
    """The most that the step's tensors take of it, by the plan."""
    out: dict[str, float]
    """Bytes that a step copies from the device to each tier."""
    back: dict[str, float]
    """Bytes that a step copies from each tier to the device."""
    waited: float
    """Seconds of a step in which it waited for copies."""
    share: float
    """`waited` as a share of the step's time."""
    process: int
    """Resident memory of the process at the last recorded step, where the device is a CPU; otherwise 0. The budget
    does not govern it: it holds the interpreter, libraries, host tiers and caches as well."""

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line of a summary."""
        met = "met" if self.peak <= self.budget else "EXCEEDED"
        rows = [
            (
                "device memory",
                f"{format_bytes(self.peak)} at most, by the plan, of a budget of {format_bytes(self.budget)}: {met}",
            )
        ]
        for tier in sorted({*self.out, *self.back}):
            out, back = self.out.get(tier, 0.0), self.back.get(tier, 0.0)
            rows.append(
                (f"copies, {tier}", f"{format_bytes(out)} to it and {format_bytes(back)} back a step")
            )
        waited = f"{format_duration(self.waited)} a step, {self.share:.0%} of its time"
        rows.append(("copies waited for", waited if self.waited else "never"))
        if self.process:
            sentence = (
                f"{format_bytes(self.process)} resident; not governed: it includes Python and the tiers"
            )
            rows.append(("process memory", sentence))
        return rows


class BudgetMeter:
    """Adds up what the budget of this rank did in steps, without what lies between them."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._copied: Counter[tuple[str, bool]] = Counter()
        self._waited, self._seconds, self._steps, self._process = 0.0, 0.0, 0, 0
        self._began = (budget.copied, 0.0)

    def begin(self) -> None:
        """A step begins."""
        self._began = self._budget.copied, self._budget.waited

    def end(self, seconds: float) -> None:
        """A step of `seconds` ended."""
        copied, waited = self._began
        now = self._budget.copied
        now.subtract(copied)
        self._copied.update(now)
        self._waited += self._budget.waited - waited
        self._seconds += seconds
        self._steps += 1

    def record(self, memory: float, *, on_cpu: bool) -> dict[str, float]:
        """The fields of a step's record on the budget. `memory`: what the back end says is allocated; of a CPU, that
        the process has."""
        self._process = int(memory) if on_cpu else 0
        steps = max(self._steps, 1)
        found = {
            "memory_budget": float(self._budget.bytes),
            "memory_peak": float(self._budget.peak),
            "memory_copied": self._copied.total() / steps,
            "memory_stall": self._budget.stalled(),
        }
        return {**found, "memory_process": memory} if on_cpu else found

    def use(self) -> BudgetUse | None:
        """Over all steps so far; None before the first."""
        if not self._steps:
            return None
        sums = {
            way: {
                tier: count / self._steps
                for (tier, out), count in self._copied.items()
                if out is way and count
            }
            for way in (True, False)
        }
        return BudgetUse(
            budget=self._budget.bytes,
            peak=self._budget.peak,
            out=sums[True],
            back=sums[False],
            waited=self._waited / self._steps,
            share=self._waited / self._seconds if self._seconds else 0.0,
            process=self._process,
        )


_NO_PREDICTION = (
    "none: no cluster was named. `hyper-parallel calibrate`, then add train.profile.cluster=cluster.yaml"
)


@dataclass(frozen=True)
class Summary:
    """The outcome of `Trainer.run`; also in `<out>/summary.json`. Losses are in nats for a valid token."""

    out: str
    steps: int
    """Updates done, those before a resume included."""
    stopped: bool
    """The run was asked to stop before its last step."""
    resumed_from: int | None
    """The step that this run went on from, None when it began at 0."""
    vocabulary: int
    parameters: int
    initial_loss: float | None
    """Of the first step, before any update; ln(vocabulary) is what a model that knows nothing has."""
    final_loss: float | None
    """Of the last step's batch, before its update."""
    eval_before: float | None
    """On held-out text, before the first update."""
    eval_after: float | None
    tokens: int
    """Positions computed over all steps, padding included."""
    seconds: float
    """Spent in training steps of this run, without evaluation and saving."""
    tokens_per_second: float | None
    """Of this run's steps."""
    mfu: float | None
    """Model FLOPs utilisation of this run's steps, None where the device's peak is not known."""
    checkpoint: str | None
    sample: str | None
    conversations: bool = False
    """The text has conversations, so that the model answers messages."""
    skipped: int = 0
    """Steps whose loss or gradient norm was not finite and that were left out (`train.on_nonfinite`)."""
    budget: BudgetUse | None = None
    """What the memory budget came to, on this rank; None without one."""
    profile: list[str] | None = None
    """The page and the traces of measured steps, with the prediction where there is one; a trace of each rank where
    parts of the model are on several; None where no steps were measured."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-able values; what is not finite is None."""
        finite = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v  # noqa: E731
        return {key: finite(value) for key, value in asdict(self).items()}

    @classmethod
    def read(cls, out: str | Path) -> Summary:
        """The summary of a finished run from its folder."""
        found = json.loads((Path(out) / "summary.json").read_text(encoding="utf-8"))
        if found.get("budget") is not None:
            found["budget"] = BudgetUse(**found["budget"])
        return cls(**found)

    def write(self) -> None:
        """Write `<out>/summary.json`."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        publish(Path(self.out) / "summary.json", text.encode())

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line that is shown."""
        rows = [("steps", f"{self.steps}{' (stopped early)' if self.stopped else ''}")]
        if self.skipped:
            rows.append(("skipped", f"{self.skipped} (loss or gradient norm not finite)"))
        if self.resumed_from is not None:
            rows.append(("resumed from", f"step {self.resumed_from}"))
        rows.append(("parameters", format_count(self.parameters)))
        if self.initial_loss is not None:
            known = math.log(self.vocabulary)
            rows.append(
                (
                    "initial loss",
                    f"{self.initial_loss:.4f}, {self.initial_loss / known:.4f} of ln {self.vocabulary} = {known:.4f}",
                )
            )
        if self.final_loss is not None:
            rows.append(("final train loss", f"{self.final_loss:.4f}"))
        if self.eval_before is not None:
            after = f" → {self.eval_after:.4f}" if self.eval_after is not None else ""
            rows.append(("held-out loss", f"{self.eval_before:.4f}{after}"))
        rows.append(("tokens", format_count(self.tokens)))
        if self.tokens_per_second is not None:
            mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
            rows.append(
                (
                    "time",
                    f"{format_seconds(self.seconds)}, {format_count(self.tokens_per_second)} tokens/s{mfu}",
                )
            )
        if self.budget is not None:
            rows += self.budget.rows()
        if self.profile is not None:
            page, *traces = self.profile
            if page.endswith(".html"):
                rows.append(("profile", page))
                rows += [("trace", f"{trace} (opens in ui.perfetto.dev)") for trace in traces]
                if len(traces) == 1:
                    rows.append(("prediction", _NO_PREDICTION))
            else:
                folder = Path(page).parent
                rows.append(("traces", f"{folder}, one for each rank (they open in ui.perfetto.dev)"))
        rows.append(("metrics", f"{self.out}/metrics.jsonl"))
        if self.checkpoint is not None:
            rows.append(("checkpoint", self.checkpoint))
        return rows
