"""Facts about a published machine: each number with its source, or how it was estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.cluster.cluster import Cluster
from hyper_parallel.cluster.files import build


@dataclass(frozen=True)
class Fact:
    """A number or a table, with its source."""

    value: Any
    source: str
    public: bool = True
    """False if the maker does not publish it: `source` then says how it was estimated."""


def known(value: Any, source: str) -> Fact:
    """A number that a datasheet, a paper or a measurement states."""
    return Fact(value, source)


def estimate(value: Any, how: str) -> Fact:
    """A number that is not public."""
    return Fact(value, how, public=False)


Facts = Mapping[str, Fact]
"""Facts by dotted path into a cluster file, such as `device.memory.read`."""


def cluster(name: str, device: str, source: str, facts: Facts) -> Cluster:
    """The cluster that the facts describe; `sources` or `estimates` has every number's path.

    A memory without a `write` fact writes as fast as it reads.
    """
    tree: dict[str, Any] = {"name": name, "source": source, "device": {"name": device}}
    for path, fact in facts.items():
        *folders, leaf = path.split(".")
        section = tree
        for folder in folders:
            section = section.setdefault(folder, {})
        section[leaf] = fact.value
    tree["device"]["memory"]["name"] = "device"
    for tier in ("host", "pool", "flash"):
        if tier in tree:
            tree[tier]["name"] = tier
    for memory in (tree["device"]["memory"], *(tree[tier] for tier in ("host", "pool") if tier in tree)):
        memory.setdefault("write", memory["read"])
    for level, link in tree.get("links", {}).items():
        link["level"] = level
    tree["sources"] = {path: fact.source for path, fact in facts.items() if fact.public}
    tree["estimates"] = {path: fact.source for path, fact in facts.items() if not fact.public}
    return build(tree, name)
