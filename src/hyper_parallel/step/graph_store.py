"""A folder of captured steps: what was captured and rewritten once is read by later runs of the same step.

A step has a file by its key (`graph_key`), in the part of the cache that only this user can write to. The file names
its key and the sources that its code was loaded from; where the file is another key's, a source has changed, or the
file is damaged, the step is captured anew and written over it. It is written aside and put in place at once, so that
ranks and runs may share the folder. The oldest files go where there are too many.

All ranks come to the same order of collectives whether they read the step or capture it: what decides the order is part
of the key, what is read is what the same code made of it, and a run compares orders before its first step
(`collective_order.order_digest`). Process groups that the capture made are made in its order. A rank that reads its
step while another one captures it would wait for it, so ranks first tell one another whether they have it
(`step.engine`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.graph import Pass, StepGraph
from hyper_parallel.graph.accumulate import Accumulation
from hyper_parallel.graph.artifacts import Unreadable, own
from hyper_parallel.graph.graph_file import (
    Unwritable,
    about,
    from_bytes,
    group_rows,
    groups_of,
    to_bytes,
)
from hyper_parallel.shard import ShardedModel
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_key import NoDigest, key_of, source_digest, sources
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.untrusted_files import open_regular, read_bytes

log = logging.getLogger(__name__)

LARGEST = 1 << 30
"""Bytes of a file at most."""
_UNREADABLE = (OSError, Unreadable, KeyError, TypeError, ValueError, AttributeError)
_ANEW = "the cached step cannot be read and is captured anew: %s"
_FILES, _BYTES = 512, 4 << 30
"""Of the folder at most."""


class GraphStore:
    """The steps of a run on this rank."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the cache; it is made where it is missing."""
        self._folder = folder

    def key(
        self, recipe: Recipe, shape: BatchShape, device: torch.device, passes: Sequence[Pass], whole: bool
    ) -> str | None:
        """As of `graph_key.key_of`; None where there is none, which is logged."""
        try:
            return key_of(recipe, shape, device, passes, whole)
        except NoDigest as why:
            log.info("the captured step is not cached: %s", why)
        # Classes of the user's are asked what they are.
        except Exception as error:
            log.info("the captured step is not cached: %s: %s", type(error).__name__, error, exc_info=True)
        return None

    def find(self, key: str) -> bytes | None:
        """The file of a step that can be read; None where it is to be captured."""
        try:
            path = own(self._folder) / f"{key}.graph"
            content = read_bytes(open_regular(path, links=False), LARGEST)
            told = about(content)
            if told["key"] != key:  # moved or copied here: its graph is whole, and another step's
                log.info(_ANEW, f"{path} is of another step, {told['key']}")
                return None
            changed = [file for file, digest in told["sources"].items() if source_digest(file) != digest]
            if changed:
                log.info("the cached step is of other code: %s has changed", changed[0])
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            log.info(_ANEW, error)
            return None
        return content

    def read(self, content: bytes, handle: ShardedModel) -> tuple[StepGraph, Accumulation | None] | None:
        """The step as it was rewritten, and the loop whose body it is, if any; None where it is to be captured.

        Process groups that its collectives join are made: all ranks must read, or none.
        """
        try:
            told = about(content)
            _make_groups(handle, told["groups"])
            step, _ = from_bytes(content, handle.axes.process_groups())
            loop = None if told["loop"] is None else _loop(step, told["loop"])
        except _UNREADABLE as error:
            log.info(_ANEW, error)
            return None
        return step, loop

    def save(self, key: str, step: StepGraph, loop: Accumulation | None) -> None:
        """Keep a step; where that is not possible, it is logged, and nothing else happens."""
        try:
            told = {
                "key": key,
                "sources": sources(),
                "groups": group_rows(step.groups),
                "loop": None if loop is None else _of_loop(loop),
            }
            # A step as one graph is planned within a budget, perhaps on few of its layers.
            short = None if step.short is None or loop is not None else step.short()
            content = to_bytes(step, told, short)
            folder = own(self._folder)
            temporary = folder / f"{key}.{os.getpid()}.{time.monotonic_ns()}.new"
            try:
                temporary.write_bytes(content)
                os.replace(temporary, folder / f"{key}.graph")
            finally:
                temporary.unlink(missing_ok=True)
            tidy(folder)
        except (NoDigest, Unwritable, OSError) as error:
            log.info("the captured step is not cached: %s", error)


def _make_groups(handle: ShardedModel, told: Any) -> None:
    """Make the process groups that the capture of a step made, in its order."""
    begun: set[str] = set()
    made = {(group.axis, group.ranks) for group in handle.axes.process_groups().values()}
    for axis, ranks in groups_of(told):
        if (axis, ranks) not in made:
            if axis in begun:
                handle.axes[axis]  # and those of its levels
            else:
                handle.axes.group(axis)
            made = {(group.axis, group.ranks) for group in handle.axes.process_groups().values()}
        begun.add(axis)


def _of_loop(loop: Accumulation) -> dict[str, Any]:
    given = _placed(loop.body)
    if any(given.get(name) != value for name, value in loop.totals.items()):
        raise Unwritable("a sum is no input of the loop's body")
    return {
        "totals": list(loop.totals),
        "added": {name: node.name for name, node in loop.added.items()},
        "weights": {name: node.name for name, node in loop.weights.items()},
        "batch": sorted(loop.batch),
        "width": loop.width,
    }


def _loop(body: StepGraph, told: Any) -> Accumulation:
    named = {node.name: node for node in body.graph.nodes}
    given = _placed(body)
    return Accumulation(
        body,
        {name: given[name] for name in told["totals"]},
        {name: named[node] for name, node in told["added"].items()},
        {name: named[node] for name, node in told["weights"].items()},
        frozenset(told["batch"]),
        told["width"],
    )


def _placed(step: StepGraph) -> dict[str, Any]:
    """The value of each input."""
    pairs = zip(step.inputs, step.placeholders, strict=True)
    return {entry.name: node.meta["value"] for entry, node in pairs}


def tidy(folder: Path) -> None:
    """Let the oldest files go where there are too many."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
    size = 0
    for number, (_, held, path) in enumerate(sorted(found, key=lambda one: one[0], reverse=True)):
        size += held
        if number >= _FILES or size > _BYTES:
            path.unlink(missing_ok=True)
