"""Memory budgets for your own training loop, or Transformers' Trainer: `hp.offload(model, budget=…)`.

The two passes of a model are captured as one step, planned as one, and run as autograd asks for them.
"""

from hyper_parallel.offloading.autograd.budget import Swap
from hyper_parallel.offloading.autograd.offloaded_model import Offloaded, offload, release

__all__ = ["Offloaded", "Swap", "offload", "release"]
