"""Payloads and headers: differences are lossless, and damage is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.rl.weights.exchange import BufferPool
from hyper_parallel.rl.weights.payload import (
    HEADER_BYTES,
    Header,
    apply_difference,
    checksum,
    difference,
    pack,
    packed_bytes,
    payload_of,
    unpack,
)
from hyper_parallel.rl.weights.plan import Message, Part, PlannedParameter


def _message(sizes: list[int]) -> Message:
    parts = []
    for at, size in enumerate(sizes):
        dtype = ("float32", "bfloat16")[at >= len(sizes) // 2]
        parameter = PlannedParameter(source=f"s{at}", target=f"t{at}", dtype=dtype)
        parts.append(Part(parameter=parameter, give=(slice(0, size),), take=(slice(0, size),)))
    return Message(sender=0, receiver=1, parts=tuple(parts))


@given(st.lists(st.integers(1, 40), max_size=5), st.floats(0, 1), st.integers(0, 2**32))
def test_a_difference_gives_the_same_bits(sizes: list[int], share: float, seed: int) -> None:
    message, draw = _message(sizes), np.random.default_rng(seed)
    # Any bits: NaNs of different payloads and both zeros are different values here.
    old = draw.integers(0, 256, message.bytes, dtype=np.uint8)
    new = np.where(draw.random(message.bytes) < share, draw.integers(0, 256, message.bytes), old).astype(
        np.uint8
    )
    sent = difference(message, torch.from_numpy(new), torch.from_numpy(old))
    assert sent.numel() <= message.bytes
    if sent.numel() < message.bytes:
        applied = torch.from_numpy(old)
        apply_difference(message, sent, applied)
        assert applied.tolist() == new.tolist()
    else:
        assert sent.tolist() == new.tolist()


def test_a_difference_of_nothing_is_a_bitmap() -> None:
    message = _message([16, 16])
    old = torch.arange(message.bytes, dtype=torch.uint8)
    assert difference(message, old.clone(), old).numel() == 4


def test_a_difference_that_does_not_fit_is_refused() -> None:
    message = _message([16, 16])
    old = torch.zeros(message.bytes, dtype=torch.uint8)
    new = old.clone()
    new[5] = 1
    sent = difference(message, new, old)
    with pytest.raises(ValueError, match="shorter"):
        apply_difference(message, sent[:-3], old)
    with pytest.raises(ValueError, match="longer"):
        apply_difference(message, torch.cat([sent, old[:1]]), old)


def test_boxes_are_rounded_on_their_way() -> None:
    message = _message([3, 3])
    given_values = {"s0": torch.tensor([1.0, 2.0, 1 + 2**-12]), "s1": torch.tensor([1.0, 2.0, 1 + 2**-12])}
    staged = {"t0": torch.zeros(3), "t1": torch.zeros(3, dtype=torch.bfloat16)}
    packed = torch.empty(packed_bytes(message), dtype=torch.uint8)
    pack(message, lambda part: given_values[part.parameter.source][part.give], packed)
    unpack(message, payload_of(packed), staged)
    assert staged["t0"].tolist() == given_values["s0"].tolist()
    assert staged["t1"].tolist() == [1.0, 2.0, 1.0]


@given(st.integers(0, HEADER_BYTES * 8 - 1), st.integers(0, 2**32))
def test_a_header_survives_and_a_flipped_bit_is_found(bit: int, seed: int) -> None:
    draw = random.Random(seed)
    header = Header(
        digest=draw.randbytes(8),
        epoch=draw.randrange(2**32),
        place=draw.randrange(2**32),
        version=draw.randrange(2**63),
        base=draw.randrange(-1, 2**62),
        length=draw.randrange(2**40),
        checksum=draw.randrange(2**32),
    )
    data = bytearray(header.pack())
    assert len(data) == HEADER_BYTES
    assert Header.parse(bytes(data)) == header
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="damaged"):
        Header.parse(bytes(data))


@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(0, 7))
def test_a_flipped_bit_changes_the_checksum(size: int, at: int, bit: int) -> None:
    payload = torch.from_numpy(np.random.default_rng(at).integers(0, 256, size, dtype=np.uint8))
    before = checksum(payload)
    assert checksum(payload.clone()) == before
    payload[at % size] ^= 1 << bit
    assert checksum(payload) != before


def test_rows_that_change_places_change_the_checksum() -> None:
    payload = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    first, second = payload[:1024].clone(), payload[1024:2048].clone()
    before = checksum(payload)
    payload[:1024], payload[1024:2048] = second, first
    assert checksum(payload) != before


def test_buffers_are_used_again() -> None:
    pool = BufferPool()
    large, small = pool.take(100), pool.take(10)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(8).data_ptr() == small.data_ptr()
    assert pool.take(8).data_ptr() == large.data_ptr()
    third = pool.take(8)
    assert third.data_ptr() not in (small.data_ptr(), large.data_ptr())
    assert len(pool) == 3
    pool.give_back(third)
    assert pool.take(1000).numel() == 1000
    assert len(pool) == 3
