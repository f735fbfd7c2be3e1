"""The tokenized corpus: flat arrays on disk, built once and then memory-mapped.

- `tokens`, u16 or u32, [T]: all documents one after the other, each with its end token.
- `offsets`, i64, [D + 1]: document d is tokens[offsets[d] : offsets[d + 1]].
- `loss`, u8, [T]: 1 for each token whose prediction contributes to the loss; absent if all do.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data import chat
from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build_parts
from hyper_parallel.data.document import Answer, Chat, Document, Text, is_held_out
from hyper_parallel.data.tokenizer import Encoding, Tokenizer
from hyper_parallel.errors import DataError, one_line

log = logging.getLogger(__name__)

_FORMAT = 3
# A batch for the tokenizer's own threads, which take one text each.
_BATCH_CHARACTERS = 4 * 2**20
# As many as fit the first line of an array file; templates have one to three.
_ENDS = 64


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized documents; the arrays may be mapped files."""

    tokens: NDArray[Any]
    """[T], unsigned."""
    offsets: NDArray[np.int64]
    """[D + 1], from 0 to T."""
    loss: NDArray[np.uint8] | None = None
    """[T], 1 for each token whose prediction contributes to the loss; None if all do."""
    conversations: bool = False
    """Whether any document is a conversation in the chat template."""
    ends: tuple[int, ...] = ()
    """The added special tokens with which answers end: the model's stop tokens."""

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1


def corpora(
    folder: Path, key: str, documents: Callable[[], Iterable[Document]], tokenizer: Tokenizer, holdout: float
) -> tuple[Corpus, Corpus]:
    """The training and the held-out part of some documents, tokenized and cached in `folder`.

    `key` is a digest of the documents. The held-out part may be empty; the training part is empty only if there are
    no documents: if the share would hold out all documents, it holds out none.
    """
    # Another release may render a template, or normalize a text, otherwise.
    releases = "-".join(version(package) for package in ("transformers", "tokenizers"))
    key = f"corpus-{_FORMAT}-{key}-{tokenizer.digest}-{releases}-{holdout!r}"

    def build() -> None:
        log.info("tokenizing into %s", folder)
        if not _build(folder, key, documents(), tokenizer, holdout) and holdout:
            _build(folder, key, documents(), tokenizer, 0.0)

    return read_or_build_parts(folder, key, lambda name: _read(folder, name, tokenizer.vocab_size), build)


def encode(batch: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int] | None]]:
    """The ids of each document, with 1 for each id that contributes to the loss; None if all of them do.

    The ids are those of the tokenizer's own call on the whole text, a prompt and its response joined; the end-of-text
    token follows where the call does not end with it. A conversation ends as its template ends it, plus the end-of-text
    token only if the template's last answer has no end-of-turn token. A token contributes to the loss if it holds any
    character of a response or an answer, also where it begins in the prompt: no character of an answer is left out.
    """
    _require_template(batch, tokenizer)
    rendered = [chat.render(tokenizer.transformers, one) for one in batch if isinstance(one, Chat)]
    try:
        texts = iter(tokenizer.encode_texts([one.text for one in batch if isinstance(one, Text)]))
        joined = [one.prompt + one.response for one in batch if isinstance(one, Answer)]
        answers = iter(tokenizer.encode_ranges(joined))
        conversations = zip(rendered, tokenizer.encode_template([one.text for one in rendered]), strict=True)
    except DataError:
        raise
    except Exception as error:  # the library's Rust part raises plain ones
        if len(batch) == 1:
            raise DataError(
                f"{batch[0].where}: the tokenizer does not take this text: {one_line(error)}"
            ) from error
        for document in batch:  # one of them is at fault
            yield from encode([document], tokenizer)
        return

    end = tokenizer.eos
    for document in batch:
        match document:
            case Text():
                ids = next(texts)
                yield (ids if ids[-1:] == [end] else [*ids, end]), None
            case Answer():
                yield _answer(document, next(answers), end)
            case Chat():
                yield _conversation(document, *next(conversations), end=end)


def _require_template(batch: Sequence[Document], tokenizer: Tokenizer) -> None:
    """Raise DataError if a batch has conversations and the tokenizer has no chat template."""
    for document in batch if tokenizer.chat_template is None else ():
        if isinstance(document, Chat):
            whose = f"the tokenizer in {tokenizer.folder}" if tokenizer.folder else "the tokenizer"
            raise DataError(
                f"{document.where}: 'messages' need a chat template, and {whose} has none; set "
                "data.tokenizer.chat_template to a Jinja file with the template that the model is to answer in, or "
                "to 'builtin' for a simple one"
            )


def _answer(document: Answer, encoding: Encoding, end: int) -> tuple[list[int], list[int]]:
    """The ids of a prompt with its response, and which bear loss: the response and what the tokenizer adds behind."""
    ids, ranges, prefix, suffix = encoding
    start = len(document.prompt)
    stop = len(ids) - suffix
    inner = bears_loss(ranges[prefix:stop], [(start, start + len(document.response))])
    mask = [0] * prefix + inner + [1] * suffix
    return (ids, mask) if ids[-1:] == [end] else ([*ids, end], [*mask, 1])


def _conversation(
    document: Chat, rendered: chat.Rendered, encoded: tuple[list[int], list[tuple[int, int]]], end: int
) -> tuple[list[int], list[int]]:
    ids, ranges = encoded
    mask = bears_loss(ranges, rendered.answers)
    if not any(mask) and not rendered.open:
        raise DataError(f"{document.where}: the tokenizer has no token for any character of the answers")
    return ([*ids, end], [*mask, 1]) if rendered.open else (ids, mask)


def bears_loss(ranges: Iterable[tuple[int, int]], answers: Iterable[tuple[int, int]]) -> list[int]:
    """1 for each token that holds a character of an answer, of tokens and answers as ranges of characters.

    A token of no character, such as a space that the tokenizer inserts, belongs to the character behind it.
    """
    spans = sorted(span for span in answers if span[0] < span[1])
    starts = [start for start, _ in spans]
    mask = []
    for first, last in ranges:
        place = bisect_left(starts, max(last, first + 1)) - 1
        mask.append(int(place >= 0 and spans[place][1] > first))
    return mask


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content())
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


class _CorpusWriter:
    """Writes one corpus; the offsets are written last and complete it."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        wide = tokenizer.vocab_size > 2**16
        self._tokens = ArrayWriter(folder / f"{name}-tokens.array", "<u4" if wide else "<u2")
        self._loss = ArrayWriter(folder / f"{name}-loss.array", "|u1")
        self._offsets = ArrayWriter(folder / f"{name}-offsets.array", "<i8")
        self._lengths: list[int] = []
        self._masked = self._conversations = False
        self._marks, self._ends = tokenizer.marks, set[int]()

    def append(self, document: Document, ids: list[int], mask: list[int] | None) -> None:
        self._conversations |= isinstance(document, Chat)
        last = zip(ids, mask or (), [*(mask or ())[1:], 0], strict=bool(mask))
        self._ends |= self._marks & {token for token, bears, more in last if bears and not more}
        self._lengths.append(len(ids))
        self._tokens.append(np.array(ids, np.uint32))
        self._masked |= mask is not None
        self._loss.append(np.ones(len(ids), np.uint8) if mask is None else np.array(mask, np.uint8))

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def commit(self) -> None:
        self._tokens.commit()
        if self._masked:
            self._loss.commit()
        self._offsets.append(np.array([0, *itertools.accumulate(self._lengths)], np.int64))
        self._offsets.commit(
            masked=self._masked, conversations=self._conversations, ends=sorted(self._ends)[:_ENDS]
        )

    def discard(self) -> None:
        for writer in (self._tokens, self._loss, self._offsets):
            writer.discard()


def _build(
    folder: Path, key: str, documents: Iterable[Document], tokenizer: Tokenizer, holdout: float
) -> bool:
    """Writes both parts; writes nothing and returns False if the holdout left no document to train on."""
    train = _CorpusWriter(folder, f"{key}-train", tokenizer)
    held_out = _CorpusWriter(folder, f"{key}-eval", tokenizer)
    try:
        for batch in _batches(documents):
            sides = [is_held_out(document, holdout) for document in batch]
            encoded = encode(batch, tokenizer)
            for document, side, (ids, mask) in zip(batch, sides, encoded, strict=True):
                (held_out if side else train).append(document, ids, mask)
        if held_out.documents and not train.documents:
            return False
        train.commit()
        held_out.commit()
    finally:
        train.discard()
        held_out.discard()
    return True


def _read(folder: Path, name: str, vocab_size: int) -> Corpus | None:
    offsets = read_array(folder / f"{name}-offsets.array")
    tokens = read_array(folder / f"{name}-tokens.array")
    if offsets is None or tokens is None:
        return None
    loss = None
    if offsets[1].get("masked"):
        loss = read_array(folder / f"{name}-loss.array")
        if loss is None:
            return None
    meta = offsets[1]
    corpus = Corpus(
        tokens[0],
        offsets[0],
        None if loss is None else loss[0],
        conversations=bool(meta.get("conversations")),
        ends=tuple(meta.get("ends", ())),
    )
    ends, count = corpus.offsets, len(corpus.tokens)
    fits = len(ends) and ends[0] == 0 and ends[-1] == count and bool((np.diff(ends) >= 0).all())
    # Digests say that an array is whole, not who wrote it; a row that the embedding does not have would end the run.
    fits = fits and (not count or int(corpus.tokens.max()) < vocab_size)
    fits = fits and all(isinstance(end, int) and 0 <= end < vocab_size for end in corpus.ends)
    if not fits or (loss is not None and len(loss[0]) != count):
        raise DataError(f"the cache {folder} holds parts of different corpora; delete {name}-*")
    return corpus
