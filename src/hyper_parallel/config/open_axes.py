"""`auto` axes in files that extend each other: an override replaces single axes; and `roles: auto`, which replaces the
devices of roles and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.strategy.axes import AUTO, OPEN_NAMES

_ALL = dict.fromkeys(OPEN_NAMES, AUTO)
_ALL_ROLES = {"split": AUTO, "actor": {"devices": None}, "rollout": {"devices": None}}


def spelled_out(content: Any) -> Any:
    """A file's content with `strategy: auto`, and `axes: auto`, written as one `auto` for each axis, and `roles: auto`
    as a split over roles without devices."""
    if not isinstance(content, Mapping):
        return content
    found = dict(content)
    if found.get("roles") == AUTO:
        found["roles"] = _ALL_ROLES
    if found.get("strategy") == AUTO:
        found["strategy"] = {"axes": AUTO}
    if isinstance(found.get("strategy"), Mapping):
        found["strategy"] = spelled_out(found["strategy"])
    if found.get("axes") == AUTO:
        found["axes"] = _ALL
    return found


def one_tensor(data: Any) -> Any:
    """Merged data in which a degree of `tensor` replaces an open `tensor_x`, or the reverse."""
    if not isinstance(data, Mapping):
        return data
    found = dict(data)
    if isinstance(found.get("strategy"), Mapping):
        found["strategy"] = one_tensor(found["strategy"])
    axes = found.get("axes")
    if isinstance(axes, Mapping) and {"tensor", "tensor_x"} <= axes.keys():
        open_ = next((name for name in ("tensor_x", "tensor") if axes[name] == AUTO), None)
        found["axes"] = {name: degree for name, degree in axes.items() if name != open_}
    return found
