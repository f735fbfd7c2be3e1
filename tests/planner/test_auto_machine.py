"""Which machine a run is planned for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from auto_cases import machine, run_file

from hyper_parallel import compat
from hyper_parallel.calibrate import Settings
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto.machine import FORM, machine_of, measured, named
from hyper_parallel.planner.auto.open_axes import workload_of


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []
    said: list[str] = []

    def measure(settings: Settings, say: object) -> Cluster:
        asked.append(settings.workers)
        return machine(settings.workers)

    first = measured(4, said.append, measure)
    again = measured(4, said.append, measure)
    assert first == again and asked == [4] and first.ranks == 4
    assert "once" in said[0] and "measured before" in said[-1]
    measured(2, said.append, measure)
    (file,) = tmp_path.rglob(f"*4-workers-{FORM}.yaml")
    file.write_text("nothing")
    measured(4, said.append, measure)
    assert asked == [4, 2, 4]


def test_a_named_machine_has_to_be_large_enough(tmp_path: Path) -> None:
    assert named("h100x8", 4, "strategy.cluster").ranks == 4
    with pytest.raises(
        ConfigError, match=r"strategy.cluster: h100x8 has 8 devices, and there are 16 workers"
    ):
        named("h100x8", 16, "strategy.cluster")


def test_several_machines_have_links_that_nobody_measured(tmp_path: Path) -> None:
    worker = Worker(0, 0, 4, 2, torch.device("cpu"), compat.backend("cpu"))
    with pytest.raises(ConfigError, match=r"set strategy.cluster"):
        machine_of(run_file(tmp_path), worker, lambda _: None)
    run = run_file(tmp_path, {"axes": "auto", "cluster": "h100x8"})
    assert machine_of(run, worker, lambda _: None).name == "h100x8"


def test_a_vocabulary_is_the_tokenizers_that_will_be_trained(tmp_path: Path) -> None:
    run = run_file(tmp_path)
    assert run.model.config is not None
    assert workload_of(run).shape.vocabulary == run.model.config["vocab_size"]
    fields = {key: value for key, value in run.model.config.items() if key != "vocab_size"}
    other = run.model_copy(update={"model": run.model.model_copy(update={"config": fields})})
    assert workload_of(other).shape.vocabulary == run.data.tokenizer.trained_size
