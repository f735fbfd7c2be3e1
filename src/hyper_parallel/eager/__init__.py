"""A memory budget for a training loop of one's own, or Transformers' Trainer: `hp.offload(model, budget=…)`.

The two passes of a model are captured as one step, planned as one, and run as autograd asks for them.
"""

from hyper_parallel.eager.entry import offload, release
from hyper_parallel.eager.offloaded import Offloaded
from hyper_parallel.eager.swap import Swap

__all__ = ["Offloaded", "Swap", "offload", "release"]
