"""A Hugging Face folder of safetensors: its tensors by their names in the files, and slices of them.

Slices are read through the library, which maps files, or by pread(2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hyper_parallel.errors import CheckpointError
from hyper_parallel.untrusted_files import is_plain_name, open_regular, parse_json, read_json

_LARGEST_INDEX = 64 * 2**20
_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN = {**_FLOATING, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool}
"""Element types whose values are the weights (or, whole numbers, buffers) themselves."""


class Folder:
    """The tensors of a folder, opened as they are asked for; a context that closes the files."""

    def __init__(self, folder: Path, pread: bool = False) -> None:
        """`pread`: read slices without mapping the files. Raises CheckpointError when there is no safetensors file, or
        its index cannot be read."""
        self._open: Callable[[Path], Any] = PreadFile if pread else _opened
        self.folder, self._files = folder, _safetensors_of(folder, self._open)
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> frozenset[str]:
        """Names of all tensors, as the folder keeps them."""
        return frozenset(self._files)

    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor, as Transformers' `dtype="auto"` finds it; None where there is
        none."""
        for stored, path in self._files.items():
            kind = self._opened_file(path).get_slice(stored).get_dtype()
            if kind in _FLOATING:
                return _FLOATING[kind]
        return None

    def stored(self, name: str) -> StoredTensor:
        """A tensor by its name in the folder. Raises CheckpointError when its file cannot be read."""
        path = self._files[name]
        try:
            return StoredTensor(path, name, self._opened_file(path).get_slice(name))
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None

    def _opened_file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(self._open(path))
        return self._opened[path]


class StoredTensor:
    """A tensor of a file, read in slices."""

    def __init__(self, path: Path, name: str, piece: Any) -> None:
        self.name, self._path, self._piece = name, path, piece
        self._kind = piece.get_dtype()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self._piece.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """Its element type; bytes for a type that is no weight's."""
        return _PLAIN.get(self._kind, torch.uint8)

    def check(self) -> None:
        """Raise CheckpointError where the values are weights only together with other tensors."""
        if self._kind not in _PLAIN:
            raise CheckpointError(
                f"{self._path}: {self.name!r} is stored as {self._kind}, which are weights only together with scales "
                f"or a table; give a folder of plain weights ({', '.join(_FLOATING)})"
            )

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor:
        try:
            values: torch.Tensor = self._piece[slices]
        except SafetensorError as error:
            raise CheckpointError(f"{self._path}: {self.name!r} cannot be read: {error}") from None
        return values


def _safetensors_of(folder: Path, open_file: Callable[[Path], Any]) -> dict[str, Path]:
    """Tensor name to file, of a folder as `save_pretrained` writes it. The folder may be anybody's."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            found = read_json(index, _LARGEST_INDEX)
            files = found.get("weight_map") if isinstance(found, dict) else None
            if not isinstance(files, dict):
                raise ValueError("it has no 'weight_map' of tensors to files")
            strange = next((file for file in files.values() if not is_plain_name(file)), None)
            if strange is not None:
                raise ValueError(f"{strange!r:.80} names no file of the folder")
        except OSError as error:
            raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise CheckpointError(f"{index}: not an index of safetensors files: {error}") from None
        return {name: folder / file for name, file in files.items()}
    if not single.is_file():
        raise CheckpointError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json is there{_other_weights(folder)}"
        )
    with open_file(single) as file:
        return dict.fromkeys(file.keys(), single)


_LFS = b"version https://git-lfs"


def _other_weights(folder: Path) -> str:
    """A hint for a folder without safetensors."""
    if any(folder.glob("pytorch_model*.bin")):
        return (
            "; pytorch_model.bin is not read, since it can run code: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(another) writes safetensors"
        )
    if (folder / "adapter_config.json").is_file():
        return "; it is an adapter: merge it into its base model with peft's merge_and_unload, then save_pretrained"
    return "; copy the whole folder as save_pretrained wrote it, or leave model.path out for new weights (model.config)"


def _opened(path: Path) -> Any:
    """A safetensors file. The library refuses a header that does not fit to the file; pipes would keep it waiting."""
    try:
        open_regular(path).close()
        return safe_open(path, framework="pt")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (SafetensorError, MemoryError) as error:
        with open(path, "rb") as file:
            pointer = file.read(len(_LFS)) == _LFS
        reason = (
            "it is a pointer of Git LFS; run git lfs pull there"
            if pointer
            else f"{error}; copy it again, whole"
        )
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None


# Slices of a safetensors file by pread(2), without mapping the file.
#
# The library maps a whole file as private writable memory, which counts against a limit on the process's data
# (RLIMIT_DATA) as if it had been read. Here only the rows that are asked for are in memory. The format: eight bytes
# with the length of a JSON header, the header, and the bytes of all tensors at the offsets that it names.

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
