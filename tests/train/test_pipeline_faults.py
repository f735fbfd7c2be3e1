"""Faults, requests and steps that are not finite in the middle of a pipeline's schedule, on real workers."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from forked_launch import launched
from tiny_run import metrics, run_config

from harness.pipeline_faults import Fault
from hyper_parallel.config import RunConfig

STEPS = 5
TRAIN = {"steps": STEPS, "batch": 8, "micro_batch": 2, "eval": {"batches": 1}, "sample": False}
TWO = {"axes": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}}
NAMED = r"stage \d, micro-batch \d, \w+\([^()]*\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def config_of(folder: Path, name: str, **sections: Any) -> RunConfig:
    given: dict[str, Any] = {"strategy": TWO, **sections}
    launch = {"device": "cpu", "threads": 1, "timeout": 6, **given.pop("launch", {})}
    train = {**TRAIN, **given.pop("train", {})}
    return run_config(folder, name, train=train, launch=launch, checkpoint={"every": 2, "keep": 9}, **given)


def trained(config: RunConfig) -> None:
    code, said = launched(config)
    assert code == 0, said


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, float]:
    config = config_of(folder, "undisturbed")
    trained(config)
    return metrics(config)


def with_fault(config: RunConfig, fault: Fault) -> tuple[int | None, str]:
    return launched(config, "harness.pipeline_faults:main", fault.environment())


def line_of(errors: str) -> str:
    """The one line of the error, without that of the steps that are lost."""
    lines = [line for line in errors.splitlines() if ": lost: " not in line]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("kill", r"was killed by SIGKILL \(out of memory, or by hand\) in step 4, "),
        ("stop", r"has given no sign of life for \S+: its process is stopped \(SIGSTOP, a debugger\); it was last "
         r"heard in step 4, "),
        ("hang", r"has stood still for \S+ while the others wait for it; it is in step 4, "),
    ],
)  # fmt: skip
def test_a_rank_that_stops_is_named_with_its_instruction_and_the_run_goes_on_from_its_checkpoint(
    kind: str,
    how: str,
    folder: Path,
    undisturbed: dict[int, float],
) -> None:
    config = config_of(folder, kind)
    fault = Fault(kind, 1, 4, "stage 1, micro-batch 2, Run(forward 1)")
    code, errors = with_fault(config, fault)
    said = line_of(errors)
    assert code == 1
    assert re.search(rf"error: worker 1 {how}stage 1, micro-batch 2, Run\(forward 1\)", said), said
    assert re.search(rf"; worker 0 is in step 4, {NAMED}", said), said
    trained(config)
    assert metrics(config) == undisturbed


def test_a_message_that_is_lost_ends_the_run_and_tells_what_each_rank_waits_for(folder: Path) -> None:
    fault = Fault("lose", 0, 3, "stage 0, micro-batch 1, Send(")
    code, errors = with_fault(config_of(folder, "lose"), fault)
    said = line_of(errors)
    assert code == 1
    assert re.search(r"worker \d stopped first, and every other one here stands still too", said), said
    assert re.search(r"in step 3, stage 1, micro-batch 1, Wait\(forward\S+\) for pipeline rank 0", said), said
    assert re.search(r"in step 3, stage 0, micro-batch \d, Wait\(backward\S+\) for pipeline rank 1", said), (
        said
    )


def test_an_error_in_a_task_keeps_its_traceback_and_names_the_instruction(folder: Path) -> None:
    config = config_of(folder, "raise")
    fault = Fault("raise", 0, 2, "stage 0, micro-batch 1, Run(backward 0)")
    code, said = with_fault(config, fault)
    assert code == 1
    note = "ValueError: the defect\nin step 2, stage 0, micro-batch 1, Run(backward 0)\n"
    assert said.startswith("worker 0 failed") and note in said and said.count("Traceback") == 1
    log = Path(config.out) / "logs" / "rank-0.log"
    assert note in log.read_text()
    # It is asked to end, and on a busy machine does so before its own transfer has failed.
    waiting = log.with_name("rank-1.log").read_text()
    assert "TransferError" not in waiting or re.search(
        rf"TransferError: step 2, {NAMED} for pipeline rank 0: not over", waiting
    )


def test_memory_that_runs_out_in_a_task_is_one_line(folder: Path) -> None:
    fault = Fault("memory", 1, 2, "stage 1, micro-batch 0, Run(backward 1)")
    code, errors = with_fault(config_of(folder, "memory"), fault)
    assert code == 2
    assert "error: step 2, stage 1, micro-batch 0, Run(backward 1): out of memory " in line_of(errors)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_requests_to_stop_and_to_save_are_met_at_the_end_of_the_step(
    number: signal.Signals, folder: Path, undisturbed: dict[int, float]
) -> None:
    config = config_of(folder, number.name)
    fault = Fault("signal", 1, 3, "stage 1, micro-batch 1, Run(forward 1)", number=number)
    stops = number == signal.SIGTERM
    code, errors = with_fault(config, fault)
    assert code == (130 if stops else 0)
    saved = sorted(path.name for path in (Path(config.out) / "checkpoints").glob("step-*"))
    assert "step-00000003" in saved
    assert max(metrics(config)) == (3 if stops else STEPS)
    if stops:
        trained(config)
    assert metrics(config) == undisturbed
    assert "Traceback" not in errors


@pytest.mark.parametrize(("kind", "rank"), [("nan", 1), ("infinite", 0)])
def test_a_step_that_is_not_finite_on_one_stage_ends_the_run_on_all(
    kind: str, rank: int, folder: Path
) -> None:
    config = config_of(folder, f"stop-{kind}")
    code, errors = with_fault(config, Fault(kind, rank, 3))
    said = line_of(errors)
    assert code == 2
    assert "step 3: the loss is" in said and "Nothing was updated. The weights are healthy" in said
    assert ("the loss is nan" in said) == (kind == "nan")
    if kind == "infinite":
        assert re.search(r"the worst gradient is that of '\S+', \S+% of it not finite, and 1 of", said)


@pytest.mark.parametrize("how", ["skip", "rollback"])
def test_the_batch_of_such_a_step_is_left_out_as_on_one_device(how: str, folder: Path) -> None:
    staged = config_of(folder, f"{how}-staged", train={"on_nonfinite": how})
    alone = config_of(folder, f"{how}-alone", train={"on_nonfinite": how, "engine": "eager"}, strategy={})
    for config, rank in ((staged, 1), (alone, 0)):
        code, errors = with_fault(config, Fault("nan", rank, 3))
        assert code == 0, errors
    one, other = metrics(alone), metrics(staged)
    assert one.keys() == other.keys() and one == pytest.approx(other, rel=1e-5)
    assert metrics(alone, "skipped") == metrics(staged, "skipped") != {}
    summaries = [json.loads((Path(config.out) / "summary.json").read_text()) for config in (alone, staged)]
    assert [summary["skipped"] for summary in summaries] == [1, 1]
