"""Fills tensors from a checkpoint that was saved under any layout and number of ranks.

Saved boxes of the global tensor are intersected with the wanted boxes. A block of the file is read into memory, its
digest is compared there, and only then are elements copied out of it, so that the loaded bytes are the verified ones.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.checkpoint import file_format
from hyper_parallel.checkpoint.file_format import unseal
from hyper_parallel.checkpoint.shard import Piece, check, dtype_name
from hyper_parallel.checkpoint.verify import read_file, read_marker
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import CheckpointError, nearest
from hyper_parallel.layout import Box
from hyper_parallel.untrusted_files import open_within


def read(
    path: str | os.PathLike[str],
    pieces: Mapping[str, Piece],
    *,
    rank: int | None = None,
    prefix: str = "",
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """Fill the local tensor of each piece in place from the checkpoint at `path`; the state it was saved
    with.

    `rank` is this rank of the run: by default the rank in the default process group, or 0 without one. The checkpoint's
    tensors whose names begin with `prefix` must be exactly those of `pieces` and those named in `elsewhere`, which only
    other ranks of the run hold (other stages of a pipeline). Only blocks that hold a wanted element are read, one at a
    time.

    Raises CheckpointError, with names, if a tensor is missing, superfluous, or of another shape or element type (then
    nothing has changed), and if a byte differs from what was written (then the pieces hold a mixture: do not use them).
    """
    checkpoint = Checkpoint(Path(path))
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    checkpoint.match(pieces, prefix, elsewhere)
    checkpoint.fill(pieces, rank)
    return checkpoint.state


@dataclass(frozen=True)
class ReadBlock:
    """One saved block: the box of the global tensor, the file, the range of its bytes there, and their
    digest.
    """

    box: Box
    file: str
    start: int
    stop: int
    sha256: str


@dataclass
class Tensor:
    """One saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[ReadBlock] = field(default_factory=list)


class Checkpoint:
    """A committed checkpoint, open for reading. `tensors` by name; `state` as it was given to `Writer.save`.

    Raises CheckpointError if the marker or an index is damaged or invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._marker = read_marker(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.state: dict[str, Any] = self._marker["state"]
        self.step: int = self._marker["step"]
        self.tensors: dict[str, Tensor] = {}
        for rank, files in enumerate(self._marker["ranks"]):
            raw = read_file(path, files["index"], self._marker)
            try:
                index = unseal(raw)
                file_format.index(index, rank, self._marker)
            except ValueError as error:
                raise CheckpointError(f"{path}: {files['index']}: {error}") from error
            self._add(index, files["data"])
        # In one order, whatever groups of ranks the tensors are in: an export's bytes follow it.
        self.tensors = dict(sorted(self.tensors.items()))
        try:
            for name, tensor in self.tensors.items():
                file_format.whole(name, tensor.shape, (block.box for block in tensor.blocks))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _add(self, index: dict[str, Any], file: str) -> None:
        """Add the blocks in `file` that a valid index lists."""
        for name, saved in index["tensors"].items():
            kind = Tensor(tuple(saved["shape"]), file_format.DTYPES[saved["dtype"]])
            tensor = self.tensors.setdefault(name, kind)
            if (tensor.shape, tensor.dtype) != (kind.shape, kind.dtype):
                raise CheckpointError(f"{self.path}: the ranks' indexes describe {name} differently")
            for piece in saved["pieces"]:
                box = Box(tuple(piece["offset"]), (0,) * len(piece["offset"]), tuple(piece["size"]))
                start, stop = piece["bytes"]
                tensor.blocks.append(ReadBlock(box, file, start, stop, piece["sha256"]))

    @property
    def assets(self) -> list[str]:
        """The names of the assets: small files that were saved with the tensors."""
        start = f"{file_format.ASSETS}/"
        return [file.removeprefix(start) for file in self._marker["files"] if file.startswith(start)]

    def asset(self, name: str) -> bytes:
        """The verified content of one of `assets`."""
        return read_file(self.path, f"{file_format.ASSETS}/{name}", self._marker)

    def match(self, pieces: Mapping[str, Piece], prefix: str = "", elsewhere: Collection[str] = ()) -> None:
        """Raise CheckpointError unless the saved tensors under `prefix` are those of `pieces`, and those named in
        `elsewhere`, which only other ranks hold.
        """
        saved = {name for name in self.tensors if name.startswith(prefix)}
        wanted = pieces.keys() | set(elsewhere)
        if missing := sorted(wanted - self.tensors.keys()):
            hint = nearest(missing[0], saved - wanted)
            raise CheckpointError(f"{self.path} does not have {_some(missing)}{hint}")
        if extra := sorted(saved - wanted):
            raise CheckpointError(
                f"{self.path} has {_some(extra)}, for which there is no place; resume with the model and the "
                "optimizer that it was saved from"
            )
        for name, piece in pieces.items():
            tensor = self.tensors[name]
            if tensor.shape != piece.layout.shape:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {tensor.shape}, but {piece.layout.shape} is needed; "
                    "resume with "
                    "the model that it was saved from"
                )
            if tensor.dtype != piece.local.dtype:
                raise CheckpointError(
                    f"{self.path}: {name} is {dtype_name(tensor.dtype)}, but {dtype_name(piece.local.dtype)} "
                    "is "
                    "needed; resume with the same 'precision', or read into that type and convert"
                )

    def fill(self, pieces: Mapping[str, Piece], rank: int) -> None:
        """Fill pieces that `match`, of a rank of the run, file by file in the order of the bytes."""
        wanted: dict[str, list[tuple[int, int, str, ReadBlock, tuple[Box, ...]]]] = {}
        missing: dict[str, int] = {}
        for position, (name, piece) in enumerate(pieces.items()):
            check(name, piece, rank)
            boxes = piece.boxes(rank)
            missing[name] = sum(math.prod(box.size) for box in boxes)
            for block in self.tensors[name].blocks:
                if any(block.box.intersect(box) for box in boxes):
                    wanted.setdefault(block.file, []).append((block.start, position, name, block, boxes))
        for file, reads in wanted.items():
            reads.sort(key=lambda item: item[:2])
            try:
                with open_within(self.path, file) as stream:
                    _check_size(stream, self._marker["files"][file]["bytes"])
                    for _, _, name, block, boxes in reads:
                        values = self._load(stream, block, self.tensors[name].dtype)
                        local = pieces[name].local
                        with present(local, changed=True):
                            missing[name] -= _copy(values, block.box, boxes, local)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {file}: cannot be read: {error.strerror}") from error
        if left := sorted(name for name, count in missing.items() if count):
            raise CheckpointError(f"{self.path} has no values for a part of {_some(left)}")

    def _load(self, stream: FileIO, block: ReadBlock, dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(block.stop - block.start, dtype=torch.uint8)
        view = data.numpy().data
        stream.seek(block.start)
        while view.nbytes:
            count = stream.readinto(view)
            if not count:
                raise CheckpointError(f"{self.path}: {block.file}: truncated; resume from another checkpoint")
            view = view[count:]
        if hashlib.sha256(data.numpy().data).hexdigest() != block.sha256:
            raise CheckpointError(
                f"{self.path}: {block.file}: sha256 of bytes {block.start} to {block.stop} differs; resume "
                "from "
                "another checkpoint"
            )
        return data.view(dtype).view(block.box.size)


def _check_size(stream: FileIO, size: int) -> None:
    """Raise OSError unless an open file has as many bytes as were written, since memory is allocated for these."""
    found = os.fstat(stream.fileno()).st_size
    if found != size:
        raise OSError(errno.EIO, f"it has {found} bytes instead of {size}")


def _copy(values: torch.Tensor, box: Box, boxes: tuple[Box, ...], local: torch.Tensor) -> int:
    """Copy a block's part of each wanted box into the local tensor; returns the number of elements."""
    copied = 0
    with torch.no_grad():
        for mine in boxes:
            if common := mine.intersect(box):
                target = local[common[0]]
                target.copy_(values[common[1]])
                copied += target.numel()
    return copied


def _some(found: list[str]) -> str:
    """The first few names and the number of the others."""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(found[:4]) + more
