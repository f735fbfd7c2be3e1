"""Merging of mappings: inheritance between files, and overrides of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]
Kinds = Mapping[Path, tuple[str, Any]]
"""For a section with several kinds (`train.optimizer`): the key that names the kind, and its default."""


def merge(base: Any, over: Any, kinds: Kinds, path: Path = ()) -> Any:
    """Merge `over` into `base`: mappings key by key; any other value replaces the base's.

    A section of another kind replaces the base's, because its keys mean something else. Keys keep the base's order,
    new ones follow; keys of the base that `over` repeats take `over`'s order, since the order of axes and of rules
    matters.
    """
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    if path in kinds:
        key, default = kinds[path]
        was = base.get(key, default)
        if over.get(key, was) != was:
            return over
    again = iter([key for key in over if key in base])
    order = [next(again) if key in over else key for key in base]
    order += [key for key in over if key not in base]
    return {
        key: merge(base[key], over[key], kinds, (*path, str(key)))
        if key in base and key in over
        else (over if key in over else base)[key]
        for key in order
    }


def nest(path: Path, value: Any) -> Any:
    """``{"a": {"b": value}}`` for the path ``("a", "b")``."""
    for key in reversed(path):
        value = {key: value}
    return value


def without(data: Any, path: Path) -> Any:
    """The data without the value at a path; the data itself if the path does not exist."""
    key, *rest = path
    if not isinstance(data, Mapping) or key not in data:
        return data
    if rest:
        return {k: without(v, tuple(rest)) if k == key else v for k, v in data.items()}
    return {k: v for k, v in data.items() if k != key}


def present(data: Any, path: tuple[str | int, ...]) -> int:
    """The number of leading elements of a path that exist in the data."""
    for depth, key in enumerate(path):
        if not _has(data, key):
            return depth
        data = data[key]
    return len(path)


def value_at(data: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a path, or None where the path ends before it."""
    for key in path:
        if not _has(data, key):
            return None
        data = data[key]
    return data


def _has(data: Any, key: str | int) -> bool:
    if isinstance(data, Mapping):
        return key in data
    return isinstance(data, list) and isinstance(key, int) and key < len(data)
