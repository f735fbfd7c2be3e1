"""The process groups of this process set aside for a while, so that others can be made in their place.

PyTorch keeps one default process group and a registry of groups by name. A check that simulates ranks needs its own
default group, even in a worker that already has real groups. The real groups are only set aside: nothing is sent and
nothing is destroyed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch.distributed import distributed_c10d as c10d

_REGISTRIES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside there is no process group, and one may be made; it has to be destroyed before the end.

    Afterwards the groups that were there are back, under their names. No collective.
    """
    if not dist.is_initialized():
        yield
        return
    world, hook = c10d._world, sys.excepthook
    kept = {name: dict(getattr(c10d, name)) for name in _REGISTRIES}
    default, count, method = world.default_pg, c10d._group_count, c10d._default_pg_init_method
    for name in _REGISTRIES:
        getattr(c10d, name).clear()
    world.default_pg = None
    try:
        yield
    finally:
        for name, entries in kept.items():
            getattr(c10d, name).clear()
            getattr(c10d, name).update(entries)
        world.default_pg = default
        c10d._group_count, c10d._default_pg_init_method = count, method
        # Destroying the default group that was made inside unregistered every group that C++ knows by name.
        _unregister_all_process_groups()
        for group, group_name in kept["_pg_names"].items():
            _register_process_group(group_name, group)
        sys.excepthook = hook


def is_simulation() -> bool:
    """Whether the default process group stands for ranks that no process runs."""
    return dist.is_initialized() and dist.get_backend() == "fake"
