"""`strategy: auto` and pipelines: when one is chosen, what is said of it, and that real workers run it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from auto_cases import launched, machine, run_file

from harness.commands import noted
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.planner.auto.candidates import Simulated
from hyper_parallel.planner.auto.choose import Choice, choose
from hyper_parallel.planner.auto.entry import STRATEGY_FILE
from hyper_parallel.planner.auto.open_axes import resolved
from hyper_parallel.planner.solve import TIE
from hyper_parallel.schedule import check_pipeline

WIDE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
OPEN = {"axes": {"replicate": "auto", "pipeline": "auto"}}
"""Copies cost a reduction of all gradients over slow links, or a pipeline sends activations."""
FEW_GIB = 2.02
"""Memory of four workers in which copies of the model do not fit, and its stages do."""


def _chosen(
    folder: Path, strategy: Any = None, gib: float = 8.0, **sections: Any
) -> tuple[RunConfig, Choice]:
    config = run_file(folder, strategy or OPEN, model={"config": WIDE}, **sections)
    choice = choose(config, machine(4, gib).for_workers(4), 4, simulate=None)
    return resolved(config, choice.laid), choice


def test_slow_links_make_a_pipeline_the_fastest(tmp_path: Path) -> None:
    found, choice = _chosen(tmp_path)
    assert found.strategy.axes.pipeline > 1 and found.strategy.axes.world == 4
    assert found.strategy.pipeline.schedule != "auto" and found.train.micro_batch is not None
    assert "pipeline" in choice.lines[0]
    assert choice.lines[-1].startswith("the best strategy without a pipeline, replicate 4; ")


def test_where_only_a_pipeline_fits_it_is_chosen(tmp_path: Path) -> None:
    found, choice = _chosen(tmp_path, gib=FEW_GIB)
    assert found.strategy.axes.pipeline > 1
    assert choice.lines[-1].startswith(
        "a pipeline, since without one the model fits no strategy of 4 workers"
    )
    assert all("\n" not in line for line in choice.lines)


def test_the_candidates_have_the_micro_batches_that_their_schedules_need(tmp_path: Path) -> None:
    seen: list[RunConfig] = []

    def simulate(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
        seen.extend(one for one in runs if one.strategy.axes.pipeline > 1)
        return [Simulated(1.0, True)] * len(runs)

    for schedule in ("auto", "zb-v", "v-half"):
        config = run_file(tmp_path, {**OPEN, "pipeline": {"schedule": schedule}}, model={"config": WIDE})
        choose(config, machine(4).for_workers(4), 4, simulate=simulate)
    assert len({one.strategy.pipeline.schedule for one in seen}) == 3
    for one in seen:
        check_pipeline(one.strategy, one.micro_batches, 4)


@pytest.mark.parametrize(
    ("strategy", "sections", "told"),
    [
        (OPEN, {"train": {"batch": 8, "engine": "eager"}}, "no pipeline: train.engine is eager"),
        (OPEN, {"train": {"batch": 8, "compile": True}}, "no pipeline: train.compile is true"),
        (
            {**OPEN, "memory": {"recompute": "layer", "recompute_layers": 1}},
            {},
            "no pipeline: memory.recompute_layers is set",
        ),
        (
            {**OPEN, "memory": {"device": "1GiB", "host": "1GiB"}},
            {},
            "no pipeline: memory.device sets a budget",
        ),
    ],
)
def test_what_excludes_pipelines_is_named(
    tmp_path: Path, strategy: Any, sections: dict[str, Any], told: str
) -> None:
    found, choice = _chosen(tmp_path, strategy, **sections)
    assert found.strategy.axes.pipeline == 1 and choice.lines[-1] == told


def test_a_file_that_leaves_no_pipeline_open_gets_none_and_no_word_of_it(tmp_path: Path) -> None:
    found, choice = _chosen(tmp_path, {"axes": {"replicate": "auto"}})
    assert found.strategy.axes.pipeline == 1 and not any("pipeline" in line for line in choice.lines)


def test_what_the_file_writes_of_the_pipeline_stays(tmp_path: Path) -> None:
    strategy = {**OPEN, "pipeline": {"schedule": "interleaved-1f1b", "virtual": 2}}
    found, _ = _chosen(tmp_path, strategy, gib=FEW_GIB)
    assert found.strategy.axes.pipeline > 1
    assert (found.strategy.pipeline.schedule, found.strategy.pipeline.virtual) == ("interleaved-1f1b", 2)
    # Where the simple strategy is taken, the section has nothing to say.
    fast = run_file(tmp_path, {**strategy, "axes": {"replicate": "auto", "pipeline": "auto"}})
    laid = {"train": {"micro_batch": 1}, "strategy": {"axes": {"replicate": 4}}}
    assert resolved(fast, laid).strategy.axes.pipeline == 1


@pytest.mark.parametrize(
    ("saved", "piped"), [(0.0, False), (TIE / 2, False), (2 * TIE, True), (-2 * TIE, False)]
)
def test_a_pipeline_that_ties_with_a_simple_strategy_is_not_chosen(
    tmp_path: Path, saved: float, piped: bool
) -> None:
    def simulate(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
        return [Simulated(1.0 - saved * (one.strategy.axes.pipeline > 1), True) for one in runs]

    config = run_file(tmp_path, OPEN, model={"config": WIDE})
    choice = choose(config, machine(4).for_workers(4), 4, simulate=simulate)
    assert choice.piped == piped
    assert f"strategy with{'out' * piped} a pipeline, " in choice.lines[-1]
    assert "is predicted to take" in choice.lines[-1]


def test_a_pipeline_that_cannot_be_simulated_is_named_with_the_reason(tmp_path: Path) -> None:
    def simulate(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
        piped = Simulated(None, reason="its layers cannot be cut")
        return [piped if one.strategy.axes.pipeline > 1 else Simulated(1.0, True) for one in runs]

    config = run_file(tmp_path, OPEN, model={"config": WIDE})
    choice = choose(config, machine(4).for_workers(4), 4, simulate=simulate)
    assert not choice.piped
    assert choice.lines[-1].endswith("cannot be simulated: its layers cannot be cut")


def _trained(folder: Path, strategy: Any, workers: int = 4, **train: Any) -> tuple[dict[str, Any], str]:
    """What rank 0 notes of a run, and the strategy file that it wrote."""
    sections: dict[str, Any] = {
        "model": {"config": WIDE},
        "data": {
            "train": argparse.__file__,
            "sequence": 64,
            "tokenizer": {"vocab_size": 512},
            "cache": str(folder.parent),
        },
        "train": {"batch": 8, "steps": 2, "sample": {"tokens": 0}, **train},
        "checkpoint": {"every": 1},
        "launch": {"workers": workers},
    }
    assert launched(run_file(folder, strategy, **sections), "train") == 0
    notes = [noted(folder, rank) for rank in range(workers)]
    assert all(one["laid"] == notes[0]["laid"] for one in notes)
    file = folder / "run" / STRATEGY_FILE
    return notes[0], file.read_text() if file.is_file() else ""


def test_workers_run_the_pipeline_that_was_chosen_and_keep_it_when_they_resume(tmp_path: Path) -> None:
    machine(4, FEW_GIB).dump(tmp_path / "cluster.yaml")
    strategy = {**OPEN, "cluster": str(tmp_path / "cluster.yaml"), "tries": 0}
    first, text = _trained(tmp_path / "auto", strategy)
    assert first["laid"]["axes"]["pipeline"] > 1 and first["laid"]["pipeline"]["schedule"] != "auto"
    assert "# a pipeline, since without one the model fits no strategy of 4 workers" in text

    written, _ = _trained(tmp_path / "written", first["laid"], micro_batch=first["micro"])
    assert written["losses"] == first["losses"]

    again, kept = _trained(tmp_path / "auto", strategy, steps=3)
    assert again["laid"] == first["laid"] and kept == text


def test_workers_try_pipelines_beside_simple_strategies(tmp_path: Path) -> None:
    machine(2).dump(tmp_path / "cluster.yaml")
    strategy = {**OPEN, "cluster": str(tmp_path / "cluster.yaml"), "tries": 2}
    first, text = _trained(tmp_path / "auto", strategy, workers=2)
    tried = next(line for line in text.splitlines() if "that were tried" in line)
    assert "cannot run" not in tried and "pipeline" in text
    written, _ = _trained(tmp_path / "written", first["laid"], workers=2, micro_batch=first["micro"])
    assert written["losses"] == first["losses"]
