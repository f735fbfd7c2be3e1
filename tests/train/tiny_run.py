"""A run small enough for a test: a two-layer Llama on a few files of the standard library."""

from __future__ import annotations

import argparse
import bisect
import cmd
import heapq
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import compat
from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker
from hyper_parallel.train.summary import Summary
from hyper_parallel.train.trainer import Trainer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def run_config(folder: Path, name: str = "run", **sections: Any) -> RunConfig:
    """`sections` are merged into the file's, one level deep."""
    file: dict[str, Any] = {
        "version": 1,
        "out": str(folder / name),
        "seed": 7,
        "model": {"config": LLAMA},
        "data": {
            "train": [argparse.__file__, bisect.__file__, cmd.__file__],
            "eval": heapq.__file__,
            "tokenizer": {"vocab_size": 300},
            "sequence": 32,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": 6,
            "batch": 8,
            "optimizer": {"name": "adamw", "lr": 3e-3},
            "schedule": {"name": "cosine", "warmup": 2},
            "eval": {"batches": 2},
            "sample": {"tokens": 4, "temperature": 0},
        },
        "trackers": [],
    }
    for section, values in sections.items():
        file[section] = {**file[section], **values} if isinstance(file.get(section), dict) else values
    return RunConfig.model_validate(file)


def run(config: RunConfig, model: nn.Module | None = None) -> Summary:
    """Run on this process's rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    worker = Worker(rank, rank, world, world, torch.device("cpu"), compat.backend("cpu"))
    return Trainer(config, model).run(worker if world > 1 else None)


def metrics(config: RunConfig, name: str = "loss") -> dict[int, float]:
    """Step to metric, from the run's metrics file."""
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record[name] for record in map(json.loads, lines) if name in record}


class Bigram(nn.Module):
    """Logits from the token alone. From the training forward `broken_at` on (from 1) they are `factor` times as large,
    until that of `mended_at`."""

    calls: torch.Tensor

    def __init__(
        self,
        vocabulary: int = 300,
        broken_at: int | None = None,
        mended_at: float = math.inf,
        factor: float = math.inf,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 16)
        self.up = nn.Linear(16, 32)
        self.head = nn.Linear(32, vocabulary, bias=False)
        self.broken_at, self.mended_at, self.factor = broken_at, mended_at, factor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.up(self.embedding(input_ids))))
        if self.broken_at is None or not self.training:
            return logits
        self.calls += 1
        broken = (self.calls >= self.broken_at) & (self.calls < self.mended_at)
        return logits * torch.where(broken, self.factor, 1.0)
