"""A save that copies nothing: the same files, from tensors whose memory may be away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from checkpoint_worlds import random_tensor, same_bits

from hyper_parallel.checkpoint import Piece, Writer, newest, read
from hyper_parallel.compat import memory
from hyper_parallel.layout import Layout, Mesh

MESH = Mesh()


def _pieces() -> dict[str, Piece]:
    tensors = {
        "model.a": random_tensor((7, 5), torch.float32, 0),
        "model.b": random_tensor((64, 9), torch.bfloat16, 1),
    }
    return {
        name: Piece(tensor, Layout.replicated(MESH, tuple(tensor.shape))) for name, tensor in tensors.items()
    }


def _saved(folder: Path, pieces: dict[str, Piece], *, streamed: bool) -> dict[str, bytes]:
    with Writer(folder, MESH.world, 0, streamed=streamed) as writer:
        writer.save(3, pieces, {"step": 3})
    found = newest(folder)
    assert found is not None
    return {
        path.name: path.read_bytes() for path in sorted(found.path.iterdir()) if path.suffix == ".safetensors"
    }


def test_the_files_are_those_of_a_save_that_copies(tmp_path: Path) -> None:
    assert _saved(tmp_path / "a", _pieces(), streamed=True) == _saved(
        tmp_path / "b", _pieces(), streamed=False
    )


def test_tensors_that_are_away_are_saved_and_loaded_one_at_a_time(tmp_path: Path) -> None:
    pieces, expected = _pieces(), _pieces()
    held = {piece.local.untyped_storage()._cdata: piece.local.clone() for piece in pieces.values()}
    there = most = 0

    @contextlib.contextmanager
    def lend(tensor: torch.Tensor, changed: bool) -> Iterator[None]:
        nonlocal there, most
        storage = tensor.untyped_storage()
        values = held[storage._cdata]
        storage.resize_(values.nbytes)
        tensor.copy_(values)
        there += 1
        most = max(most, there)
        yield
        there -= 1
        if changed:
            values.copy_(tensor)
        storage.resize_(0)

    for piece in pieces.values():
        memory.keep(piece.local, lend)
        piece.local.untyped_storage().resize_(0)
    try:
        assert _saved(tmp_path / "a", pieces, streamed=True) == _saved(
            tmp_path / "b", expected, streamed=False
        )
        assert most == 1
        assert _saved(tmp_path / "c", pieces, streamed=False) == _saved(
            tmp_path / "d", expected, streamed=False
        )
        for values in held.values():
            values.zero_()
        found = newest(tmp_path / "b")
        assert found is not None
        read(found.path, pieces)
        for piece, other in zip(pieces.values(), expected.values(), strict=True):
            assert not piece.local.untyped_storage().nbytes()
            assert same_bits(held[piece.local.untyped_storage()._cdata], other.local)
    finally:
        for piece in pieces.values():
            memory.forget(piece.local)
