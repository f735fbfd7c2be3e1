"""A changed, cut or missing byte is never loaded: it is named, and the checkpoint before is found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import pieces_of, random_tensor, save_world
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hyper_parallel.checkpoint import Piece, Writer, newest, read
from hyper_parallel.checkpoint.file_format import seal, unseal
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout, Mesh

MESH = Mesh(("shard", 2))
TENSORS = {"w": random_tensor((8, 4), torch.float32, 1), "n": random_tensor((), torch.int64, 2)}
LAYOUTS = {"w": Layout(MESH, (8, 4), (("shard",), ())), "n": Layout.replicated(MESH, ())}
FILES = ["commit.json", *(f"rank-{rank:05d}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors"))]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    for step in (1, 2):
        save_world(folder, TENSORS, LAYOUTS, MESH, step, {"step": step})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged") / "run"


def fresh(pristine: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    return folder / "step-00000002"


def load(path: Path) -> None:
    """Read every rank's part: what is loaded is right, or CheckpointError is raised."""
    for rank in (0, 1):
        got = pieces_of(TENSORS, LAYOUTS, rank, empty=True)
        assert read(path, got, rank=rank) == {"step": 2}
        for name, want in pieces_of(TENSORS, LAYOUTS, rank).items():
            assert (
                got[name].local.reshape(-1).view(torch.uint8).equal(want.local.reshape(-1).view(torch.uint8))
            )


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(file="rank-00000.safetensors", where=0.0, bit=0)  # the header's length
@example(file="rank-00001.safetensors", where=0.999999, bit=7)  # the last byte of data
@example(file="commit.json", where=0.999999, bit=1)  # the newline
def test_a_flipped_bit_is_never_loaded(pristine, folder, file, where, bit):
    path = fresh(pristine, folder)
    raw = bytearray((path / file).read_bytes())
    raw[int(where * len(raw))] ^= 1 << bit
    (path / file).write_bytes(raw)
    found = newest(folder)
    assert found is not None and found.step == 1
    ((skipped, reason),) = found.skipped
    assert skipped == path
    assert re.fullmatch(rf"{file}: (sha256 differs|its own sha256 (differs|is missing)|not JSON)", reason), (
        reason
    )
    at, header = int(where * len(raw)), 0
    if file.endswith(".safetensors"):
        header = 8 + int.from_bytes((pristine / path.name / file).read_bytes()[:8], "little")
    if at < header:  # a reader goes by the verified index and never looks at this header
        load(path)
    else:
        with pytest.raises(CheckpointError, match=rf"^[^\n]*{file}: [^\n]*$"):
            load(path)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), keep=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_never_loaded(pristine, folder, file, keep):
    path = fresh(pristine, folder)
    raw = (path / file).read_bytes()
    cut = int(keep * len(raw))
    (path / file).write_bytes(raw[:cut])
    found = newest(folder)
    assert found is not None and found.step == 1
    reason = found.skipped[0][1]
    if file == "commit.json":
        assert reason.startswith("commit.json: ")
    else:
        assert reason == f"{file}: truncated: {cut} of {len(raw)} bytes"
    with pytest.raises(CheckpointError, match=re.escape(file)):
        load(path)


def test_missing_extended_and_exchanged_files_are_named(pristine, folder):
    path = fresh(pristine, folder)
    (path / "commit.json").unlink()
    assert newest(folder).skipped == ((path, "no commit marker"),)
    path = fresh(pristine, folder)
    (path / "rank-00001.json").unlink()
    assert newest(folder).skipped == ((path, "rank-00001.json: missing"),)
    path = fresh(pristine, folder)
    data = path / "rank-00001.safetensors"
    size = data.stat().st_size
    with data.open("ab") as file:
        file.write(b"xx")
    assert newest(folder).skipped[0][1] == f"rank-00001.safetensors: {size + 2} bytes instead of {size}"
    path = fresh(pristine, folder)
    shutil.copy(folder / "step-00000001" / "commit.json", path)
    assert newest(folder).skipped[0][1] == "commit.json: is of step 1"


def test_all_damaged_is_an_error_and_none_at_all_is_none(pristine, folder, tmp_path):
    fresh(pristine, folder)
    for step in (1, 2):
        (folder / f"step-{step:08d}" / "commit.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"step-00000002: no commit marker; step-00000001: no commit marker"
    ):
        newest(folder)
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file is in the way"):
        newest(tmp_path / "file")


def test_a_newer_format_is_refused(pristine, folder):
    path = fresh(pristine, folder)
    marker = unseal((path / "commit.json").read_bytes())
    (path / "commit.json").write_bytes(seal({**marker, "version": 2}))
    with pytest.raises(CheckpointError, match="format version 2, this program reads version 1"):
        load(path)


@settings(max_examples=50)
@given(data=st.data())
def test_unseal_undoes_seal_and_sees_every_bit(data):
    leaf = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False)
    )
    body = data.draw(st.dictionaries(st.text().filter(lambda key: key != "sha256"), leaf))
    raw = seal(body)
    assert unseal(raw) == body
    flipped = bytearray(raw)
    flipped[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"sha256|not JSON"):
        unseal(bytes(flipped))


def _write(folder: Path, step: int, keep: int, value: float = 0.0) -> None:
    layout = Layout.replicated(Mesh(), (4,))
    with Writer(folder, 1, 0, keep=keep) as writer:
        writer.save(step, {"w": Piece(torch.full((4,), value), layout)}, {})


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))


def test_keep_counts_only_good_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        _write(tmp_path, step, keep=3)
    assert _names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / "rank-00000.safetensors").write_bytes(b"")
    _write(tmp_path, 5, keep=2)
    # 4 is damaged: it does not take the place of 3, and stays for whoever wants to look at it.
    assert _names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    _write(tmp_path, 6, keep=2)
    assert _names(tmp_path) == ["step-00000005", "step-00000006"]


def test_a_rewound_run_replaces_a_damaged_step_and_prunes_nothing_newer(tmp_path):
    _write(tmp_path, 10, keep=1)
    _write(tmp_path, 20, keep=2, value=1.0)
    (tmp_path / "step-00000020" / "rank-00000.json").write_bytes(b"{}")
    assert newest(tmp_path).step == 10
    _write(tmp_path, 15, keep=1)
    assert _names(tmp_path) == ["step-00000015", "step-00000020"]
    assert newest(tmp_path).step == 15
    _write(tmp_path, 20, keep=1, value=2.0)
    assert _names(tmp_path) == ["step-00000020-r1"]
    got = torch.zeros(4)
    assert newest(tmp_path).path.name == "step-00000020-r1"
    read(newest(tmp_path).path, {"w": Piece(got, Layout.replicated(Mesh(), (4,)))})
    assert got.eq(2).all()


def test_a_good_newer_step_never_takes_the_place_of_the_one_just_saved(tmp_path):
    _write(tmp_path, 20, keep=1)
    _write(tmp_path, 10, keep=1)
    assert _names(tmp_path) == ["step-00000010", "step-00000020"]


def test_names_of_any_width_are_ordered_by_number(tmp_path):
    for step in (99_999_999, 100_000_000):
        _write(tmp_path, step, keep=2)
    assert newest(tmp_path).step == 100_000_000
