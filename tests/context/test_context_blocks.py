"""Blocks cover exactly what is seen, nothing twice; rings have equal work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.mesh import DeviceGroup, Mesh
from hyper_parallel.shard.context.block_attention import AttentionBlock, Documents, blocks, relation, steps
from hyper_parallel.shard.context.plan import PositionSplit, position_chunks
from hyper_parallel.shard.mesh_axis import Axis


def seen_by_definition(length: int, window: int | None, documents: Documents | None) -> np.ndarray:
    at = np.arange(length)
    seen = (at[None, :] <= at[:, None])[None]
    if window is not None:
        seen = seen & (at[None, :] > at[:, None] - window)
    if documents is not None:
        seen = seen & (documents.queries[:, :, None] == documents.keys[:, None, :])
    return seen


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, int | None, Documents | None, int]:
    rings = draw(st.integers(1, 5))
    length = 2 * rings * draw(st.integers(1, 6))
    window = draw(st.none() | st.integers(1, length + 2))
    documents = None
    if draw(st.booleans()):
        begins = np.array(draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length)))
        queries = begins.reshape(2, length).cumsum(1)
        keys = queries.copy()
        hidden = draw(st.integers(0, length - 1))
        if hidden:
            keys[:, -hidden:] = length + 1
        documents = Documents(queries, keys)
    return rings, length, window, documents, draw(st.sampled_from([1, 3, 2048]))


@given(situations())
@settings(max_examples=60)
def test_blocks_hold_what_is_seen_once_and_say_how(
    situation: tuple[int, int, int | None, Documents | None, int],
) -> None:
    rings, length, window, documents, tile = situation
    wanted = seen_by_definition(length, window, documents)
    found = np.zeros_like(wanted, dtype=int)
    for ring in range(rings):
        for t in (0, *steps(length, rings, window)):
            mine, theirs = (
                position_chunks(length, rings, ring),
                position_chunks(length, rings, (ring - t) % rings),
            )
            at_q, at_k = (np.concatenate([np.arange(*p) for p in x]) for x in (mine, theirs))
            for block in blocks(mine, theirs, window, documents, tile):
                q, k = at_q[slice(*block.queries)], at_k[slice(*block.keys)]
                computed = np.ones((len(wanted), len(q), len(k)), dtype=bool)
                if block.relation == "causal":
                    computed &= np.tril(np.ones((len(q), len(k)), dtype=bool))
                if block.relation == "masked":
                    assert list(q) == list(range(*block.query_positions))
                    assert list(k) == list(range(*block.key_positions))
                    assert max(len(q), len(k)) <= tile
                    computed &= wanted[:, q[:, None], k[None, :]]
                found[:, q[:, None], k[None, :]] += computed
    assert (found == wanted).all()


def _scores(block: AttentionBlock) -> float:
    """Scores computed: all of them, or half of a causal block."""
    area = (block.queries[1] - block.queries[0]) * (block.keys[1] - block.keys[0])
    return area / 2 if block.relation == "causal" else area


@pytest.mark.parametrize("rings", [2, 4, 8, 16])
def test_every_ring_index_has_the_same_work_under_a_causal_mask(rings: int) -> None:
    length = 256 * rings
    work = [
        sum(
            _scores(block)
            for t in range(rings)
            for block in blocks(
                position_chunks(length, rings, ring), position_chunks(length, rings, (ring - t) % rings)
            )
        )
        for ring in range(rings)
    ]
    assert max(work) == min(work)
    assert sum(work) == length**2 / 2


def test_nothing_is_computed_or_sent_beyond_a_window() -> None:
    assert steps(1024, 8, 64) == (1, 7)
    assert steps(1024, 8, None) == tuple(range(1, 8))
    assert steps(1024, 8, 1) == ()
    whole = sum(_scores(block) for block in blocks([(0, 65536)], [(0, 65536)], 1024))
    assert whole < 65536 * (1024 + 2 * 2048)


def test_a_relation_is_skipped_full_causal_or_masked() -> None:
    assert relation((0, 4), (4, 8), None, None) is None
    assert relation((4, 8), (0, 4), None, None) == "full"
    assert relation((4, 8), (4, 8), None, None) == "causal"
    assert relation((4, 8), (0, 4), 3, None) == "masked"
    assert relation((8, 12), (0, 4), 3, None) is None


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=40)
def test_positions_are_dealt_once_and_put_back(rings: int, ulysses: int, times: int) -> None:
    split = PositionSplit(
        Axis("context", DeviceGroup.of_all_ranks(Mesh(("context", rings * ulysses))), ""), ulysses
    )
    length = split.multiple * times
    dealt = torch.cat([split.positions(length, index) for index in range(rings * ulysses)])
    assert sorted(dealt.tolist()) == list(range(length))
    if split.multiple > 1:
        with pytest.raises(StrategyError, match=f"multiple of {split.multiple}$"):
            split.check(length + 1)
