"""A Hugging Face folder of safetensors: its tensors by their names in the files, and slices of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hyper_parallel.errors import CheckpointError
from hyper_parallel.shard.safetensors_pread import PreadFile
from hyper_parallel.untrusted import is_plain_name, open_regular, read_json

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
        """Of the first floating-point tensor, as Transformers' `dtype="auto"` finds it; None where there is none."""
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
    """What to do about a folder without safetensors."""
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
