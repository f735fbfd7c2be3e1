"""Faults in the middle of a run within a budget: said so that a person can act, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import metrics, run, run_config

from harness.commands import descendants, running, wait_until
from harness.forked_command import CommandProcess
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import FaultError, TierError
from hyper_parallel.launch.worker_failure import Failure
from hyper_parallel.offloading import choose
from hyper_parallel.offloading.schedule import equal_graphs
from hyper_parallel.offloading.tiers import memory_tier
from hyper_parallel.offloading.tiers.leases import OWN, PREFIX
from hyper_parallel.offloading.tiers.memory_tier import SHARED
from hyper_parallel.step.graph_executor import GraphStepper

TRAIN = {"steps": 6, "eval": {"batches": 1}, "sample": {"tokens": 0}}


@pytest.fixture(autouse=True)
def any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_graphs, "choose", functools.partial(choose, tries=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, float]:
    config = run_config(folder, "undisturbed", train=TRAIN)
    run(config)
    return metrics(config)


def _config(folder: Path, name: str, **memory: Any) -> RunConfig:
    """Within a budget, with a checkpoint after each second step."""
    memory = {"device": 700_000, **memory}
    return run_config(folder, name, train=TRAIN, checkpoint={"every": 2}, strategy={"memory": memory})


def _in_step(step: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do `act` before a step, counted from 1."""
    usual = GraphStepper.run

    def disturbed(self: GraphStepper, **arguments: Any) -> Any:
        if self._batch.step + 1 == step:
            act()
        return usual(self, **arguments)

    monkeypatch.setattr(GraphStepper, "run", disturbed)


def _spilled(folder: Path) -> list[Path]:
    return sorted((folder / "spill").glob("*/slots-*"))


def _disk_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)


def _damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in _spilled(folder):
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))


def _cut_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in _spilled(folder):
        os.truncate(path, 0)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(_disk_full, "ran full"), (_damaged, "is damaged"), (_cut_short, "is damaged|made it shorter")],
    ids=["full", "damaged", "cut short"],
)
def test_a_disk_that_fails_in_mid_run_ends_it_and_the_next_start_goes_on(
    fault: Callable[[Path, pytest.MonkeyPatch], None],
    said: str,
    folder: Path,
    undisturbed: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _config(folder, fault.__name__, flash=str(folder / "spill"))
    with monkeypatch.context() as patch:
        _in_step(4, lambda: fault(folder, patch), patch)
        with pytest.raises(TierError) as failed:
            run(config)
    assert re.search(said, str(failed.value))
    assert "spill/hyper-parallel-spill-" in str(failed.value) and "memory.flash" in str(failed.value)
    assert re.search(r"\(slot \d+: \S+", str(failed.value)), "what was in the slot"
    assert not list((folder / "spill").iterdir())
    assert run(config).resumed_from == 2
    assert metrics(config) == undisturbed
    assert not list((folder / "spill").iterdir())


def test_a_host_without_the_memory_is_said_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_tier, "bytes_in", lambda path, key: 100_000)
    config = _config(folder, "host", host="64MiB")
    with pytest.raises(TierError, match=r"this machine has 97\.7 KiB available; .* set memory\.host lower"):
        run(config)
    assert not (Path(config.out) / "metrics.jsonl").exists()


class _Started:
    """`hyper-parallel train` on two workers, in a session of its own."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        self.process = CommandProcess(["train", str(file)], folder)
        done = max(_steps(config), default=0)

        def under_way() -> bool:
            assert self.process.poll() is None, self.process.output()
            return max(_steps(config), default=0) >= done + 3

        wait_until(under_way, "three steps are done", timeout=120)
        self.family = descendants(self.process.pid)

    def worker(self, path: Path) -> int:
        """The process that a spilled file is of."""
        return int(path.parent.name.split("-")[3])

    def end(self) -> tuple[int, str]:
        """Its exit code and what it wrote; no process of it is left."""
        code = self.process.wait(60)
        wait_until(lambda: not any(map(running, self.family)), "no process is left", timeout=10)
        return code, self.process.output()[1]


def _steps(config: RunConfig) -> list[int]:
    """Those that are recorded."""
    file = Path(config.out) / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [record["step"] for record in map(json.loads, whole) if "loss" in record]


def _pool(config: RunConfig) -> Path:
    """The folder of a run's pool."""
    run = hashlib.blake2b(str(Path(config.out).absolute()).encode(), digest_size=8).hexdigest()
    return SHARED / OWN / f"{PREFIX}{run}"


@pytest.fixture
def two(tmp_path: Path, request: pytest.FixtureRequest) -> RunConfig:
    memory = {"device": 400_000, "flash": str(tmp_path / "spill"), **getattr(request, "param", {})}
    return run_config(
        tmp_path,
        train={**TRAIN, "steps": 3000},
        checkpoint={"every": 2},
        launch={"device": "cpu", "threads": 1},
        strategy={"axes": {"shard": 2}, "memory": memory},
    )


@pytest.fixture
def start(two: RunConfig, tmp_path: Path) -> Iterator[Callable[[], _Started]]:
    begun: list[_Started] = []

    def started() -> _Started:
        begun.append(_Started(tmp_path, two))
        return begun[-1]

    yield started
    for one in begun:
        one.process.kill()


@pytest.mark.matrix
def test_a_file_that_is_damaged_ends_both_workers(
    start: Callable[[], _Started], two: RunConfig, tmp_path: Path
) -> None:
    started = start()
    _, second = _spilled(tmp_path)
    began = time.monotonic()
    while started.process.poll() is None and time.monotonic() < began + 60:
        with contextlib.suppress(FileNotFoundError), second.open("r+b") as file:
            file.write(os.urandom(second.stat().st_size))
    code, said = started.end()
    assert code == 1, said  # not the user's mistake
    error, *lost = said.splitlines()
    assert error.startswith("hyper-parallel: error: reading ")
    # No step is lost where the newest checkpoint is that of the last one.
    told = r"hyper-parallel: lost: the (step|\d+ steps) since .*/step-\d{8}, the newest .*"
    assert len(lost) <= 1 and all(re.fullmatch(told, line) for line in lost)
    assert f"{second} is damaged" in said and "memory.flash" in said
    assert not list((tmp_path / "spill").iterdir())


@pytest.mark.matrix
def test_a_disk_that_takes_no_more_ends_both_workers(
    start: Callable[[], _Started], two: RunConfig, tmp_path: Path
) -> None:
    started = start()
    first, _ = _spilled(tmp_path)
    # What the system answers beyond it is what it answers where a quota is used up.
    size = first.stat().st_size - 4096
    resource.prlimit(started.worker(first), resource.RLIMIT_FSIZE, (size, size))
    code, said = started.end()
    assert code == 2, said
    assert f"the disk of {first} ran full" in said
    assert not list((tmp_path / "spill").iterdir())


@pytest.mark.matrix
@pytest.mark.parametrize("two", [{"pool": "64MiB"}], indirect=True)
def test_after_a_kill_the_next_start_cleans_up_and_goes_on(
    start: Callable[[], _Started], two: RunConfig, tmp_path: Path
) -> None:
    started = start()
    assert _pool(two).exists()
    first, second = _spilled(tmp_path)
    os.kill(started.worker(second), signal.SIGKILL)
    code, said = started.end()
    assert code == 1, said
    assert "was killed by SIGKILL" in said and "continues from the last committed checkpoint" in said
    assert second in _spilled(tmp_path), "nobody could remove it"
    again = start()
    assert second not in _spilled(tmp_path) and first not in _spilled(tmp_path)
    steps = _steps(two)
    assert len(steps) == len(set(steps)), "it went on, and did not begin anew"
    os.killpg(again.process.pid, signal.SIGINT)
    code, said = again.end()
    assert code == 130, said
    assert not list((tmp_path / "spill").iterdir()) and not _pool(two).exists()


def test_a_fault_of_a_disk_is_not_the_users_mistake(tmp_path: Path) -> None:
    assert Failure.of(0, FaultError("slots-1 is damaged")).exit_code == 1
    assert Failure.of(0, TierError("the disk ran full; make room")).exit_code == 2
    said = Failure.of(0, FaultError("slots-1 is damaged")).render(run_config(tmp_path, "run"))
    assert said == "hyper-parallel: error: slots-1 is damaged"
