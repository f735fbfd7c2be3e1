"""Processes of a benchmark: fresh interpreters, groups of gloo workers, commands, and temporary folders.

- `fresh` calls a function in an interpreter of its own, whose memory, threads and environment are its own;
- `Stepping` keeps such a process, which goes on each time it is asked to, so that processes take turns;
- `workers` calls a function in such a process for each rank of a gloo group over loopback;
- `hyper_parallel` runs the command as a user does.

Functions are found by the names of their modules, and arguments and results are pickled.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from measure import ROOT

BENCHMARKS = ROOT / "benchmarks"
TRIMMED: dict[str, Any] = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which large blocks come from the system and go back to it, so that a process holds what its tensors
hold."""


class Died(Exception):
    """A process ended before it had a result: its exit code, and the last line that it said."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"ended with {code}: {said}")
        self.code, self.said = code, said


class Stepping:
    """A fresh process in which a generator function runs until its next `yield` for each value that is taken."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        threads: int = 1,
        group: Sequence[Any] = (),
        **environment: str,
    ) -> None:
        """`environment`: variables beside those of this process. `group`: rank, world and a file to meet at, for a rank
        of a gloo group, whose function is called with rank and world before the arguments."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reading, writing = os.pipe()
        self.answers: IO[bytes] = os.fdopen(reading, "rb")
        named = [Path(inspect.getfile(function)).stem, function.__name__, writing, *group]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, named)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), **environment},
            stdin=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=[writing],
        )
        os.close(writing)
        assert self.process.stdin is not None
        self._ask = self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(arguments, self._ask)
            self._ask.flush()

    def begin(self) -> None:
        """Let it go on to its next value, which `answers` then has."""
        with contextlib.suppress(BrokenPipeError):
            self._ask.write(b"\n")
            self._ask.flush()

    def answer(self) -> Any:
        """Wait for the value. Raises Died where there is none."""
        try:
            return pickle.load(self.answers)
        except EOFError:
            raise Died(self.process.wait(), self._last_line()) from None

    def next(self) -> Any:
        """Let it go on; its next value. Raises Died where there is none."""
        self.begin()
        return self.answer()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self._ask.close()
        self.process.wait()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else ""


def fresh(function: Callable[..., Any], *arguments: Any, threads: int = 1, **environment: str) -> Any:
    """What a function at the top of a module returns in an interpreter of its own. Raises Died where it fails."""
    process = Stepping(function, *arguments, threads=threads, **environment)
    try:
        return process.next()
    finally:
        process.close()


def survived(function: Callable[..., dict[str, Any]], *arguments: Any, **environment: str) -> dict[str, Any]:
    """What `fresh` gives; `died`, an exit code, and `said`, the last line, where it fails."""
    try:
        return dict(fresh(function, *arguments, threads=1, **environment))
    except Died as died:
        return {"died": died.code, "said": died.said}


def workers(
    function: Callable[..., Any], world: int, *arguments: Any, threads: int = 1, **environment: str
) -> list[Any]:
    """`function(rank, world, *arguments)` in a fresh process for each rank of a gloo group over loopback; the results
    in the order of ranks. Raises Died, and ends the others, where one fails.

    Forked ranks (`harness.run_ranks`) begin sooner, and compute with one thread each.
    """
    with scratch() as folder:
        ranks = [
            Stepping(
                function, *arguments, threads=threads, group=(rank, world, folder / "store"), **environment
            )
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.begin()
            results: dict[int, Any] = {}
            while len(results) < world:
                left = [one.answers.fileno() for rank, one in enumerate(ranks) if rank not in results]
                ready = wait(left)
                for rank, process in enumerate(ranks):
                    if process.answers.fileno() in ready:
                        results[rank] = process.answer()
        except Died:
            for process in ranks:
                process.process.kill()
            raise
        finally:
            for process in ranks:
                process.close()
    return [results[rank] for rank in range(world)]


def threads_of(world: int) -> int:
    """Threads for each of so many workers, so that all of them use the cores once."""
    return max(1, len(os.sched_getaffinity(0)) // world)


def hyper_parallel(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None, limit: float | None = None
) -> tuple[float, str]:
    """Seconds of a command in a folder, and what it printed. Raises Died where it fails, and
    subprocess.TimeoutExpired after `limit` seconds, when it has been killed with its children."""
    command = [sys.executable, "-m", "hyper_parallel", *arguments]
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, said = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
    if process.returncode:
        raise Died(process.returncode, said.strip()[-2000:])
    return time.perf_counter() - begun, printed


@contextlib.contextmanager
def scratch(*, on_disk: bool = False) -> Iterator[Path]:
    """A folder that is removed at the end. `on_disk`: beside the scripts, since the system's temporary folder may lie
    in memory."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=BENCHMARKS if on_disk else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def limit_memory(headroom: int | None) -> int:
    """Private memory that this process has mapped, as RLIMIT_DATA counts it. From now on it gets no more than
    `headroom` bytes beside it, where they are given."""
    gc.collect()
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmData:"))
    held = int(line.split()[1]) * 1024
    if headroom is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (held + headroom,) * 2)
    return held


def _main() -> None:
    """The side of a fresh process."""
    module_name, name, results, *group = sys.argv[1:]
    module = importlib.import_module(module_name)
    sys.modules["__main__"] = module  # what a script pickled of its own
    arguments = pickle.load(sys.stdin.buffer)
    answers = os.fdopen(int(results), "wb")
    values: Iterator[Any] = _values(getattr(module, name), arguments, group)
    for _ in sys.stdin.buffer:
        pickle.dump(next(values), answers)
        answers.flush()


def _values(function: Callable[..., Any], arguments: Sequence[Any], group: Sequence[str]) -> Iterator[Any]:
    """What a function returns, or the values of a generator, where it is told in its gloo group."""
    if not group:
        value = function(*arguments)
        yield from value if inspect.isgenerator(value) else [value]
        return
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank, world = int(group[0]), int(group[1])
    dist.init_process_group("gloo", init_method=f"file://{group[2]}", rank=rank, world_size=world)
    value = function(rank, world, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    yield value


if __name__ == "__main__":
    _main()
