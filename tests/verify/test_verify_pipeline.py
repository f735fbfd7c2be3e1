"""`verify` runs a pipeline in one process and on workers, and says wrong where a part of it is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from hyper_parallel.cli.main import main
from hyper_parallel.compat import backend
from hyper_parallel.config.load import from_dict
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.step.program_runner import ProgramRunner
from hyper_parallel.verify import Report, verify_file
from hyper_parallel.verify.run import RESULT, worker_main


@pytest.fixture
def run_file(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text(
        "".join(f"line {n}: the quick brown fox, again and again.\n" for n in range(400))
    )
    mixtral = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 28, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return {
        "version": 1,
        "out": str(tmp_path / "out"),
        "model": {"config": {**mixtral, **heads, **experts, "tie_word_embeddings": True}},
        "data": {
            "train": str(tmp_path / "text.txt"),
            "sequence": 32,
            "tokenizer": {"vocab_size": 300},
            "cache": str(tmp_path / "cache"),
        },
        "train": {"batch": 16, "micro_batch": 1},
        "strategy": {"axes": {"pipeline": 2, "shard": 2}, "pipeline": {"schedule": "1f1b"}},
    }


@pytest.mark.parametrize("driver", ["auto", "gloo"])
def test_from_the_command_line(
    run_file: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], driver: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run_file))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(file), "--json", "--driver", driver])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, report["failures"]
    assert report["strategy"] == "pipeline 2 · shard 2"
    assert report["driver"] == {"auto": "all ranks in one process", "gloo": "4 workers over gloo"}[driver]
    # Only real workers write.
    assert (tmp_path / "out").exists() == (driver == "gloo")
    names = [one["name"] for one in report["parameters"]]
    assert len(names) == len(set(names)) == 20
    assert max(one["gradient"] for one in report["parameters"]) < 1e-5


def _broken(rank: int, world: int, run_file: dict[str, Any]) -> None:
    reduced = ProgramRunner._gradients

    def halved(self: ProgramRunner, kinds: Any) -> dict[str, torch.Tensor]:
        found = reduced(self, kinds)
        return {name: one * (0.5 if "layers.1" in name else 1.0) for name, one in found.items()}

    ProgramRunner._gradients = halved  # type: ignore[method-assign]
    worker_main(from_dict(run_file), Worker(rank, rank, world, world, torch.device("cpu"), backend("cpu")))


def test_a_broken_stage_is_found(run_file: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(_broken, 2, {**run_file, "train": {"batch": 4}, "strategy": {"axes": {"pipeline": 2}}})
    report = Report.from_json(json.loads((tmp_path / "out" / RESULT).read_text()))
    assert not report.ok
    assert any(one.startswith("gradient norm") for one in report.failures)
    assert all("layers.1" in one for one in report.failures if one.startswith("gradient of"))
    assert all(one.gradient < 1e-5 for one in report.parameters if "layers.1" not in one.name)


def test_a_broken_stage_is_found_in_one_process_too(
    run_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = ProgramRunner._gradients

    def halved(self: ProgramRunner, kinds: Any) -> dict[str, torch.Tensor]:
        found = reduced(self, kinds)
        return {name: one * (0.5 if "layers.1" in name else 1.0) for name, one in found.items()}

    monkeypatch.setattr(ProgramRunner, "_gradients", halved)
    report = verify_file(from_dict(run_file), "local")
    assert not report.ok and any(one.startswith("gradient norm") for one in report.failures)
    assert all("layers.1" in one for one in report.failures if one.startswith("gradient of"))


def test_a_rank_that_fails_in_one_process_ends_the_others_and_its_error_is_told(
    run_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = StageRunner.weight

    def fails(self: StageRunner, micro_batch: int) -> None:
        if self.stage.number == 1 and micro_batch == 2:
            raise HyperParallelError("broken here")
        weight(self, micro_batch)

    monkeypatch.setattr(StageRunner, "weight", fails)
    with pytest.raises(HyperParallelError, match=r"step 1, stage 1, .*broken here"):
        verify_file(from_dict(run_file), "local")
