"""Reads documents from sources: text files, JSON lines and datasets folders; all in order, or one by its place."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.data.document import Document, Text, from_record
from hyper_parallel.data.hub_data import SPLITS, named_split
from hyper_parallel.data.sources import Source
from hyper_parallel.errors import DataError, nearest, one_line

_ROWS = 256
"""Rows of a dataset that are in memory at once."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Place(NamedTuple):
    """Where a document stands in the sources."""

    source: int
    offset: int
    """In bytes, of a line; 0 of a file or a row."""
    number: int
    """Of a line, from 1, or of a row, from 0."""


def documents(sources: Sequence[Source], key: str) -> Iterator[Document]:
    """Every document of the sources of `data.<key>`, in order; one file at a time is in memory.

    Raises DataError, with the file and the line or the byte, at the first unreadable record.
    """
    return (document for _, document in placed_documents(sources, key))


def placed_documents(sources: Sequence[Source], key: str) -> Iterator[tuple[Place, Document]]:
    """As `documents`, with the place of each."""
    for index, source in enumerate(sources):
        match source.kind:
            case "text":
                yield from ((Place(index, 0, 0), document) for document in _text(source))
            case "jsonl":
                yield from ((Place(index, *at), document) for *at, document in _jsonl(source))
            case "datasets":
                yield from ((Place(index, 0, at), document) for at, document in _datasets(source, key))


class DocumentReader:
    """Single documents of the sources of `data.<key>`, by their places."""

    def __init__(self, sources: Sequence[Source], key: str) -> None:
        self._sources, self._key = sources, key
        self._tables: dict[int, Any] = {}

    def where(self, place: Place) -> str:
        """The place in words."""
        source = self._sources[place.source]
        match source.kind:
            case "text":
                return str(source.path)
            case "jsonl":
                return _line_of(source, place.number)
            case "datasets":
                return _row_of(source, place.number)

    def read(self, place: Place) -> Document:
        """The document there. Raises DataError, also where there is none any more."""
        source, where = self._sources[place.source], self.where(place)
        found: Document | None = None
        match source.kind:
            case "text":
                found = next(_text(source), None)
            case "jsonl":
                try:
                    with open(source.path, "rb") as file:
                        file.seek(place.offset)
                        line = file.readline()
                except OSError as error:
                    raise DataError(f"cannot read {source.path}: {error.strerror}") from error
                line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    found = from_record(_parse(line, where, place.offset), where, source.path.parent)
            case "datasets":
                if place.source not in self._tables:
                    self._tables[place.source] = _table(source, self._key)
                found = next(_rows(self._tables[place.source], place.number, 1, source), None)
        if found is None:
            raise DataError(f"{where}: the record is gone; the file has changed while the run was using it")
        return found


def _text(source: Source) -> Iterator[Document]:
    try:
        data = source.path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}") from error
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        # A handful of the standard library's files declare another encoding (PEP 263); they are known and
        # left out.
        if source.stdlib:
            return
        offset = error.start + (len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0)
        raise DataError(_not_utf8(str(source.path), data, offset)) from None
    if text.strip():
        yield Text(str(source.path), text)
    elif source.named:
        raise DataError(f"{source.path} is empty; name a file with text, or leave it out")


def _line_of(source: Source, number: int) -> str:
    return f"{source.path}, line {number}"


def _row_of(source: Source, number: int) -> str:
    return f"{source.path}, row {number}"


def _jsonl(source: Source) -> Iterator[tuple[int, int, Document]]:
    offset, found = 0, False
    try:
        with open(source.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                where = _line_of(source, number)
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    document = from_record(_parse(line, where, offset), where, source.path.parent)
                    if document is not None:
                        found = True
                        yield offset, number, document
                offset += len(raw)
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}") from error
    if not found and source.named:
        raise DataError(f"{source.path} is empty; it needs one JSON object a line")


def _parse(line: bytes, where: str, offset: int) -> Any:
    try:
        # Without its end, behind which an error would be in column 1.
        return json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(where, line, error.start, offset)) from None
    except json.JSONDecodeError as error:
        what = (error.msg[0].lower() + error.msg[1:]).removesuffix(" at")
        raise DataError(
            f"{where}: broken JSON, {what} at column {error.colno}; each line must be one whole JSON object"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read ({error})") from None


def _not_utf8(where: str, data: bytes, at: int, offset: int = 0) -> str:
    what = f"byte 0x{data[at]:02x} at offset {offset + at}"
    if data.startswith(_UTF16):
        what += ", the mark of UTF-16"
    return f"{where} is not UTF-8 text ({what}); convert it, for example with iconv -t UTF-8, or leave it out"


def _datasets(source: Source, key: str) -> Iterator[tuple[int, Document]]:
    table, found = _table(source, key), False
    for first in range(0, len(table), _ROWS):
        for number, document in enumerate(_rows(table, first, _ROWS, source), first):
            if document is not None:
                found = True
                yield number, document
    if not found:
        raise DataError(f"{source.path} is empty; it has no rows with text")


def _table(source: Source, key: str) -> Any:
    """The rows as they are stored: images and recordings are not decoded."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source.path} is a datasets folder; to read it, pip install 'hyper-parallel[datasets]'"
        ) from None
    if source.tables:
        parts = [datasets.Dataset.from_file(str(path)) for path in source.tables]
        return datasets.concatenate_datasets(parts).with_format("arrow")
    try:
        loaded = datasets.load_from_disk(str(source.path))
    except Exception as error:  # the library raises its own, Arrow's and the system's exceptions alike
        raise DataError(
            f"{source.path} cannot be read as a folder that datasets.save_to_disk wrote: {one_line(error)}"
        ) from error
    table = _split(loaded, source.path, key) if isinstance(loaded, datasets.DatasetDict) else loaded
    return table.with_format("arrow")


def _rows(table: Any, first: int, count: int, source: Source) -> Iterator[Document | None]:
    try:
        records = table[first : first + count].to_pylist()
    except Exception as error:  # a truncated Arrow file shows only when its rows are read
        raise DataError(f"{_row_of(source, first)}: cannot be read, {one_line(error)}") from error
    for number, record in enumerate(records, first):
        yield from_record(_without_none(record), _row_of(source, number), source.path)


def _without_none(value: Any) -> Any:
    """A row without the keys that it does not have: a table has every key of a column's objects in each of them."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _split(loaded: Any, path: Path, key: str) -> Any:
    wanted = SPLITS[key]
    if (found := named_split(loaded, wanted)) is not None:
        return loaded[found]
    splits = ", ".join(loaded)
    hint = nearest(wanted[0], loaded)
    raise DataError(
        f"{path} has the splits {splits}, none of them {' or '.join(repr(name) for name in wanted)}{hint}; "
        f"name the folder of one split in data.{key}, for example {path / next(iter(loaded), 'train')}"
    )
