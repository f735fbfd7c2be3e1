"""The commit of a save on the background thread: each rank's tensors and index, then rank 0's marker, and pruning."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hyper_parallel._version import __version__
from hyper_parallel.checkpoint import file_format, shard
from hyper_parallel.checkpoint.durable import Written, discard, explain, fsync_folder, publish, write_file
from hyper_parallel.checkpoint.file_format import seal, unseal
from hyper_parallel.checkpoint.verify import damage, reason_to_pass_over, usable
from hyper_parallel.errors import CheckpointError, FollowsError
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
        folder = partial / file_format.ASSETS
        folder.mkdir()
        for name, data in what.assets.items():
            files[f"{file_format.ASSETS}/{name}"] = write_file(folder / name, [data])
        fsync_folder(folder)
    _await_ranks(partial, what, time_limit)
    indexes = []
    for rank in range(what.mesh.world):
        raw = (partial / file_format.index_file(rank)).read_bytes()
        try:
            index = unseal(raw)
        except ValueError as error:
            raise CheckpointError(f"{partial / file_format.index_file(rank)}: {error}; save again") from error
        indexes.append(index)
        files[file_format.index_file(rank)] = Written(len(raw), hashlib.sha256(raw).hexdigest())
        files[file_format.data_file(rank)] = Written(index["data"]["bytes"], index["data"]["sha256"])
        found = os.stat(partial / file_format.data_file(rank)).st_size
        if found != index["data"]["bytes"]:
            raise CheckpointError(
                f"{partial / file_format.data_file(rank)}: {found} bytes instead of {index['data']['bytes']}; save "
                "again"
            )
    _check_whole(indexes, what)
    fsync_folder(partial)
    marker = {
        "format": file_format.FORMAT,
        "version": file_format.VERSION,
        "step": what.step,
        "world": what.mesh.world,
        "mesh": [list(axis) for axis in what.mesh.axes],
        "versions": {
            "hyper_parallel": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "ranks": [
            {"data": file_format.data_file(rank), "index": file_format.index_file(rank)}
            for rank in range(what.mesh.world)
        ],
        "files": {name: asdict(written) for name, written in files.items()},
        "unusable": sorted({name for index in indexes for name in index["unusable"]}),
        "state": what.state,
    }
    publish(partial / file_format.COMMIT, seal(marker))
    os.rename(partial, final)
    fsync_folder(final.parent)


def prune(newest: Path, keep: int, known: set[Path]) -> None:
    """Delete checkpoints older than the `keep` newest good ones; `newest`, just committed, is the first of these.

    Those in `known` were written by this run; others are verified before they count, so that a damaged one never
    replaces a good one. Ruined ones (`health`) do not count either; the `keep` newest of them stay too. Names newer
    than `newest` are not touched. A failed deletion is only logged: the new checkpoint is durable.
    """
    folder = newest.parent
    committed = file_format.committed(folder)
    last = next(name for name in committed if str(name) == newest.name)
    good = passed_over = 0
    for name in committed:
        path = folder / str(name)
        if name > last:
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


def _await_ranks(partial: Path, what: Commit, time_limit: float) -> None:
    """Wait for every rank's index, which is written after the rank's data is on the disk."""
    deadline = time.monotonic() + time_limit
    missing = set(range(what.mesh.world))
    while True:
        present = set(os.listdir(partial))
        for rank, code in file_format.failures(present).items():
            reason: object = f"see the log of rank {rank}"
            if code:
                reason = explain(OSError(code, os.strerror(code)), partial)
            raise CheckpointError(f"step {what.step} was not saved: rank {rank} failed: {reason}")
        missing = {rank for rank in missing if file_format.index_file(rank) not in present}
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
            file_format.whole(name, tuple(shape), boxes[name])
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


POLL_SECONDS = 0.02
"""Seconds between polls of the folder for other ranks' progress."""


@dataclass(frozen=True)
class Part:
    """The data that one rank writes; training does not change it.

    `mesh` has all ranks of the run. `tensors` describes every tensor that this rank holds a part of, `blocks` has the
    boxes to write and their places, and `read` returns a block's bytes when it is written.
    """

    step: int
    rank: int
    mesh: Mesh
    partial: Path
    final: Path
    tensors: dict[str, dict[str, Any]]
    blocks: list[shard.WriteBlock]
    read: Callable[[shard.WriteBlock], memoryview]
    largest: Mapping[str, float] = field(default_factory=dict)
    """For some tensors, the largest magnitude of an element that is still usable."""

    def write(self) -> None:
        """Write the tensors, then the index, whose presence shows that both are on the disk.

        Raises GivenUpError if rank 0 has removed the folder, OSError from the file system.
        """
        digests: list[str] = []
        unusable: set[str] = set()
        tensors = {block.key: (block.dtype, block.box.size) for block in self.blocks}
        head = file_format.header(tensors, {"format": "pt"})

        def chunks() -> Iterator[bytes | memoryview]:
            yield head
            for block in self.blocks:
                chunk = self.read(block)
                digests.append(hashlib.sha256(chunk).hexdigest())
                if block.name in self.largest and not usable(
                    file_format.values(chunk, block.dtype), self.largest[block.name]
                ):
                    unusable.add(block.name)
                yield chunk

        try:
            written = write_file(self.partial / file_format.data_file(self.rank), chunks())
            index = self._index(digests, len(head), written, sorted(unusable))
            publish(self.partial / file_format.index_file(self.rank), index)
        except FileNotFoundError as error:
            if self.rank == 0:
                raise
            raise self._given_up() from error

    def _index(self, digests: list[str], start: int, written: Written, unusable: list[str]) -> bytes:
        tensors: dict[str, dict[str, Any]] = {
            name: {**tensor, "pieces": []} for name, tensor in self.tensors.items()
        }
        for block, digest in zip(self.blocks, digests, strict=True):
            tensors[block.name]["pieces"].append(
                {
                    "key": block.key,
                    "offset": list(block.box.offset),
                    "size": list(block.box.size),
                    "bytes": [start + block.start, start + block.stop],
                    "sha256": digest,
                }
            )
        file = file_format.data_file(self.rank)
        return seal(
            {
                "step": self.step,
                "rank": self.rank,
                "mesh": [list(axis) for axis in self.mesh.axes],
                "data": {"file": file, "bytes": written.bytes, "sha256": written.sha256},
                "tensors": tensors,
                "unusable": unusable,
            }
        )

    def await_commit(self, time_limit: float) -> None:
        """Wait until rank 0 has committed or failed, by polling the file system, since this thread runs no collectives.

        Waits twice `time_limit` seconds, so that rank 0, which knows which rank is late, fails first.
        """
        deadline = time.monotonic() + 2 * time_limit
        while not self.final.is_dir():
            # The rename may come between the two looks, hence the second one.
            if not self.partial.is_dir() and not self.final.is_dir():
                raise self._given_up()
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"step {self.step} is written on rank {self.rank}, but rank 0 did not commit it within "
                    f"{2 * time_limit:.0f} s; see rank 0's log"
                )
            time.sleep(POLL_SECONDS)

    def report(self, error: BaseException) -> None:
        """Report this rank's failure to rank 0, after deleting what it wrote: the disk may be full."""
        with contextlib.suppress(OSError):
            (self.partial / file_format.data_file(self.rank)).unlink(missing_ok=True)
            code = error.errno or 0 if isinstance(error, OSError) else 0
            (self.partial / file_format.failed_file(self.rank, code)).touch()
            fsync_folder(self.partial)

    def _given_up(self) -> GivenUpError:
        return GivenUpError(
            f"step {self.step} was not saved: another rank could not write its part; rank 0 says why"
        )


class GivenUpError(CheckpointError, FollowsError):
    """Rank 0 has removed the folder that this rank was writing."""
