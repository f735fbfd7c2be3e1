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
`--shard I/N` does every N-th. The figures are those of all that was done.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from campaigns import Log
from commandline import run
from disturbed_runs import HEAD, Command, Row, campaign, family, judged, records, results
from pages import Benchmark
from processes import scratch

from hyper_parallel.checkpoint import newest
from hyper_parallel.errors import PREFIX

BENCHMARK = Benchmark("signals")
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


def interrupt(command: Command, out: str, case: Row, span: float) -> Row:
    """Start a run, send it a signal, and tell how it ended.

    The moment is a share of `span` seconds from the start, or from the first step (`within`); where the run has ended
    before it, it is moved forward.
    """
    folder, moment = command.folder, case["moment"]
    number = signal.Signals[case["signal"]]
    while True:
        shutil.rmtree(folder / out, ignore_errors=True)
        command.start(out)
        code = None
        if case["within"]:
            code = command.until_first_step(out)
        begun = time.monotonic()
        while code is None and time.monotonic() - begun < moment * span:
            code = command.ended(0.002)
        while code is None and not send(command, number, case["whom"], case["rank"]):
            code = command.ended(0.01)
        sent, step = time.monotonic(), max(records(folder, out), default=0)
        if code is None:
            code = command.ended(GRACE_S + 60)
            return {
                "sent_s": round(sent - command.begun, 2),
                "ended_s": round(time.monotonic() - sent, 2),
                "code": code,
                "sent_step": step,
                "said": command.said(out),
            }
        moment *= 0.5


def stopped(command: Command, out: str, case: Row, span: float, whole: Any) -> Row:
    folder, row = command.folder, interrupt(command, out, case, span)
    row["step"] = max(records(folder, out), default=0)
    found = newest(folder / out / "checkpoints") if (folder / out / "checkpoints").exists() else None
    row["saved"] = found.step if found is not None else 0
    # A signal that comes while the run ends is too late to stop anything.
    complete = row["step"] == STEPS and row["code"] in (0, 130)
    row["exit"] = complete or (row["code"] == 130 and row["said"].strip() in ("", STOPPING))
    row["in_time"] = row["ended_s"] <= GRACE_S
    row["last_step_saved"] = row["saved"] == row["step"]
    row["resumed"] = command.finish(out) and results(folder, out, STEPS) == whole
    row["ok"] = row["exit"] and row["in_time"] and row["last_step_saved"] and row["resumed"]
    return row


def saved(command: Command, out: str, case: Row, span: float, whole: Any) -> Row:
    folder, row = command.folder, interrupt(command, out, case, span)
    text = (folder / f"{out}.txt").read_text()
    asked = [int(line.split()[2].rstrip(",")) for line in text.splitlines() if line.startswith("saved step")]
    row["saved"] = asked
    row["exit"] = row["code"] == 0 and row["said"] == ""
    row["unchanged"] = results(folder, out, STEPS) == whole
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
        row["resumed"] = command.finish(out) and results(folder, out, STEPS) == whole
    row["ok"] = row["exit"] and row["unchanged"] and row["last_step_saved"] and row["resumed"]
    return row


def frozen(command: Command, out: str, case: Row, span: float, whole: Any) -> Row:
    """A rank is stopped in the middle of the steps."""
    command.start(out, f"launch.timeout={FROZEN_S:g}")
    while not records(command.folder, out) or len(workers := command.workers()) < 2:
        assert command.ended(0.005) is None, command.said(out)
    time.sleep(case["moment"] * 0.1)
    os.kill(workers[case["rank"]], signal.SIGSTOP)
    begun = time.monotonic()
    code = command.ended(FROZEN_S + 120)
    said = command.said(out)
    row = {"code": code, "ended_s": round(time.monotonic() - begun, 1), "said": said}
    row["named"] = said.startswith(f"{PREFIX}worker {case['rank']} ") and said.count(PREFIX) == 1
    row["left"] = len(command.workers())
    row["ok"] = code == 1 and row["named"] and not row["left"]
    return row


def cases(moments: int, freezes: int) -> list[Row]:
    """All of them, the kinds in turns, so that a campaign that is cut short has some of each."""
    draw = random.Random(0)
    found: list[Row] = []
    kinds = list(itertools.product(("SIGTERM", "SIGINT", "SIGUSR1"), ("group", "command", "worker")))
    for at in range(max(moments, freezes)):
        for name, whom in kinds if at < moments else ():
            place = {"rank": draw.randrange(2), "moment": draw.random(), "within": at % 2 == 1}
            found.append({"signal": name, "whom": whom, **place})
        if at < freezes:
            found.append({"signal": "SIGSTOP", "whom": "worker", "rank": at % 2, "moment": draw.random()})
    return [{"case": number, **case} for number, case in enumerate(found)]


def run_cases(todo: list[Row], log: Log, folder: Path) -> None:
    """Run the cases in a folder of their own, beside a run that nothing interrupts."""
    with contextlib.closing(Command(folder, RUN, text=2000, eval=60)) as command:
        assert command.finish("whole"), command.said("whole")
        whole = results(folder, "whole", STEPS)
        shutil.rmtree(folder / "whole")
        command.start("whole")  # the first one has made the tokenizer
        assert command.until_first_step("whole") is None, command.said("whole")
        first = time.monotonic()
        assert command.ended(600) == 0
        spans = (time.monotonic() - command.begun, time.monotonic() - first)

        def result_of(case: Row) -> Row:
            out = f"run-{case['case']}"
            kind = {"SIGUSR1": saved, "SIGSTOP": frozen}.get(case["signal"], stopped)
            row = kind(command, out, case, spans[case.get("within", False)], whole)
            if row["ok"]:
                shutil.rmtree(folder / out, ignore_errors=True)
            return row

        campaign(log, todo, result_of)


def main(
    moments: int = 30,
    freezes: int = 10,
    folder: Annotated[Path | None, "where results are kept from start to start"] = None,
    shard: Annotated[str, "I/N: every N-th case, from the I-th on"] = "0/1",
) -> bool:
    """Run the cases that are left, and write the figures; whether a case was wrong."""
    every = cases(moments, freezes)
    index, count = map(int, shard.split("/"))
    with scratch() as place:
        kept = folder or place / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        log = Log(kept / f"cases-{index}-{count}.jsonl")
        if todo := every[index::count]:
            run_cases(todo, log, place)
        rows = [row for path in sorted(kept.glob("cases-*.jsonl")) for row in Log(path).rows]
    table, wrong = judged(rows, lambda row: f"{row['signal']} to {row['whom']}")
    limits = {"steps": STEPS, "grace_s": GRACE_S, "frozen_timeout_s": FROZEN_S}
    BENCHMARK.keep({**limits, "planned": len(every), "done": len(rows), "table": table, "wrong": wrong})
    return bool(wrong) or not rows


if __name__ == "__main__":
    run(main)
