"""Reads documents from sources: text files, JSON lines and datasets folders."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.data.document import Document, Text, from_record
from hyper_parallel.data.sources import Source
from hyper_parallel.errors import DataError, nearest

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def documents(sources: Sequence[Source], key: str) -> Iterator[Document]:
    """Every document of the sources of `data.<key>`, in order; one file at a time is in memory.

    Raises DataError, with the file and the line or the byte, at the first unreadable record.
    """
    for source in sources:
        match source.kind:
            case "text":
                yield from _text(source)
            case "jsonl":
                yield from _jsonl(source)
            case "datasets":
                yield from _datasets(source, key)


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


def _jsonl(source: Source) -> Iterator[Document]:
    offset, found = 0, False
    try:
        with open(source.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{source.path}, line {number}"
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    document = from_record(_parse(line, where, offset), where)
                    if document is not None:
                        found = True
                        yield document
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


def _datasets(source: Source, key: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source.path} is a datasets folder; to read it, pip install 'hyper-parallel[datasets]'"
        ) from None
    try:
        loaded = datasets.load_from_disk(str(source.path))
    except Exception as error:  # the library raises its own, Arrow's and the system's exceptions alike
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{source.path} cannot be read as a folder that datasets.save_to_disk wrote: {reason}"
        ) from error
    table = _split(loaded, source.path, key) if isinstance(loaded, datasets.DatasetDict) else loaded
    rows = iter(table)
    found = False
    for number in range(len(table)):
        where = f"{source.path}, row {number}"
        try:
            row = next(rows)
        except Exception as error:  # a truncated Arrow file shows only when its rows are read
            raise DataError(f"{where}: cannot be read, {' '.join(str(error).split())[:200]}") from error
        document = from_record(row, where)
        if document is not None:
            found = True
            yield document
    if not found:
        raise DataError(f"{source.path} is empty; it has no rows with text")


def _split(loaded: Any, path: Path, key: str) -> Any:
    wanted = ("train",) if key == "train" else ("validation", "eval", "test")
    for name in wanted:
        if name in loaded:
            return loaded[name]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    splits = ", ".join(loaded)
    hint = nearest(wanted[0], loaded)
    raise DataError(
        f"{path} has the splits {splits}, none of them {' or '.join(repr(name) for name in wanted)}{hint}; "
        f"name the folder of one split in data.{key}, for example {path / next(iter(loaded), 'train')}"
    )
