"""Files on a disk: damage is found, a full disk is said, and nothing is left behind."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from hyper_parallel.compat import backend
from hyper_parallel.errors import TierError
from hyper_parallel.launch import worker_supervisor
from hyper_parallel.offloading.tiers import FlashTier, file_io, leases

MiB = 2**20
CPU = backend("cpu")
FORK = multiprocessing.get_context("fork")
COUNT = 5 * MiB + 3


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def slots_file(folder: Path) -> Path:
    (found,) = folder.glob("hyper-parallel-spill-*/slots-*")
    return found


def written(folder: Path) -> FlashTier:
    """A tier with noise in slot 1, behind another slot."""
    tier = FlashTier(folder, CPU)
    tier.reserve({0: 4096, 1: COUNT})
    tier.begin_write(1, noise(COUNT)).wait()
    return tier


def read(tier: FlashTier, slot: int = 1) -> torch.Tensor:
    x = torch.full((COUNT,), 7, dtype=torch.uint8)
    tier.begin_read(slot, x).wait()
    return x


@pytest.mark.parametrize("at", [0, 2 * MiB + 12345, COUNT - 1])
def test_a_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    with written(tmp_path) as tier:
        path = slots_file(tmp_path)
        with path.open("r+b") as opened:
            opened.seek(4096 + at)
            (byte,) = opened.read(1)
            opened.seek(4096 + at)
            opened.write(bytes([byte ^ 0x80]))
        x = torch.full((COUNT,), 7, dtype=torch.uint8)
        with pytest.raises(
            TierError, match=rf"{path} is damaged: what slot 1 has at {4096 + at // (2 * MiB) * 2 * MiB}"
        ):
            tier.begin_read(1, x).wait()
        part = x[at // (2 * MiB) * 2 * MiB :][: 2 * MiB]
        assert bool((part == 7).all()), "a wrong number was given"


def test_what_an_earlier_write_left_is_found(tmp_path: Path) -> None:
    with written(tmp_path) as tier:
        path = slots_file(tmp_path)
        before = path.read_bytes()
        tier.begin_write(1, noise(COUNT, 1)).wait()
        assert torch.equal(read(tier), noise(COUNT, 1))
        path.write_bytes(before)
        with pytest.raises(TierError, match="is damaged"):
            read(tier)


def test_a_file_that_became_shorter_is_found(tmp_path: Path) -> None:
    with written(tmp_path) as tier:
        os.truncate(slots_file(tmp_path), 3 * MiB)
        with pytest.raises(TierError, match="ends at"):
            read(tier)


def test_a_disk_without_the_space_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with written(tmp_path) as tier:
        usage = shutil.disk_usage(tmp_path)._replace(free=MiB)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(TierError, match=r"more are needed in .*, and 1\.0 MiB are free.*memory\.flash"):
            tier.reserve({0: 4096, 1: COUNT, 2: 20 * MiB})
        assert torch.equal(read(tier), noise(COUNT))


def test_the_space_is_taken_before_the_run(tmp_path: Path) -> None:
    with FlashTier(tmp_path, CPU) as tier:
        tier.reserve({0: 3 * MiB})
        assert slots_file(tmp_path).stat().st_blocks * 512 >= 3 * MiB


def test_a_disk_that_runs_full_in_mid_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with written(tmp_path) as tier:
        real, calls = os.pwritev, []

        def full(*args: object) -> int:
            calls.append(args)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(TierError, match=r"writing slot 1 .* ran full at .*No space left.*memory\.flash"):
            tier.begin_write(1, noise(COUNT, 1)).wait()
        with pytest.raises(TierError, match="ran full"):
            read(tier)


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, fill = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda f, views, at: write(f, [views[0][: 64 * 4096]], at))
    monkeypatch.setattr(os, "preadv", lambda f, views, at: fill(f, [views[0][: 32 * 4096]], at))
    with written(tmp_path) as tier:
        assert torch.equal(read(tier), noise(COUNT))


def test_without_direct_input_and_output_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuses(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr(file_io, "_refused", set())
    with caplog.at_level(logging.WARNING), written(tmp_path) as first, written(tmp_path) as second:
        assert torch.equal(read(first), read(second))
    assert len([record for record in caplog.records if "does not support direct I/O" in record.message]) == 1


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"no folder can be made in .*memory\.flash"):
        FlashTier(tmp_path / "file" / "spill", CPU)


def test_close_leaves_nothing_and_an_error_too(tmp_path: Path) -> None:
    written(tmp_path).close()
    with pytest.raises(ZeroDivisionError), written(tmp_path):
        1 / 0
    tier = written(tmp_path)
    assert list(tmp_path.iterdir())
    del tier  # never closed
    assert not list(tmp_path.iterdir())


def test_a_plan_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with written(tmp_path) as tier:
        real = os.pwritev

        def full(*args: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(TierError, match="ran full"):
            tier.reserve({1: COUNT})  # which moves it to the front
        monkeypatch.setattr(os, "pwritev", real)
        assert torch.equal(read(tier), noise(COUNT))
        assert slots_file(tmp_path)


def _holds(folder: Path, out: Connection) -> None:
    with written(folder) as tier:
        out.send(slots_file(folder).parent.name)
        out.recv()
        out.send(torch.equal(read(tier), noise(COUNT)))


def test_a_killed_processs_files_go_with_the_next_start_and_a_live_ones_stay(tmp_path: Path) -> None:
    here, there = FORK.Pipe()
    child = FORK.Process(target=_holds, args=(tmp_path, there), daemon=True)
    child.start()
    assert here.poll(60)
    name = here.recv()
    (tmp_path / "hyper-parallel-spill-notes").mkdir()
    (tmp_path / "mine-1").mkdir()
    with FlashTier(tmp_path, CPU):
        assert (tmp_path / name).exists()
    here.send(None)
    assert here.poll(60)
    assert here.recv(), "what a live process had was damaged"
    child.join()

    child = FORK.Process(target=_holds, args=(tmp_path, there), daemon=True)
    child.start()
    assert here.poll(60)
    name = here.recv()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert (tmp_path / name / "slots-1").exists()
    with FlashTier(tmp_path, CPU):
        assert not (tmp_path / name).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"hyper-parallel-spill-notes", "mine-1"}


def test_what_others_put_into_the_folder_neither_stops_nor_redirects(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = tmp_path / "spill"
    folder.mkdir()
    os.mkfifo(folder / "hyper-parallel-spill-1-00000000")
    (folder / "hyper-parallel-spill-1-00000001").symlink_to(outside)
    (folder / "hyper-parallel-spill-1-00000002").mkdir()
    (folder / "hyper-parallel-spill-1-00000002").chmod(0o777)
    young = folder / "hyper-parallel-spill-1-00000003.new"
    young.mkdir(mode=0o700)
    old = folder / "hyper-parallel-spill-1-00000004.new"
    old.mkdir(mode=0o700)
    os.utime(old, (0, 0))
    there = {path for path in folder.iterdir() if path != old}
    kept = leases.hold(folder)  # as anybody may
    with FlashTier(folder, CPU) as tier:
        tier.reserve({0: 4096})
        assert stat.S_IMODE(slots_file(folder).parent.stat().st_mode) == 0o700
    os.close(kept)
    assert set(folder.iterdir()) == there
    assert (outside / "kept").read_text() == "kept"


def _under_a_limit(folder: Path, out: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MiB, 4 * MiB))
    try:
        with FlashTier(folder, CPU) as tier:
            tier.reserve({0: 20 * MiB})
    except TierError as error:
        out.send(str(error))


def test_a_limit_on_files_is_said(tmp_path: Path) -> None:
    here, there = FORK.Pipe()
    child = FORK.Process(target=_under_a_limit, args=(tmp_path, there), daemon=True)
    child.start()
    assert here.poll(60)
    assert "File too large" in here.recv()
    child.join()
    assert not list(tmp_path.iterdir())


def test_copies_under_way_end_before_close(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path, CPU)
    tier.reserve(dict.fromkeys(range(8), 4 * MiB))
    pending = [tier.begin_write(slot, noise(4 * MiB)) for slot in range(8)]
    tier.close()
    assert all(one.done() for one in pending)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("spare", "lanes"), [(0, 1), (2, 1), (4, 2), (64, 3)])
def test_threads_follow_the_cores_that_nothing_computes_on(
    spare: int, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = CPU
    monkeypatch.setattr(type(cpu), "spare_cores", lambda self: spare)
    with FlashTier(tmp_path, cpu, capacity=MiB) as tier:
        assert len(tier._out._threads) == len(tier._back._threads) == lanes


def test_a_processors_cores_are_spare_where_no_kernel_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = CPU
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert cpu.spare_cores() == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu.spare_cores() == 0


def test_a_server_of_workers_under_a_budget_has_kernels_that_do_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> object:
        seen.append(env.get("OMP_WAIT_POLICY"))
        raise OSError

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(worker_supervisor.subprocess, "Popen", popen)
    for spins in (True, False):
        with pytest.raises(OSError):
            worker_supervisor.ForkServer(spins)
    assert seen == [None, "passive"]
