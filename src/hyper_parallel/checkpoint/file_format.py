"""Checkpoint format: names of folders and files, sealed JSON, safetensors streams, and validation of what is read.

``step-00000120`` is committed; ``step-00000120-r1`` is a second, newer checkpoint of the same step (the first was
damaged, or the run was rewound). ``….partial-<hex>`` is being written, ``….deleted-<hex>`` is being removed; readers
ignore these, and the next writer removes them after a crash.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyper_parallel.checkpoint.shard import SAFETENSORS_NAMES, dtype_name
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Box
from hyper_parallel.units import format_bytes
from hyper_parallel.untrusted_files import is_plain_name, parse_json

FORMAT = "hyper-parallel checkpoint"
VERSION = 1
COMMIT = "commit.json"
ASSETS = "assets"
_COMMITTED = re.compile(r"step-([0-9]{8,})(?:-r([1-9][0-9]*))?")
_STALE = re.compile(r"step-[0-9]{8,}(?:-r[1-9][0-9]*)?\.(?:partial|deleted)-[0-9a-f]+")
_FAILED = re.compile(r"rank-([0-9]{5,})\.failed-([0-9]+)")


@dataclass(frozen=True, order=True)
class Name:
    """Sort key of a committed checkpoint: newer is greater."""

    step: int
    revision: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f"-r{self.revision}" if self.revision else "")


def committed(folder: Path) -> list[Name]:
    """The checkpoints in a folder by their names, newest first; empty if there is no such folder."""
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = filter(None, map(_COMMITTED.fullmatch, entries))
    return sorted((Name(int(m[1]), int(m[2] or 0)) for m in matches), reverse=True)


def free(folder: Path, step: int) -> Name:
    """The name for a new checkpoint of `step`: newer than all existing ones of that step."""
    taken = [name.revision for name in committed(folder) if name.step == step]
    return Name(step, max(taken, default=-1) + 1)


def stale(folder: Path) -> list[Path]:
    """The folders that interrupted writers left."""
    return [folder / entry for entry in os.listdir(folder) if _STALE.fullmatch(entry)]


def data_file(rank: int) -> str:
    """Name of the file with the tensors that a rank wrote."""
    return f"rank-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    """Name of a rank's index, which locates its pieces in its data file; its presence shows that the rank is done."""
    return f"rank-{rank:05d}.json"


def failed_file(rank: int, code: int) -> str:
    """Name of an empty file that records that a rank failed, with its errno (0: not a file-system error).

    A name appears atomically and needs no space on a full disk.
    """
    return f"rank-{rank:05d}.failed-{code}"


def failures(entries: Iterable[str]) -> dict[int, int]:
    """Rank to errno of each failed rank among the names in a partial folder."""
    matches = filter(None, map(_FAILED.fullmatch, entries))
    return {int(match[1]): int(match[2]) for match in matches}


# Sealed JSON files, which contain their own SHA-256 digest.
#
# The text is ``json.dumps(body, sort_keys=True)`` and a newline, with one more key, ``sha256``: the digest of
# the same text without that key. The bytes must be exactly that text, so that every changed bit is noticed,
# also one that changes no value.

LARGEST = 64 * 2**20
"""Maximum bytes of a sealed file: the index of a rank with a quarter of a million blocks."""


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def seal(body: Mapping[str, Any]) -> bytes:
    """The bytes of the sealed file for `body`, which must not have the key ``sha256``.

    Raises CheckpointError if no reader would accept it.
    """
    assert "sha256" not in body
    data = _text({**body, "sha256": hashlib.sha256(_text(body)).hexdigest()}) + b"\n"
    if len(data) > LARGEST:
        raise CheckpointError(
            f"the description of a checkpoint takes {format_bytes(len(data))}, and may take {format_bytes(LARGEST)}; "
            "save from more ranks, or less beside the tensors"
        )
    return data


def unseal(data: bytes) -> dict[str, Any]:
    """The body of a sealed file. Raises ValueError, with the reason in words, if a single bit differs."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise ValueError(str(error).partition(":")[0]) from error
    if not isinstance(body, dict) or "sha256" not in body:
        raise ValueError("its own sha256 is missing")
    try:
        same_text = _text(body) + b"\n" == data
    except ValueError:  # a NaN
        same_text = False
    digest = body.pop("sha256")
    if not same_text or hashlib.sha256(_text(body)).hexdigest() != digest:
        raise ValueError("its own sha256 differs")
    return body


def check_state(value: object, where: str = "state") -> None:
    """Raise CheckpointError, naming the place, if JSON cannot hold `value`.

    As usual with JSON, tuples come back as lists and integer keys (a Transformers config has some) as strings.
    """
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(
                f"{where} is {value}, which JSON does not have; save a finite number or None"
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) and type(key) is not int:
                raise CheckpointError(f"{where} has the key {key!r}; the keys of the state are strings")
            if not isinstance(key, str) and str(key) in value:
                raise CheckpointError(f"{where} has the keys {key!r} and {str(key)!r}, which are one in JSON")
            check_state(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            check_state(item, f"{where}[{position}]")
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; the state is JSON: numbers, strings, lists, dicts"
        )


# The safetensors format, written as a stream: the header first, then the tensors one after the other.
#
# Eight bytes give the length of the header, which is JSON: the name of each tensor to its element type, shape
# and the range of its bytes in what follows (https://github.com/huggingface/safetensors, "Format"). The library
# writes only from tensors that are all in memory, and gives no digest of what it wrote.

METADATA = "__metadata__"
"""The header's key for metadata; no tensor can have this name."""
Entry = tuple[torch.dtype, tuple[int, ...]]


def header(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file in which `tensors` (element type and shape) follow in their order."""
    entries: dict[str, object] = {METADATA: dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        assert at % dtype.itemsize == 0, "wider element types come first"
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def values(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `raw`: a tensor of one dim over the bytes, without a copy."""
    return torch.frombuffer(data, dtype=dtype)


# Validation of a checkpoint's marker and indexes before any name or offset in them is used.
#
# A digest proves that a file is what somebody wrote, not that this program wrote it. So every name, number and range
# that a reader uses must be one that the writer can have written:
#
# - The files are those that the format names, and assets with plain names: no path leaves the folder.
# - A block's bytes lie within its file and match its box in number, and no two blocks share any: reading never takes
#   more memory than the checkpoint takes on the disk.
# - The blocks of a tensor lie within it and contain each of its elements once: no element stays uninitialised.
#
# Each function raises ValueError, with the place and the reason in words.

LARGEST_ASSET = 256 * 2**20
"""Maximum bytes of a file other than the tensors'; each is read whole."""
DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_NAMES}
"""The element types that a checkpoint may hold, by their names in the indexes."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 2**63 - 1
_MOST_DIMS = 32
_MOST_RANKS = 2**20
_MOST_PAIRS = 10**8
"""Maximum number of pairs of blocks to compare."""


def marker(body: dict[str, Any]) -> None:
    """Validates ``commit.json``: as many ranks as the mesh has, their files by the format's names, and nothing else."""
    _need(body.get("format") == FORMAT, f"its format is not {FORMAT!r}")
    _need(_is_count(body.get("step")), "its step is no count")
    world: Any = body.get("world")
    mesh: Any = body.get("mesh")
    _need(_is_count(world) and 1 <= world <= _MOST_RANKS, "its world is no number of ranks")
    _need(
        isinstance(mesh, list) and len(mesh) <= _MOST_DIMS and all(map(_is_axis, mesh)),
        "its mesh is no list of axes",
    )
    _need(math.prod(size for _, size in mesh) == world, "its mesh has another number of ranks than its world")
    listed: Any = body.get("ranks")
    _need(isinstance(listed, list) and len(listed) == world, "its ranks are not as many as its world")
    ranks = [{"data": data_file(rank), "index": index_file(rank)} for rank in range(world)]
    _need(listed == ranks, "its ranks do not have the files that the format names")
    files: Any = body.get("files")
    _need(isinstance(files, dict), "its files are no mapping")
    known = {file for rank in ranks for file in rank.values()}
    for name, written in files.items():
        folder, slash, asset = name.partition("/")
        is_asset = bool(slash) and folder == ASSETS and is_plain_name(asset)
        _need(name in known or is_asset, f"it names the file {_shown(name)}, which no checkpoint has")
        digests = isinstance(written, dict) and _is_digest(written.get("sha256"))
        _need(digests and _is_count(written.get("bytes")), f"{name} has no size and digest")
        limit = LARGEST_ASSET if is_asset else _MOST if name.endswith(".safetensors") else LARGEST
        _need(written["bytes"] <= limit, f"{name} is larger than such a file can be")
    missing = sorted(known - files.keys())
    _need(not missing, f"{missing[0] if missing else ''} has no size and digest")
    _need(isinstance(body.get("state"), dict), "its state is no mapping")


def index(body: dict[str, Any], rank: int, marked: Mapping[str, Any]) -> None:
    """Validates the index of one rank against a valid marker."""
    _need(body.get("rank") == rank, f"it is not that of rank {rank}")
    _need(body.get("step") == marked["step"], "it is of another step")
    _need(body.get("mesh") == marked["mesh"], "it is of another mesh")
    file = data_file(rank)
    written = marked["files"][file]
    data = {"file": file, "bytes": written["bytes"], "sha256": written["sha256"]}
    _need(body.get("data") == data, f"it is of another {file}")
    tensors: Any = body.get("tensors")
    _need(isinstance(tensors, dict), "its tensors are no mapping")
    ranges: list[tuple[int, int]] = []
    for name, tensor in tensors.items():
        _need(0 < len(name) <= 4096 and name.isprintable(), f"a tensor's name is {_shown(name)}")
        _need(isinstance(tensor, dict), f"{name} is no mapping")
        shape: Any = tensor.get("shape")
        dtype: Any = tensor.get("dtype")
        pieces: Any = tensor.get("pieces")
        _need(_is_shape(shape), f"the shape of {name} is none")
        _need(
            isinstance(dtype, str) and dtype in DTYPES, f"the element type of {name} is none that is stored"
        )
        _need(isinstance(tensor.get("layout"), str), f"the layout of {name} is no text")
        _need(isinstance(pieces, list), f"the blocks of {name} are no list")
        for piece in pieces:
            _need(isinstance(piece, dict), f"a block of {name} is no mapping")
            ranges.append(_block(piece, name, shape, DTYPES[dtype].itemsize, written["bytes"]))
    ranges.sort()
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        _need(stop <= start, f"two blocks share bytes of {file}")


def _block(piece: dict[str, Any], name: str, shape: list[int], itemsize: int, size: int) -> tuple[int, int]:
    """The range of a block's bytes in a file of `size` bytes."""
    offset: Any = piece.get("offset")
    extent: Any = piece.get("size")
    span: Any = piece.get("bytes")
    _need(
        _is_shape(offset)
        and _is_shape(extent)
        and len(offset) == len(extent) == len(shape)
        and all(o + e <= length for o, e, length in zip(offset, extent, shape, strict=True)),
        f"a block of {name} does not lie within it",
    )
    _need(
        isinstance(span, list)
        and len(span) == 2
        and all(map(_is_count, span))
        and span[0] <= span[1] <= size
        and span[1] - span[0] == math.prod(extent) * itemsize,
        f"a block of {name} has other bytes than its elements take",
    )
    _need(_is_digest(piece.get("sha256")), f"a block of {name} has no digest")
    return span[0], span[1]


def whole(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Checks that the blocks of a tensor, from all ranks, contain each of its elements exactly once."""
    found = [box for box in boxes if math.prod(box.size)]
    held = sum(math.prod(box.size) for box in found)
    _need(held == math.prod(shape), f"{held} of {math.prod(shape)} elements of {name} are there")
    if len(found) < 2 or not shape:
        _need(len(found) < 2, f"{name} is there twice")
        return
    start = np.array([box.offset for box in found], np.int64)
    stop = start + np.array([box.size for box in found], np.int64)
    # Along the dim that is cut most, a block can only meet those that begin before it ends.
    dim = max(range(len(shape)), key=lambda d: len(np.unique(start[:, d])))
    order = np.argsort(start[:, dim], kind="stable")
    start, stop = start[order], stop[order]
    last = np.searchsorted(start[:, dim], stop[:, dim], "left")
    pairs = int((last - np.arange(len(found))).sum())
    _need(pairs <= _MOST_PAIRS, f"{name} is in {len(found)} blocks, more than can be compared")
    for i in range(len(found) - 1):
        others = slice(i + 1, int(last[i]))
        meets = (start[others] < stop[i]) & (start[i] < stop[others])
        _need(not meets.all(axis=1).any(), f"two blocks of {name} hold the same elements")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMS
        and all(map(_is_count, value))
        and math.prod(max(length, 1) for length in value) <= _MOST
    )


def _is_axis(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    name, size = value
    return isinstance(name, str) and _is_count(size) and 1 <= size <= _MOST_RANKS


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _shown(name: str) -> str:
    """An untrusted name, shortened to one line."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")
