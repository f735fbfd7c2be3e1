"""Rank 0's part of a save: wait for every rank's files, check that they fit together, commit, and prune."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hyper_parallel._version import __version__
from hyper_parallel.checkpoint import folder_names, validate
from hyper_parallel.checkpoint.digest_json import seal, unseal
from hyper_parallel.checkpoint.durable import Written, discard, explain, fsync_folder, publish, write_file
from hyper_parallel.checkpoint.rank_save import POLL_SECONDS
from hyper_parallel.checkpoint.verify import damage, reason_to_pass_over
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Box, Mesh

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """The commit marker's fields besides the files and their digests; `mesh` has all ranks of the run."""

    step: int
    mesh: Mesh
    state: dict[str, Any]
    assets: dict[str, bytes]


def commit(partial: Path, final: Path, what: Commit, time_limit: float) -> None:
    """Commit `partial`: durable files, then the marker, then the name that readers accept.

    Raises CheckpointError if a rank failed, did not appear within `time_limit` seconds, or described a tensor
    differently from the others, or did not save its part; OSError from the file system.
    """
    files: dict[str, Written] = {}
    if what.assets:
        folder = partial / folder_names.ASSETS
        folder.mkdir()
        for name, data in what.assets.items():
            files[f"{folder_names.ASSETS}/{name}"] = write_file(folder / name, [data])
        fsync_folder(folder)
    _await_ranks(partial, what, time_limit)
    indexes = []
    for rank in range(what.mesh.world):
        raw = (partial / folder_names.index_file(rank)).read_bytes()
        try:
            index = unseal(raw)
        except ValueError as error:
            raise CheckpointError(
                f"{partial / folder_names.index_file(rank)}: {error}; save again"
            ) from error
        indexes.append(index)
        files[folder_names.index_file(rank)] = Written(len(raw), hashlib.sha256(raw).hexdigest())
        files[folder_names.data_file(rank)] = Written(index["data"]["bytes"], index["data"]["sha256"])
        found = os.stat(partial / folder_names.data_file(rank)).st_size
        if found != index["data"]["bytes"]:
            raise CheckpointError(
                f"{partial / folder_names.data_file(rank)}: {found} bytes instead of {index['data']['bytes']}; save "
                "again"
            )
    _check_whole(indexes, what)
    fsync_folder(partial)
    marker = {
        "format": folder_names.FORMAT,
        "version": folder_names.VERSION,
        "step": what.step,
        "world": what.mesh.world,
        "mesh": [list(axis) for axis in what.mesh.axes],
        "versions": {
            "hyper_parallel": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "ranks": [
            {"data": folder_names.data_file(rank), "index": folder_names.index_file(rank)}
            for rank in range(what.mesh.world)
        ],
        "files": {name: asdict(written) for name, written in files.items()},
        "unusable": sorted({name for index in indexes for name in index["unusable"]}),
        "state": what.state,
    }
    publish(partial / folder_names.COMMIT, seal(marker))
    os.rename(partial, final)
    fsync_folder(final.parent)


def prune(newest: Path, keep: int, known: set[Path]) -> None:
    """Delete checkpoints older than the `keep` newest good ones; `newest`, just committed, is the first of these.

    Those in `known` were written by this run; others are verified before they count, so that a damaged one never
    replaces a good one. Ruined ones (`health`) do not count either; the `keep` newest of them stay too. Names newer
    than `newest` are not touched. A failed deletion is only logged: the new checkpoint is durable.
    """
    folder = newest.parent
    good = passed_over = 0
    for name in folder_names.committed(folder):
        path = folder / str(name)
        if name > _name_of(newest, folder):
            continue
        ruined = good < keep and reason_to_pass_over(path) is not None
        if ruined and passed_over < keep:
            passed_over += 1
        elif good < keep and not ruined:
            good += path in known or damage(path) is None
        else:
            try:
                discard(path)
            except OSError as error:
                _log.warning("an old checkpoint could not be deleted: %s: %s", path, error.strerror)


def _name_of(path: Path, folder: Path) -> folder_names.Name:
    return next(name for name in folder_names.committed(folder) if str(name) == path.name)


def _await_ranks(partial: Path, what: Commit, time_limit: float) -> None:
    """Wait for every rank's index, which is written after the rank's data is on the disk."""
    deadline = time.monotonic() + time_limit
    missing = set(range(what.mesh.world))
    while True:
        present = set(os.listdir(partial))
        for rank, code in folder_names.failures(present).items():
            reason: object = f"see the log of rank {rank}"
            if code:
                reason = explain(OSError(code, os.strerror(code)), partial)
            raise CheckpointError(f"step {what.step} was not saved: rank {rank} failed: {reason}")
        missing = {rank for rank in missing if folder_names.index_file(rank) not in present}
        if not missing:
            return
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)[:8]))
            raise CheckpointError(
                f"step {what.step} was not saved: nothing from rank {ranks} within {time_limit:.0f} s in "
                f"{partial}; "
                "are those ranks alive, and is the folder on a file system that all ranks share?"
            )
        time.sleep(POLL_SECONDS)


def _check_whole(indexes: list[dict[str, Any]], what: Commit) -> None:
    """Check that the ranks describe the tensors that they share alike, and that each element of each tensor was written
    once.

    A tensor is in the indexes of the ranks that hold a part of it. The blocks themselves are compared, as a reader
    compares them: what is committed can be read.
    """
    first: dict[str, tuple[Any, ...]] = {}
    boxes: dict[str, list[Box]] = {}
    failed = f"step {what.step} was not saved"
    for rank, index in enumerate(indexes):
        if (index["rank"], index["step"]) != (rank, what.step):
            raise CheckpointError(
                f"{failed}: rank {rank} wrote step {index['step']}, rank 0 step {what.step}; all ranks save the same "
                "step"
            )
        for name, tensor in index["tensors"].items():
            kind = tuple(tensor.get(key) for key in ("shape", "dtype", "layout", "mesh", "groups"))
            if first.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{failed}: {name} is {_described(kind)} on rank {rank}, but {_described(first[name])} on "
                    "another; all ranks give it the same layout and the same device groups"
                )
            boxes.setdefault(name, []).extend(
                Box(tuple(piece["offset"]), (0,) * len(piece["offset"]), tuple(piece["size"]))
                for piece in tensor["pieces"]
            )
    for name, (shape, *_) in first.items():
        written = sum(math.prod(box.size) for box in boxes[name])
        if written != math.prod(shape):
            raise CheckpointError(
                f"{failed}: {written} of {math.prod(shape)} elements of {name} were written; every rank that holds a "
                "part of it must save it"
            )
        try:
            validate.whole(name, tuple(shape), boxes[name])
        except ValueError as error:
            raise CheckpointError(
                f"{failed}: {error}; all ranks give it the same layout and the same device groups"
            ) from error
    mesh = [list(axis) for axis in what.mesh.axes]
    for rank, index in enumerate(indexes):
        if index["mesh"] != mesh:
            raise CheckpointError(
                f"{failed}: rank {rank} saved tensors of mesh {index['mesh']}, rank 0 of {mesh}; all ranks save the "
                "tensors that all of them hold, on the same mesh"
            )


def _described(kind: tuple[Any, ...]) -> str:
    _, dtype, layout, mesh, groups = kind
    return f"{dtype} {layout}" + (f" on mesh {mesh} in {', '.join(groups)}" if groups else "")
