"""Packing of documents into rows of exactly S tokens (best-fit decreasing), and of rows into batches.

A document longer than S is cut into pieces of S and a rest. With `pack`, a full piece is a whole row, and shorter
pieces share rows by best-fit decreasing: the longest first, each into the fullest row that still has room (Ding et al.
2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830, section 3), so that no document is cut that fits
into a row. Without `pack` every piece is a row. The rest of a row is padding.

Position ids begin at 0 with every piece: Transformers takes a step other than +1 for the border of two documents, which
do not attend to each other. The padding at the end of a row continues the positions of the piece before it. So no token
of the piece attends to it (causal order), every query keeps at least one key (itself), positions stay below S, and a
row with one piece is no packed row, for which attention uses its causal path without a mask.

Labels are shifted: labels[i] is the token after input_ids[i] in the same document, also where that token
begins the next piece. So every token but a document's first is predicted exactly once. Pieces without any token that
contributes to the loss (a lone last token, a part of a prompt) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.data.corpus import Corpus
from hyper_parallel.data.order import RowWork

IGNORED = -100
"""The label of tokens that do not contribute to the loss, PyTorch's `ignore_index`."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Pieces in row order: row r holds the pieces rows[r] : rows[r + 1]."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]
    """The end of each piece's document."""
    rows: NDArray[np.int64]


class PackedText:
    """Packed rows of tokens; `len` is their number. The same corpus, sequence and `pack` always give the same rows."""

    def __init__(self, corpus: Corpus, sequence: int, *, pad: int, pack: bool = True) -> None:
        """`sequence`: tokens per row. `pad`: the id of padding."""
        self.sequence = sequence
        self.documents = corpus.documents
        """The number of documents."""
        self.tokens = len(corpus.tokens)
        """The number of tokens of all documents, end tokens included."""
        self._corpus = corpus
        self._pad = pad
        self._plan = _plan(corpus, sequence, pack)

    def __len__(self) -> int:
        return len(self._plan.rows) - 1

    @property
    def several(self) -> bool:
        """Whether any row holds pieces of several documents."""
        return len(self._plan.starts) > len(self)

    def positions(self, rows: Sequence[int], multiple: int = 1) -> int:
        """As `Rows`: each has `sequence`, which is checked to be a multiple elsewhere."""
        return self.sequence

    def work(self, row: int, encoder: float) -> RowWork:
        """As `Rows`: all are alike."""
        return RowWork(self.sequence)

    def batch(self, rows: Sequence[int], length: int | None = None) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` (shifted; the loss ignores -100) and `position_ids`: int64 [len(rows), sequence]."""
        assert length in (None, self.sequence), f"rows of {length}"
        shape = (len(rows), self.sequence)
        ids = np.full(shape, self._pad, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for index, row in enumerate(rows):
            assert 0 <= row < len(self), f"row {row} of {len(self)}"
            self._fill(row, ids[index], labels[index], positions[index])
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }

    def _fill(self, row: int, ids: NDArray[Any], labels: NDArray[Any], positions: NDArray[Any]) -> None:
        plan, corpus = self._plan, self._corpus
        at = length = 0
        for piece in range(int(plan.rows[row]), int(plan.rows[row + 1])):
            at += length
            start, length, end = int(plan.starts[piece]), int(plan.lengths[piece]), int(plan.ends[piece])
            ids[at : at + length] = corpus.tokens[start : start + length]
            positions[at : at + length] = np.arange(length)
            last = min(start + length + 1, end)
            targets = corpus.tokens[start + 1 : last].astype(np.int64)
            if corpus.loss is not None:
                targets[corpus.loss[start + 1 : last] == 0] = IGNORED
            labels[at : at + len(targets)] = targets
        positions[at + length :] = np.arange(length, len(ids) - at)


def _plan(corpus: Corpus, sequence: int, pack: bool) -> _Plan:
    starts, lengths, ends = _pieces(corpus, sequence)
    row = np.arange(len(starts), dtype=np.int64)
    if pack:
        short = np.flatnonzero(lengths < sequence)
        row[short] = len(starts) + _best_fit(lengths[short], sequence)
    # Rows are sorted by their first token, and the pieces of a row as in the corpus, so that the first rows are
    # as mixed as the rest.
    _, first, row = np.unique(row, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    row = rank[row]
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(len(first) + 1))
    return _Plan(starts[order], lengths[order], ends[order], bounds.astype(np.int64))


def _pieces(corpus: Corpus, sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Start, length and document's end of each piece of at most `sequence` tokens that contributes to the loss."""
    begin, end = corpus.offsets[:-1].astype(np.int64), corpus.offsets[1:].astype(np.int64)
    counts = -(-(end - begin) // sequence)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begin[document] + number * sequence
    ends = end[document]
    lengths = np.minimum(sequence, ends - starts)
    first, last = starts + 1, np.minimum(starts + lengths + 1, ends)
    bears = last > first
    if corpus.loss is not None and bears.any():
        padded = np.append(corpus.loss, np.uint8(0))
        bounds = np.stack([first[bears], last[bears]], 1).ravel()
        bears[bears] = np.add.reduceat(padded, bounds, dtype=np.int64)[::2] > 0
    return starts[bears], lengths[bears], ends[bears]


def _best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin of each length by best-fit decreasing; bins hold `capacity`, equal lengths are taken in order.

    The free sizes that some bin has are a bit set, so that one shift finds the smallest sufficient one.
    """
    bins = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[int]] = {}
    rooms = used = 0
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            candidates = by_room[room]
            chosen = candidates.pop()
            if not candidates:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, used
            used += 1
        bins[item] = chosen
        left = room - length
        if left:
            by_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins


class Rows(Protocol):
    """Rows to train or to evaluate on, the same in every process."""

    sequence: int
    """The most positions of a row."""
    documents: int

    def __len__(self) -> int: ...

    @property
    def several(self) -> bool:
        """Whether any row holds several documents."""

    def positions(self, rows: Sequence[int], multiple: int = 1) -> int:
        """Positions of each of these rows where they are computed at the same time, a multiple of `multiple`."""

    def work(self, row: int, encoder: float) -> RowWork:
        """The work of a row. `encoder`: what encoders do for a position that stands for media, in positions of the
        language model. Rows that are always computed in the same shape have the same."""

    def batch(self, rows: Sequence[int], length: int | None = None) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` (shifted; the loss ignores -100), int64 [len(rows), length], and what else the
        model takes. `length`: as of `positions`, of these rows or more; left out, of these."""
