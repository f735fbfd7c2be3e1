"""Device back ends and PyTorch's private APIs; no other folder asks which device it is on.

`backend("auto" | name)` answers every device question; `register` (or the entry point group
`hyper_parallel.backends`) adds a device, so that a new accelerator is a registration and not a rewrite.
"""

from hyper_parallel.compat.accelerator import TorchBackend
from hyper_parallel.compat.backend import Backend, Event, Stream, is_lost_peer, is_out_of_memory
from hyper_parallel.compat.registry import accelerators, backend, names, register, unused_accelerators

__all__ = [
    "Backend",
    "Event",
    "Stream",
    "TorchBackend",
    "accelerators",
    "backend",
    "is_lost_peer",
    "is_out_of_memory",
    "names",
    "register",
    "unused_accelerators",
]
