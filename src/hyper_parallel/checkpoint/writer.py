"""Checkpoint writer: a snapshot to host memory and asynchronous writing, or synchronous writing tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from hyper_parallel.checkpoint import file_format, shard
from hyper_parallel.checkpoint.commit import Commit, GivenUpError, Part, commit, prune
from hyper_parallel.checkpoint.durable import discard, explain
from hyper_parallel.checkpoint.file_format import LARGEST_ASSET, check_state
from hyper_parallel.checkpoint.rank_agreement import Ranks, agree, ranks_of
from hyper_parallel.checkpoint.shard import Piece, check, check_world
from hyper_parallel.compat import backend
from hyper_parallel.compat.memory import present
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Mesh
from hyper_parallel.proc import try_lock
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import is_plain_name, open_lock


class Writer:
    """Writes checkpoints of one run into one folder. Every rank creates one and calls the same methods in the same
    order.

    `folder` must be on a file system that all ranks share. `keep` committed checkpoints are kept. With
    `background`, `save` returns after the copy to host memory. `streamed`: nothing is copied; `save` writes each tensor
    as it is read and waits, regardless of `background`. `world` is the number of ranks of the run and `rank` this one.
    `group` is the process group of all ranks of the run (the default group if None and the run has more than one), and
    must carry CPU tensors; it is used in the constructor and in `save`, on the calling thread only. `time_limit`:
    seconds that a rank that has written its part waits for the others.

    Raises CheckpointError, on all ranks, if the folder cannot be written or another run is writing into it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        world: int,
        rank: int,
        *,
        keep: int = 2,
        background: bool = True,
        streamed: bool = False,
        group: dist.ProcessGroup | Ranks | None = None,
        time_limit: float = 600.0,
    ) -> None:
        assert keep >= 1, f"keep {keep}"
        self._folder = Path(folder).absolute()
        self._world = world
        self._rank = rank
        self._keep = keep
        self._background, self._streamed = background and not streamed, streamed
        self._time_limit = time_limit
        self._ranks = ranks_of(group, world, rank)
        self._lock: int | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last: Path | None = None
        self._own: set[Path] = set()
        error = None
        if rank == 0:
            try:
                self._lock = open_folder(self._folder)
            except CheckpointError as problem:
                error = problem
            except OSError as problem:
                error = explain(problem, self._folder)
        agree(self._ranks, error)

    def save(
        self,
        step: int,
        pieces: Mapping[str, Piece],
        state: Mapping[str, Any],
        *,
        assets: Mapping[str, bytes] | None = None,
        largest: Mapping[str, float] | None = None,
    ) -> None:
        """Save the current values of `pieces` as the checkpoint of `step`.

        Every rank gives the tensors that it holds a part of: a stage of a pipeline those of its device group.
        Tensors of the model are named ``model.<parameter>``, which `export` requires; tied weights are given once.
        `state` is JSON (no NaN; tuples come back as lists and integer keys as strings); rank 0's is stored. `assets`
        are small files by name, such as a tokenizer's; rank 0's are stored. `largest`: bounds on the magnitude of
        elements, by tensor name; a checkpoint with an element beyond its bound, or not finite, is written, and `newest`
        skips it.

        Waits for the previous save first, and raises its error, if any. Raises CheckpointError on all
        ranks if a piece does not fit its layout and its groups, the state is not JSON, or the folder cannot be written.
        """
        self.wait()
        error: CheckpointError | None = None
        blocks: list[shard.WriteBlock] = []
        mesh = Mesh(("rank", self._world))
        what = Commit(step, mesh, {}, {})
        try:
            for name, piece in pieces.items():
                check_world(name, piece, self._world)
                check(name, piece, self._rank)
            pieces = {name: piece for name, piece in pieces.items() if piece.written}
            mesh = _mesh_of_run(pieces, self._world)
            check_state(state)
            files = _checked(assets or {})
            what = Commit(step, mesh, json.loads(json.dumps(state)), files)
            blocks = shard.blocks(pieces, self._rank)
            if not self._streamed:
                self._copy(pieces, blocks)
        except CheckpointError as problem:
            error = problem
        partial, final = self._open_partial(step, error)
        tensors = {name: piece.description(self._world) for name, piece in pieces.items()}
        read = functools.partial(_block_of, pieces) if self._streamed else self._copied
        part = Part(step, self._rank, mesh, partial, final, tensors, blocks, read, dict(largest or {}))
        if self._background:
            # Not a daemon: the interpreter waits for a save that has begun.
            self._thread = threading.Thread(target=self._run, args=(part, what), name=f"checkpoint-{step}")
            self._thread.start()
        else:
            self._run(part, what)
            self.wait()

    def wait(self) -> Path | None:
        """Wait for the save in flight and raise its error, if any; returns the last committed checkpoint, if any.

        A failed save leaves nothing in the folder.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._last

    def close(self) -> None:
        """`wait`, then release the folder's lock."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_partial(self, step: int, error: CheckpointError | None) -> tuple[Path, Path]:
        """The folder to write into, created by rank 0 and visible to all, and its final path.

        `error` is this rank's error so far. One rank's error is raised on all ranks; nothing is left.
        """
        made: Path | None = None
        note = ""
        if self._rank == 0 and error is None:
            try:
                name = file_format.free(self._folder, step)
                made = self._folder / f"{name}.partial-{secrets.token_hex(4)}"
                made.mkdir()
                note = f"{made.name}/{name}"
            except OSError as problem:
                error = explain(problem, made or self._folder)
                made = None
        try:
            partial, final = (self._folder / name for name in agree(self._ranks, error, note).split("/"))
            if not partial.is_dir():
                error = CheckpointError(
                    f"{partial}, made by rank 0, is not visible here; put 'out' on a file system that all "
                    "ranks share"
                )
            agree(self._ranks, error)
        except CheckpointError:
            if made is not None:
                with contextlib.suppress(OSError):
                    discard(made)
            raise
        return partial, final

    def _copy(self, pieces: Mapping[str, Piece], blocks: list[shard.WriteBlock]) -> None:
        """Copy this rank's blocks into the host buffer, which is reused from save to save."""
        size = blocks[-1].stop if blocks else 0
        if self._buffer.numel() != size:
            share: Counter[str] = Counter()
            for block in blocks:
                share[pieces[block.name].local.device.type] += block.stop - block.start
            # In memory from which the device that most of the bytes come from copies fastest.
            kind = share.most_common(1)[0][0] if share else "cpu"
            self._buffer = backend(kind).host_buffer((size,), torch.uint8)
        with torch.no_grad():
            for name, several in groupby(blocks, key=lambda block: block.name):
                local = pieces[name].local
                with present(local):
                    for block in several:
                        target = self._buffer[block.start : block.stop].view(block.dtype)
                        target.view(block.box.size).copy_(local[block.box.local_slices])

    def _copied(self, block: shard.WriteBlock) -> memoryview:
        return file_format.raw(self._buffer[block.start : block.stop])

    def _run(self, part: Part, what: Commit) -> None:
        """On the thread: write, then commit (rank 0) or wait for the commit (the others)."""
        try:
            part.write()
            if self._rank == 0:
                commit(part.partial, part.final, what, self._time_limit)
                self._own.add(part.final)
                prune(part.final, self._keep, self._own)
            else:
                part.await_commit(self._time_limit)
            self._last = part.final
        except BaseException as error:
            if self._rank == 0:
                # The ranks that still wait see that the folder is gone.
                with contextlib.suppress(OSError):
                    discard(part.partial)
            elif not isinstance(error, GivenUpError):
                part.report(error)
            self._error = explain(error, part.partial) if isinstance(error, OSError) else error


def _mesh_of_run(pieces: Mapping[str, Piece], world: int) -> Mesh:
    """The mesh of the tensors that all ranks of the run hold as one group; without such a tensor one axis of ranks.

    Raises CheckpointError if there are several.
    """
    whole = {name: piece.layout.mesh for name, piece in pieces.items() if piece.spans(world)}
    if not whole:
        return Mesh(("rank", world))
    first, mesh = next(iter(whole.items()))
    for name, other in whole.items():
        if other.axes != mesh.axes:
            raise CheckpointError(
                f"{name}: its layout is on mesh {other.axes}, but that of {first} is on mesh {mesh.axes}; give both "
                "the same mesh"
            )
    return mesh


def _block_of(pieces: Mapping[str, Piece], block: shard.WriteBlock) -> memoryview:
    """The current bytes of a block."""
    local = pieces[block.name].local
    with present(local), torch.no_grad():
        return file_format.raw(
            local[block.box.local_slices].clone(memory_format=torch.contiguous_format).cpu()
        )


def _checked(assets: Mapping[str, bytes]) -> dict[str, bytes]:
    for name, data in assets.items():
        if not is_plain_name(name) or not isinstance(data, bytes):
            raise CheckpointError(
                f"asset {name!r}: an asset is a plain file name (no folder, no leading dot) and its bytes"
            )
        if len(data) > LARGEST_ASSET:
            raise CheckpointError(
                f"asset {name!r} has {format_bytes(len(data))}, and may have {format_bytes(LARGEST_ASSET)}"
            )
    return dict(assets)


LOCK = ".writer.lock"


def open_folder(folder: Path) -> int | None:
    """Create the folder, take its lock, and remove what interrupted writers left; returns the lock's file descriptor.

    None on a file system without locks: nothing is removed there, since files of dead and live writers look alike.
    Raises CheckpointError if another run holds the lock, OSError if the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = open_lock(folder / LOCK)
    try:
        locked = try_lock(descriptor)
        if locked is False:
            raise CheckpointError(
                f"another run is writing checkpoints into {folder}; wait for it, or give this run another 'out'"
            )
        if locked:
            for path in file_format.stale(folder):
                discard(path)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
