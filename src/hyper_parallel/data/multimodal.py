"""Rows of images, sound and text for training and evaluation: one document each, made by the model's own processor.

Rows are not packed. Rows that are computed at the same time, on whatever ranks, are padded to the longest of them, so
that all ranks compute the same shapes of text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hyper_parallel.config.data import BUILTIN, DataConfig
from hyper_parallel.data.dealing import RowWork
from hyper_parallel.data.order import Order
from hyper_parallel.data.processor import Processor
from hyper_parallel.data.read_documents import DocumentReader
from hyper_parallel.data.sample_index import MediaDigests, SampleIndex, indexes, media_digests
from hyper_parallel.data.sources import Digests, Source, digests, find
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class RowCost:
    """The work of a row, known before it is loaded."""

    tokens: int
    """Positions of the language model, without padding."""
    media_tokens: int
    """Of these, positions that stand for media."""
    values: int
    """Numbers that encoders read: in proportion to patches and frames."""
    media: int
    """Images and recordings."""


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

    def cost(self, row: int) -> RowCost:
        """The work of a row."""
        entry = self._index.entry(row)
        return RowCost(entry.tokens, entry.media_tokens, entry.values, entry.media)

    def work(self, row: int, encoder: float) -> RowWork:
        """As `Rows`."""
        entry = self._index.entry(row)
        return RowWork(entry.tokens, encoder * entry.values / self._values_per_token)

    def positions(self, rows: Sequence[int], multiple: int = 1) -> int:
        """As `Rows`."""
        longest = max(self._index.entry(row).tokens for row in rows)
        return -(-longest // multiple) * multiple

    def batch(self, rows: Sequence[int], length: int | None = None) -> dict[str, Tensor]:
        """As `Rows`. Raises DataError for a file that has changed since the run began."""
        entries = [self._index.entry(row) for row in rows]
        documents = [self._reader.read(entry.place) for entry in entries]
        made = self._processor.batch(documents, length or self.positions(rows))
        for entry, document, known in zip(
            entries, documents, made["attention_mask"].sum(1).tolist(), strict=True
        ):
            if entry.tokens != known:
                raise DataError(
                    f"{document.where}: it had {entry.tokens} tokens when the run began, and has {known} now; do not "
                    "change data while a run reads them"
                )
        return made


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
        train: Found,
        held_out: Found | None,
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
        """No prompt: text cannot be sampled beside images yet."""
        return []


@dataclass(frozen=True, slots=True)
class Found:
    """Sources with the digests of their text and of the media that they name."""

    sources: list[Source]
    text: Digests
    media: MediaDigests | None

    @classmethod
    def of(cls, config: DataConfig, key: str, family: str, kinds: Collection[str]) -> Found:
        """Those of `data.<key>`, for a model `family` that takes media of these `kinds`. Raises DataError."""
        sources = find(getattr(config, key), config.format, key)
        return cls(sources, digests(sources), media_digests(sources, key, family, kinds))

    @property
    def key(self) -> str:
        """Of the cache."""
        return f"{self.text.reading}-{self.media.reading if self.media else ''}"
