"""Real runs that are killed, stopped or sent signals, and what is left of them: shared by `kill_saves`, `signals` and
`pipeline_kills`, which have the cases and judge them.

A `Command` is a process that is the command of one run after another; it imports PyTorch once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from campaigns import Log
from shapes import text_of_functions

from hyper_parallel import config, launch
from hyper_parallel.errors import PREFIX, HyperParallelError

HEAD = """\
version: 1
out: OUT
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
"""
"""A run file's beginning; ``OUT`` is the folder of the run."""
Row = dict[str, Any]
"""A case, and what it came to."""


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def records(folder: Path, out: str) -> dict[int, dict[str, Any]]:
    """Step to its metrics, of whole lines."""
    path = folder / out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record for record in found if "loss" in record}


def results(folder: Path, out: str, steps: int) -> tuple[dict[int, Any], dict[str, bytes]]:
    """What must not depend on interruptions: every loss and norm, and the bytes of the last checkpoint."""
    values = {step: (row["loss"], row["grad_norm"]) for step, row in records(folder, out).items()}
    files = (folder / out / "checkpoints" / f"step-{steps:08d}").glob("*.safetensors")
    return values, {path.name: path.read_bytes() for path in files}


class Command:
    """A process that starts runs one after another as ``hyper-parallel train`` does, and is the command of each."""

    def __init__(self, folder: Path, run: str, /, **functions: int) -> None:
        """`run`: a run file, with ``OUT`` for the folder of the run; `functions`: of the texts that it names."""
        self.folder, self._run = folder, run
        for name, count in functions.items():
            (folder / f"{name}.txt").write_text(text_of_functions(count))
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, out: str, *overrides: str) -> None:
        (self.folder / f"{out}.yaml").write_text(self._run.replace("OUT", out))
        (self.folder / f"{out}.err").write_text("")
        (self.folder / f"{out}.txt").write_text("")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([out, *overrides]).encode() + b"\n")
        self.process.stdin.flush()
        self.begun = time.monotonic()

    def ended(self, timeout: float) -> int | None:
        """The run's exit code; None while it lives."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return None
        return int(self.process.stdout.readline())

    def said(self, out: str) -> str:
        return (self.folder / f"{out}.err").read_text()

    def until_first_step(self, out: str) -> int | None:
        """Wait until the run has a step; its exit code where it ended before that."""
        while not records(self.folder, out):
            if (code := self.ended(0.005)) is not None:
                return code
            assert time.monotonic() - self.begun < 300, "no step within five minutes"
        return None

    def finish(self, out: str, *overrides: str) -> bool:
        """Run to the end; whether that is as it should be."""
        self.start(out, *overrides)
        code = self.ended(600)
        assert code is not None, f"{out} did not end"
        return code == 0

    def workers(self) -> list[int]:
        """Process ids of the run's workers, by rank, as far as they are there."""
        below = family(self.process.pid)[1:]
        return sorted(below[1:])  # the first is the fork server, which forks them in order

    def close(self) -> None:
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def serve() -> None:
    """The command's side: a run for each line of standard input, its exit code for an answer."""
    answers = os.fdopen(os.dup(1), "w")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)  # one that comes after a run's end
    for line in sys.stdin:
        out, *overrides = json.loads(line)
        for descriptor, kind in ((1, "txt"), (2, "err")):
            file = os.open(f"{out}.{kind}", os.O_WRONLY | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
        try:
            code = launch.run(config.load(f"{out}.yaml", overrides), "hyper_parallel.train.entry:main")
        except HyperParallelError as error:
            os.write(2, f"{PREFIX}{error}\n".encode())
            code = 2
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(f"{code}\n")
        answers.flush()


def judged(rows: Sequence[Row], name: Callable[[Row], str]) -> tuple[dict[str, dict[str, float]], list[Row]]:
    """How many cases of each name were right, and the slowest end; and the cases that were not. Printed too."""
    table = {}
    for kind in dict.fromkeys(map(name, rows)):
        those = [row for row in rows if name(row) == kind]
        right, slowest = sum(row["ok"] for row in those), max(row["ended_s"] for row in those)
        table[kind] = {"cases": len(those), "right": right, "slowest_end_s": slowest}
        print(kind, table[kind])
    return table, [row for row in rows if not row["ok"]]


def campaign(log: Log, cases: Sequence[Row], result_of: Callable[[Row], Row]) -> None:
    """Run the cases that a log does not have, and keep and print each."""
    done = {row["case"] for row in log.rows}
    for case in cases:
        if case["case"] not in done:
            row = {**case, **result_of(case)}
            log.add(row)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    serve()
