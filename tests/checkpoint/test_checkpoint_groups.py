"""Checkpoints of runs in which a tensor lives in some device groups only, such as a pipeline's stages."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import (
    DTYPES,
    SHAPES,
    ThreadRanks,
    each_rank,
    layouts_on,
    local_at,
    raised,
    random_tensor,
    same_bits,
)
from device_group_worlds import (
    WORLDS,
    Groups,
    Saved,
    Tensors,
    check_read,
    check_written_once,
    model_on,
    pieces,
    save_tensors,
    world_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hyper_parallel.checkpoint import Piece, Writer, export, newest, read, shard
from hyper_parallel.checkpoint.commit import Part
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import DeviceGroup, Layout, Mesh

PAIR = WORLDS["2 groups of 2"]
SINGLES = WORLDS["4 groups of 1"]
OTHER = {name: "4 groups of 1" if name != "4 groups of 1" else "1 group" for name in WORLDS}
"""For each world another one."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model, saved under each world."""
    return {
        name: save_tensors(tmp_path_factory.mktemp("groups"), model_on(groups), world_of(groups))
        for name, groups in WORLDS.items()
    }


@pytest.mark.parametrize("after", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_what_one_world_saves_every_other_reads(saved, before, after):
    groups = WORLDS[after]
    check_read(saved[before], model_on(groups), range(world_of(groups)))


@pytest.mark.parametrize("world", WORLDS)
def test_a_single_process_reads_and_exports_it(saved, tmp_path, world):
    tensors = model_on(WORLDS[world])
    mesh = Mesh(("replicate", 1))
    whole = {
        name: Piece(torch.zeros_like(one.whole), Layout.replicated(mesh, tuple(one.whole.shape)))
        for name, one in tensors.items()
    }
    state = read(saved[world], whole)
    assert state["step"] == 1
    assert all(same_bits(whole[name].local, one.whole) for name, one in tensors.items())
    assert newest(saved[world].parent).path == saved[world]
    file, other = (
        export(saved[name], tmp_path / name) / "model.safetensors" for name in (world, OTHER[world])
    )
    assert file.read_bytes() == other.read_bytes()
    exported = load_file(file)
    assert {f"model.{name}" for name in exported} == {name for name in tensors if name.startswith("model.")}
    assert all(same_bits(value, tensors[f"model.{name}"].whole) for name, value in exported.items())


@pytest.mark.parametrize("smallest", [1, 16, shard.SMALLEST])
@pytest.mark.parametrize("world", WORLDS)
def test_each_byte_is_written_once(tmp_path, monkeypatch, world, smallest):
    monkeypatch.setattr(shard, "SMALLEST", smallest)
    tensors, ranks = model_on(WORLDS[world]), world_of(WORLDS[world])
    path = save_tensors(tmp_path, tensors, ranks)
    sizes = check_written_once(path, tensors)
    assert len(sizes) == ranks
    assert sum(sizes.values()) == sum(
        one.whole.numel() * one.whole.element_size() for one in tensors.values()
    )


def test_copies_in_all_groups_share_the_writing():
    """A tied embedding and the buffers are written by all that hold them, in even shares."""
    groups = WORLDS["2 groups of shard 2, tensor 2"]
    mesh = groups[0].mesh
    layouts = {"tied": Layout(mesh, (4096, 256), (("shard",), ()))}
    layouts |= {f"buffer.{number}": Layout.replicated(mesh, (16,)) for number in range(64)}
    written = []
    for rank in range(8):
        coordinate = next(group for group in groups if rank in group.ranks).coordinate(rank)
        locals_ = {
            name: Piece(torch.zeros(layout.local_shape(coordinate)), layout, groups)
            for name, layout in layouts.items()
        }
        blocks = shard.blocks(locals_, rank)
        written.append(sum(block.stop - block.start for block in blocks))
    assert sum(written) == 4096 * 256 * 4 + 64 * 16 * 4
    assert max(written) <= 1.1 * sum(written) / 8


def test_an_index_names_the_groups_of_its_own_tensors(saved):
    index = json.loads((saved["2 groups of 2"] / "rank-00003.json").read_text())
    assert index["rank"] == 3 and index["mesh"] == [["rank", 4]]
    tensors = index["tensors"]
    assert "model.0.out" not in tensors and "model.empty" not in tensors
    assert tensors["model.norm"]["groups"] == ["pipeline rank 1"]
    assert tensors["model.embed"]["groups"] == ["pipeline rank 0", "pipeline rank 1"]
    assert ["shard", 2] in tensors["model.embed"]["mesh"]
    assert json.loads((saved["unequal groups"] / "rank-00003.json").read_text())["tensors"] == {}
    plain = json.loads((saved["1 group"] / "rank-00003.json").read_text())
    assert plain["mesh"] == [["shard", 2], ["tensor_x", 2]]
    assert all(
        tensor.keys() == {"shape", "dtype", "layout", "pieces"} for tensor in plain["tensors"].values()
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_one_group_of_all_ranks_has_the_files_of_a_run_without_groups(tmp_path, streamed):
    (group,) = WORLDS["1 group"]
    tensors = model_on((group,))
    named = save_tensors(tmp_path / "named", tensors, 4, streamed=streamed)

    def one(ranks: ThreadRanks) -> Path | None:
        plain = {
            name: Piece(piece.local, piece.layout) for name, piece in pieces(tensors, ranks.rank).items()
        }
        with Writer(tmp_path / "plain", 4, ranks.rank, group=ranks, streamed=streamed) as writer:
            writer.save(1, plain, {"step": 1, "model_config": {"model_type": "x"}})
            return writer.wait()

    plain = raised(each_rank(4, one))[0]
    files = sorted(path.name for path in plain.iterdir())
    assert files == sorted(path.name for path in named.iterdir()) and len(files) == 9
    assert all((plain / file).read_bytes() == (named / file).read_bytes() for file in files)


# Damage.


@pytest.mark.parametrize("world", ["2 groups of 2", "4 groups of 1", "unequal groups"])
def test_a_damaged_or_missing_file_of_any_rank_is_found(tmp_path, world):
    groups = WORLDS[world]
    tensors, ranks = model_on(groups), world_of(groups)
    save_tensors(tmp_path, tensors, ranks, 1)
    path = save_tensors(tmp_path, tensors, ranks, 2)
    copy = tmp_path / "copy"
    for rank in range(ranks):
        for file in (f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"):
            shutil.copytree(path, copy)
            (path / file).unlink()
            assert newest(tmp_path).skipped == ((path, f"{file}: missing"),)
            raw = bytearray((copy / file).read_bytes())
            raw[-1] ^= 1
            (path / file).write_bytes(raw)
            found = newest(tmp_path)
            assert found.step == 1 and found.skipped[0][1].startswith(f"{file}: "), found
            shutil.rmtree(path)
            copy.rename(path)
    assert newest(tmp_path).step == 2


def test_damage_in_another_stage_does_not_matter_to_a_reader(tmp_path):
    tensors = model_on(PAIR)
    tensors = {name: one for name, one in tensors.items() if len(one.owners) == 1}
    path = save_tensors(tmp_path, tensors, 4)
    data = path / "rank-00002.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    check_read(path, tensors, (0, 1))
    with pytest.raises(
        CheckpointError, match=r"^[^\n]*rank-00002.safetensors: sha256 of bytes \d+ to \d+ differs"
    ):
        check_read(path, tensors, (2,))


def test_a_rank_that_never_writes_is_named(tmp_path, monkeypatch):
    write = Part.write
    monkeypatch.setattr(Part, "write", lambda part: write(part) if part.rank != 2 else None)
    with pytest.raises(CheckpointError, match="nothing from rank 2 within 0 s"):
        save_tensors(tmp_path, model_on(SINGLES), 4, time_limit=0.2)
    assert [entry.name for entry in tmp_path.iterdir()] == [".writer.lock"]


# What does not fit together.


def test_names_and_shapes_that_do_not_fit_are_named(saved):
    path, tensors = saved["2 groups of 2"], model_on(SINGLES)
    mine = pieces(tensors, 3, empty=True)
    others = tensors.keys() - mine.keys()
    with pytest.raises(
        CheckpointError, match=r"^[^\n]* has model\.0\.out, [^\n]*, for which there is no place[^\n]*$"
    ):
        read(path, mine, rank=3)
    with pytest.raises(CheckpointError, match=r"^[^\n]*does not have model\.9\.out[^\n]*$"):
        read(path, mine, rank=3, elsewhere={*others, "model.9.out"})
    wrong = Piece(torch.zeros(6), Layout.replicated(SINGLES[3].mesh, (6,)), SINGLES[3:])
    with pytest.raises(
        CheckpointError, match=r"^[^\n]*model.norm has shape \(5,\), but \(6,\) is needed[^\n]*$"
    ):
        read(path, {**mine, "model.norm": wrong}, rank=3, elsewhere=others)
    renamed = {name.replace("model.norm", "model.norms"): piece for name, piece in mine.items()}
    with pytest.raises(CheckpointError, match=r"^[^\n]*does not have model\.norms[^\n]*model\.norm\b[^\n]*$"):
        read(path, renamed, rank=3, elsewhere=others)
    assert all(piece.local.eq(0).all() for piece in mine.values())
    with pytest.raises(CheckpointError, match="rank 0 is not in the device groups 'pipeline rank 3'"):
        read(path, mine, rank=0, elsewhere=others)
    plain = {"model.norm": Piece(torch.zeros(3), Layout(Mesh(("shard", 2)), (5,), (("shard",),)))}
    with pytest.raises(CheckpointError, match="rank 2 is not in the device groups 'all ranks'"):
        read(path, plain, rank=2, prefix="model.norm")
    inside = Checkpoint(path)
    inside.match(mine, "model.", others)


def _refused(folder: Path, owners, layout=None, world: int = 4) -> str:
    """The line with which every rank refuses to save a tensor that rank r holds in `owners(r)`, None for nothing."""

    def one(ranks: ThreadRanks) -> None:
        listed = owners(ranks.rank)
        held = {}
        if listed is not None:
            shape = layout or Layout.replicated(listed[0].mesh if listed else Mesh(), (8,))
            held = {"w": Piece(torch.ones(shape.shape), shape, listed)}
        with Writer(folder, world, ranks.rank, group=ranks) as writer:
            writer.save(1, held, {})

    results = each_rank(world, one)
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert [entry.name for entry in folder.iterdir()] == [".writer.lock"]
    assert all("\n" not in str(result) for result in results)
    return str(results[0])


def test_groups_that_do_not_fit_the_run_are_refused_on_every_rank(tmp_path):
    first = PAIR[0]
    assert "w: rank 2 is not in the device groups 'pipeline rank 0', which hold" in _refused(
        tmp_path, lambda _: (first,)
    )
    assert "of 1 ranks, but the run has 4; name the device groups" in _refused(tmp_path, lambda _: ())
    outside = DeviceGroup(first.mesh, (3, 4), "outside")
    assert "'outside' has rank 4, but the run has ranks 0 to 3" in _refused(
        tmp_path, lambda _: (outside, first)
    )
    both = DeviceGroup(first.mesh, (1, 2), "middle")
    assert "rank 1 is in two of the device groups 'pipeline rank 0', 'middle'" in _refused(
        tmp_path, lambda _: (first, both)
    )
    tensor = DeviceGroup(Mesh(("tensor_x", 2)), (2, 3), "tensor")
    assert re.search(
        "device group 'tensor' is on .*; rank 2 gives the layout that the tensor has in this group",
        _refused(tmp_path, lambda _: (first, tensor)),
    )


def test_two_meshes_of_all_ranks_are_refused(tmp_path):
    def one(ranks: ThreadRanks) -> None:
        held = {
            name: Piece(torch.ones(4), Layout.replicated(Mesh((name, 2)), (4,)))
            for name in ("shard", "tensor")
        }
        with Writer(tmp_path, 2, ranks.rank, group=ranks) as writer:
            writer.save(1, held, {})

    for result in each_rank(2, one):
        assert "rank 0: tensor: its layout is on mesh (('tensor', 2),), but that of shard" in str(result)


def test_ranks_that_disagree_do_not_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "SMALLEST", 16)
    first, second = PAIR
    mesh = first.mesh
    line = _refused(tmp_path, lambda rank: (first,) if rank < 2 else (first, second))
    assert re.search(
        r"w is float32 \[8\] on mesh .* in pipeline rank 0, pipeline rank 1 on rank 2, but float32 \[8\] on mesh .* in "
        r"pipeline rank 0 on another",
        line,
    ), line
    assert "elements of w were written" in _refused(tmp_path, lambda rank: (first,) if rank == 1 else None)
    layouts = (Layout.replicated(mesh, (8,)), Layout.replicated(mesh, (4,)))
    stages = {rank: PAIR[rank // 2] for rank in range(4)}

    def one(ranks: ThreadRanks) -> None:
        layout = layouts[ranks.rank // 2]
        held = {"w": Piece(torch.ones(layout.shape), layout, (stages[ranks.rank],))}
        with Writer(tmp_path, 4, ranks.rank, group=ranks) as writer:
            writer.save(1, held, {})

    assert re.search(r"w is float32 \[4\] .* in pipeline rank 1 on rank 2", str(each_rank(4, one)[0]))


def test_blocks_that_two_groups_write_are_seen_though_their_number_is_right(tmp_path, monkeypatch):
    """Groups of the same name: rank 1 takes itself for the first of two copies, as rank 0 does."""
    monkeypatch.setattr(shard, "SMALLEST", 16)
    one, two, three = (DeviceGroup(Mesh(("shard", 1)), (rank,), "stage") for rank in range(3))
    owners = {0: (one, two), 1: (two, three), 2: None}
    line = _refused(tmp_path, owners.__getitem__, world=3)
    assert "two blocks of w hold the same elements; all ranks give it the same layout" in line


def test_a_rank_that_leaves_out_what_all_ranks_hold_is_named(tmp_path):
    """Also where it would have written no byte: a reader requires the same mesh in all indexes."""
    layout = Layout.replicated(Mesh(("replicate", 2)), (4,))
    (writes,) = (rank for rank in (0, 1) if shard.blocks({"w": Piece(torch.ones(4), layout)}, rank))

    def one(ranks: ThreadRanks) -> None:
        held = {"w": Piece(torch.ones(4), layout)} if ranks.rank == writes else {}
        with Writer(tmp_path, 2, ranks.rank, group=ranks) as writer:
            writer.save(1, held, {})

    assert "save the tensors that all of them hold, on the same mesh" in str(each_rank(2, one)[0])
    assert [entry.name for entry in tmp_path.iterdir()] == [".writer.lock"]


# Any groups, owners and layouts.


@st.composite
def groups_of_a_run(draw: st.DrawFn) -> Groups:
    """Disjoint groups of up to eight ranks, in any order; some ranks may be in none."""
    ranks = draw(st.permutations(range(8)))
    found: list[DeviceGroup] = []
    at = 0
    while at < len(ranks) and len(found) < 4:
        sizes = draw(st.sampled_from([(1,), (2,), (2, 2), (3,), (1, 2), (2, 1, 2)]))
        mesh = Mesh(*zip(("replicate", "shard", "tensor"), sizes, strict=False))
        if at + mesh.world > len(ranks) or (found and draw(st.integers(0, 3)) == 0):
            break
        repeats = draw(st.integers(1, 3))
        for _ in range(min(repeats, (len(ranks) - at) // mesh.world)):
            found.append(DeviceGroup(mesh, tuple(ranks[at : at + mesh.world]), f"group {len(found)}"))
            at += mesh.world
    return tuple(found)


@st.composite
def tensors_on(draw: st.DrawFn, groups: Groups, wholes: dict[str, torch.Tensor]) -> Tensors:
    """Any layout of each tensor in any groups of one mesh."""
    placed = {}
    for name, whole in wholes.items():
        first = draw(st.sampled_from(groups))
        alike = [group for group in groups if group.mesh == first.mesh and group is not first]
        others = [group for group in alike if draw(st.booleans())]
        layout = draw(layouts_on(first.mesh, tuple(whole.shape)))
        placed[name] = Saved(whole, layout, (first, *others))
    return placed


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_groups_to_any_groups(data):
    wholes = {
        f"t.{number}": random_tensor(shape, data.draw(st.sampled_from(DTYPES)), number)
        for number, shape in enumerate(data.draw(st.lists(SHAPES, min_size=1, max_size=5)))
    }
    before, after = data.draw(groups_of_a_run()), data.draw(groups_of_a_run())
    tensors, wanted = data.draw(tensors_on(before, wholes)), data.draw(tensors_on(after, wholes))
    smallest = shard.SMALLEST
    shard.SMALLEST = data.draw(st.sampled_from([1, 16, smallest]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            streamed = data.draw(st.booleans())
            path = save_tensors(Path(folder), tensors, world_of(before), streamed=streamed)
            found = newest(folder)
            assert found is not None and found.path == path and not found.skipped
            sizes = check_written_once(path, tensors)
            assert sum(sizes.values()) == sum(math.prod(t.shape) * t.element_size() for t in wholes.values())
            check_read(path, wanted, range(world_of(after)))
    finally:
        shard.SMALLEST = smallest


def test_local_at_is_the_coordinate_in_the_group():
    """The helper of these tests cuts by the place in the group and not by the rank of the run."""
    group = DeviceGroup(Mesh(("shard", 2)), (5, 3))
    layout = Layout(group.mesh, (5,), (("shard",),))
    assert local_at(torch.arange(5), layout, group.coordinate(3)).tolist() == [3, 4]
