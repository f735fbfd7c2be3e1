"""A save that dies, fails or is refused leaves the old checkpoint or the new: never none, never wrong."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_worlds import ThreadRanks, each_rank, random_tensor

from harness import run_ranks
from harness.fork_server import fork_context
from hyper_parallel.checkpoint import Piece, Writer, durable, newest, read
from hyper_parallel.checkpoint.commit import Part
from hyper_parallel.checkpoint.durable import explain
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout, Mesh

MESH = Mesh(("shard", 2))
LAYOUT = Layout(MESH, (64, 64), (("shard",), ()))


def value(step: int) -> torch.Tensor:
    """What the tensor is at a step, so that any mixture of two steps is noticed."""
    return random_tensor((64, 64), torch.int64, step)


def save(folder: Path, step: int, *, keep: int = 1, wait: bool = True) -> None:
    """Both ranks of the mesh save, as two threads of this process."""

    def one(ranks: ThreadRanks) -> None:
        with Writer(folder, MESH.world, ranks.rank, keep=keep, group=ranks) as writer:
            mine = value(step)[32 * ranks.rank :][:32].clone()
            writer.save(step, {"w": Piece(mine, LAYOUT)}, {"step": step})

    for result in each_rank(2, one):
        if isinstance(result, Exception):
            raise result


def check_newest(folder: Path, steps: set[int]) -> int:
    """The newest checkpoint is of one of `steps` and holds that step's values."""
    found = newest(folder)
    assert found is not None and found.step in steps, (found, steps)
    whole = torch.zeros(64, 64, dtype=torch.int64)
    layout = Layout.replicated(Mesh(), (64, 64))
    assert read(found.path, {"w": Piece(whole, layout)}) == {"step": found.step}
    assert torch.equal(whole, value(found.step))
    return found.step


def start(target, *args) -> multiprocessing.Process:
    process = fork_context().Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _save_for_ever(folder: Path, first: int, connection) -> None:
    torch.set_num_threads(1)
    for step in range(first, first + 10_000):
        save(folder, step)
        connection.send(step)


def test_killed_at_random_moments(tmp_path):
    moments = random.Random(20)
    save(tmp_path, 1)
    committed = 1
    for _ in range(7):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = start(_save_for_ever, tmp_path, committed + 1, theirs)
        theirs.close()
        saved = ours.recv()
        time.sleep(moments.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            while True:
                saved = ours.recv()
        except EOFError:
            pass
        committed = check_newest(tmp_path, {saved, saved + 1})


def _die_at(folder: Path, step: int, call: int) -> None:
    """Save, and die by SIGKILL at the `call`-th call that changes the file system."""
    torch.set_num_threads(1)
    counter = iter(range(10**9))
    lock = threading.Lock()

    def counted(function):
        def wrapped(*args, **options):
            with lock:
                if next(counter) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapped

    for name in ("mkdir", "fsync", "rename", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    durable.open = counted(open)
    save(folder, step)


def test_killed_at_every_change_of_the_file_system(tmp_path):
    save(tmp_path, 1)
    step, seen = 1, set()
    for call in range(200):
        process = start(_die_at, tmp_path, step + 1, call)
        process.join(60)
        now = check_newest(tmp_path, {step, step + 1})
        seen.add(now - step)
        step = now
        if process.exitcode == 0:
            break
    assert process.exitcode == 0 and call > 20, "every call of a whole save was tried"
    assert seen == {0, 1}
    leftovers = {path.name for path in tmp_path.iterdir()}
    assert leftovers == {".writer.lock", f"step-{step:08d}"}, (
        "the last writer removed what the killed ones left"
    )


def test_a_folder_may_be_renamed_as_soon_as_its_last_index_is_seen(tmp_path, monkeypatch):
    """Rank 0 commits a step when it sees every index, which another rank may still be making durable."""
    partial, rename = tmp_path / "step-1.partial", os.rename
    partial.mkdir()

    def rename_and_commit(source, target) -> None:
        rename(source, target)
        rename(partial, tmp_path / "step-1")

    monkeypatch.setattr(os, "rename", rename_and_commit)
    durable.publish(partial / "rank-1.json", b"{}")
    assert (tmp_path / "step-1" / "rank-1.json").read_bytes() == b"{}"


def test_everything_is_durable_before_the_marker_and_the_marker_before_the_name(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def recording_rename(source, target) -> None:
        rename(source, target)
        done.append(("rename", Path(target).name))

    save(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    save(tmp_path, 2)
    marker = done.index(("rename", "commit.json"))
    for rank in (0, 1):
        index = done.index(("rename", f"rank-{rank:05d}.json"))
        assert done.index(("fsync", f"rank-{rank:05d}.safetensors")) < index < marker
        assert any(
            name.startswith(f".rank-{rank:05d}.json-") for kind, name in done[:index] if kind == "fsync"
        )
    named = done.index(("rename", "step-00000002"))
    before = [name for kind, name in done[:marker] if kind == "fsync"]
    assert before[-1].startswith(".commit.json-") and before[-2].startswith("step-00000002.partial-")
    assert done[marker + 1][0] == "fsync" and done[marker + 1][1].startswith("step-00000002.partial-")
    assert done[named + 1] == ("fsync", tmp_path.name)
    removed = [
        position for position, (kind, name) in enumerate(done) if ".deleted-" in name and kind == "rename"
    ]
    assert removed and min(removed) > named + 1, "the old one goes after the new one is durable"


@pytest.mark.parametrize("limit", [1, 5000, 20_000])
@pytest.mark.parametrize("background", [True, False])
def test_a_file_that_does_not_fit_leaves_nothing(tmp_path, limit, background):
    whole = value(2)
    layout = Layout.replicated(Mesh(), (64, 64))
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_second(writer: Writer) -> None:
        writer.save(2, {"w": Piece(whole, layout)}, {"step": 2})
        writer.wait()

    with Writer(tmp_path, 1, 0, background=background) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                CheckpointError, match=r"cannot write .*step-00000002.*larger than a file may be"
            ):
                save_second(writer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(path.name for path in tmp_path.iterdir()) == [".writer.lock", "step-00000001"]
        save_second(writer)  # once there is room again
    check_newest(tmp_path, {2})


def _fill_a_small_disk(folder: str, connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    private, clone_newns, recursive = 1 << 18, 0x20000, 1 << 14
    if (
        libc.unshare(clone_newns)
        or libc.mount(b"none", b"/", None, recursive | private, None)
        or libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=128k")
    ):
        connection.send((None, os.strerror(ctypes.get_errno())))
        return
    torch.set_num_threads(1)
    save(Path(folder), 1)
    try:
        for step in range(2, 20):
            save(Path(folder), step, keep=20)
        connection.send(("it never filled", []))
    except CheckpointError as error:
        left = [name for name in os.listdir(folder) if not name.startswith(".")]
        check_newest(Path(folder), {step - 1})
        connection.send((str(error), left))


def test_a_full_disk(tmp_path):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start(_fill_a_small_disk, str(tmp_path), theirs)
    theirs.close()
    message, left = ours.recv()
    process.join()
    if message is None:
        pytest.skip(f"no small file system can be mounted here: {left}")
    assert "no space is left" in message and "checkpoint.keep" in message and "\n" not in message, message
    assert left and all(".partial" not in name for name in left), left


def test_each_error_of_the_file_system_has_its_line(tmp_path):
    for code, words in (
        (errno.ENOSPC, r"no space is left \([0-9.]+ \w*B free\); free some"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EROFS, "not writable .*change its permissions"),
        (errno.ENOTDIR, "a file is in the way"),
        (errno.EIO, "Input/output error"),
    ):
        error = explain(OSError(code, os.strerror(code)), tmp_path / "new")
        with pytest.raises(CheckpointError, match=rf"^cannot write {tmp_path}/new: .*{words}"):
            raise error


def test_a_folder_that_cannot_be_written_is_refused_at_the_start_by_all(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "under", Path("/proc/nothing")):
        results = each_rank(
            2, lambda ranks, folder=folder: Writer(folder, MESH.world, ranks.rank, group=ranks)
        )
        for result in results:
            assert isinstance(result, CheckpointError), result
            assert str(result).startswith(f"rank 0: cannot write {folder}: "), result
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "there", "here"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "no space is left",
            "failed: cannot write .*no space is left",
        ),
        (MemoryError("not enough"), "not enough", "failed: see the log of rank 1"),
    ],
)
def test_one_ranks_failure_is_named_and_ends_the_save_on_all(tmp_path, monkeypatch, error, there, here):
    save(tmp_path, 1)
    write_file = durable.write_file

    def failing(path, chunks):
        if path.name == "rank-00001.safetensors":
            raise error
        return write_file(path, chunks)

    monkeypatch.setattr("hyper_parallel.checkpoint.commit.write_file", failing)

    def one(ranks: ThreadRanks) -> str:
        with Writer(tmp_path, MESH.world, ranks.rank, group=ranks, time_limit=10) as writer:
            writer.save(2, {"w": Piece(value(2)[:32], LAYOUT)}, {})
            with pytest.raises((CheckpointError, MemoryError)) as caught:
                writer.wait()
            return str(caught.value)

    first, second = each_rank(2, one)
    assert re.search(f"step 2 was not saved: rank 1 {here}", first), first
    assert there in second
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer.lock", "step-00000001"]
    check_newest(tmp_path, {1})


def test_a_rank_that_never_writes_is_named(tmp_path, monkeypatch):
    write = Part.write
    monkeypatch.setattr(Part, "write", lambda part: write(part) if part.rank == 0 else None)

    def one(ranks: ThreadRanks) -> str:
        with Writer(tmp_path, MESH.world, ranks.rank, group=ranks, time_limit=0.2) as writer:
            writer.save(2, {"w": Piece(value(2)[:32], LAYOUT)}, {})
            with pytest.raises(CheckpointError) as caught:
                writer.wait()
            return str(caught.value)

    first, second = each_rank(2, one)
    assert "rank 0 says why" in second
    assert "nothing from rank 1 within 0 s" in first and "file system that all ranks share" in first
    assert [path.name for path in tmp_path.iterdir()] == [".writer.lock"]


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    with Writer(tmp_path, 1, 0), pytest.raises(CheckpointError, match="another run is writing"):
        Writer(tmp_path, 1, 0)
    Writer(tmp_path, 1, 0).close()


def test_an_error_in_the_background_is_raised_once_and_by_the_next_save(tmp_path, monkeypatch):
    layout = Layout.replicated(Mesh(), (64, 64))
    piece = {"w": Piece(value(1), layout)}

    def failing(*_) -> None:
        raise MemoryError

    with Writer(tmp_path, 1, 0) as writer:
        with monkeypatch.context() as patch:
            patch.setattr("hyper_parallel.checkpoint.writer.commit", failing)
            writer.save(1, piece, {})
            writer._thread.join()
        with pytest.raises(MemoryError):
            writer.save(2, piece, {})
        writer.save(3, piece, {"step": 3})
        assert writer.wait() == tmp_path / "step-00000003"


def _train_and_resume(rank: int, world: int, folder: str) -> list[int]:
    mesh = Mesh(("shard", world))
    layout = Layout(mesh, (64, 64), (("shard",), ()))
    rows = slice(*layout.intervals(0, mesh.coordinate(rank))[0])
    local = value(0)[rows].clone()
    with Writer(folder, mesh.world, rank, keep=2) as writer:
        for step in (1, 2, 3):
            local.copy_(value(step)[rows])
            writer.save(step, {"w": Piece(local, layout)}, {"step": step})
            local.zero_()
            dist.all_reduce(torch.ones(1))  # training's collectives go on beside the save
    found = newest(folder, dist.group.WORLD)
    assert found is not None
    got = torch.zeros_like(local)
    state = read(found.path, {"w": Piece(got, layout)})
    assert torch.equal(got, value(3)[rows])
    return [found.step, state["step"]]


def test_real_ranks_over_gloo(tmp_path):
    assert run_ranks(_train_and_resume, 3, str(tmp_path)) == [[3, 3]] * 3
    check_newest(tmp_path, {3})
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-00000002", "step-00000003"]


def test_a_run_of_several_ranks_needs_its_group(tmp_path):
    with pytest.raises(CheckpointError, match="a run of 2 ranks needs a process group"):
        Writer(tmp_path, MESH.world, 0)
    for result in each_rank(2, lambda ranks: Writer(tmp_path, 4, ranks.rank, group=ranks)):
        assert "rank 0 of 2 in the process group" in str(result) or "rank 1 of 2" in str(result)
