"""HyperParallelTrainer over the stages of a pipeline against Transformers' own Trainer in one process."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import SHAPE, STEPS, Case, Told, as_torchrun, collate, rows, told, trainer_of

from harness import run_ranks
from hyper_parallel.errors import HyperParallelError, IntegrationError
from hyper_parallel.integration.trainer_pipeline import rows_of_micro_batch

NEAR = 1e-4
"""Sums in other orders in fp32, over up to eight updates by AdamW."""

TWO: dict[str, Any] = {"axes": {"pipeline": 2}}
FEW = {"max_steps": 4}
ROWS = {"gradient_accumulation_steps": 1, **FEW}
"""The micro-batches of the schedule are parts of the Trainer's only one."""
SHORT = {
    "per_device_train_batch_size": 5,
    "gradient_accumulation_steps": 3,
    "max_steps": -1,
    "num_train_epochs": 1,
}
"""The last step of the epoch is one micro-batch of three rows."""
SMOOTH = {"label_smoothing_factor": 0.1, **ROWS}
ON_TWO = {
    "llama": Case(TWO),
    "rows": Case(TWO, arguments=ROWS),
    "short": Case(TWO, arguments=SHORT),
    "smooth": Case(TWO, arguments=SMOOTH),
    "mixtral": Case(TWO, "mixtral", arguments=FEW),
    "lora": Case(TWO, "lora", arguments=FEW),
}
ON_FOUR = {
    "rows, shard": Case({"axes": {"pipeline": 2, "shard": 2}}, arguments=ROWS),
    "llama, tensor": Case({"axes": {"pipeline": 2, "tensor": 2}, "sequence": True}),
}
PLAIN = {name: replace(case, strategy=None) for name, case in ON_TWO.items()}


@pytest.fixture(scope="module")
def plain() -> dict[str, Told]:
    """What Transformers' own Trainer tells."""
    return run_ranks(told, 1, PLAIN)[0]


@pytest.fixture(scope="module")
def piped() -> dict[str, Told]:
    """What ours tells."""
    return run_ranks(told, 2, ON_TWO, timeout=280)[0] | run_ranks(told, 4, ON_FOUR, timeout=280)[0]


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_losses_norms_and_events_are_those_of_one_process(
    plain: dict[str, Told], piped: dict[str, Told], name: str
) -> None:
    ours, theirs = piped[name], plain[name.partition(",")[0]]
    assert len(theirs.losses) in (STEPS, 4) and len(theirs.evaluated) >= 1
    assert ours.losses == pytest.approx(theirs.losses, abs=NEAR)
    assert ours.norms == pytest.approx(theirs.norms, rel=NEAR)
    assert ours.evaluated == pytest.approx(theirs.evaluated, abs=NEAR)
    assert ours.events == theirs.events


def _dropping() -> Any:
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    return PhiForCausalLM(PhiConfig(**SHAPE, resid_pdrop=0.3, embd_pdrop=0.2))


def _balanced() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    losses = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(**SHAPE, **experts, **losses))


def _ours(rank: int, world: int, strategy: Any) -> list[list[float]]:
    """Losses of models that train otherwise in Transformers' own Trainer."""
    as_torchrun(rank, world)
    found = []
    # Of one length, since padding counts in the auxiliary loss.
    even = [{key: value[:5] for key, value in row.items()} for row in rows(48)]
    for model in (_dropping(), _balanced()):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(Case(strategy, arguments=FEW), folder, model=model, train_dataset=even)
            trainer.train()
        found.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    return found


def test_dropout_and_the_auxiliary_loss_are_those_of_one_process() -> None:
    alone = run_ranks(_ours, 1, {"axes": {}})[0]
    for ours, theirs in zip(run_ranks(_ours, 2, TWO)[0], alone, strict=True):
        assert ours == pytest.approx(theirs, abs=NEAR)


# Checkpoints.

SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}


def _run(rank: int, world: int, strategy: Any, folder: str, resume: str | None) -> list[float]:
    as_torchrun(rank, world)
    trainer = trainer_of(Case(strategy, arguments=SAVED), folder)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/whole")
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def test_a_run_goes_on_with_other_stages(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = run_ranks(_run, 1, None, str(tmp_path / "plain"), None)[0]
    begun = run_ranks(_run, 2, TWO, str(tmp_path / "piped"), None, timeout=240)[0]
    assert begun == pytest.approx(theirs, abs=NEAR)
    middle = str(tmp_path / "piped" / "checkpoint-3")
    wider = {"axes": {"pipeline": 2, "shard": 2}}
    for world, strategy in ((4, wider), (2, {"axes": {"shard": 2}})):
        out = str(tmp_path / f"resumed-{world}")
        resumed = run_ranks(_run, world, strategy, out, middle, timeout=240)[0]
        assert resumed == pytest.approx(theirs, abs=NEAR)
    # From a run without stages to one with them.
    single = str(tmp_path / "resumed-2" / "checkpoint-6")
    longer = str(tmp_path / "longer")
    run_ranks(_run, 2, TWO, longer, single, timeout=240)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "whole").named_parameters())
    for name in ("piped", "resumed-4", "resumed-2", "longer"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "whole")
        for key, value in model.named_parameters():
            assert torch.allclose(value, expected[key], atol=1e-3), (name, key)


# Bad input.


def _refused(rank: int, world: int) -> list[str]:
    as_torchrun(rank, world)
    found = []

    def tried(case: Case, then: Any = lambda trainer: trainer.train(), **more: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                then(trainer_of(case, folder, **more))
                found.append("nothing was refused")
            except HyperParallelError as error:
                found.append(str(error))

    tried(Case(TWO, metrics=True))
    tried(Case(TWO, own_loss=True))
    tried(Case(TWO, "classes"))
    tried(Case(TWO, arguments={"neftune_noise_alpha": 5.0}))
    tried(Case({**TWO, "memory": {"device": "1GiB", "host": "1GiB"}}))
    tried(Case(TWO, arguments={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}))
    tried(Case({"axes": {"pipeline": 4}}))
    tried(Case(TWO, arguments=FEW, side="left"))
    tried(Case(TWO, arguments=FEW), data_collator=_with_image)
    tried(Case(TWO, arguments=SHORT), model=_balanced())
    tried(Case(TWO), lambda trainer: trainer.predict(rows(4)))
    tried(Case(TWO), lambda trainer: trainer.model(input_ids=torch.ones(1, 4, dtype=torch.int64)))
    return found


def _with_image(batch: Any) -> dict[str, Any]:
    return {**collate(batch), "pixel_values": torch.zeros(len(batch), 3)}


def test_what_stages_cannot_do_is_refused_with_its_mend() -> None:
    expected = [
        "compute_metrics cannot be used with axes.pipeline: no rank has the logits; evaluate by the loss",
        "leave compute_loss_func out",
        "the stages are cut from a causal language model",
        "neftune_noise_alpha cannot be used with axes.pipeline",
        "leave it out, or recompute layers (memory.recompute: layer)",
        "a pipeline of 2 needs at least 2; make one of them larger, or axes.pipeline smaller",
        "torchrun --nproc-per-node 4",
        "set tokenizer.padding_side = 'right'",
        "pixel_values in the batch cannot be given to the stages of a pipeline",
        "set dataloader_drop_last=True",
        "predict with the saved model (save_model), or set axes.pipeline to 1",
        "the model is cut into the stages of a pipeline",
    ]
    for found in run_ranks(_refused, 2, timeout=240):
        for text, one in zip(expected, found, strict=True):
            assert text in one and "\n" not in one, one


@pytest.mark.parametrize(
    ("rows", "accumulation", "ranks", "each"),
    [(4, 2, 2, 4), (4, 1, 2, 1), (16, 1, 2, 2), (8, 2, 4, 1), (6, 1, 2, 1), (12, 1, 2, 1), (64, 3, 4, 8)],
)
def test_a_batch_is_cut_into_enough_micro_batches(
    rows: int, accumulation: int, ranks: int, each: int
) -> None:
    assert rows_of_micro_batch(rows, accumulation, ranks) == each


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(IntegrationError, match="are 3 micro-batches of a row, and a pipeline of 4 needs"):
        rows_of_micro_batch(3, 1, 4)
