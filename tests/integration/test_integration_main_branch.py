"""LlamaFactory's main branch: a client that makes its calls trains as one process does, resumes and exports."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from harness import run_ranks
from hyper_parallel.integration.llamafactory import HSDPModule, HyperParallelArguments
from hyper_parallel.shard import sharded
from integration.main_branch import (
    MainBranchTrainer,
    arguments,
    as_torchrun_says,
    forget_accelerate,
    own_loss,
)
from integration.spread_steps import VOCABULARY, tiny

STEPS, SAVED, FEW = 8, 5, 3
NEAR = 1e-4
"""Sums in other orders in fp32, over eight updates by AdamW."""


def dataset(rows: int = 64, lengths: tuple[int, int] = (7, 14)) -> list[dict[str, list[int]]]:
    """Rows of different lengths, of which the first tokens bear no loss."""
    numbers = torch.Generator().manual_seed(5)
    made = []
    for _ in range(rows):
        length = int(torch.randint(*lengths, (), generator=numbers))
        ids = torch.randint(3, VOCABULARY, (length,), generator=numbers).tolist()
        made.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return made


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest, an odd number of positions at times."""
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    made = {
        key: torch.tensor([row[key] + [value] * (length - len(row[key])) for row in rows])
        for key, value in fill.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return {**made, "attention_mask": (torch.arange(length) < lengths.unsqueeze(1)).long()}


class InOrder:
    """The rows in their own order."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Client(InOrder, MainBranchTrainer):
    pass


class OneProcess(InOrder, Trainer):
    pass


class AfterFew(TrainerCallback):
    """Ends a run early, under the schedule of a whole one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == FEW


@dataclass
class Told:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    eval_loss: float = 0.0
    logits: Any = None


def told(trainer: Trainer) -> Told:
    log = [line for line in trainer.state.log_history if "loss" in line]
    return Told([line["loss"] for line in log], [line["grad_norm"] for line in log])


def one_process(rank: int, world: int, out: Path) -> dict[str, Told]:
    """Transformers' own Trainer at the same global batches."""
    found = {}
    for name, batch, loss in (("two", 4, None), ("one", 2, None), ("experts", 4, None), ("own", 2, own_loss)):
        trainer = OneProcess(
            model=tiny(experts=name == "experts"),
            args=arguments(out / name, STEPS, per_device_train_batch_size=batch),
            train_dataset=dataset(),
            data_collator=collate,
            compute_loss_func=loss,
        )
        trainer.train()
        found[name] = told(trainer)
        found[name].weights = {key: value.detach() for key, value in trainer.model.state_dict().items()}
        if name == "one":
            _evaluated(trainer, found[name])
    return found


def _evaluated(trainer: Trainer, found: Told) -> None:
    trainer.args.prediction_loss_only = False
    rows = dataset(6, (9, 10))
    found.eval_loss = trainer.evaluate(rows)["eval_loss"]
    found.logits = trainer.predict(rows).predictions


def _client(out: Path, fields: dict[str, Any], plugin: dict[str, Any] | None = None, **more: Any) -> Client:
    forget_accelerate()
    loss = more.pop("loss", None)
    model = more.pop("model", None)
    few = more.pop("few", False)
    return Client(
        HyperParallelArguments.from_dict(fields),
        plugin or {},
        model=model if model is not None else tiny(experts="ep_size" in fields),
        args=arguments(out, STEPS, **more),
        train_dataset=dataset(),
        data_collator=collate,
        compute_loss_func=loss,
        callbacks=[AfterFew()] if few else [],
    )


def clients(rank: int, world: int, out: Path) -> dict[str, Told]:
    """The client on two ranks: each way to spread, resumed from a checkpoint, evaluated and exported."""
    as_torchrun_says(rank, world)
    found = {}
    saving = {"save_strategy": "steps", "save_steps": SAVED, "eval_strategy": "no"}

    for name, fields in (("fsdp", {}), ("cp", {"cp_size": 2})):
        model, plugin = tiny(), {"auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
        names = [(key, p.shape) for key, p in model.named_parameters()]
        if name == "cp":
            # Only rank 0 has the weights.
            plugin["cpu_ram_efficient_loading"] = True
            if rank:
                for parameter in model.parameters():
                    torch.nn.init.zeros_(parameter)
        trainer = _client(out / name, fields, plugin, model=model, **saving)
        trainer.train()
        found[name] = told(trainer)
        assert trainer.model is model and isinstance(model, HSDPModule)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert [(key, p.shape) for key, p in model.named_parameters()] == names
        assert trainer._prepared(model) is model
        trainer.save_model()
        if name == "cp":
            _evaluated(trainer, found[name])
        again = _client(out / name, fields, plugin, **saving)
        again.train(resume_from_checkpoint=str(out / name / f"checkpoint-{SAVED}"))
        found[f"{name} resumed"] = told(again)
        if rank == 0:
            loaded = AutoModelForCausalLM.from_pretrained(out / name)
            found[name].weights = {key: value.detach() for key, value in loaded.state_dict().items()}

    # Saved by one strategy, gone on with under another, on which each rank has other moments.
    other = _client(out / "cp", {}, **saving, per_device_train_batch_size=1)
    other.train(resume_from_checkpoint=str(out / "cp" / f"checkpoint-{SAVED}"))
    found["cp to fsdp"] = told(other)

    recomputed = _client(out / "again", {"cp_size": 2, "activation_mode": "recompute"}, few=True)
    recomputed.train()
    found["cp recomputed"] = told(recomputed)

    experts = _client(out / "ep", {"ep_size": 2})
    experts.train()
    assert sharded(experts.model).mesh.size("expert") == 2
    found["ep"] = told(experts)

    for mode in ("none", "recompute"):
        model = tiny()
        model.config.attention_dropout = 0.3
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        dropped = _client(out / mode, {"activation_mode": mode}, model=model, few=True)
        dropped.train()
        found[f"dropout {mode}"] = told(dropped)

    own = _client(out / "own", {"cp_size": 2}, loss=own_loss, few=True)
    own.train()
    found["own"] = told(own)
    return found


def on_four(rank: int, world: int, out: Path) -> dict[str, Told]:
    """Several axes at once."""
    as_torchrun_says(rank, world)
    found = {}
    for name, fields in (("cp of 4", {"cp_size": 2}), ("hybrid", {"cp_size": 2, "fsdp_size": 1})):
        trainer = _client(out / name, fields, few=True)
        trainer.train()
        found[name] = told(trainer)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Told], dict[str, Told]]:
    out = tmp_path_factory.mktemp("runs")
    alone = run_ranks(one_process, 1, out / "alone")[0]
    found = run_ranks(clients, 2, out / "two")[0] | run_ranks(on_four, 4, out / "four")[0]
    shutil.rmtree(out)
    return alone, found


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("fsdp", "two"),
        ("cp", "one"),
        ("ep", "experts"),
        ("cp of 4", "two"),
        ("hybrid", "two"),
        ("own", "own"),
        ("cp recomputed", "one"),
        ("fsdp resumed", "two"),
        ("cp resumed", "one"),
        ("cp to fsdp", "one"),
    ],
)
def test_losses_and_norms_are_those_of_one_process(runs: Any, name: str, like: str) -> None:
    alone, found = runs
    losses, norms = found[name].losses, found[name].norms
    steps = FEW if name in ("own", "cp recomputed", "cp of 4", "hybrid") else STEPS
    assert len(losses) == steps
    assert losses == pytest.approx(alone[like].losses[:steps], abs=NEAR)
    assert norms == pytest.approx(
        alone[like].norms[:steps], rel=1e-5 if name in ("fsdp", "cp", "ep") else 1e-3
    )


def test_a_run_that_resumes_has_the_bits_of_one_that_did_not_stop(runs: Any) -> None:
    _, found = runs
    for name in ("fsdp", "cp"):
        assert found[f"{name} resumed"].losses == found[name].losses


def test_recomputing_a_layer_drops_the_same_activations(runs: Any) -> None:
    _, found = runs
    assert found["dropout recompute"].losses == found["dropout none"].losses
    assert found["dropout recompute"].norms == found["dropout none"].norms
    assert found["dropout none"].losses[0] != found["fsdp"].losses[0]


def test_an_evaluation_gives_each_rank_its_own_rows(runs: Any) -> None:
    alone, found = runs
    assert found["cp"].eval_loss == pytest.approx(alone["one"].eval_loss, abs=NEAR)
    assert found["cp"].logits == pytest.approx(alone["one"].logits, abs=1e-3)


def test_the_exported_folder_has_the_weights_of_one_process(runs: Any) -> None:
    alone, found = runs
    for name, like in (("fsdp", "two"), ("cp", "one")):
        assert found[name].weights.keys() == alone[like].weights.keys()
        for key, value in found[name].weights.items():
            assert torch.allclose(value, alone[like].weights[key], atol=1e-3), key
