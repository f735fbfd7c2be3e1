"""`run_command` and `run_script`: `hyper-parallel`, or a Python program, in a process that has imported it already.

What `python -m hyper_parallel ARGUMENTS` does from the first line of `main` on, with its own folder, environment, open
files, signals and exit code, but without start-up, which is seconds of importing. The fork server that a command starts
for its workers is a fork, too (`harness.forked_workers`). Start-up itself, what reads its environment when it is
imported, and what ends with the interpreter are tested by subprocesses, such as tests/cli/test_cli_starts_fast.py.

A command ends with the test process, however that ends, and its workers end with it.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from harness.fork_server import end_with_server, fork_context, server_pid
from harness.forked_workers import fork_server_of_workers, text_stream

HERE = Path(__file__).parents[2]


class CommandProcess:
    """A running command, with what tests use of `subprocess.Popen`; at the end of a `with` block it is killed."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        largest_file: int = resource.RLIM_INFINITY,
        together: bool = False,
        output: int | None = None,
        program: Path | str | None = None,
    ) -> None:
        """`largest_file`: the limit on files in bytes. `together`: errors go into the output. `output`: the
        descriptor that both are written to instead, such as a terminal's. `program`: a Python file or its
        text; left out, `hyper-parallel`.
        """
        self.arguments = list(arguments)
        self._files = [tempfile.TemporaryFile() for _ in range(1 if together else 2)]  # noqa: SIM115
        context = fork_context()
        start = _Start(
            server_pid(),
            program,
            self.arguments,
            str(folder),
            dict(os.environ if env is None else env),
            largest_file,
        )
        outputs = [file.fileno() for file in self._files] if output is None else [output]
        descriptors = [DupFd(descriptor) for descriptor in outputs]
        # A daemon: the test process does not wait at its end for one that a test forgot.
        self._process = context.Process(target=_become, args=(start, descriptors), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> CommandProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired; the command then still runs."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0.0, *map(bytes, self._read()))
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To the command alone, not to its workers."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, if it still runs; its workers end with it."""
        self._process.kill()
        self._process.join()

    def output(self) -> list[str]:
        """What it has written so far: the output and, unless they go together, the errors."""
        return [content.decode(errors="replace") for content in self._read()]

    def _read(self) -> list[bytes]:
        return [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in self._files]


def run_command(
    *arguments: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    largest_file: int = resource.RLIM_INFINITY,
) -> subprocess.CompletedProcess[str]:
    """Run `hyper-parallel ARGUMENTS` in a folder. Raises subprocess.TimeoutExpired, after it was killed."""
    with CommandProcess(arguments, folder, env=env, largest_file=largest_file) as command:
        return subprocess.CompletedProcess(
            ["hyper-parallel", *arguments], command.wait(timeout), *command.output()
        )


def run_script(
    program: Path | str,
    *arguments: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a Python file (a path), or code (a string, as behind `python -c`), as `run_command` runs a command."""
    with CommandProcess(arguments, folder, env=env, program=program) as script:
        return subprocess.CompletedProcess([str(program), *arguments], script.wait(timeout), *script.output())


@dataclass(frozen=True)
class _Start:
    server: int
    program: Path | str | None
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    largest_file: int


def _become(start: _Start, files: list[Any]) -> NoReturn:
    end_with_server(start.server)
    multiprocessing.current_process().daemon = False  # it may have children
    multiprocessing.set_start_method(None, force=True)
    descriptors = [file.detach() for file in files]
    output, errors = descriptors[0], descriptors[-1]
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
    sys.stdout, sys.stderr = (
        text_stream(1, line_buffering=os.isatty(1)),
        text_stream(2, line_buffering=True),
    )
    os.setsid()
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (start.largest_file, start.largest_file))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    program = start.program
    first = str(program.resolve().parent) if isinstance(program, Path) else start.folder
    sys.path[:] = _search_path(first, start.environment.get("PYTHONPATH", ""))
    _read_hub_variables(before)
    fork_server_of_workers()
    code: Any = 0
    try:
        _run(program, start.arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _search_path(first: str, pythonpath: str) -> list[str]:
    """As Python has it: the program's folder, then PYTHONPATH; the tests' own folders only where that names them."""
    named = [folder for folder in pythonpath.split(os.pathsep) if folder]
    hidden = {str(HERE / part) for part in ("tests", "benchmarks", "tools")}
    return [first, *named, *(folder for folder in sys.path if folder not in hidden and folder not in named)]


def _read_hub_variables(before: Mapping[str, str]) -> None:
    """Of another Hub or cache than the server's: `huggingface_hub` and `datasets` read them when they are imported."""
    if all(
        before.get(name) == os.environ.get(name) for name in {*before, *os.environ} if name.startswith("HF_")
    ):
        return
    constants = importlib.reload(importlib.import_module("huggingface_hub.constants"))
    importlib.import_module("huggingface_hub.hf_api").api.endpoint = constants.ENDPOINT
    if "datasets" in sys.modules:
        importlib.reload(sys.modules["datasets.config"])


def _run(program: Path | str | None, arguments: list[str]) -> None:
    if program is None:
        from hyper_parallel.cli.main import main

        sys.argv = ["hyper-parallel", *arguments]
        main()
    elif isinstance(program, Path):
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), module.__dict__)
