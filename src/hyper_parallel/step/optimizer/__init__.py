"""Optimizers behind one interface: a per-parameter update with a declared Layout. AdamW and Muon are built in."""

from hyper_parallel.step.optimizer.adamw import AdamW
from hyper_parallel.step.optimizer.build import build_optimizer, register_optimizer
from hyper_parallel.step.optimizer.interface import Optimizer
from hyper_parallel.step.optimizer.muon import Muon

__all__ = ["AdamW", "Muon", "Optimizer", "build_optimizer", "register_optimizer"]
