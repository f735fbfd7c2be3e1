"""HyperParallelSFTTrainer on two ranks against TRL's SFTTrainer in one process, on the same global batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from harness import run_ranks
from hyper_parallel.errors import IntegrationError
from integration.main_branch import as_torchrun_says, forget_accelerate

STEPS, NEAR = 6, 1e-4
WORDS = ["river", "stone", "light", "garden", "paper", "window", "morning", "silver", "engine", "forest"]


@dataclass(frozen=True)
class Case:
    strategy: dict[str, Any] | None
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False


PACKED = {"packing": True, "max_length": 32, "padding_free": True}
PLAIN = {
    "text": Case(None),
    "packed": Case(None, PACKED),
    "dft": Case(None, {"loss_type": "dft"}),
    "lora": Case(None, lora=True),
}
SPREAD = {
    "shard text": Case({"axes": {"shard": 2}}),
    "tensor text": Case({"axes": {"tensor": 2}, "sequence": True}),
    "context text": Case({"axes": {"context": 2}}),
    "context packed": Case({"axes": {"context": 2}}, PACKED),
    "shard dft": Case({"axes": {"shard": 2}}, {"loss_type": "dft"}),
    "tensor lora": Case({"axes": {"tensor": 2}}, lora=True),
}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def texts() -> Any:
    """Prompts, which bear no loss, and completions. (Some releases of Transformers count the first token of a row that
    bears loss from its beginning, which nothing predicts.)"""
    from datasets import Dataset

    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return Dataset.from_list([{"prompt": words(2, 4), "completion": f" {words(3, 11)}"} for _ in range(64)])


def train(case: Case, out: Path, data_ranks: int) -> Any:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from hyper_parallel.integration.trl import HyperParallelSFTTrainer

    forget_accelerate()
    given: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // data_ranks,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    more: dict[str, Any] = {} if case.strategy is None else {"strategy": case.strategy}
    if case.lora:
        torch.manual_seed(1)
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    cls = SFTTrainer if case.strategy is None else HyperParallelSFTTrainer
    trainer = cls(
        model=model(),
        args=SFTConfig(**{**given, **case.settings}),
        train_dataset=texts(),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return trainer


def told(rank: int, world: int, cases: dict[str, Case], out: Path) -> dict[str, dict[str, list[float]]]:
    """Losses, norms and tokens of each case."""
    if world > 1:
        as_torchrun_says(rank, world)
    found = {}
    for name, case in cases.items():
        data = (case.strategy or {"axes": {}})["axes"].get("shard", 1)
        trainer = train(case, out / name, data)
        log = [line for line in trainer.state.log_history if "loss" in line]
        found[name] = {key: [line[key] for line in log] for key in ("loss", "grad_norm", "num_tokens")}
        if world > 1 and name == "tensor text":
            trainer.save_model(str(out / "saved"))
            if rank == 0:
                logits = AutoModelForCausalLM.from_pretrained(out / "saved")(torch.tensor([[5, 6, 7]])).logits
                assert logits.isfinite().all()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("sft")
    return run_ranks(told, 1, PLAIN, out / "plain")[0], run_ranks(told, 2, SPREAD, out / "spread")[0]


@pytest.mark.parametrize("name", SPREAD)
def test_losses_norms_and_tokens_are_those_of_one_process(runs: Any, name: str) -> None:
    plain, spread = runs
    expected, found = plain[name.split()[1]], spread[name]
    assert len(found["loss"]) == STEPS
    assert found["loss"] == pytest.approx(expected["loss"], abs=NEAR)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert found["num_tokens"] == expected["num_tokens"]


def test_offloading_of_trls_own_is_refused() -> None:
    from hyper_parallel.integration.trl import HyperParallelSFTTrainer

    # TRL makes what offloads before the model is spread, and cannot on a CPU.
    trainer: Any = SimpleNamespace(args=SimpleNamespace(activation_offloading=True))
    with pytest.raises(IntegrationError, match="activation_offloading"):
        HyperParallelSFTTrainer._spread(trainer, model())
