"""Packing: every label once, nothing across documents, rows exactly full or padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data.corpus import Corpus
from hyper_parallel.data.packing import IGNORED, PackedText, _best_fit

PAD = 9_999


def corpus_of(lengths: list[int], masks: list[list[int]] | None = None) -> Corpus:
    """Every token is its own index in the corpus, so that a batch says where each came from."""
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    loss = None if masks is None else np.array([bit for mask in masks for bit in mask], np.uint8)
    return Corpus(np.arange(offsets[-1], dtype=np.uint32), offsets, loss)


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    if draw(st.booleans()):
        return corpus_of(lengths)
    masks = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    return corpus_of(lengths, masks)


@settings(max_examples=200, deadline=None)
@given(corpora(), st.integers(1, 17), st.booleans())
def test_every_token_that_bears_loss_is_predicted_once_from_the_token_before_it(
    corpus: Corpus, sequence: int, pack: bool
) -> None:
    packed = PackedText(corpus, sequence, pad=PAD, pack=pack)
    batch = packed.batch(range(len(packed)))
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape == (len(packed), sequence)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}

    firsts = set(corpus.offsets[:-1].tolist())
    bears = corpus.loss if corpus.loss is not None else np.ones(len(corpus.tokens))
    expected = [token for token in range(len(corpus.tokens)) if token not in firsts and bears[token]]
    valid = labels != IGNORED
    assert sorted(labels[valid].tolist()) == expected
    assert torch.equal(labels[valid], ids[valid] + 1)
    seen = ids[ids != PAD]
    assert len(seen) == len(seen.unique())


@settings(max_examples=200, deadline=None)
@given(corpora(), st.integers(1, 17), st.booleans())
def test_positions_restart_with_every_piece_and_count_on_through_padding(
    corpus: Corpus, sequence: int, pack: bool
) -> None:
    packed = PackedText(corpus, sequence, pad=PAD, pack=pack)
    document = np.repeat(np.arange(corpus.documents), np.diff(corpus.offsets))
    assert packed.several == bool((packed.batch(range(len(packed)))["position_ids"][:, 1:] == 0).any())
    for row in range(len(packed)):
        batch = packed.batch([row])
        ids, positions = batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()
        assert positions[0] == 0 and ids[0] != PAD and max(positions) < sequence
        for before, after, p, q in zip(ids, ids[1:], positions, positions[1:], strict=False):
            if after == PAD:
                assert q == p + 1
            elif q == p + 1:
                assert after == before + 1 and document[after] == document[before]
            else:
                assert q == 0 and before != PAD
        if not pack:
            assert positions == list(range(sequence))


def test_a_document_that_fits_is_not_cut() -> None:
    packed = PackedText(corpus_of([5, 5, 3, 8, 3]), 8, pad=PAD)
    rows = packed.batch(range(len(packed)))["input_ids"].tolist()
    assert rows == [
        [0, 1, 2, 3, 4, 21, 22, 23],
        [5, 6, 7, 8, 9, 10, 11, 12],
        [13, 14, 15, 16, 17, 18, 19, 20],
    ]


def test_labels_reach_into_the_next_piece_but_not_into_the_next_document() -> None:
    packed = PackedText(corpus_of([6, 2]), 4, pad=PAD)
    batch = packed.batch([0, 1])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [5, IGNORED, 7, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_pieces_without_loss_are_left_out() -> None:
    # 5 = 4 + a lone end, which the piece before it predicts; and a prompt of 8 before an answer of 2.
    assert len(PackedText(corpus_of([5]), 4, pad=PAD)) == 1
    packed = PackedText(corpus_of([10], [[0] * 8 + [1, 1]]), 4, pad=PAD)
    assert packed.batch([0, 1])["labels"].tolist() == [[IGNORED] * 3 + [8], [9] + [IGNORED] * 3]


@settings(deadline=None)
@given(st.lists(st.integers(1, 32), max_size=60))
def test_best_fit_fills_no_bin_beyond_its_capacity(lengths: list[int]) -> None:
    bins = _best_fit(np.array(lengths, np.int64), 32)
    filled = np.bincount(bins, weights=lengths, minlength=1) if lengths else np.zeros(1)
    assert filled.max() <= 32
    # No two bins would fit into one, or the shorter lengths of one would have gone to the other.
    fullness = sorted(filled[filled > 0].tolist())
    assert len(fullness) < 2 or fullness[0] + fullness[1] > 32


def test_a_large_corpus_is_planned_and_hardly_padded() -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 20_000)
    packed = PackedText(corpus_of(lengths.tolist()), 512, pad=PAD)
    assert len(packed) * 512 < packed.tokens * 1.001


def test_a_row_that_does_not_exist_is_refused() -> None:
    packed = PackedText(corpus_of([8]), 4, pad=PAD)
    with pytest.raises(AssertionError):
        packed.batch([-1])
