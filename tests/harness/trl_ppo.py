"""The PPO loss of TRL (0.29) on small models, read where its trainer computes it.

TRL's PPO has its loss in the middle of `PPOTrainer.train`. A run of it on small random models generates ragged answers
and updates several times on them with a large learning rate, so that ratios and values leave the clip. At each backward
pass the local variables of `train` are read: inputs, rewards, advantages, returns, both losses and their gradients.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor

from harness.trl_losses import WORDS, small, tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "k1": {
        "kl_estimator": "k1",
        "kl_coefficient": 0.05,
        "gamma": 1.0,
        "lam": 0.95,
        "clip": 0.2,
        "value_clip": 0.2,
        "value_coefficient": 0.1,
    },
    "k3, discounted": {
        "kl_estimator": "k3",
        "kl_coefficient": 0.2,
        "gamma": 0.9,
        "lam": 0.8,
        "clip": 0.1,
        "value_clip": 0.05,
        "value_coefficient": 0.5,
    },
}

Update = tuple[dict[str, Tensor], dict[str, Tensor]]


def updates(seed: int, rows: int, length: int, settings: dict[str, Any], epochs: int = 3) -> list[Update]:
    """The batch and TRL's losses, gradients, rewards, returns and advantages of each update of one run."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.manual_seed(seed)
    words = tokenizer()
    prompts = torch.randint(3, WORDS, (rows, 2)).tolist()
    scored: dict[str, Any] = {
        "heads": "LlamaForSequenceClassification",
        "num_labels": 1,
        "initializer_range": 0.4,
    }
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            use_cpu=True,
            bf16=False,
            seed=seed,
            learning_rate=1e-2,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=epochs,
            total_episodes=rows,
            num_sample_generations=0,
            response_length=length,
            stop_token="eos",
            temperature=1.0,
            disable_tqdm=True,
            logging_steps=1e9,
            save_strategy="no",
            kl_estimator=settings["kl_estimator"],
            kl_coef=settings["kl_coefficient"],
            gamma=settings["gamma"],
            lam=settings["lam"],
            cliprange=settings["clip"],
            cliprange_value=settings["value_clip"],
            vf_coef=settings["value_coefficient"],
        ),
        processing_class=words,
        model=small(initializer_range=0.4),
        ref_model=small(initializer_range=0.4),
        reward_model=small(**scored),
        value_model=small(**scored),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
    )
    found: list[Update] = []
    backward = trainer.accelerator.backward

    def reading(loss: Tensor) -> None:
        found.append(_read(loss, sys._getframe(1).f_locals))
        backward(loss)

    trainer.accelerator.backward = reading
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return found


def _read(loss: Tensor, names: dict[str, Any]) -> Update:
    """From the local variables of `PPOTrainer.train`; those of the whole batch in the order of the micro-batch."""
    order = torch.as_tensor(names["micro_batch_inds"])

    def of(name: str) -> Tensor:
        return names[name].detach()[order].clone()

    gradients = torch.autograd.grad(loss, [names["new_logprobs"], names["vpred"]], retain_graph=True)
    batch = {
        "mask": (~of("padding_mask")).long(),
        "value_mask": (~of("padding_mask_p1")).long(),
        "logprobs": names["new_logprobs"].detach().clone(),
        "values": names["vpred"].detach().clone(),
        "behaviour": of("logprobs"),
        "reference": of("ref_logprobs"),
        "old_values": of("values"),
        "scores": of("scores"),
    }
    theirs = {
        "rewards": of("rewards"),
        "returns": torch.where(batch["value_mask"] == 1, of("returns"), 0.0),
        "advantages": of("advantages"),
        "policy_loss": names["pg_loss"].detach().clone(),
        "value_loss": names["vf_loss"].detach().clone(),
        "loss": loss.detach().clone(),
        "gradient": gradients[0],
        "value_gradient": gradients[1],
    }
    return batch, theirs
