"""An index of the samples of multimodal data: where each stands, and its size. Built once and cached.

To know the size of a sample its media are processed, as before a step. So the first start reads all of them, names what
cannot be read, and tells the cost of every row; later starts read the index.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build
from hyper_parallel.data.document import Chat, is_held_out
from hyper_parallel.data.media import NAMES, unreadable
from hyper_parallel.data.processor import Processor
from hyper_parallel.data.read_documents import Place, placed_documents
from hyper_parallel.data.sources import Source
from hyper_parallel.errors import DataError

log = logging.getLogger(__name__)

_FORMAT = 2
_ENDS = 64
"""As many as fit the first line of an array file."""


class Entry(NamedTuple):
    """One sample."""

    source: int
    offset: int
    number: int
    tokens: int
    media_tokens: int
    values: int
    media: int

    @property
    def place(self) -> Place:
        """Where its document stands."""
        return Place(self.source, self.offset, self.number)


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The samples of one part of the data, in the order of the sources."""

    table: NDArray[np.int64]
    """[samples, fields of `Entry`]."""
    conversations: bool = False
    """Whether any is a conversation."""
    ends: tuple[int, ...] = ()
    """The added special tokens with which answers end."""

    def __len__(self) -> int:
        return len(self.table)

    def entry(self, number: int) -> Entry:
        """One of them."""
        return Entry(*self.table[number].tolist())


class MediaDigests(NamedTuple):
    """Two digests of the media that documents name, of their names and sizes."""

    reading: str
    """The cache key; also covers when the files were changed."""
    content: str


def media_digests(
    sources: Sequence[Source], key: str, family: str, kinds: Collection[str]
) -> MediaDigests | None:
    """Looks at every file of media that the documents of `data.<key>` name; None where they name none.

    Raises DataError for a file that does not exist, and for media of other `kinds` than the model `family` takes.
    """
    reading, content = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    known: dict[Path, tuple[int, int]] = {}
    any_media = False
    for _, document in placed_documents(sources, key):
        for one in document.media:
            any_media = True
            if one.kind not in kinds:
                takes = " and ".join(f"{kind}s" if kind == "image" else "sound" for kind in sorted(kinds))
                raise DataError(
                    f"{document.where}: {NAMES[one.kind]}, and {family} takes {takes} beside text; leave the record out"
                )
            if one.path is None:
                continue  # a part of the record, whose bytes count
            if one.path not in known:
                try:
                    found = os.stat(one.path)
                except OSError as error:
                    raise DataError(unreadable(one, document.where, error)) from error
                known[one.path] = (found.st_size, found.st_mtime_ns)
            size, changed = known[one.path]
            content.update(json.dumps([*one.identity, size]).encode())
            reading.update(json.dumps([*one.identity, str(one.path), size, changed]).encode())
    return MediaDigests(reading.hexdigest(), content.hexdigest()) if any_media else None


def indexes(
    folder: Path, key: str, sources: Sequence[Source], of: str, processor: Processor, holdout: float
) -> tuple[SampleIndex, SampleIndex]:
    """The training and the held-out part of the documents of `data.<of>`, cached in `folder`.

    `key`: a digest of the documents and their media. As of `corpora`, the training part is empty only if there are no
    documents.
    """
    key = f"samples-{_FORMAT}-{key}-{processor.digest}-{holdout!r}"

    def read() -> tuple[SampleIndex, SampleIndex] | None:
        train, held_out = _read(folder, f"{key}-train"), _read(folder, f"{key}-eval")
        return None if train is None or held_out is None else (train, held_out)

    def build() -> None:
        log.info("measuring images and recordings into %s", folder)
        _build(folder, key, sources, of, processor, holdout)

    return read_or_build(folder, key, read, build)


class _Part:
    """The samples of one part, so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.conversations = False
        self.ends: set[int] = set()

    def write(self, path: Path) -> None:
        writer = ArrayWriter(path, "<i8")
        try:
            writer.append(np.array(self.entries, np.int64).reshape(-1))
            writer.commit(conversations=self.conversations, ends=sorted(self.ends)[:_ENDS])
        finally:
            writer.discard()


def _build(
    folder: Path, key: str, sources: Sequence[Source], of: str, processor: Processor, holdout: float
) -> None:
    train, held_out = _Part(), _Part()
    marks = processor.tokenizer.marks
    for place, document in placed_documents(sources, of):
        sample = processor.measure(document)
        if not sample.predicted:
            log.warning("%s: no token bears loss; it is left out", document.where)
            continue
        part = held_out if is_held_out(document, holdout) else train
        part.conversations |= isinstance(document, Chat)
        part.ends |= marks & sample.ends
        part.entries.append(
            Entry(*place, sample.tokens, sample.media_tokens, sample.values, len(document.media))
        )
    if not train.entries:  # a share that takes all takes none
        train, held_out = held_out, train
    train.write(folder / f"{key}-train.array")
    held_out.write(folder / f"{key}-eval.array")


def _read(folder: Path, name: str) -> SampleIndex | None:
    found = read_array(folder / f"{name}.array")
    if found is None:
        return None
    values, meta = found
    width = len(Entry._fields)
    if len(values) % width or (len(values) and int(values.min()) < 0):
        raise DataError(f"the cache {folder} holds another kind of index; delete {name}.array")
    ends: Iterable[int] = meta.get("ends", ())
    return SampleIndex(
        np.asarray(values).reshape(-1, width),
        bool(meta.get("conversations")),
        tuple(int(end) for end in ends),
    )
