"""One rank's save, on a background thread: tensors, then the index, then the report to rank 0."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint import folder_names, stream, write_partition
from hyper_parallel.checkpoint.digest_json import seal
from hyper_parallel.checkpoint.durable import Written, fsync_folder, publish, write_file
from hyper_parallel.checkpoint.health import usable
from hyper_parallel.errors import CheckpointError, FollowsError
from hyper_parallel.layout import Mesh

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
    blocks: list[write_partition.WriteBlock]
    read: Callable[[write_partition.WriteBlock], memoryview]
    largest: Mapping[str, float] = field(default_factory=dict)
    """For some tensors, the largest magnitude of an element that is still usable."""

    def write(self) -> None:
        """Write the tensors, then the index, whose presence shows that both are on the disk.

        Raises GivenUpError if rank 0 has removed the folder, OSError from the file system.
        """
        digests: list[str] = []
        unusable: set[str] = set()
        tensors = {block.key: (block.dtype, block.box.size) for block in self.blocks}
        head = stream.header(tensors, {"format": "pt"})

        def chunks() -> Iterator[bytes | memoryview]:
            yield head
            for block in self.blocks:
                chunk = self.read(block)
                digests.append(hashlib.sha256(chunk).hexdigest())
                if block.name in self.largest and not usable(
                    stream.values(chunk, block.dtype), self.largest[block.name]
                ):
                    unusable.add(block.name)
                yield chunk

        try:
            written = write_file(self.partial / folder_names.data_file(self.rank), chunks())
            index = self._index(digests, len(head), written, sorted(unusable))
            publish(self.partial / folder_names.index_file(self.rank), index)
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
        file = folder_names.data_file(self.rank)
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
            (self.partial / folder_names.data_file(self.rank)).unlink(missing_ok=True)
            code = error.errno or 0 if isinstance(error, OSError) else 0
            (self.partial / folder_names.failed_file(self.rank, code)).touch()
            fsync_folder(self.partial)

    def _given_up(self) -> GivenUpError:
        return GivenUpError(
            f"step {self.step} was not saved: another rank could not write its part; rank 0 says why"
        )


class GivenUpError(CheckpointError, FollowsError):
    """Rank 0 has removed the folder that this rank was writing."""
