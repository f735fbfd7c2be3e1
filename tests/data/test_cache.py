"""Cached arrays are whole or absent, and one process builds while the others wait."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import cache
from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build
from hyper_parallel.data.corpus import corpora
from hyper_parallel.data.document import Text
from hyper_parallel.data.tokenizer import trained
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


def test_a_file_under_anothers_name_counts_as_absent(tmp_path: Path) -> None:
    write(tmp_path / "a", [1])
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())
    assert read_array(tmp_path / "b") is None
    assert read_array(tmp_path / "a") is not None


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


def _forged(path: Path, **line: Any) -> None:
    """An array file of whoever can compute a digest."""
    data = line.pop("data", b"\0" * 16)
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    head = {"format": 1, "dtype": "<u2", "count": 8, "digest": digest, "meta": {}, **line}
    path.write_bytes(json.dumps(head).encode().ljust(4095) + b"\n" + data)


@pytest.mark.parametrize(
    "line",
    [
        {"dtype": "|O", "count": 2},
        {"dtype": "(8,)<u2", "count": 1},
        {"dtype": ["<u2"]},
        {"dtype": None},
        {"count": -1, "data": b""},
        {"count": 8.0},
        {"count": True, "data": b"xx"},
        {"count": 10**30},
        {"meta": []},
        {"digest": 3},
        {"format": [[]]},
    ],
    ids=str,
)
def test_a_forged_array_counts_as_absent(tmp_path: Path, line: dict[str, Any]) -> None:
    path = tmp_path / "key.array"
    _forged(path)
    found = read_array(path)
    assert found is not None and found[0].tolist() == [0] * 8
    _forged(path, **line)
    assert read_array(path) is None


def test_what_lies_in_the_place_of_a_cache_file_is_neither_waited_for_nor_written_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    os.mkfifo(tmp_path / "pipe.array")
    (tmp_path / "link.array").symlink_to(kept)
    for name in ("pipe", "link"):
        with pytest.raises(DataError, match="cannot read the cache file"):
            read_array(tmp_path / f"{name}.array")
    (tmp_path / "key.lock").symlink_to(kept)
    with pytest.raises(DataError, match="cannot write the cache"):
        read_or_build(tmp_path, "key", lambda: None, lambda: None)
    assert kept.read_text() == "kept"


def test_a_corpus_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tokenizer = trained(folder, "some", ["some text"], 9, 300)

    def made() -> Any:
        return corpora(folder, "key", lambda: [Text("a line", "some text")], tokenizer, 0.0)

    made()
    (tokens,) = folder.glob("*-train-tokens.array")
    (offsets,) = folder.glob("*-train-offsets.array")
    good, count = offsets.read_bytes(), len(read_array(tokens)[0])
    for forged in ([], [1, count], [0, count + 5, count], [0, -3, count], [0, count - 1]):
        data = np.array(forged, "<i8").tobytes()
        _forged(offsets, dtype="<i8", count=len(forged), data=data, meta={"masked": False})
        with pytest.raises(DataError, match="parts of different corpora; delete"):
            made()
    offsets.write_bytes(good)
    made()
    _forged(tokens, count=count, data=np.full(count, 60000, "<u2").tobytes())
    with pytest.raises(DataError, match="parts of different corpora; delete"):
        made()
    (kept,) = folder.glob("tokenizer-*.array")
    _forged(kept, dtype="|u1", count=3, data=b"{}\xff")
    with pytest.raises(DataError, match="holds no tokenizer; delete it"):
        trained(folder, "some", ["some text"], 9, 300)
