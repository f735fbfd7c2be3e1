"""A Hugging Face folder of safetensors: where it keeps each tensor of a model, and slices of it.

Folders outlive the code that wrote them. Where Transformers has renamed modules since, or put the experts of a layer
into one tensor, the published folders still have the older form; it is read here, a slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from hyper_parallel.errors import CheckpointError
from hyper_parallel.shard.safetensors_pread import PreadFile
from hyper_parallel.untrusted import is_plain_name, open_regular, read_json

_RENAMED = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    (".mlp.", ".block_sparse_moe."),
)
"""(what a model's names have now, what folders have): vision-language models before Transformers 4.52, and Mixtral."""

_EXPERT_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""One tensor of all experts to the tensors of one expert that lie in it, one after the other on their first dim."""


_LARGEST_INDEX = 64 * 2**20
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "BOOL")
"""Element types whose values are the weights (or, whole numbers, buffers) themselves."""
_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Source(Protocol):
    """A tensor that is read in slices: one in memory, one in a file, or one assembled from several."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor: ...


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

    def find(self, name: str, model: Any, shape: tuple[int, ...]) -> Source | None:
        """The tensor of a model's parameter or buffer, under whichever name the folder keeps it; None if it has none.

        Raises CheckpointError when it has another shape, or its file cannot be read.
        """
        stored = next((candidate for candidate in _names(name, model) if candidate in self._files), None)
        if stored is None:
            return self._experts(name, model, shape)
        found: Source = self._slice(stored, shape)
        return found

    def _slice(self, stored: str, shape: tuple[int, ...]) -> Any:
        path = self._files[stored]
        try:
            piece = self._opened_file(path).get_slice(stored)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        if tuple(piece.get_shape()) != shape:
            raise CheckpointError(
                f"{path}: {stored!r} has shape {list(piece.get_shape())}, the model needs {list(shape)}"
            )
        if piece.get_dtype() not in _PLAIN:
            raise CheckpointError(
                f"{path}: {stored!r} is stored as {piece.get_dtype()}, which are weights only together with "
                f"scales or a table; give a folder of plain weights ({', '.join(_PLAIN[:4])})"
            )
        return piece

    def _opened_file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(self._open(path))
        return self._opened[path]

    def _experts(self, name: str, model: Any, shape: tuple[int, ...]) -> Source | None:
        prefix, _, own = name.rpartition(".")
        for parts in _EXPERT_PARTS.get(own, ()):
            for candidate in _names(prefix, model):
                if f"{candidate}.0.{parts[0]}.weight" in self._files:
                    one = (shape[1] // len(parts), *shape[2:])
                    names = [
                        [f"{candidate}.{expert}.{part}.weight" for part in parts]
                        for expert in range(shape[0])
                    ]
                    missing = [stored for row in names for stored in row if stored not in self._files]
                    if missing:
                        raise CheckpointError(
                            f"{self.folder}: no tensor {missing[0]!r}; an expert is missing"
                        )
                    return _Experts([[self._slice(stored, one) for stored in row] for row in names], one[0])
        return None


class _Experts:
    """[E, P · R, C] of the P tensors [R, C] of each of E experts."""

    def __init__(self, parts: list[list[Any]], rows: int) -> None:
        self.parts, self.rows = parts, rows

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        experts, rows, columns = slices
        start, stop, _ = rows.indices(self.rows * len(self.parts[0]))
        chosen = []
        for expert in range(*experts.indices(len(self.parts))):
            pieces = []
            for index, part in enumerate(self.parts[expert]):
                first = index * self.rows
                a, b = max(start - first, 0), min(stop - first, self.rows)
                if a < b:
                    pieces.append(part[a:b, columns])
            chosen.append(torch.cat(pieces))
        return torch.stack(chosen)


def _names(name: str, model: Any) -> Iterator[str]:
    """The names that a folder may have for a tensor or module of a model, the likeliest first."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    yield from (name, name.removeprefix(prefix), prefix + name)
    for now, before in _RENAMED:
        if now in name:
            yield name.replace(now, before)
    # Last, since a model that could tie two weights and does not has both in its folder.
    ties = getattr(model, "_tied_weights_keys", None) or {}
    if isinstance(ties, dict):
        yield from (key for key, target in ties.items() if target == name)


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
        return "; it is an adapter: name it as model.adapter, and the folder of its base model as model.path"
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
