"""The two classes: a mixin before a Trainer's own class."""

from __future__ import annotations

from transformers import Seq2SeqTrainer, Trainer

from hyper_parallel.integration.trainer import SpreadTrainer
from hyper_parallel.integration.versions import check

check("transformers", "accelerate", "torch")


class HyperParallelTrainer(SpreadTrainer, Trainer):
    """`transformers.Trainer` with one argument more, `strategy`: how HyperParallel spreads the model."""


class HyperParallelSeq2SeqTrainer(SpreadTrainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with one argument more, `strategy`."""
