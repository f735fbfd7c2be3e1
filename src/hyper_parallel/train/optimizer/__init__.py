"""Optimizers behind one seam: a per-parameter update with a declared Layout. AdamW and Muon are built in."""

from hyper_parallel.train.optimizer.adamw import AdamW
from hyper_parallel.train.optimizer.build import build_optimizer, register_optimizer
from hyper_parallel.train.optimizer.muon import Muon
from hyper_parallel.train.optimizer.seam import Optimizer

__all__ = ["AdamW", "Muon", "Optimizer", "build_optimizer", "register_optimizer"]
