"""The tokenized corpus: flat arrays on disk, built once and then memory-mapped.

- `tokens`, u16 or u32, [T]: all documents one after the other, each with its end token.
- `offsets`, i64, [D + 1]: document d is tokens[offsets[d] : offsets[d + 1]].
- `loss`, u8, [T]: 1 for each token whose prediction contributes to the loss; absent if all do.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data import chat
from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build
from hyper_parallel.data.document import Answer, Chat, Document, Text, is_held_out
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import DataError

log = logging.getLogger(__name__)

_FORMAT = 2
# A batch for the tokenizer's own threads, and the longest text that one of them takes in one piece.
_BATCH_CHARACTERS = 4 * 2**20
_PIECE_CHARACTERS = 2**20
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
    key = f"corpus-{_FORMAT}-{key}-{tokenizer.digest}-{holdout!r}"

    def read() -> tuple[Corpus, Corpus] | None:
        rows = tokenizer.vocab_size
        train, held_out = _read(folder, f"{key}-train", rows), _read(folder, f"{key}-eval", rows)
        return None if train is None or held_out is None else (train, held_out)

    def build() -> None:
        log.info("tokenizing into %s", folder)
        if not _build(folder, key, documents(), tokenizer, holdout) and holdout:
            _build(folder, key, documents(), tokenizer, 0.0)

    return read_or_build(folder, key, read, build)


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int] | None]]:
    """The ids of each document, with 1 for each id that contributes to the loss; None if all of them do.

    A text or a response ends with the end-of-text token. A prompt and its response are tokenized separately, so that
    no token holds parts of both, as in generation. A conversation ends as its template ends it, plus the end-of-text
    token only if the template's last answer has no end-of-turn token.
    """
    for batch in _batches(documents):
        yield from _encode(batch, tokenizer)


def _encode(batch: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int] | None]]:
    pieces: list[str] = []
    for document in batch:
        pieces += _plain_pieces(document)
    plain = iter(tokenizer.encode_raw(pieces))

    template = _template_for(batch, tokenizer)
    own_marks = template is not None and chat.marks_answers(template)
    rendered = [
        chat.render(tokenizer.transformers, document)
        for document in batch
        if isinstance(document, Chat) and not own_marks
    ]
    conversations = zip(rendered, tokenizer.encode_template([item.text for item in rendered]), strict=True)

    beginning, end = tokenizer.beginning, tokenizer.eos
    for document in batch:
        match document:
            case Text():
                ids = [token for _ in _plain_pieces(document) for token in next(plain)]
                yield [*beginning, *ids, end], None
            case Answer():
                prompt, response = next(plain), next(plain)
                mask = [0] * (len(beginning) + len(prompt)) + [1] * (len(response) + 1)
                yield [*beginning, *prompt, *response, end], mask
            case Chat() if own_marks:
                yield chat.tokens(tokenizer.transformers, document)
            case Chat():
                yield _conversation(*next(conversations), end=end)


def _template_for(batch: list[Document], tokenizer: Tokenizer) -> str | None:
    """The chat template, required if a batch has conversations."""
    template = tokenizer.chat_template
    if template is None:
        for document in batch:
            if isinstance(document, Chat):
                whose = f"the tokenizer in {tokenizer.folder}" if tokenizer.folder else "the tokenizer"
                raise DataError(
                    f"{document.where}: 'messages' need a chat template, and {whose} has none; set "
                    "data.tokenizer.chat_template to a Jinja file with the template that the model is to answer in, or "
                    "to 'builtin' for a simple one"
                )
    return template


def _plain_pieces(document: Document) -> list[str]:
    match document:
        case Text():
            return _cut(document.text)
        case Answer():
            return [document.prompt, document.response]
        case Chat():
            return []


def _conversation(
    rendered: chat.Rendered, encoded: tuple[list[int], list[tuple[int, int]]], end: int
) -> tuple[list[int], list[int]]:
    ids, spans = encoded
    # A token bears loss when it holds any character of an answer: some tokenizers count the space before a
    # word, which the template wrote, to the word's token.
    mask = [0] * len(ids)
    answers = iter(rendered.answers)
    answer = next(answers, None)
    for index, (first, last) in enumerate(spans):
        while answer is not None and answer[1] <= first:
            answer = next(answers, None)
        if answer is not None and last > answer[0]:
            mask[index] = 1
    if rendered.open:
        return [*ids, end], [*mask, 1]
    return ids, mask


def _cut(text: str) -> list[str]:
    """A text in chunks of at most 1 Mi characters, cut after a line break if possible.

    Tokenizing a text takes many times its memory and one thread; chunks bound the memory and occupy all threads.
    """
    pieces, start = [], 0
    while len(text) - start > _PIECE_CHARACTERS:
        cut = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1
        cut = cut if cut > start else start + _PIECE_CHARACTERS
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


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
            encoded = _encode(batch, tokenizer)
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
