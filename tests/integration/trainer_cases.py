"""Runs of Transformers' Trainer, plain in one process and spread over the ranks of a test, on the same rows."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STEPS, BATCH, ACCUMULATION, TRAINED, EVALUATED = 8, 4, 2, 48, 10
"""Rows of one process at once; the step has ACCUMULATION times as many. EVALUATED leaves a last batch that is short."""
EVENTS = (
    "train_begin",
    "epoch_begin",
    "step_begin",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "log",
    "evaluate",
    "prediction_step",
    "epoch_end",
    "train_end",
)
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """One run."""

    strategy: dict[str, Any] | None
    """None: plain, in one process."""
    model: str = "llama"
    arguments: dict[str, Any] = field(default_factory=dict)
    metrics: bool = False
    """Whether logits are evaluated, not only the loss."""
    side: str = "right"
    """Where rows are padded."""
    data: int | None = None
    """Shares of the batch; left out, what the strategy's axes say."""
    own_loss: bool = False
    """Whether the loss is a function of the caller's."""
    stream: bool = False
    """Whether rows come from a dataset without a length."""


@dataclass(frozen=True)
class Told:
    """What rank 0's log says of a run."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    events: list[str]
    metrics: list[dict[str, float]]


class Events(TrainerCallback):
    """Notes each event by name."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def _noted(name: str) -> Any:
    def on(self: Events, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(name)

    return on


for _name in EVENTS:
    setattr(Events, f"on_{_name}", _noted(_name))


def model_of(kind: str) -> Any:
    """A tiny model, always with the same values."""
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))
    if kind == "classes":
        return LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=3, pad_token_id=0))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    if kind == "lora":
        import peft

        torch.manual_seed(int(os.environ.get("RANK", "0")))  # as who builds adapters before seeding does
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def rows(count: int, classes: bool = False) -> list[dict[str, list[int]]]:
    """Rows of 5 to 15 tokens whose first two bear no loss; with `classes` the label is one number for each row."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        length = int(torch.randint(5, 16, (1,), generator=generator))
        ids = torch.randint(1, 67, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [ids[0] % 3] if classes else [-100, -100, *ids[2:]]})
    return found


class Stream(IterableDataset):
    """The rows, one after the other."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from rows(TRAINED)


def doubled(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """Twice the next-token loss."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 2 * total / num_items_in_batch


def collate(batch: list[dict[str, list[int]]], side: str = "right") -> dict[str, torch.Tensor]:
    """Padded to the longest row."""
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(name: str, value: int) -> torch.Tensor:
        short = [row[name] if name in row else [1] * len(row["input_ids"]) for row in batch]
        more = [[value] * (longest - len(one)) for one in short]
        return torch.tensor([a + b if side == "right" else b + a for a, b in zip(short, more, strict=True)])

    classes = all(len(row["labels"]) == 1 for row in batch)
    return {
        "input_ids": padded("input_ids", 0),
        "attention_mask": padded("attention_mask", 0),
        "labels": torch.tensor([row["labels"][0] for row in batch]) if classes else padded("labels", -100),
    }


def hits(prediction: Any) -> dict[str, float]:
    """How sure the right token is on average, and how often it is the likeliest."""
    logits, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
    logits, labels = logits[:, :-1], labels[:, 1:]
    borne = labels != -100
    sure = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)[borne]
    return {"sure": float(sure.mean()), "rows": float(labels.size(0))}


def trainer_of(case: Case, folder: str, **more: Any) -> Any:
    """The Trainer of a case, in this rank."""
    transformers.logging.set_verbosity_error()
    strategy = case.strategy
    axes = {} if strategy is None else strategy.get("axes", {})
    data = case.data or axes.get("shard", 1) * axes.get("replicate", 1)
    # Copied: a Trainer changes the lists and dicts that it is given.
    given: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": BATCH // data,
        "per_device_eval_batch_size": BATCH // data,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    given.update(case.arguments)
    chosen: dict[str, Any] = {
        "model": model_of(case.model),
        "args": TrainingArguments(**given),
        "train_dataset": Stream() if case.stream else rows(TRAINED, case.model == "classes"),
        "eval_dataset": rows(EVALUATED, case.model == "classes"),
        "compute_loss_func": doubled if case.own_loss else None,
        "data_collator": functools.partial(collate, side=case.side),
        "compute_metrics": hits if case.metrics else None,
        **more,
    }
    if strategy is None:
        return Trainer(**chosen)
    from hyper_parallel.integration.transformers import HyperParallelTrainer

    return HyperParallelTrainer(**chosen, strategy={"check": False, **strategy})


def as_torchrun(rank: int, world: int) -> None:
    """Say in the environment what torchrun says, by which Accelerate finds the other ranks."""
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )


def told(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Told]:
    """Run every case, one after the other."""
    as_torchrun(rank, world)
    found = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            events = Events()
            trainer = trainer_of(case, folder, callbacks=[events])
            trainer.pop_callback(transformers.PrinterCallback)
            trainer.train()
        log = trainer.state.log_history
        found[name] = Told(
            [one["loss"] for one in log if "loss" in one],
            [float(one["grad_norm"]) for one in log if "grad_norm" in one],
            [one["eval_loss"] for one in log if "eval_loss" in one],
            events.seen,
            [{key: one[key] for key in ("eval_sure", "eval_rows")} for one in log if "eval_sure" in one],
        )
    return found
