"""What is saved under one layout and world is read under any other, bit for bit, and written once."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import (
    DTYPES,
    SHAPES,
    ThreadRanks,
    check_read,
    each_rank,
    layouts_on,
    local_of,
    meshes,
    pieces_of,
    raised,
    random_tensor,
    same_bits,
    save_world,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hyper_parallel.checkpoint import Piece, Writer, newest, read, shard
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Box, Layout, Mesh

TWO = Mesh(("shard", 2))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_layout_to_any_layout(data):
    before, after = data.draw(meshes()), data.draw(meshes())
    tensors, saved, wanted = {}, {}, {}
    for number, shape in enumerate(data.draw(st.lists(SHAPES, min_size=1, max_size=4))):
        name = f"t.{number}"
        tensors[name] = random_tensor(shape, data.draw(st.sampled_from(DTYPES)), number)
        saved[name] = data.draw(layouts_on(before, shape))
        wanted[name] = data.draw(layouts_on(after, shape))
    smallest = shard.SMALLEST
    shard.SMALLEST = data.draw(st.sampled_from([1, 16, smallest]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            (path, *others) = save_world(
                Path(folder), tensors, saved, before, background=data.draw(st.booleans())
            )
            assert all(other == path for other in others)
            found = newest(folder)
            assert found is not None and found.path == path and not found.skipped
            check_read(path, tensors, wanted)
    finally:
        shard.SMALLEST = smallest


@given(data=st.data())
def test_cut_makes_disjoint_blocks_of_the_whole_box(data):
    shape = data.draw(st.lists(st.integers(1, 12), max_size=4).map(tuple))
    box = Box(tuple(3 for _ in shape), tuple(5 for _ in shape), shape)
    limit = data.draw(st.integers(1, 200))
    seen = torch.zeros([8 + length for length in shape], dtype=torch.int64)
    for block in shard.cut(box, 4, limit):
        assert all(lo - go == 2 for lo, go in zip(block.local, block.offset, strict=True))
        assert math.prod(block.size) * 4 <= max(2 * limit, 4)
        seen[block.local_slices] += 1
    assert seen[box.local_slices].eq(1).all()
    assert seen.sum() == math.prod(shape)


def test_copies_share_the_writing():
    mesh = Mesh(("replicate", 4), ("tensor", 2))
    layout = Layout(mesh, (4096, 512), (("tensor",), ()))
    small = Layout.replicated(mesh, (16,))
    pieces = {"w": layout} | {f"s.{number}": small for number in range(64)}
    written = []
    for rank in range(mesh.world):
        locals_ = {
            name: Piece(torch.zeros(layout.local_shape(mesh.coordinate(rank))), layout)
            for name, layout in pieces.items()
        }
        blocks = shard.blocks(locals_, rank)
        written.append(sum(block.stop - block.start for block in blocks))
    assert sum(written) == 4096 * 512 * 4 + 64 * 16 * 4
    assert max(written) <= 1.1 * sum(written) / mesh.world


def test_files_are_safetensors_and_hold_each_element_once(tmp_path):
    mesh = Mesh(("replicate", 2), ("tensor", 2))
    tensors = {
        "odd": random_tensor((3,), torch.bool, 0),
        "w": random_tensor((8, 5), torch.bfloat16, 1),
        "step": random_tensor((), torch.int64, 2),
    }
    layouts = {
        "odd": Layout.replicated(mesh, (3,)),
        "w": Layout(mesh, (8, 5), (("tensor",), ()), {0: (5, 3)}),
        "step": Layout.replicated(mesh, ()),
    }
    path = save_world(tmp_path, tensors, layouts, mesh)[0]
    elements = 0
    for rank in range(4):
        with safe_open(path / f"rank-{rank:05d}.safetensors", "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is not a dict
                name, slices = re.fullmatch(r"(.*)\[(.*)\]", key).groups()
                ranges = [slice(*map(int, text.split(":"))) for text in slices.split(", ") if text]
                block = file.get_tensor(key)
                assert same_bits(block, tensors[name][tuple(ranges)])
                elements += block.numel()
    assert elements == 3 + 40 + 1


def test_only_needed_blocks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "LARGEST", 4096)
    whole = random_tensor((64, 64), torch.float32, 0)
    one = Mesh(("shard", 1))
    path = save_world(tmp_path, {"w": whole}, {"w": Layout.replicated(one, (64, 64))}, one)[0]
    data = path / "rank-00000.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1  # in the last rows, which rank 0 of two does not need
    data.write_bytes(raw)
    layout = Layout(TWO, (64, 64), (("shard",), ()))
    mine = Piece(torch.zeros(32, 64), layout)
    read(path, {"w": mine}, rank=0)
    assert same_bits(mine.local, whole[:32])
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: sha256 of bytes \d+ to \d+ differs"):
        read(path, {"w": Piece(torch.zeros(32, 64), layout)}, rank=1)


def test_the_values_at_the_call_are_saved_and_buffers_are_reused(tmp_path):
    layout = Layout.replicated(Mesh(), (1000, 100))
    source = torch.zeros(1000, 100)
    state = {"step": 0, "order": [1]}
    buffers = set()
    with Writer(tmp_path, 1, 0, keep=3) as writer:
        for step in (1, 2, 3):
            source.fill_(step)
            state["step"] = step
            writer.save(step, {"w": Piece(source, layout)}, state)
            source.fill_(-1)  # training goes on
            state["step"] = -1
            state["order"].append(step)
            buffers.add(writer._buffer.data_ptr())
    assert len(buffers) == 1
    for step in (1, 2, 3):
        got = Piece(torch.empty(1000, 100), layout)
        assert read(tmp_path / f"step-{step:08d}", {"w": got}) == {
            "step": step,
            "order": [1, *range(1, step)],
        }
        assert got.local.eq(step).all()


def test_noncontiguous_and_grad_requiring_locals(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    layout = Layout.replicated(Mesh(), (4, 3))
    with Writer(tmp_path, 1, 0) as writer:
        writer.save(1, {"w": Piece(torch.nn.Parameter(whole.t()), layout)}, {})
    target = torch.nn.Parameter(torch.zeros(3, 4))
    read(tmp_path / "step-00000001", {"w": Piece(target.t(), layout)})
    assert torch.equal(target.detach(), whole)


def _saved(tmp_path):
    tensors = {"model.a": torch.ones(4, 2), "model.b": torch.ones(3), "adam.a": torch.ones(4, 2)}
    layouts = {name: Layout.replicated(Mesh(), tuple(t.shape)) for name, t in tensors.items()}
    return save_world(tmp_path, tensors, layouts, Mesh())[0], pieces_of(tensors, layouts, 0, empty=True)


def test_prefix_reads_a_part(tmp_path):
    path, pieces = _saved(tmp_path)
    del pieces["adam.a"]
    with pytest.raises(CheckpointError, match=r"has adam\.a, for which there is no place"):
        read(path, pieces)
    assert pieces["model.a"].local.eq(0).all()
    read(path, pieces, prefix="model.")
    assert pieces["model.a"].local.eq(1).all()


def test_mismatches_are_named_and_change_nothing(tmp_path):
    path, pieces = _saved(tmp_path)
    wrong = {**pieces, "model.bb": pieces["model.b"]}
    with pytest.raises(CheckpointError, match=r"does not have model.bb"):
        read(path, wrong)
    shape = Layout.replicated(Mesh(), (5,))
    with pytest.raises(CheckpointError, match=r"model.b has shape \(3,\), but \(5,\) is needed"):
        read(path, {**pieces, "model.b": Piece(torch.zeros(5), shape)})
    half = Piece(torch.zeros(3, dtype=torch.bfloat16), pieces["model.b"].layout)
    with pytest.raises(CheckpointError, match=r"model\.b is float32, but bfloat16 is needed"):
        read(path, {**pieces, "model.b": half})
    assert all(piece.local.eq(0).all() for piece in pieces.values())


def test_bad_pieces_and_states_are_refused_on_every_rank(tmp_path):
    layout = Layout(TWO, (4,), (("shard",),))

    def save(local, layout=layout, state=None, assets=None, step=1):
        def one(ranks: ThreadRanks):
            with Writer(tmp_path, TWO.world, ranks.rank, group=ranks) as writer:
                mine = local(ranks.rank) if callable(local) else local
                writer.save(step, {"w": Piece(mine, layout)}, state or {}, assets=assets)

        results = each_rank(2, one)
        assert all(isinstance(result, CheckpointError) for result in results), results
        assert len({str(result) for result in results}) == 1
        assert [entry.name for entry in tmp_path.iterdir()] == [".writer.lock"]
        return str(results[0])

    good = torch.zeros(2)
    only_one = save(lambda rank: torch.zeros(2 + rank))
    assert re.search(
        r"^rank 1: w: rank 1 has a local tensor of shape \(3,\), but layout \[4/shard\] gives", only_one
    )
    assert "its sum over shard has not been taken" in save(
        torch.zeros(4), Layout(TWO, (4,), ((),), partial=frozenset({"shard"}))
    )
    assert "complex64 cannot be stored" in save(good.to(torch.complex64))
    assert "of 4 ranks, but the run has 2" in save(
        torch.zeros(4), Layout.replicated(Mesh(("tensor", 4)), (4,))
    )
    assert "state['loss'] is nan" in save(good, state={"loss": float("nan")})
    assert "state['a'][0] has the key 3.5" in save(good, state={"a": [{3.5: 1}]})
    assert "has the keys 3 and '3'" in save(good, state={"3": 1, 3: 1})
    assert "state['t'] is a Tensor" in save(good, state={"t": good})
    assert "asset '../x'" in save(good, assets={"../x": b""})


def test_ranks_that_disagree_do_not_commit(tmp_path):
    def one(ranks: ThreadRanks, case: str):
        rank = ranks.rank
        layout = Layout(TWO, (4, 4), (("shard",), ()))
        pieces = {"w": Piece(torch.zeros(2, 4), layout)}
        if case == "layout" and rank:
            pieces = {"w": Piece(torch.zeros(4, 2), Layout(TWO, (4, 4), ((), ("shard",))))}
        if case == "name" and rank:
            pieces = {}
        with Writer(tmp_path, TWO.world, rank, group=ranks) as writer:
            writer.save(2 + (case == "step" and rank), pieces, {})

    for case, words in (
        ("layout", r"w is float32 \[4, 4/shard\] on rank 1, but float32 \[4/shard, 4\] on another"),
        ("name", "8 of 16 elements of w were written"),
        ("step", "rank 1 wrote step 3"),
    ):
        results = each_rank(2, lambda ranks, case=case: one(ranks, case))
        assert re.search(words, str(results[0])), results
        assert "step" in str(results[1]) and "another rank could not" in str(results[1])
        assert [entry.name for entry in tmp_path.iterdir()] == [".writer.lock"]


def test_newest_shares_the_reading_out(tmp_path):
    mesh = Mesh(("shard", 3))
    whole = random_tensor((30, 4), torch.float32, 0)
    layouts = {"w": Layout(mesh, (30, 4), (("shard",), ()))}
    save_world(tmp_path, {"w": whole}, layouts, mesh, step=1)
    path = save_world(tmp_path, {"w": whole}, layouts, mesh, step=2)[0]
    data = path / "rank-00002.safetensors"
    data.write_bytes(data.read_bytes()[:-3])
    size = data.stat().st_size
    reason = f"rank-00002.safetensors: truncated: {size} of {size + 3} bytes"
    for found in raised(each_rank(3, lambda ranks: newest(tmp_path, ranks))):
        assert found.step == 1 and found.skipped == ((path, reason),)


def test_state_and_assets_come_back(tmp_path):
    state = {"seed": 7, "data": {"consumed": 12}, "lr": 1e-3, "x": [1, None, "é", 2**70]}
    keys = {"id2label": {0: "a", 1: "b"}, "t": (1, 2)}
    with Writer(tmp_path, 1, 0) as writer:
        writer.save(5, {}, {**state, **keys}, assets={"tokenizer.json": b"{}\n"})
    path = tmp_path / "step-00000005"
    assert read(path, {}) == {**state, "id2label": {"0": "a", "1": "b"}, "t": [1, 2]}
    assert (path / "assets" / "tokenizer.json").read_bytes() == b"{}\n"
    marker = json.loads((path / "commit.json").read_text())
    assert marker["step"] == 5 and marker["world"] == 1 and "assets/tokenizer.json" in marker["files"]


def test_local_of_is_the_layouts_own(tmp_path):
    """The helper of these tests cuts as the layout says: fused parts are taken part by part."""
    layout = Layout(TWO, (6,), (("shard",),), {0: (4, 2)})
    assert local_of(torch.arange(6), layout, 1).tolist() == [2, 3, 5]
