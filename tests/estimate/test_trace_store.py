"""A prediction of a step that was captured before is read, and is the same prediction."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hyper_parallel import config
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import build_trace, cluster_of, predict, predict_run
from hyper_parallel.estimate.build_trace import TraceStore
from hyper_parallel.estimate.prediction import Prediction
from hyper_parallel.step import graph_key

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def _run(*overrides: str) -> RunConfig:
    return config.load(EXAMPLE, ["model.config.num_hidden_layers=2", *overrides])


def _predicted(
    run: RunConfig, cache: Path | None, name: str = "h100x4", *, as_written: bool = False
) -> Prediction:
    return predict_run(run, cluster_of(name, run), as_written=as_written, cache=cache)


@pytest.fixture(autouse=True)
def unchanged_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that other tests of this process wrote and loaded count as loaded from what is there."""
    monkeypatch.setattr(graph_key, "_BEGUN", time.time())


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each step that is captured."""
    found: list[str] = []
    original = build_trace.capture_one

    def counted(*given: object) -> object:
        found.append("captured")
        return original(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(build_trace, "capture_one", counted)
    return found


def test_the_second_prediction_of_a_step_is_read(tmp_path: Path, captures: list[str]) -> None:
    plain = _predicted(_run(), None)
    first, second = (_predicted(_run(), tmp_path) for _ in range(2))
    assert len(captures) == 2
    assert first.timeline == second.timeline == plain.timeline
    assert first.timeline.alone == second.timeline.alone == plain.timeline.alone
    assert first.to_json() == second.to_json() == plain.to_json()
    assert first.text() == second.text() == plain.text()


def test_what_decides_a_step_is_part_of_its_key(tmp_path: Path, captures: list[str]) -> None:
    _predicted(_run(), tmp_path)
    _predicted(_run("data.sequence=128"), tmp_path)
    _predicted(_run("strategy.overlap.schedule=none"), tmp_path)
    _predicted(_run(), tmp_path, "a100x4")
    _predicted(_run(), tmp_path, as_written=True)
    _predicted(_run("model.config.num_hidden_layers=3"), tmp_path)
    assert len(captures) == 6


def test_a_damaged_file_is_captured_and_written_again(tmp_path: Path, captures: list[str]) -> None:
    whole = _predicted(_run(), tmp_path)
    (file,) = tmp_path.rglob("*.trace")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert _predicted(_run(), tmp_path).timeline == whole.timeline
    assert file.read_bytes() == content
    assert len(captures) == 2


def test_code_that_has_changed_is_captured(
    tmp_path: Path, captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyper_parallel.estimate import build_trace

    _predicted(_run(), tmp_path)
    monkeypatch.setattr(build_trace, "source_digest", lambda _: "another")
    _predicted(_run(), tmp_path)
    assert len(captures) == 2


def test_what_is_explained_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(folder: Path) -> TraceStore:
        raise AssertionError(f"{folder} is looked at")

    monkeypatch.setattr(predict, "TraceStore", unused)
    run = _run("strategy.memory.device=20GiB", "strategy.memory.host=20GiB")
    found = predict_run(run, cluster_of("h100x4", run), explain=True, cache=tmp_path)
    assert found.timeline.step > 0
