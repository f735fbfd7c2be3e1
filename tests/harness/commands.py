"""Launching a target of `harness.targets` from a command of its own, which signals can be sent to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.forked_command import CommandProcess
from hyper_parallel.config import RunConfig

PROGRAM = Path(__file__).with_name("command.py")


def make_config(folder: Path, axes: Mapping[str, int], **launch: Any) -> RunConfig:
    """A run file for launch tests: its data and model are never read."""
    return RunConfig.model_validate(
        {
            "version": 1,
            "out": str(folder / "run"),
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": "unread"},
            "train": {"batch": 16},
            "strategy": {"axes": dict(axes)},
            "launch": {"device": "cpu", **launch},
        }
    )


def noted(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank left with `targets.note`."""
    return dict(json.loads((folder / "run" / f"rank-{rank}.json").read_text()))


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Poll until the condition holds; fails with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {timeout:g} s"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """The processes below `pid`, however deep."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


class Command:
    """`python -m harness.command` in a session of its own, its output collected from a file or a terminal."""

    def __init__(
        self,
        config: RunConfig,
        target: str,
        *,
        name: str = "command",
        path: list[str] | None = None,
        terminal: bool = False,
        imports: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`path`: folders to import from first. `terminal`: it writes to one. `imports`: a new interpreter, for what
        start-up is a part of; left out, a fork of one that has imported everything. `env`: added to the environment.
        """
        folder = Path(config.out).parent
        file = folder / f"{name}.json"
        file.write_text(config.model_dump_json())
        arguments = [str(file), f"harness.targets:{target}"]
        env = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join([*(path or []), *sys.path])}
        self._errors = folder / f"{name}.err"
        self._screen, output = (
            os.openpty() if terminal else (None, os.open(self._errors, os.O_WRONLY | os.O_CREAT))
        )
        self.process: subprocess.Popen[bytes] | CommandProcess
        if imports:
            command = [sys.executable, "-m", "harness.command", *arguments, str(os.getpid())]
            self.process = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, start_new_session=True
            )
        else:
            self.process = CommandProcess(arguments, Path.cwd(), env=env, program=PROGRAM, output=output)
        os.close(output)

    @property
    def errors(self) -> str:
        """What it has written so far; once it has ended, where it writes to a terminal."""
        if self._screen is not None:
            return os.read(self._screen, 1 << 16).decode().replace("\r\n", "\n")
        return self._errors.read_text()

    def end(self, timeout: float = 60.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout)
