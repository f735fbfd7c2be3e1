"""Each hostile file to a command in this process, and how that ended.

A command has to end by itself with exit code 2 and one line of text, or do what a good file has it do ("harmless": the
change meant nothing); and nothing may be written but what the command is asked to write, for which everything around it
is looked at before and after.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from harness.hostile import checkpoints as hostile_checkpoints
from harness.hostile import models as hostile_models
from harness.hostile import runs as hostile_runs
from hyper_parallel.cli.main import main as command
from hyper_parallel.errors import PREFIX, HyperParallelError

WALL_S = 60
"""After which a case that waits for something is ended."""
GOOD = ("refused", "harmless")
CONTROL = "nothing changed"
"""The first case of each kind, which has to go through: what is refused is refused for what was changed."""


@dataclass(frozen=True)
class Outcome:
    """How one case ended."""

    kind: str
    name: str
    verdict: str
    """`refused` or `harmless`; anything else is a defect."""
    said: str
    cpu_s: float


class _Overrun(BaseException):
    """The clock ran out."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Overrun

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(WALL_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(
    kind: str, name: str, folder: Path, run: Callable[[], Any], made: Sequence[str] = (), lines: int = 1
) -> Outcome:
    """Run one case in `folder`, in which nothing may change but what begins with a name in `made`.

    `lines`: how many may be said, where a file can have several mistakes.
    """
    there, said = _listing(folder, made), io.StringIO()
    code: Any = 0
    began = time.process_time()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            with _limited():
                run()
        except SystemExit as end:
            code = end.code
        except _Overrun:
            code = "waited"
        except BaseException:
            code = "traceback"
            traceback.print_exc()
    spent = time.process_time() - began
    text = said.getvalue().replace(str(folder), "…")
    told = text.splitlines()
    errors = [line for line in told if line.startswith(PREFIX)]
    if name == CONTROL and code:
        verdict = "a good file is refused"
    elif _listing(folder, made) != there:
        verdict = "wrote elsewhere"
    elif code in ("waited", "traceback"):
        verdict = code
    elif code == 2 and 1 <= len(errors) <= lines and "Traceback" not in text and "hunter2" not in text:
        verdict = "refused"
    elif not code:
        verdict = "harmless"
    else:
        verdict = f"ended with {code} and {len(errors)} lines of errors"
    return Outcome(kind, name, verdict, (told or [""])[-1][:300], round(spent, 3))


def _listing(folder: Path, made: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not name.startswith(tuple(made)) or not made:
            seen = os.lstat(path)
            found[name] = (
                seen.st_mode,
                *(() if stat.S_ISDIR(seen.st_mode) else (seen.st_size, seen.st_mtime_ns)),
            )
    return found


def checkpoints(seed: int, count: int, root: Path) -> Iterator[Outcome]:
    """The named forgeries, and drawn ones until there are `count`; each is exported."""
    pristine = hostile_checkpoints.pristine(root / "pristine")
    draw = random.Random(seed)
    cases = [(CONTROL, _unchanged), *list(hostile_checkpoints.CASES.items())[:count]]
    cases += [hostile_checkpoints.mutated(draw) for _ in range(count + 1 - len(cases))]
    for name, case in cases:
        with _folder(root) as folder:
            canary = folder / "canary"
            canary.mkdir()
            shutil.copytree(pristine.parent, folder / "run")
            path = folder / "run" / pristine.name
            case(path, canary)
            arguments = ["export", str(path), str(folder / "exported")]
            yield attempt("checkpoint", name, folder, partial(command, arguments), ["exported"])


def models(seed: int, count: int, root: Path) -> Iterator[Outcome]:
    """The named folders, and drawn ones until there are `count`; each is built and filled as a run does it."""
    import torch.distributed as dist

    pristine = hostile_models.pristine(root / "model")
    draw = random.Random(seed)
    cases = [(CONTROL, _unchanged), *list(hostile_models.CASES.items())[:count]]
    cases += [hostile_models.mutated(draw) for _ in range(count + 1 - len(cases))]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, case in cases:
            with _folder(root) as folder:
                (folder / "canary").mkdir()
                (folder / "text.txt").write_text("some text, and more of it\n" * 50)
                shutil.copytree(pristine, folder / "model")
                case(folder / "model")
                file = folder / "run.yaml"
                file.write_text(_MODEL.format(folder=folder))
                yield attempt("model folder", name, folder, partial(_told, partial(_fill, file)), ["cache"])
    finally:
        dist.destroy_process_group()


_MODEL = """\
version: 1
out: {folder}/out
model: {{path: {folder}/model}}
data: {{train: {folder}/text.txt, sequence: 32, cache: {folder}/cache}}
trackers: []
"""


def _fill(file: Path) -> None:
    """Read the file, look at what it names, build the model and read its weights, as a worker does before it trains."""
    from hyper_parallel import config, parallelize
    from hyper_parallel.cli.preflight import check
    from hyper_parallel.step.build import fill_model, unsharded

    run = config.load(file)
    check(run)
    model, _ = unsharded(run)
    parallelize(model, run.strategy)
    fill_model(model, run, "cpu")


def _told(work: Callable[[], None]) -> None:
    """End as the command does."""
    try:
        work()
    except HyperParallelError as error:
        print("\n".join(f"{PREFIX}{line}" for line in str(error).split("\n")), file=sys.stderr)
        sys.exit(2)


def runs(seed: int, count: int, root: Path) -> Iterator[Outcome]:
    """The named run files, and drawn ones until there are `count`. What would be started is not."""
    from hyper_parallel import launch

    draw = random.Random(seed)
    cases = [(CONTROL, hostile_runs.also("")), *list(hostile_runs.CASES.items())[:count]]
    cases += [hostile_runs.mutated(draw) for _ in range(count + 1 - len(cases))]
    start, here = launch.run, os.getcwd()
    launch.run = lambda config, target: 0
    try:
        for name, case in cases:
            with _folder(root) as folder:
                (folder / "canary").mkdir()
                (folder / "text.txt").write_text("some text\n")
                (folder / "good.yaml").write_text(hostile_runs.GOOD)
                case(folder)
                os.chdir(folder)
                yield attempt("run file", name, folder, lambda: command(["train", "run.yaml"]), lines=22)
                os.chdir(here)
    finally:
        launch.run = start
        os.chdir(here)


def _unchanged(*folders: Path) -> None:
    """Leave all as it is."""


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
