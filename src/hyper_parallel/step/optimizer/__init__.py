"""Optimizers behind one interface: an update of each parameter with state in a declared Layout. AdamW, AdamW in 8 bits,
Lion, Adafactor and Muon are built in."""

from hyper_parallel.step.optimizer.adafactor import Adafactor
from hyper_parallel.step.optimizer.adamw import AdamW
from hyper_parallel.step.optimizer.adamw_8bit import AdamW8bit
from hyper_parallel.step.optimizer.build import build_optimizer, register_optimizer
from hyper_parallel.step.optimizer.interface import Optimizer
from hyper_parallel.step.optimizer.lion import Lion
from hyper_parallel.step.optimizer.muon import Muon

__all__ = [
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Muon",
    "Optimizer",
    "build_optimizer",
    "register_optimizer",
]
