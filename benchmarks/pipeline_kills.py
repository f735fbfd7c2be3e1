"""Kill or stop a worker of a pipeline in the middle of its schedule; go on with other stages; compare the losses.

    python benchmarks/pipeline_kills.py [--cases 40] [--seed 0] [--folder FOLDER]

A real run of a small Llama on two or four workers gets SIGKILL or SIGSTOP on one of them at a moment drawn over its
steps. Of each case is checked:

- the run ends with code 1 and leaves no worker; its error is told `KILLED_S` seconds after a SIGKILL, or as much more
  than `launch.timeout` after a SIGSTOP (the kernel may keep a killed process longer, for its writes to the disk);
- its one line names the worker, the step, a stage that is the worker's, the micro-batch and the instruction;
- the run that goes on from the last checkpoint, with the same strategy, with another number of stages or on one
  device, ends with the losses of a run that nothing disturbed: the same bits with the same strategy, else to 1e-5.

A moment between two schedules (the optimizer's update, a save) is counted and drawn anew. With a `--folder` each result
is kept there as it is found, and a later start does what is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

from campaigns import Log
from commandline import run
from disturbed_runs import Command, Row, campaign, judged, records
from pages import Benchmark
from processes import scratch

from hyper_parallel.errors import PREFIX

BENCHMARK = Benchmark("pipeline_kills")
STEPS = 14
TIMEOUT_S = 6.0
KILLED_S = 15.0
"""Seconds in which the error is told once a worker has died."""
TOLERANCE = 1e-5
"""Largest relative difference of a loss between strategies."""
RUN = f"""\
version: 1
out: OUT
model:
  config: {{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}}
data: {{train: text.txt, eval: eval.txt, sequence: 64, tokenizer: {{vocab_size: 300}}, cache: cache}}
train: {{steps: {STEPS}, batch: 8, micro_batch: 1, eval: {{batches: 1}}, sample: false}}
launch: {{device: cpu, threads: 1, timeout: {TIMEOUT_S:g}}}
checkpoint: {{every: 3}}
trackers: []
"""
STRATEGIES = {
    "2 stages, 1f1b": "strategy={axes: {pipeline: 2}, pipeline: {schedule: 1f1b}}",
    "4 stages, 1f1b": "strategy={axes: {pipeline: 4}, pipeline: {schedule: 1f1b}}",
    "2 ranks with 2 stages each, zb-v": "strategy={axes: {pipeline: 2}, pipeline: {schedule: zb-v}}",
    "2 stages of tensor 2, 1f1b": "strategy={axes: {pipeline: 2, tensor: 2}, pipeline: {schedule: 1f1b}}",
}
ALONE = "one device"
WORLDS = dict(zip(STRATEGIES, (2, 4, 2, 4), strict=True))
Losses = dict[int, float]
"""By step."""


def stages_of(strategy: str, rank: int) -> set[int]:
    if "zb-v" in strategy:
        return {rank, 3 - rank}
    return {rank // 2 if "tensor" in strategy else rank}


def losses(folder: Path, out: str) -> Losses:
    return {step: row["loss"] for step, row in records(folder, out).items()}


def disturb(command: Command, out: str, case: Row, moment: float) -> Row:
    """Start a run, send the signal `moment` seconds after its first step, and tell how it ended; empty where the run
    was over by then."""
    shutil.rmtree(command.folder / out, ignore_errors=True)
    command.start(out, STRATEGIES[case["strategy"]])
    assert command.until_first_step(out) is None, command.said(out)
    if command.ended(moment) is not None:
        return {}
    workers = command.workers()
    if len(workers) < WORLDS[case["strategy"]]:
        command.ended(60)
        return {}
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[case["rank"]], signal.Signals[case["signal"]])
    sent, told, code = time.monotonic(), 0.0, None
    while code is None and time.monotonic() - sent < TIMEOUT_S + 120:
        code = command.ended(0.05)
        if not told and PREFIX in command.said(out):
            told = time.monotonic() - sent
    row = {"told_s": round(told, 2), "ended_s": round(time.monotonic() - sent, 2), "code": code}
    return {**row, "said": command.said(out), "left": len(command.workers())}


def own_part(said: str) -> str:
    """What an error says of the worker that it names first."""
    return said.partition("; worker ")[0]


def judge(case: Row, row: Row) -> None:
    """Add what the end of a disturbed run has to be like."""
    lines = [line for line in row["said"].splitlines() if not line.startswith(f"{PREFIX[:-7]}lost: ")]
    limit = KILLED_S + (TIMEOUT_S if case["signal"] == "SIGSTOP" else 0)
    row["in_time"] = row["code"] == 1 and row["told_s"] <= limit and row["left"] == 0
    at = r"in step (\d+), stage (\d+), micro-batch (\d+), (\w+\([^()]*\))"
    found = re.match(rf"{PREFIX}worker {case['rank']} .*?{at}", own_part(row["said"]))
    row["at"] = list(found.groups()) if found else None
    row["named"] = (
        len(lines) == 1 and found is not None and int(found[2]) in stages_of(case["strategy"], case["rank"])
    )
    row["others"] = len(re.findall(rf"; worker \d is {at}", lines[0])) if lines else 0


def goes_on(command: Command, out: str, case: Row, wanted: Losses) -> bool:
    """Whether the run ends, with what the case says, with the losses of one that nothing disturbed."""
    override = STRATEGIES.get(case["then"], "launch.workers=1")
    before = [] if case["then"] in STRATEGIES else [STRATEGIES[case["strategy"]]]
    if not command.finish(out, *before, override):
        return False
    found = losses(command.folder, out)
    if case["then"] == case["strategy"]:
        return found == wanted
    return found.keys() == wanted.keys() and all(
        abs(found[step] / wanted[step] - 1) <= TOLERANCE for step in wanted
    )


def drawn(count: int, seed: int) -> list[Row]:
    """All of them, strategies and signals in turns."""
    draw, names = random.Random(seed), list(STRATEGIES)
    made = []
    for number in range(count):
        turn, at = divmod(number, len(names))
        strategy = names[at]
        then = (strategy, ALONE, draw.choice([name for name in names if name != strategy]))[turn % 3]
        case = {
            "case": number,
            "strategy": strategy,
            "signal": ("SIGKILL", "SIGSTOP")[turn % 2],
            "then": then,
        }
        made.append({**case, "rank": draw.randrange(WORLDS[strategy]), "seed": draw.randrange(1 << 30)})
    return made


def run_case(command: Command, case: Row, whole: Losses, span: float) -> Row:
    """A case until its moment was in a schedule."""
    draw, outside, slowest, out = random.Random(case["seed"]), 0, 0.0, f"case-{case['case']}"
    while True:
        row = disturb(command, out, case, draw.random() * 0.8 * span)
        if row:
            judge(case, row)
            if ", stage " in own_part(row["said"]) or not row["in_time"]:
                break
            slowest = max(slowest, row["ended_s"])
        outside += 1
        assert outside < 20, "no moment was in a schedule"
    row |= {"between_schedules": outside, "slowest_end_between_schedules_s": slowest}
    row["resumed"] = goes_on(command, out, case, whole)
    row["ok"] = row["in_time"] and row["named"] and row["resumed"]
    if row["ok"]:
        shutil.rmtree(command.folder / out)
    return row


def resumed_on(row: Row) -> str:
    if row["then"] == row["strategy"]:
        return "same"
    return ALONE if row["then"] == ALONE else "other stages"


def reported(rows: list[Row], seed: int) -> bool:
    """Write the figures; whether something was wrong."""
    by_kind = sorted(rows, key=lambda row: (row["strategy"], row["signal"], row["case"]))
    table, wrong = judged(by_kind, lambda row: f"{row['signal']}, {row['strategy']}")
    settings = {"seed": seed, "steps": STEPS, "timeout_s": TIMEOUT_S, "tolerance": TOLERANCE}
    BENCHMARK.keep(
        {
            **settings,
            "cases": len(rows),
            "right": len(rows) - len(wrong),
            "stopped_in": Counter(row["at"][3].partition("(")[0] if row["at"] else "none" for row in rows),
            "resumed_on": {"same": 0, "other stages": 0, ALONE: 0} | Counter(map(resumed_on, rows)),
            "others_named": sum(row["others"] > 0 for row in rows),
            "slowest_told_s": max(row["told_s"] for row in rows),
            "moments_between_schedules": sum(row["between_schedules"] for row in rows),
            "slowest_end_between_schedules_s": max(row["slowest_end_between_schedules_s"] for row in rows),
            "table": table,
            "an_example": rows[0]["said"].splitlines()[0],
            "wrong": wrong,
        }
    )
    return bool(wrong)


def main(
    cases: int = 40,
    seed: int = 0,
    folder: Annotated[Path | None, "where results are kept from start to start"] = None,
) -> bool:
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(scratch())
        folder.mkdir(parents=True, exist_ok=True)
        log = Log(folder / "cases.jsonl")
        command = stack.enter_context(contextlib.closing(Command(folder, RUN, text=3000, eval=300)))
        whole: dict[str, Losses] = {}
        span: dict[str, float] = {}
        for number, (strategy, override) in enumerate(STRATEGIES.items()):
            out = f"whole-{number}"
            if max(records(folder, out), default=0) < STEPS:
                assert command.finish(out, override), command.said(out)
            whole[strategy] = losses(folder, out)
            span[strategy] = sum(row["seconds"] for row in records(folder, out).values())
        campaign(
            log,
            drawn(cases, seed),
            lambda case: run_case(command, case, whole[case["strategy"]], span[case["strategy"]]),
        )
        return reported(sorted(log.rows, key=lambda row: int(row["case"])), seed)


if __name__ == "__main__":
    run(main)
