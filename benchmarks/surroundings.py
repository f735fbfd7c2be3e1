"""Sixty faults of a run's surroundings: each is survived, or refused in one line, and the run ends with the same bits.

    python benchmarks/surroundings.py [--only rl] [--folder FOLDER] [--shard 0/1]

A cell is a fault, a command (`train`, `rl`) and a moment: a `new` run, one that goes on from a checkpoint (`resume`),
or one in the middle of its steps (`run`). The faults: files of the run or its caches that are damaged, exchanged,
removed or no files; standard streams that are closed or full; a full disk; locks that others hold; too few file
descriptors; ranks with impossible places or with other files than rank 0's. Of each cell is checked:

- The command goes on to its last step with exit code 0, or ends with 2 and one error line, and never a traceback.
- It takes at most `LATE_S` longer than a run without the fault, beside the time for which a lock is held.
- Once the fault is gone, the same command ends with the checkpoint, byte for byte, of a run that had none.

Cells are independent; with a `--folder` a later start does what is left, and `--shard I/N` does every N-th.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from campaigns import Log
from commandline import Only, run
from disturbed_runs import HEAD, Row, campaign, family, judged
from pages import Benchmark
from processes import scratch
from shapes import text_of_functions

from hyper_parallel.errors import PREFIX

BENCHMARK = Benchmark("surroundings")
STEPS, HALF = 20, 10
LATE_S = 10.0
"""Seconds beyond the time of an undisturbed run after which a cell counts as a hang."""
HELD_S = 5.0
"""Seconds for which a lock is held."""
LIMIT_S = 180.0
SIZE = "400k"
"""Of a disk that is full before the next checkpoint."""
FILES = {
    "train": f"""{HEAD}data: {{train: text.txt, sequence: 32, tokenizer: {{vocab_size: 300}}, cache: CACHE}}
train: {{steps: {STEPS}, batch: 4, sample: {{tokens: 0}}}}
""",
    "rl": f"""{HEAD}task: {{name: sort, settings: {{digits: 3}}, reward: exact_match}}
rl: {{steps: {STEPS}, prompts: 2, group: 2, max_tokens: 4, staleness: 0}}
eval: {{prompts: 2}}
""",
}
REST = f"""launch: {{device: cpu, threads: 1}}
checkpoint: {{every: {HALF}, keep: 9}}
trackers: []
"""


@dataclass
class Place:
    """The folder of one cell."""

    folder: Path
    command: str
    undone: list[Callable[[], object]] = field(default_factory=list)
    held_s: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    """When the fault came."""

    @property
    def out(self) -> Path:
        """The run's folder."""
        return self.folder / "out"

    def replace(self, pattern: str, how: Callable[[Path], None]) -> None:
        """Change a file of the run or of its caches, and put it back afterwards."""
        path = next(path for path in sorted(self.folder.rglob(pattern)))
        kept = path.read_bytes()
        how(path)

        def undo() -> None:
            if path.is_dir():
                path.rmdir()
            elif path.exists():
                path.unlink()
            path.write_bytes(kept)

        if not path.is_file():  # what was only damaged is left as it is
            self.undone.append(undo)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def append(data: bytes) -> Callable[[Path], None]:
    def to(path: Path) -> None:
        with path.open("ab") as file:
            file.write(data)

    return to


def exchange(path: Path) -> None:
    other = next(path.parent.glob("*-eval-tokens.array"))
    path.write_bytes(other.read_bytes())


FILE_FAULTS: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "metrics: bad bytes": ("metrics.jsonl", append(b"\xff\xfe\x00rest\n"), ("train", "rl")),
    "metrics: a number": ("metrics.jsonl", append(b"7\n"), ("train", "rl")),
    "metrics: a pipe": ("metrics.jsonl", pipe, ("train", "rl")),
    "metrics: a folder": ("metrics.jsonl", folder, ("train", "rl")),
    "log: a pipe": ("*-0.log", pipe, ("train", "rl")),
    "log: a folder": ("*-0.log", folder, ("train", "rl")),
    "samples: bad bytes": ("samples.jsonl", append(b"\xff\n"), ("rl",)),
    "samples: a pipe": ("samples.jsonl", pipe, ("rl",)),
    "tokens: a pipe": ("*-train-tokens.array", pipe, ("train",)),
    "tokens: of another corpus": ("*-train-tokens.array", exchange, ("train",)),
}
SHELL_FAULTS = {
    "stdout: read by head": '"$@" | head -1 > head.txt; exit "${PIPESTATUS[0]}"',
    "stdout: full": 'exec "$@" > /dev/full',
    "stdout: closed": 'exec "$@" >&-',
    "stderr: full": 'exec "$@" 2> /dev/full',
    "descriptors: 24, more allowed": 'ulimit -S -n 24; exec "$@"',
    "descriptors: 24": 'ulimit -n 24; exec "$@"',
    "disk: full": 'mkdir out; mount -t tmpfs -o size=SIZE none out; [ -d half ] && cp -r half/. out; exec "$@"',
}
PLACES = {
    "rank: beyond the world": {"RANK": "7", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    "rank: negative": {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    "rank: beyond its machine": {"RANK": "1", "LOCAL_RANK": "3", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
}
OTHER_RANKS = {
    "ranks differ: lr": ("optimizer.lr", "train.optimizer.lr=0.1"),
    "ranks differ: seed": ("seed", "seed=3"),
    "ranks differ: loss": ("label_smoothing", "train.loss={label_smoothing: 0.5}"),
    "ranks differ: text": ("files of data.train", ""),
}
"""What the second node is given, and the key that the line has to name."""
LOCKS = ("lock: held", "lock: of a dead holder")
REMOVALS = ("out: removed", "out: moved")


def cases() -> list[Row]:
    """The table of cells, in turns, so that a campaign that is cut short has some of each."""
    both = ("train", "rl")
    cells = [
        (name, command, "resume") for name, (_, _, commands) in FILE_FAULTS.items() for command in commands
    ]
    cells += [(name, command, at) for name in SHELL_FAULTS for command in both for at in ("new", "resume")]
    cells += [(name, "train", at) for name in LOCKS for at in ("new", "resume")]
    cells += [(name, command, "run") for name in REMOVALS for command in both]
    cells += [(name, "train", "new") for name in (*PLACES, *OTHER_RANKS)]
    cells.append(("ranks differ: lr", "train on nodes of its own", "new"))
    names = list(dict.fromkeys(name for name, _, _ in cells))
    turns = [[cell for cell in cells if cell[0] == name] for name in names]
    mixed = [row[at] for at in range(4) for row in turns if at < len(row)]
    return [
        {"case": f"{name}, {command}, {at}", "fault": name, "command": command, "moment": at}
        for name, command, at in mixed
    ]


def command_of(place: Place, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "hyper_parallel", place.command.split()[0], "run.yaml", *overrides]


def start(
    place: Place, command: list[str], shell: str | None = None, **environ: str
) -> subprocess.Popen[bytes]:
    """Start a command; what it says is in `said.txt`."""
    if shell is not None:
        command = ["bash", "-c", shell, "bash", *command]
        if "mount" in shell:
            command = ["unshare", "-rm", *command]
    environ = {"XDG_CACHE_HOME": str(place.folder.parent / "cache"), "OMP_NUM_THREADS": "1", **environ}
    with (place.folder / "said.txt").open("ab") as said:
        return subprocess.Popen(
            command, cwd=place.folder, env=os.environ | environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )  # fmt: skip


def ended(*processes: subprocess.Popen[bytes]) -> list[int | None]:
    """The exit codes; None for what did not end within `LIMIT_S` and was killed."""
    until = time.monotonic() + LIMIT_S
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            for pid in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.wait()
            codes.append(None)
    return codes


def weights(out: Path) -> dict[str, bytes]:
    """The bytes of the last checkpoint."""
    files = (out / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in files}


@contextlib.contextmanager
def locked(place: Place, dead: bool) -> Iterator[None]:
    """The locks of a cache whose arrays are gone: held for a while, or by a child of a process that has ended."""
    for array in (place.folder / "data-cache").rglob("*.array"):
        array.unlink()
    script = "import fcntl, os, sys, time\nfiles = [open(path, 'ab') for path in sys.argv[2:]]\n"
    script += "for file in files: fcntl.flock(file, fcntl.LOCK_EX)\n"
    script += (
        "print(flush=True)\n"
        + ("if os.fork(): os._exit(0)\n" if dead else "")
        + "time.sleep(float(sys.argv[1]))\n"
    )
    paths = [str(path) for path in (place.folder / "data-cache").rglob("*.lock")]
    # The time begins at the start of the run, whose imports pass first.
    seconds = 60.0 if dead else HELD_S + BASES[place.command].seconds
    holder = subprocess.Popen([sys.executable, "-c", script, str(seconds), *paths], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    place.held_s = LATE_S if dead else seconds
    try:
        yield
    finally:
        holder.kill()
        holder.wait()


@dataclass(frozen=True)
class Base:
    """An undisturbed run: its folder with the checkpoint of half its steps, its end, and how long it took."""

    half: Path
    weights: dict[str, bytes]
    seconds: float


BASES: dict[str, Base] = {}


def prepare(folder: Path, command: str) -> Base:
    """Make the undisturbed run of a command, whose last checkpoint is then taken away."""
    place = Place(folder / f"half-{command}", command)
    place.folder.mkdir()
    (place.folder / "run.yaml").write_text(
        FILES[command].replace("OUT", "out").replace("CACHE", "data-cache") + REST
    )
    (place.folder / "text.txt").write_text(text_of_functions(500))
    begun = time.monotonic()
    assert ended(start(place, command_of(place))) == [0], said(place)
    seconds, last = time.monotonic() - begun, weights(place.out)
    shutil.rmtree(place.out / "checkpoints" / f"step-{STEPS:08d}")
    return Base(place.folder, last, seconds)


def said(place: Place) -> str:
    return (place.folder / "said.txt").read_text(errors="replace")


def disturbed(place: Place, case: Row) -> list[int | None]:
    """Run the command with the fault; the exit codes."""
    fault = case["fault"]
    if fault in FILE_FAULTS:
        pattern, how, _ = FILE_FAULTS[fault]
        place.replace(pattern, how)
        return ended(start(place, command_of(place)))
    if fault in SHELL_FAULTS:
        if "mount" in SHELL_FAULTS[fault] and case["moment"] == "resume":
            place.out.rename(place.folder / "half")
            place.undone += [place.out.rmdir, lambda: shutil.move(place.folder / "half", place.out)]
        return ended(start(place, command_of(place), SHELL_FAULTS[fault].replace("SIZE", SIZE)))
    if fault in PLACES:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        two = command_of(place, "strategy.axes.shard=2")
        return ended(start(place, two, **address, **PLACES[fault]))
    if fault in LOCKS:
        with locked(place, dead=fault != LOCKS[0]):
            return ended(start(place, command_of(place)))
    if fault in REMOVALS:
        process = start(place, command_of(place, f"{place.command}.steps=2000"))
        metrics = place.out / "metrics.jsonl"
        while process.poll() is None and not (
            metrics.exists() and len(metrics.read_bytes().splitlines()) >= 3
        ):
            time.sleep(0.005)
        place.begun = time.monotonic()
        if fault == REMOVALS[0]:
            shutil.rmtree(place.out)
        else:
            place.out.rename(place.folder / "elsewhere")
        return ended(process)
    return differing(place, case)


def differing(place: Place, case: Row) -> list[int | None]:
    """Two nodes of one run on this machine, the second with another file."""
    _, override = OTHER_RANKS[case["fault"]]
    second = Place(place.folder / "second", place.command)
    second.folder.mkdir()
    for name in ("run.yaml", "text.txt"):
        shutil.copy(place.folder / name, second.folder)
    if not override:
        append(b"another line\n")(second.folder / "text.txt")
    port = 20000 + os.getpid() % 9000
    processes = []
    for node, at in enumerate((place, second)):
        more = [f"out={place.out}", "strategy.axes.shard=2", *([override] if node and override else [])]
        command = command_of(at, *more)
        if "own" in place.command:
            command += ["launch.nodes=2", f"launch.rendezvous=127.0.0.1:{port}", f"launch.node_rank={node}"]
        else:
            address = ["--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={node}"]
            torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *address]
            command = [sys.executable, "-m", *torchrun, *command[1:]]
        processes.append(start(at, command))
    codes = ended(*processes)
    with (place.folder / "said.txt").open("a") as file:
        file.write(said(second))
    return codes


def result_of(case: Row, folder: Path) -> Row:
    """Run a cell in a folder of its own."""
    base = BASES[case["command"].split()[0]]
    place = Place(folder / "cell", case["command"])
    shutil.copytree(base.half, place.folder)
    (place.folder / "said.txt").unlink()
    if case["moment"] != "resume":
        shutil.rmtree(place.out)
    codes = disturbed(place, case)
    seconds = time.monotonic() - place.begun
    text = said(place)
    errors = list(dict.fromkeys(line for line in text.splitlines() if line.startswith(PREFIX)))
    several = len(codes) > 1
    row: Row = {"codes": codes, "ended_s": round(seconds, 1), "said": errors[:2]}
    goes_on, refused = codes == [0], None not in codes and 0 not in codes and len(errors) == 1
    row["one_line"] = goes_on or (
        refused and (several or codes == [2]) and (several or "Traceback" not in text)
    )
    if several:
        row["one_line"] = row["one_line"] and OTHER_RANKS[case["fault"]][0] in errors[0]
    # Two nodes of torchrun start an interpreter more, and each imports PyTorch by itself.
    row["in_time"] = seconds <= (2 if several else 1) * base.seconds + place.held_s + LATE_S
    for undo in place.undone:
        undo()
    finished = Place(place.folder, case["command"].split()[0])
    row["resumed"] = (
        ended(start(finished, command_of(finished))) == [0] and weights(place.out) == base.weights
    )
    row["ok"] = row["one_line"] and row["in_time"] and row["resumed"]
    if not row["ok"]:
        row["text"] = text[-2000:]
    shutil.rmtree(place.folder, ignore_errors=True)
    return row


def main(
    only: Only = "",
    folder: Annotated[Path | None, "where results are kept from start to start"] = None,
    shard: Annotated[str, "I/N: every N-th cell, from the I-th on"] = "0/1",
) -> bool:
    """Run the cells that are left, and write the figures; whether a cell was wrong."""
    every = cases()
    index, count = map(int, shard.split("/"))
    with scratch() as place:
        kept = folder or place / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        log = Log(kept / f"cells-{index}-{count}.jsonl")
        todo = [case for case in every[index::count] if only in case["case"]]
        done = {row["case"] for row in log.rows}
        if any(case["case"] not in done for case in todo):
            for command in FILES:
                BASES[command] = prepare(place, command)
            campaign(log, todo, lambda case: result_of(case, place))
        rows = [row for path in sorted(kept.glob("cells-*.jsonl")) for row in Log(path).rows]
    table, wrong = judged(rows, lambda row: row["fault"])
    limits = {"steps": STEPS, "late_s": LATE_S, "held_s": HELD_S}
    BENCHMARK.keep({**limits, "planned": len(every), "done": len(rows), "table": table, "wrong": wrong})
    return bool(wrong) or not rows


if __name__ == "__main__":
    run(main)
