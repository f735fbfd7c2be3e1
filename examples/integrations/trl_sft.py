"""TRL's SFTTrainer with a model that HyperParallel parallelizes: the class changes, and one argument is added.

Needs: two CPU cores and TRL (pip install trl datasets); the versions that were tested are in docs/versions.md.

    python examples/sft/make_model.py                                       # stands in for a pretrained model
    torchrun --nproc-per-node 2 examples/integrations/trl_sft.py
    torchrun --nproc-per-node 2 examples/integrations/trl_sft.py '{axes: {tensor: 2}}'
    torchrun --nproc-per-node 2 examples/integrations/trl_sft.py '{axes: {shard: 2}}' MODEL CHATS.jsonl OUT STEPS

Shows: the losses of one process, whatever the strategy, and a plain Transformers folder in runs/trl at the end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from hyper_parallel.integration.trl import HyperParallelSFTTrainer

CHATS = Path(__file__).parents[1] / "sft" / "chats.jsonl"


def train(strategy: dict[str, object], model: str, chats: str, out: str, steps: int) -> list[float]:
    """The loss of each step."""
    trainer = HyperParallelSFTTrainer(  # was: SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=SFTConfig(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            max_length=128,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,  # leave out where there are accelerators
        ),
        train_dataset=load_dataset("json", data_files=chats, split="train"),
        strategy=strategy,
    )
    trainer.train()
    trainer.save_model(out)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str]) -> None:
    """Trains with what the command line gives, or with the defaults."""
    given = dict(enumerate(arguments))
    losses = train(
        yaml.safe_load(given.get(0, "{axes: {shard: 2}}")),
        given.get(1, "runs/sft/model"),
        given.get(2, str(CHATS)),
        given.get(3, "runs/trl"),
        int(given.get(4, 40)),
    )
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"losses {', '.join(f'{loss:.4f}' for loss in losses)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
