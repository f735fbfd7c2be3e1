"""Data sources: files, folders, globs, datasets folders and the Python standard library."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyper_parallel.config.data import HubData, as_hub
from hyper_parallel.errors import DataError, nearest
from hyper_parallel.hub.hub_id import reading

Kind = Literal["text", "jsonl", "datasets"]
STDLIB = "python-stdlib"
Declared = str | HubData | list[str | HubData]
"""What `data.train` or `data.eval` may be."""

# Third-party packages and tests are not the standard library's own text; `_sysconfigdata` describes one
# machine.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_STDLIB_EXCLUDED_PREFIX = "_sysconfigdata"
_JSONL_SUFFIXES = {".jsonl", ".ndjson"}
_TABLES = {
    ".json": "JSON that is not one object a line",
    ".csv": "a table",
    ".tsv": "a table",
    ".parquet": "a table",
    ".arrow": "a table",
    ".xlsx": "a table",
}
"""Files with records that a text would not have, as one names them for training."""
_DATASETS_MARKS = ("dataset_dict.json", "state.json")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of text or JSON lines, or one datasets folder."""

    path: Path
    kind: Kind
    named: bool
    """Whether the user named this file itself; an empty file is then an error."""
    stdlib: bool = False
    """Whether it is a file of the standard library, whose few files that are not UTF-8 are skipped."""
    tables: tuple[Path, ...] = ()
    """Arrow files with the rows of a data set of the Hub, whose id and commit `path` then shows."""
    identity: str | None = None
    """What names the content of these: the commit, the subset and the split."""

    def files(self) -> list[Path]:
        """The files whose bytes make up this source, in a fixed order."""
        if self.tables:
            return list(self.tables)
        return [self.path] if self.path.is_file() else _walk(self.path)

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.files())


def find(declared: Declared, kind: str, key: str) -> list[Source]:
    """The sources that `data.<key>` declares: in the order declared, and sorted within a folder or a glob.

    `kind` is DataConfig's `format`. Raises DataError for a missing or empty path.
    """
    sources: list[Source] = []
    for entry in declared if isinstance(declared, list) else [declared]:
        data = as_hub(entry, f"data.{key}")
        sources += _find(str(entry), kind, key) if data is None else [_of_hub(data, key)]
    return sources


@dataclass(frozen=True, slots=True)
class Digests:
    """Two digests of the same sources; neither depends on paths."""

    reading: str
    """The cache key. It also covers how the sources are declared: one file has different keys if it is declared by
    name, by folder or by glob, since an empty file is an error in the first case only.
    """
    content: str
    """Digest of the kinds, the order and the bytes of the files: the identity of the training text."""


def digests(sources: Sequence[Source]) -> Digests:
    """Reads every byte of the sources, once. Raises DataError."""
    reading, content = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for source in sources:
        reading.update(json.dumps([source.kind, source.named, source.stdlib]).encode())
        if source.identity is not None:
            reading.update(source.identity.encode())
            content.update(source.identity.encode())
            continue
        for path in source.files():
            found = _file_digest(path)
            reading.update(found)
            content.update(source.kind.encode() + found)
    return Digests(reading.hexdigest(), content.hexdigest())


def _of_hub(data: HubData, key: str) -> Source:
    from hyper_parallel.data.hub_data import tables_of

    found = tables_of(data, key)
    identity = json.dumps([data.hub_id.shown, data.name, found.split])
    return Source(Path(data.hub_id.shown), "datasets", named=True, tables=found.files, identity=identity)


def _file_digest(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _find(entry: str, kind: str, key: str) -> Iterator[Source]:
    if entry == STDLIB:
        return (Source(path, "text", named=False, stdlib=True) for path in _stdlib_files())
    path = Path(entry).expanduser()
    if not path.exists():
        matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(entry) else []
        files = [Path(match) for match in matches if os.path.isfile(match)]
        if not files:
            raise DataError(_missing(path, entry, key))
        return (Source(file, _kind(file, kind, key), named=False) for file in files)
    if not path.is_dir():
        if kind == "datasets":
            raise DataError(f"data.{key}: {entry} is a file, but format 'datasets' needs a folder")
        return iter([Source(path, _kind(path, kind, key, named=True), named=True)])
    if kind == "datasets" or (kind == "auto" and any((path / mark).is_file() for mark in _DATASETS_MARKS)):
        return iter([Source(path, "datasets", named=True)])
    files = _walk(path)
    if not files:
        raise DataError(f"data.{key}: the folder {entry} holds no files")
    return (Source(file, _kind(file, kind, key), named=False) for file in files)


def _walk(folder: Path) -> list[Path]:
    """All files below a folder in sorted order, without hidden files and folders."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(parent, name) for name in sorted(names) if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return found


def _stdlib_files() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    found: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _STDLIB_EXCLUDED)
        found += [
            Path(parent, name)
            for name in sorted(names)
            if name.endswith(".py") and not name.startswith(_STDLIB_EXCLUDED_PREFIX)
        ]
    if not found:
        raise DataError(f"{STDLIB}: {root} holds no .py files; this Python was installed without its sources")
    return found


def _kind(path: Path, declared: str, key: str, named: bool = False) -> Kind:
    if declared == "datasets":
        raise DataError(f"data.{key}: {path} is a file, but format 'datasets' needs a folder")
    if declared in ("text", "jsonl"):
        return "jsonl" if declared == "jsonl" else "text"
    suffix = path.suffix.lower()
    if suffix in _JSONL_SUFFIXES or (suffix == ".json" and _begins_with_an_object(path)):
        return "jsonl"
    if named and suffix in _TABLES:
        # Otherwise the run would learn the notation of the table.
        raise DataError(
            f"data.{key}: {path} is {_TABLES[suffix]}, whose records are not read; write each as a line of JSON, such "
            'as {"text": "..."} or {"messages": [...]}, into a file that ends in .jsonl, or set data.format to text to '
            "train on the file as it is"
        )
    return "text"


def _begins_with_an_object(path: Path) -> bool:
    """Whether the first line that is not blank is a whole JSON object, as in JSON lines but not in indented
    JSON."""
    try:
        with open(path, "rb") as file:
            first = next((line for line in file if line.strip()), b"")
        return isinstance(json.loads(first), dict)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        return False


def _missing(path: Path, entry: str, key: str) -> str:
    if glob.has_magic(entry):
        return f"data.{key}: no file matches {entry!r}"
    present = path.absolute()
    while not present.exists():
        missing, present = present.name, present.parent
    names = os.listdir(present) if present.is_dir() else []
    known = [*names, STDLIB] if present == path.absolute().parent else names
    where = "" if present == path.absolute().parent else f" ({present} has no {missing!r})"
    return f"data.{key}: {entry!r} does not exist{where}{nearest(missing, known)}{reading(entry, 'data set')}"
