"""Streams and events of the CPU: order, waiting across streams, failures, no deadlock."""

from __future__ import annotations

import gc
import threading
import time
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import stream_contract
from hyper_parallel.compat import backend
from hyper_parallel.compat.cpu import CpuEvent, CpuStream


@pytest.mark.parametrize("check", stream_contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_streams(check: stream_contract.Check) -> None:
    check(backend("cpu"), lambda work: work())


def _divide() -> float:
    return 1 / 0


def test_failure_is_raised_at_synchronize_with_its_traceback_and_drops_what_follows() -> None:
    stream, seen = CpuStream(), []
    stream.run(_divide)
    stream.run(lambda: seen.append("must not run"))
    with pytest.raises(ZeroDivisionError) as raised:
        stream.synchronize()
    assert "_divide" in "".join(traceback.format_tb(raised.value.__traceback__))
    assert seen == []
    stream.run(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["after"]


def test_failure_reaches_streams_that_wait_and_nobody_hangs() -> None:
    dead, waiting, seen = CpuStream(), CpuStream(), []
    dead.run(_divide)
    event = CpuEvent()
    event.record(dead)
    event.wait(waiting)
    waiting.run(lambda: seen.append("reads what was never written"))
    with pytest.raises(ZeroDivisionError):
        waiting.synchronize()
    with pytest.raises(ZeroDivisionError):
        event.synchronize()
    with pytest.raises(ZeroDivisionError):
        event.wait()
    with pytest.raises(ZeroDivisionError):
        dead.synchronize()
    assert seen == []


def test_the_backend_synchronizes_every_stream() -> None:
    cpu = backend("cpu")
    streams, done = [cpu.Stream() for _ in range(3)], []
    for stream in streams:
        stream.run(lambda: (time.sleep(0.01), done.append(1)))
    cpu.synchronize()
    assert len(done) == 3
    streams[1].run(_divide)
    with pytest.raises(ZeroDivisionError):
        cpu.synchronize()
    cpu.synchronize()


def test_elapsed_time_asks_for_timing_and_for_reached_events() -> None:
    start, end = CpuEvent(timing=True), CpuEvent(timing=True)
    with pytest.raises(RuntimeError, match="were recorded"):
        start.elapsed_time(end)
    start.record()
    with pytest.raises(RuntimeError, match="timing=True"):
        start.elapsed_time(CpuEvent())


def test_a_stream_that_waits_for_itself_is_refused() -> None:
    stream = CpuStream()
    stream.run(stream.synchronize)
    with pytest.raises(AssertionError, match="its own stream"):
        stream.synchronize()


def test_work_sees_the_callers_gradient_mode() -> None:
    stream, seen = CpuStream(), []
    with torch.no_grad():
        stream.run(lambda: seen.append(torch.is_grad_enabled()))
    stream.run(lambda: seen.append(torch.is_grad_enabled()))
    stream.synchronize()
    assert seen == [False, True]


def test_the_thread_ends_with_its_stream() -> None:
    stream = CpuStream()
    stream.run(lambda: None)
    stream.synchronize()
    thread = stream._queue.thread
    assert thread is not None and thread.is_alive()
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=30))
def test_any_program_of_waits_keeps_every_order_it_declares(trace: list[tuple[int, int, bool]]) -> None:
    streams, log, lock = [CpuStream() for _ in range(3)], [], threading.Lock()
    before: list[set[int]] = [set(), set(), set()]  # tasks that must precede each stream's next one
    needed: dict[int, set[int]] = {}

    def task(number: int) -> None:
        with lock:
            log.append(number)

    for number, (source, target, wait) in enumerate(trace):
        needed[number] = set(before[source])
        streams[source].run(lambda number=number: task(number))
        before[source].add(number)
        if wait:
            event = CpuEvent()
            event.record(streams[source])
            event.wait(streams[target])
            before[target] |= before[source]
    for stream in streams:
        stream.synchronize()
    assert sorted(log) == list(range(len(trace)))
    for number, earlier in needed.items():
        assert earlier <= set(log[: log.index(number)])
