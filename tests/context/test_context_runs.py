"""Blocks of queries that overlap in any way, put together by runs, are attention to all that they see."""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.context.block_attention import Runs, attend

QUERIES, KEYS, FEATURES = 8, 12, 5
BLOCKS: tuple[tuple[Interval, Interval], ...] = (((2, 7), (0, 4)), ((4, 8), (4, 8)), ((3, 5), (8, 12)))


def _tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, QUERIES, 6), (2, 2, KEYS, 6), (2, 2, KEYS, FEATURES))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def test_runs_are_attention_to_the_keys_of_all_blocks() -> None:
    q, k, v = _tensors(torch.float64)
    seen = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.bool)
    for (q0, q1), (k0, k1) in BLOCKS:
        seen[..., q0:q1, k0:k1] = True
    wanted = attend(q, k, v, seen, False, 0.3)
    runs = Runs(q, FEATURES)
    for (q0, q1), (k0, k1) in BLOCKS:
        runs.add((q0, q1), *attend(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], None, False, 0.3))
    got = runs.together(q.dtype)
    # The first two queries are in no block: 0 and −inf.
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_nothing_that_was_made_is_written_to_later() -> None:
    q, k, v = _tensors(torch.bfloat16)
    runs = Runs(q, FEATURES)
    made: list[tuple[Tensor, int]] = []
    for (q0, q1), (k0, k1) in BLOCKS:
        block = attend(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], None, False, 0.3)
        made += [(x, x._version) for x in block]
        runs.add((q0, q1), *block)
        made += [(x, x._version) for x in runs.together(torch.float32)]
    assert all(x._version == version for x, version in made)


def test_one_block_of_all_queries_is_handed_on_as_it_is() -> None:
    q, k, v = _tensors(torch.bfloat16)
    out, lse = attend(q, k, v, None, False, 0.3)
    runs = Runs(q, FEATURES)
    runs.add((0, QUERIES), out, lse)
    assert runs.together(q.dtype)[0].data_ptr() == out.data_ptr()
