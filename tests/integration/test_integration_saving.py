"""HyperParallelTrainer saves and resumes: under other axes, after a save that was cut off, and as plain folders."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from trainer_cases import Case, as_torchrun, model_of, trainer_of
from transformers import AutoModelForCausalLM

from harness import run_ranks
from hyper_parallel.cli.export import export
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration import saving

STEPS, SAVED = 6, 3
SAVES = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "eval_strategy": "no"}
SHARD = {"axes": {"shard": 2}}
TENSOR = {"axes": {"tensor": 2}, "sequence": True}


class Words:
    """A tokenizer, as far as folders go."""

    def save_pretrained(self, out: str | Path) -> None:
        (Path(out) / "words.json").write_text("[]")


def trainer(case: Case, out: Path, **more: Any) -> Any:
    made = trainer_of(case, str(out), **more)
    made.processing_class = Words()
    return made


def losses(made: Any) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in made.state.log_history if "loss" in one}


def first(rank: int, world: int, out: Path) -> dict[int, float]:
    as_torchrun(rank, world)
    made = trainer(Case(SHARD, arguments={**SAVES, "save_total_limit": 2}), out)
    made.train()
    made.save_model()
    return losses(made)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Six steps on two workers: two checkpoints, a plain folder, and the losses."""
    out = tmp_path_factory.mktemp("run")
    return out, run_ranks(first, 2, out)[0]


def going_on(strategy: dict[str, Any], out: Path) -> Any:
    """A run with other values than it began with."""
    made = trainer(Case(strategy, arguments={**SAVES, "save_strategy": "no"}), out)
    with torch.no_grad():
        for parameter in made.spread.handle.parameters():
            parameter.local.fill_(0.5)
    return made


def newest(rank: int, world: int, out: Path) -> tuple[dict[int, float], list[str]]:
    """Resume from the newest whole checkpoint; the losses, and what was logged."""
    as_torchrun(rank, world)
    said: list[str] = []
    logging.getLogger(saving.__name__).addHandler(Heard(said))
    made = going_on(TENSOR, out)
    made.train(resume_from_checkpoint=True)
    return losses(made), said


def by_path(rank: int, world: int, out: Path, damaged: Path) -> tuple[dict[int, float], str]:
    """Resume in one process; the losses, and why a damaged checkpoint is refused."""
    made = going_on({}, out)
    made.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    with pytest.raises(CheckpointError) as error:
        going_on({}, out).train(resume_from_checkpoint=str(damaged))
    return losses(made), str(error.value)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_a_checkpoint_has_the_trainers_files_and_ours(run: tuple[Path, dict[int, float]]) -> None:
    out, _ = run
    assert sorted(
        path.name for path in (out / "checkpoint-3").iterdir() if not path.name.startswith(".")
    ) == [
        "config.json",
        "generation_config.json",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "step-00000003",
        "trainer_state.json",
        "training_args.bin",
        "verified.json",
        "words.json",
    ]
    known = json.loads((out / "checkpoint-3" / "verified.json").read_text())["files"]
    assert set(known) == {
        path.name
        for path in (out / "checkpoint-3").iterdir()
        if path.is_file() and path.name not in ("verified.json", ".writer.lock")
    }


def test_a_run_resumes_under_other_axes_from_the_newest_whole_checkpoint(
    run: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    out, uninterrupted = run
    assert len(uninterrupted) == STEPS
    damaged = tmp_path / "damaged"
    shutil.copytree(out, damaged)
    (damaged / "checkpoint-6" / "rng_state_1.pth").write_bytes(b"")
    found, said = run_ranks(newest, 2, damaged)[0]
    assert found == pytest.approx(uninterrupted, abs=1e-5)
    (passed,) = said
    assert passed.startswith(f"passed over {damaged / 'checkpoint-6'}: rng_state_1.pth: truncated: 0 of ")
    (damaged / "checkpoint-6" / "verified.json").unlink()
    (damaged / "checkpoint-6" / "step-00000006" / "rank-00001.safetensors").unlink()
    alone, refused = run_ranks(by_path, 1, out, damaged / "checkpoint-6")[0]
    assert alone == pytest.approx(uninterrupted, abs=1e-5)
    assert "rank-00001.safetensors: cannot be read" in refused


def test_the_export_command_and_the_saved_folder_give_what_was_trained(
    run: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    out, _ = run
    for source, to in ((out / "checkpoint-6", "one"), (out, "newest")):
        told = CliRunner().invoke(export, [str(source), str(tmp_path / to)], catch_exceptions=False)
        assert told.exit_code == 0, told.output
        assert "step-00000006" in told.output
        assert (tmp_path / to / "words.json").is_file()
    saved = AutoModelForCausalLM.from_pretrained(out)
    assert (out / "words.json").is_file()
    for to in ("one", "newest"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / to)
        assert exported.generation_config.to_dict() == saved.generation_config.to_dict()
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter, saved.get_parameter(name)), name
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(out / "checkpoint-6")


def saved(rank: int, world: int, out: Path, case: Case) -> dict[int, float]:
    as_torchrun(rank, world)
    made = trainer(case, out)
    made.train()
    made.save_model()
    return losses(made)


def resumed(rank: int, world: int, out: Path, case: Case) -> dict[int, float]:
    as_torchrun(rank, world)
    made = trainer(case, out)
    made.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    return losses(made)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "optim", "strategy", "world", "then"),
    [
        ("mixtral", "adamw_torch", {"axes": {"shard": 2, "expert": 2}}, 2, TENSOR),
        (
            "llama",
            "rmsprop",
            {"axes": {"shard": 2, "tensor": 2}, "sequence": True},
            4,
            {"axes": {"context": 2}},
        ),
        ("llama", "sgd", {"axes": {"replicate": 2}}, 2, SHARD),
        ("llama", "adamw_torch", {**SHARD, "memory": {"device": "70KB", "host": "16MiB"}}, 2, TENSOR),
    ],
)
def test_other_models_optimizers_and_axes_resume(
    tmp_path: Path, model: str, optim: str, strategy: dict[str, Any], world: int, then: dict[str, Any]
) -> None:
    arguments = {**SAVES, "optim": optim}
    expected = run_ranks(saved, world, tmp_path, Case(strategy, model, arguments))[0]
    found = run_ranks(resumed, 2, tmp_path, Case(then, model, {**arguments, "save_strategy": "no"}))[0]
    assert found == pytest.approx(expected, abs=1e-5)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def others(rank: int, world: int, out: Path) -> tuple[Any, ...]:
    """Adapters, whose checkpoint is resumed; then plain checkpoints, the best of which is loaded at the end."""
    as_torchrun(rank, world)
    lora = trainer(Case(TENSOR, "lora", SAVES), out / "lora")
    lora.train()
    resumed = trainer(Case(SHARD, "lora", {**SAVES, "save_strategy": "no"}), out / "lora")
    resumed.train(resume_from_checkpoint=str(out / "lora" / "checkpoint-3"))
    plain = {**SAVES, "save_only_model": True, "eval_strategy": "steps", "eval_steps": SAVED}
    best = trainer(
        Case(SHARD, arguments={**plain, "load_best_model_at_end": True, "learning_rate": 0.5}), out / "plain"
    )
    best.train()
    handle = best.spread.handle
    values = {p.name: handle.gather(p.local, p.layout).clone() for p in handle.parameters()}
    return losses(lora), losses(resumed), Path(best.state.best_model_checkpoint).name, values


def test_adapters_and_plain_checkpoints(tmp_path: Path) -> None:
    trained, resumed, best, values = run_ranks(others, 2, tmp_path)[0]
    assert resumed == pytest.approx(trained, abs=1e-5)
    folder = tmp_path / "lora" / "checkpoint-6"
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < 40_000, "the base was saved"
    adapters = PeftModel.from_pretrained(model_of("llama"), folder)
    assert any(bool(p.any()) for name, p in adapters.named_parameters() if "lora_B" in name)
    with pytest.raises(CheckpointError, match="holds adapters and no base model"):
        CliRunner().invoke(export, [str(folder), str(tmp_path / "out")], catch_exceptions=False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / best)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, values[name]), name
    assert not list((tmp_path / "plain" / best).glob("step-*"))
