"""Rows of images, sound and text for training and evaluation: one document each, made by the model's own processor.

Rows are not packed. Rows that are computed at the same time, on whatever ranks, are padded to the longest of them, so
that all ranks compute the same shapes of text. A cached index has the place and the size of each sample.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.config.data import BUILTIN, DataConfig
from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build_parts
from hyper_parallel.data.document import Chat, is_held_out
from hyper_parallel.data.media import NAMES, unreadable
from hyper_parallel.data.order import Order, RowWork
from hyper_parallel.data.packing import IGNORED
from hyper_parallel.data.processor import Processor
from hyper_parallel.data.read_documents import DocumentReader, Place, placed_documents
from hyper_parallel.data.sources import Digests, Source, digests, find
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.units import round_up

# An index of the samples of multimodal data: where each stands, and its size. Built once and cached.
#
# To know the size of a sample its media are processed, as before a step. So the first start reads all of them, names
# what cannot be read, and tells the cost of every row; later starts read the index.

log = logging.getLogger(__name__)

_FORMAT = 2
_ENDS = 64
"""As many as fit the first line of an array file."""
_SHOWN = 32
"""Rows among which that of a sample is looked for."""
_KINDS = "token_type_ids"
"""How the names of the kinds of tokens end."""


class Entry(NamedTuple):
    """One sample: where its document stands, and its work, known before it is loaded."""

    source: int
    offset: int
    number: int
    tokens: int
    """Positions of the language model, without padding."""
    media_tokens: int
    """Of these, positions that stand for media."""
    values: int
    """Numbers that encoders read: in proportion to patches and frames."""
    media: int
    """Images and recordings."""

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

    def build() -> None:
        log.info("measuring images and recordings into %s", folder)
        _build(folder, key, sources, of, processor, holdout)

    return read_or_build_parts(folder, key, lambda name: _read(folder, name), build)


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


class MultimodalRows:
    """Rows of one part of the data; `len` is their number."""

    several = False

    def __init__(
        self, index: SampleIndex, reader: DocumentReader, processor: Processor, sequence: int
    ) -> None:
        """Raises DataError for a row of more than `sequence` positions, which is never cut."""
        self.sequence = sequence
        self.documents = len(index)
        self._index, self._reader, self._processor = index, reader, processor
        tokens, values = (int(index.table[:, at].sum()) for at in (4, 5))
        self._values_per_token = values / tokens if tokens and values else 1.0
        for number in (index.table[:, 3] > sequence).nonzero()[0][:1].tolist():
            entry = index.entry(number)
            media = f", {entry.media_tokens} of them of its media," if entry.media_tokens else ""
            raise DataError(
                f"{reader.where(entry.place)}: the sample has {entry.tokens} tokens{media} and data.sequence is "
                f"{sequence}; raise data.sequence, shorten the text, or have the processor make its images smaller "
                f"(size in {processor.folder})"
            )

    def __len__(self) -> int:
        return len(self._index)

    def cost(self, row: int) -> Entry:
        """The work of a row."""
        return self._index.entry(row)

    def work(self, row: int, encoder: float) -> RowWork:
        """As `Rows`."""
        entry = self._index.entry(row)
        return RowWork(entry.tokens, encoder * entry.values / self._values_per_token)

    def positions(self, rows: Sequence[int], multiple: int = 1) -> int:
        """As `Rows`."""
        longest = max(self._index.entry(row).tokens for row in rows)
        return round_up(longest, multiple)

    def batch(self, rows: Sequence[int], length: int | None = None) -> dict[str, Tensor]:
        """As `Rows`. Raises DataError for a file that has changed since the run began."""
        entries = [self._index.entry(row) for row in rows]
        documents = [self._reader.read(entry.place) for entry in entries]
        batch = self._processor.batch(documents, length or self.positions(rows))
        for entry, document, known in zip(
            entries, documents, batch["attention_mask"].sum(1).tolist(), strict=True
        ):
            if entry.tokens != known:
                raise DataError(
                    f"{document.where}: it had {entry.tokens} tokens when the run began, and has {known} now; do not "
                    "change data while a run reads them"
                )
        return batch


@dataclass(frozen=True)
class MediaPrompt:
    """What a sample goes on from: the beginning of one row, and its media."""

    ids: list[int]
    media: Mapping[str, Tensor]
    """What the model takes beside ids: ``pixel_values``."""
    kinds: Mapping[str, Tensor]
    """The kinds of the prompt's tokens, int64 [1, prompt], of processors that say what stands for media."""

    @classmethod
    def of(cls, row: Mapping[str, Tensor], count: int) -> MediaPrompt:
        """The first `count` tokens of what `MultimodalRows.batch` made of one row."""
        kinds = {name: one[:, :count] for name, one in row.items() if name.endswith(_KINDS)}
        others = {"input_ids", "labels", "attention_mask", *kinds}
        media = {name: one for name, one in row.items() if name not in others}
        return cls(row["input_ids"][0, :count].tolist(), media, kinds)

    def inputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What the model takes of a row of these ids, which begins with the prompt and goes on with text."""
        text = len(ids) - len(self.ids)
        kinds = {name: torch.nn.functional.pad(one, (0, text)) for name, one in self.kinds.items()}
        return {"input_ids": torch.tensor([ids]), **self.media, **kinds}


class MultimodalData:
    """Documents with images or sound; the same in every process that reads the same files. As `TextData`."""

    media = True

    def __init__(
        self,
        config: DataConfig,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        seed: int,
        train: DataSources,
        held_out: DataSources | None,
    ) -> None:
        """`folder`: of the processor. Raises ConfigError and DataError."""
        template = config.tokenizer.chat_template
        if template == BUILTIN:
            raise ConfigError(
                "data.tokenizer.chat_template: the built-in template has no place for images; leave it out, or name a "
                "Jinja file"
            )
        self.processor = Processor(folder, tokenizer, None if template is None else tokenizer.chat_template)
        self.tokenizer = self.processor.tokenizer
        cache = Path(config.cache).expanduser()
        holdout = config.holdout if config.eval is None else 0.0
        index, evaluated = indexes(cache, train.key, train.sources, "train", self.processor, holdout)
        reader = of_eval = DocumentReader(train.sources, "train")
        if held_out is not None:
            evaluated, _ = indexes(
                cache, f"eval-{held_out.key}", held_out.sources, "eval", self.processor, 0.0
            )
            of_eval = DocumentReader(held_out.sources, "eval")
        if not len(index):
            raise DataError("data.train: there is no document with a token that bears loss")
        self.train = MultimodalRows(index, reader, self.processor, config.sequence)
        self.eval = MultimodalRows(evaluated, of_eval, self.processor, config.sequence)
        self.order = Order(seed, len(self.train))
        self.conversations = index.conversations
        self.stops: tuple[int, ...] = tuple(dict.fromkeys((self.tokenizer.eos, *index.ends)))
        self.identity: dict[str, Any] = {
            "the digest of the text of data.train": train.text.content,
            "the digest of the media of data.train": train.media.content if train.media else None,
            "data.holdout": holdout,
            "the number of training rows": len(self.train),
        }
        if held_out is not None:
            self.identity["the digest of the text of data.eval"] = held_out.text.content
            self.identity["the digest of the media of data.eval"] = (
                held_out.media.content if held_out.media else None
            )

    def prompt(self, given: str | None = None) -> list[int]:
        """The ids of `media_prompt`."""
        return self.media_prompt(given).ids

    def media_prompt(self, given: str | None = None) -> MediaPrompt:
        """The prompt of a sample: `given`, as a user's message without media; by default a held-out row up to its first
        answer, or a training row: the first one whose media all stand there, with media if there is one."""
        if given is not None:
            return MediaPrompt(self.processor.question(given), {}, {})
        rows = self.eval if len(self.eval) else self.train
        shown = sorted(range(min(len(rows), _SHOWN)), key=lambda row: rows.cost(row).media == 0)
        for row in shown:
            made = rows.batch([row])
            ids, first = made["input_ids"][0], int((made["labels"][0] != IGNORED).nonzero()[0]) + 1
            if not any((ids[first:] == one).any() for one in self.processor.placeholder_ids.values()):
                return MediaPrompt.of(made, first)
        return MediaPrompt([self.tokenizer.eos], {}, {})


@dataclass(frozen=True, slots=True)
class DataSources:
    """Sources with the digests of their text and of the media that they name."""

    sources: list[Source]
    text: Digests
    media: MediaDigests | None

    @classmethod
    def of(cls, config: DataConfig, key: str, family: str, kinds: Collection[str]) -> DataSources:
        """The sources of `data.<key>`, for a model `family` that takes media of these `kinds`. Raises DataError."""
        sources = find(getattr(config, key), config.format, key)
        return cls(sources, digests(sources), media_digests(sources, key, family, kinds))

    @property
    def key(self) -> str:
        """The key of the cache."""
        return f"{self.text.reading}-{self.media.reading if self.media else ''}"
