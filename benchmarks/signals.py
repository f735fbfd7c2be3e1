"""Send signals to a real run of two workers at random moments; what each leaves must be complete, and go on.

    python benchmarks/signals.py [--moments 30] [--freezes 10] [--folder FOLDER] [--shard 0/1]

Signals: SIGTERM, SIGINT and SIGUSR1, each to every process of the run at once, to the command, and to one worker, at
`--moments` moments: every other one is drawn over the whole run (start, capture, steps, evaluations, saves, the end),
the rest over its steps. Of each case is checked:

- SIGTERM, SIGINT: the exit code is 130 and no more than `launch.grace` seconds pass; nothing but the one line is said
  on standard error; the newest checkpoint is that of the last step in ``metrics.jsonl`` (none where there is none); the
  run that goes on ends with the losses, norms and bytes of a run that nothing interrupted.
- SIGUSR1: the run goes on to its end, with the same results; it has saved a checkpoint at a step boundary, and a run
  that goes on from that one ends with the same results too.

Then each rank in turn is stopped (SIGSTOP), `--freezes` times: the run must end with code 1, name that rank, and leave
no process of it behind.

Cases are independent. With a `--folder` each result is kept there as it is found, and a later start does what is left;
`--shard I/N` does every N-th. The figures are written once no case is left, or with `--report`. One process imports
PyTorch once and starts the runs one after another, as the command does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
from kill_saves import HEAD, family, records, tensors

from hyper_parallel import config, launch
from hyper_parallel.checkpoint import newest
from hyper_parallel.errors import PREFIX, HyperParallelError

STEPS = 24
GRACE_S = 30.0
FROZEN_S = 10.0
"""`launch.timeout` where a rank is frozen; the default is a minute for a run of short steps."""
POLL_S = 0.1
"""How often the command looks for signals."""
LATE_S = 0.5
"""Steps between a SIGUSR1 and the step that is saved may take this long."""
STOPPING = "stopping: the workers finish their step and save; once more ends them at once"
RUN = f"""\
{HEAD}data: {{train: text.txt, eval: eval.txt, sequence: 32, tokenizer: {{vocab_size: 300}}, cache: cache}}
train: {{steps: {STEPS}, batch: 4, eval: {{every: 10, batches: 2}}, sample: {{tokens: 2}}}}
strategy: {{axes: {{shard: 2}}}}
launch: {{device: cpu, threads: 1, grace: {GRACE_S:g}}}
checkpoint: {{every: 9, keep: 9}}
trackers: []
"""


class Command:
    """A process that starts runs one after another as ``hyper-parallel train`` does, and is the command of each."""

    def __init__(self, folder: Path, text: str = RUN) -> None:
        """`text`: of run files, with ``OUT`` for the folder of the run."""
        self.folder, self._text = folder, text
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, out: str, *overrides: str, **launched: Any) -> None:
        """Begin a run; `ended` tells how it ends. `launched`: keys of `launch`."""
        (self.folder / f"{out}.yaml").write_text(self._text.replace("OUT", out))
        (self.folder / f"{out}.err").write_text("")
        (self.folder / f"{out}.txt").write_text("")
        assert self.process.stdin is not None
        more = [f"launch.{key}={value}" for key, value in launched.items()]
        self.process.stdin.write(json.dumps([out, *overrides, *more]).encode() + b"\n")
        self.process.stdin.flush()
        self.begun = time.monotonic()

    def ended(self, timeout: float) -> int | None:
        """The run's exit code; None while it lives."""
        import select

        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return None
        return int(self.process.stdout.readline())

    def finish(self, out: str, *overrides: str, **launched: Any) -> int:
        """Run to the end; the exit code."""
        self.start(out, *overrides, **launched)
        code = self.ended(600)
        assert code is not None, f"{out} did not end"
        return code

    def workers(self) -> list[int]:
        """Process ids of the run's workers, by rank, as far as they are there."""
        below = family(self.process.pid)[1:]
        return sorted(below[1:])  # the first is the fork server, which forks them in order

    def close(self) -> None:
        """End it and what it has started."""
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


def results(folder: Path, out: str) -> tuple[dict[int, Any], dict[str, bytes]]:
    """What must not depend on interruptions: every loss and norm, and the bytes of the last checkpoint."""
    values = {step: (row["loss"], row["grad_norm"]) for step, row in records(folder, out).items()}
    return values, tensors(folder / out / "checkpoints" / f"step-{STEPS:08d}")


def send(command: Command, number: int, whom: str, rank: int) -> bool:
    """Send a signal; whether there was somebody to send it to."""
    pids = {"group": family(command.process.pid), "command": [command.process.pid]}.get(whom)
    if pids is None:
        workers = command.workers()
        pids = [workers[rank]] if len(workers) == 2 else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def interrupt(
    command: Command, out: str, number: int, whom: str, rank: int, moment: float, within: bool, span: float
) -> dict[str, Any]:
    """Start a run, send it a signal, and tell how it ended.

    The moment is a share of `span` seconds from the start, or from the first step (`within`); where the run has ended
    before it, it is moved forward.
    """
    folder, row = command.folder, {}
    while True:
        shutil.rmtree(folder / out, ignore_errors=True)
        command.start(out)
        code = None
        if within:
            while not records(folder, out) and (code := command.ended(0.005)) is None:
                assert time.monotonic() - command.begun < 300, "no step within five minutes"
        begun = time.monotonic()
        while code is None and time.monotonic() - begun < moment * span:
            code = command.ended(0.002)
        while code is None and not send(command, number, whom, rank):
            code = command.ended(0.01)
        sent, step = time.monotonic(), max(records(folder, out), default=0)
        if code is None:
            code = command.ended(GRACE_S + 60)
            row = {
                "sent_s": round(sent - command.begun, 2),
                "ended_s": round(time.monotonic() - sent, 2),
                "code": code,
                "sent_step": step,
            }
            break
        moment *= 0.5
    row["said"] = (folder / f"{out}.err").read_text()
    return row


def stopped(command: Command, out: str, case: dict[str, Any], span: float, whole: Any) -> dict[str, Any]:
    """A case of SIGTERM or SIGINT."""
    folder, number = command.folder, signal.Signals[case["signal"]]
    row = interrupt(command, out, number, case["whom"], case["rank"], case["moment"], case["within"], span)
    row["step"] = max(records(folder, out), default=0)
    found = newest(folder / out / "checkpoints") if (folder / out / "checkpoints").exists() else None
    row["saved"] = found.step if found is not None else 0
    # A signal that comes while the run ends is too late to stop anything.
    complete = row["step"] == STEPS and row["code"] in (0, 130)
    row["exit"] = complete or (row["code"] == 130 and row["said"].strip() in ("", STOPPING))
    row["in_time"] = row["ended_s"] <= GRACE_S
    row["last_step_saved"] = row["saved"] == row["step"]
    row["resumed"] = command.finish(out) == 0 and results(folder, out) == whole
    row["ok"] = row["exit"] and row["in_time"] and row["last_step_saved"] and row["resumed"]
    return row


def saved(command: Command, out: str, case: dict[str, Any], span: float, whole: Any) -> dict[str, Any]:
    """A case of SIGUSR1."""
    folder = command.folder
    row = interrupt(
        command, out, signal.SIGUSR1, case["whom"], case["rank"], case["moment"], case["within"], span
    )
    text = (folder / f"{out}.txt").read_text()
    asked = [int(line.split()[2].rstrip(",")) for line in text.splitlines() if line.startswith("saved step")]
    row["saved"] = asked
    row["exit"] = row["code"] == 0 and row["said"] == ""
    row["unchanged"] = results(folder, out) == whole
    # The command looks for signals every POLL_S seconds, in which several steps of this model go by. A run that has
    # taken its last step by then has nothing to save any more; a signal to a worker is seen in the next step.
    steps = records(folder, out)
    between = range(row["sent_step"] + 1, (asked[0] if asked else STEPS) - 1)
    row["late_s"] = round(sum(steps[step]["seconds"] for step in between), 3)
    if asked:
        row["last_step_saved"] = row["late_s"] <= LATE_S
    else:
        too_late = case["whom"] == "command" and row["late_s"] <= POLL_S
        row["last_step_saved"] = too_late or row["sent_step"] >= STEPS - 1
    row["resumed"] = True
    if asked and asked[0] < STEPS:
        for path in (folder / out / "checkpoints").iterdir():
            if path.name.startswith("step-") and int(path.name.split("-")[1]) > asked[0]:
                shutil.rmtree(path)
        row["resumed"] = command.finish(out) == 0 and results(folder, out) == whole
    row["ok"] = row["exit"] and row["unchanged"] and row["last_step_saved"] and row["resumed"]
    return row


def frozen(command: Command, out: str, case: dict[str, Any], span: float, whole: Any) -> dict[str, Any]:
    """A rank is stopped in the middle of the steps."""
    folder = command.folder
    command.start(out, timeout=FROZEN_S)
    while not records(folder, out) or len(workers := command.workers()) < 2:
        assert command.ended(0.005) is None, (folder / f"{out}.err").read_text()
    time.sleep(case["moment"] * 0.1)
    os.kill(workers[case["rank"]], signal.SIGSTOP)
    begun = time.monotonic()
    code = command.ended(FROZEN_S + 120)
    said = (folder / f"{out}.err").read_text()
    row = {"code": code, "ended_s": round(time.monotonic() - begun, 1), "said": said}
    row["named"] = said.startswith(f"{PREFIX}worker {case['rank']} ") and said.count(PREFIX) == 1
    row["left"] = len(command.workers())
    row["ok"] = code == 1 and row["named"] and not row["left"]
    return row


def cases(moments: int, freezes: int, seed: int) -> list[dict[str, Any]]:
    """All of them, the kinds in turns, so that a campaign that is cut short has some of each."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    kinds = list(itertools.product(("SIGTERM", "SIGINT", "SIGUSR1"), ("group", "command", "worker")))
    for at in range(max(moments, freezes)):
        for name, whom in kinds if at < moments else ():
            place = {"rank": draw.randrange(2), "moment": draw.random(), "within": at % 2 == 1}
            found.append({"signal": name, "whom": whom, **place})
        if at < freezes:
            found.append({"signal": "SIGSTOP", "whom": "worker", "rank": at % 2, "moment": draw.random()})
    return [{"case": number, **case} for number, case in enumerate(found)]


def report(folder: Path, total: int) -> bool:
    """Write the figures of what was done; whether all of it was right."""
    rows = [
        json.loads(line)
        for path in sorted(folder.glob("cases-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    table: dict[str, Any] = {}
    print(f"{'signal':<9} {'to':<8} {'cases':>6} {'right':>6} {'slowest end':>12}")
    for name, whom in dict.fromkeys((row["signal"], row["whom"]) for row in rows):
        those = [row for row in rows if (row["signal"], row["whom"]) == (name, whom)]
        right = sum(row["ok"] for row in those)
        slowest = max(row["ended_s"] for row in those)
        table[f"{name} to {whom}"] = {"cases": len(those), "right": right, "slowest_end_s": slowest}
        print(f"{name:<9} {whom:<8} {len(those):>6} {right:>6} {slowest:>10.1f} s")
    wrong = [row for row in rows if not row["ok"]]
    result = {
        "steps": STEPS,
        "grace_s": GRACE_S,
        "frozen_timeout_s": FROZEN_S,
        "planned": total,
        "done": len(rows),
    }
    path = measure.write("signals", {**result, "table": table, "wrong": wrong})
    print(f"{len(rows)} of {total} cases, {len(wrong)} wrong -> {path.name}")
    return not wrong and bool(rows)


def main() -> None:
    """Run the cases that are left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--freezes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where results are kept from start to start")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th case, from the I-th on")
    parser.add_argument("--report", action="store_true", help="write the figures of what was done so far")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    every = cases(arguments.moments, arguments.freezes, arguments.seed)
    index, count = map(int, arguments.shard.split("/"))
    with contextlib.ExitStack() as stack:
        kept = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        log = kept / f"cases-{index}-{count}.jsonl"
        done = {json.loads(line)["case"] for line in log.read_text().splitlines()} if log.exists() else set()
        todo = [case for case in every[index::count] if case["case"] not in done]
        if todo and not arguments.report:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, lines in (("text", 2000), ("eval", 60)):
                text = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(lines))
                (folder / f"{name}.txt").write_text(text)
            command = Command(folder)
            stack.callback(command.close)
            assert command.finish("whole") == 0, (folder / "whole.err").read_text()
            whole = results(folder, "whole")
            shutil.rmtree(folder / "whole")
            command.start("whole")  # the first one has made the tokenizer
            while not records(folder, "whole"):
                assert command.ended(0.005) is None, (folder / "whole.err").read_text()
            first = time.monotonic()
            assert command.ended(600) == 0
            spans = (time.monotonic() - command.begun, time.monotonic() - first)
            for case in todo:
                out = f"run-{case['case']}"
                kind = {"SIGUSR1": saved, "SIGSTOP": frozen}.get(case["signal"], stopped)
                row = {**case, **kind(command, out, case, spans[case.get("within", False)], whole)}
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
                if row["ok"]:
                    shutil.rmtree(folder / out, ignore_errors=True)
        if arguments.report or count == 1:
            sys.exit(0 if report(kept, len(every)) else 1)


if __name__ == "__main__":
    main()
