"""Cached arrays are whole or absent, and one process builds while the others wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import cache
from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build
from hyper_parallel.errors import DataError


def write(path: Path, values: list[int], dtype: str = "<u2") -> None:
    writer = ArrayWriter(path, dtype)
    for value in values:
        writer.append(np.array([value]))
    writer.commit(note="n")


@pytest.mark.parametrize("values", [[], [1], [5, 65_535, 0]])
def test_what_is_written_is_read(tmp_path: Path, values: list[int]) -> None:
    write(tmp_path / "a", values)
    found = read_array(tmp_path / "a")
    assert found is not None
    assert found[0].tolist() == values and found[0].dtype == np.uint16 and found[1] == {"note": "n"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_or_cut_file_is_never_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cache") / "a"
    write(path, list(range(100)))
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        at = data.draw(st.integers(cache._HEADER, len(whole) - 1))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert read_array(path) is None


def test_absent_and_foreign_files_are_none(tmp_path: Path) -> None:
    assert read_array(tmp_path / "a") is None
    (tmp_path / "a").write_text("something else")
    assert read_array(tmp_path / "a") is None


def test_a_discarded_writer_leaves_nothing(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a", "<u2")
    writer.append(np.arange(3))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def _build_slowly(folder: Path) -> None:
    def build() -> None:
        with open(folder / "builders", "a") as file:
            file.write("x")
        time.sleep(0.2)
        write(folder / "key.array", [7])

    found, _ = read_or_build(folder, "key", lambda: read_array(folder / "key.array"), build)
    assert found.tolist() == [7]


def _hold_for_ever(folder: Path) -> None:
    def build() -> None:
        ArrayWriter(folder / "key.array", "<u2").append(np.arange(3))
        (folder / "held").touch()
        time.sleep(600)

    read_or_build(folder, "key", lambda: read_array(folder / "key.array"), build)


def test_one_process_builds_while_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_build_slowly, args=(tmp_path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert (tmp_path / "builders").read_text() == "x"


def test_a_killed_builder_blocks_nobody_and_its_leavings_go(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_hold_for_ever, args=(tmp_path,))
    worker.start()
    while not (tmp_path / "held").exists():
        assert worker.is_alive()
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    assert list(tmp_path.glob("*.tmp"))
    _build_slowly(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_holder_that_never_ends_is_waited_for_only_so_long(tmp_path: Path) -> None:
    with cache._locked(tmp_path / "lock") as first, cache._locked(tmp_path / "lock", timeout=0.1) as second:
        assert first and not second


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the cache .*data\.cache"):
        read_or_build(tmp_path / "file" / "cache", "key", lambda: None, lambda: None)


def test_a_full_disk(tmp_path: Path) -> None:
    def build() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"No space left on device; set data\.cache"):
        read_or_build(tmp_path, "key", lambda: None, build)
