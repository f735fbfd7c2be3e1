"""Slices of a safetensors file by pread(2), without mapping the file.

The library maps a whole file as private writable memory, which counts against a limit on the process's data
(RLIMIT_DATA) as if it had been read. Here only the rows that are asked for are in memory. The format: eight bytes with
the length of a JSON header, the header, and the bytes of all tensors at the offsets that it names.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.errors import CheckpointError
from hyper_parallel.untrusted import open_regular, parse_json

_LARGEST_HEADER = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class PreadFile:
    """A safetensors file; a context that closes it."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that cannot be read, or is no such file."""
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self._entries = self._header()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: cannot be read: no safetensors file ({error})") from None

    def __enter__(self) -> PreadFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def get_slice(self, name: str) -> PreadSlice:
        """One tensor, to be read in slices."""
        return PreadSlice(self, *self._entries[name])

    def read(self, at: int, out: torch.Tensor) -> None:
        """Fill uint8 [n] of the host from an offset."""
        view, done = out.numpy().data, 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], at + done)
            if not count:
                raise CheckpointError(f"{self.path}: ends at {at + done}, within a tensor")
            done += count

    def _header(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"its header would have {length} bytes")
        fields = parse_json(os.pread(self._file.fileno(), length, 8))
        found = {}
        for name, entry in fields.items():
            if name == "__metadata__":
                continue
            kind, shape = str(entry["dtype"]), tuple(int(count) for count in entry["shape"])
            first, last = (int(offset) for offset in entry["data_offsets"])
            if min(shape, default=0) < 0 or not 0 <= first <= last <= size - 8 - length:
                raise ValueError(f"{name!r:.80} lies outside of the file")
            if kind in _DTYPES and math.prod(shape) * _DTYPES[kind].itemsize != last - first:
                raise ValueError(f"{name!r:.80} has {last - first} bytes, which is not its shape's")
            found[name] = (kind, shape, 8 + length + first)
        return found


class PreadSlice:
    """A tensor of a file; indexing reads the rows that are asked for."""

    def __init__(self, file: PreadFile, kind: str, shape: tuple[int, ...], first: int) -> None:
        self._file, self._kind, self._shape, self._first = file, kind, shape, first

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The format's name of its element type."""
        return self._kind

    def __getitem__(self, slices: Any) -> torch.Tensor:
        slices = slices if isinstance(slices, tuple) else (slices,)
        dtype = _DTYPES[self._kind]
        if not self._shape:
            out = torch.empty(dtype.itemsize, dtype=torch.uint8)
            self._file.read(self._first, out)
            return out.view(dtype).view(())
        first, last, _ = (slices[0] if slices else slice(None)).indices(self._shape[0])
        rest = self._shape[1:]
        row = math.prod(rest) * dtype.itemsize
        out = torch.empty(max(last - first, 0) * row, dtype=torch.uint8)
        self._file.read(self._first + first * row, out)
        found = out.view(dtype).view(max(last - first, 0), *rest)
        return found[(slice(None), *slices[1:])] if len(slices) > 1 else found
