"""Transformers' Trainer with a model that HyperParallel parallelizes: one line of the script changes.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
torchrun --nproc-per-node 4 examples/transformers_trainer.py '{shard: 2, tensor: 2}'
"""

import sys
import tempfile
from typing import Any

import torch
import yaml
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hyper_parallel.integration.transformers import HyperParallelTrainer


def rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of many lengths that count upwards, so that there is something to learn."""
    return [{"input_ids": list(range(first % 7, first % 7 + 8 + first % 25))} for first in range(count)]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right; padding bears no loss."""
    longest = max(len(row["input_ids"]) for row in batch)

    def filled(value: int) -> torch.Tensor:
        texts = [torch.tensor(row["input_ids"]) for row in batch]
        return torch.stack([pad(text, (0, longest - len(text)), value=value) for text in texts])

    return {"input_ids": filled(0), "labels": filled(-100)}


def train(axes: dict[str, Any] | None, ranks_with_other_rows: int, steps: int = 6) -> list[float]:
    """The loss of each step; eight rows a step, on any number of ranks."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8 // ranks_with_other_rows,
            max_steps=steps,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = HyperParallelTrainer(  # was: trainer = Trainer(
            model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **size)),
            args=arguments,
            train_dataset=rows(8 * steps),
            data_collator=collate,
            strategy=None if axes is None else {"axes": axes},
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    from os import environ

    world = int(environ.get("WORLD_SIZE", "1"))
    chosen = yaml.safe_load(sys.argv[1]) if len(sys.argv) > 1 else None
    data = world if chosen is None else chosen.get("shard", 1) * chosen.get("replicate", 1)
    losses = train(chosen, data)
    if environ.get("RANK", "0") == "0":
        sys.stdout.write(f"losses {', '.join(f'{loss:.4f}' for loss in losses)}\n")
