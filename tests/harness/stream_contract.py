"""What streams and events of any back end must do; the CPU and a dummy accelerator run the same checks.

`launch` starts a piece of work on the current stream: on the CPU the work of a stream is its own kernel, on
an accelerator it is a kernel launch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hyper_parallel.compat import Backend

Launch = Callable[[Callable[[], object]], None]
Check = Callable[[Backend, Launch], None]


def order_within_a_stream_is_kept(backend: Backend, launch: Launch) -> None:
    stream, seen = backend.Stream(), []
    for number in range(100):
        stream.run(lambda number=number: launch(lambda: seen.append(number)))
    stream.synchronize()
    assert seen == list(range(100))


def run_returns_before_the_work_is_done(backend: Backend, launch: Launch) -> None:
    stream, gate = backend.Stream(), threading.Event()
    stream.run(lambda: launch(gate.wait))
    assert not stream.query()
    gate.set()
    stream.synchronize()
    assert stream.query()


def a_stream_waits_for_an_event_of_another(backend: Backend, launch: Launch) -> None:
    first, second, gate, seen = backend.Stream(), backend.Stream(), threading.Event(), []
    first.run(lambda: launch(gate.wait))
    first.run(lambda: launch(lambda: seen.append("first")))
    done = backend.Event()
    done.record(first)
    done.wait(second)
    second.run(lambda: launch(lambda: seen.append("second")))
    assert not done.query()
    gate.set()
    second.synchronize()
    assert seen == ["first", "second"]
    assert done.query()


def an_event_stands_for_its_last_recording_before_the_wait(backend: Backend, launch: Launch) -> None:
    first, second, gate = backend.Stream(), backend.Stream(), threading.Event()
    event = backend.Event()
    event.record(first)
    event.wait(second)
    first.run(lambda: launch(gate.wait))
    event.record(first)
    second.run(lambda: launch(lambda: None))
    second.synchronize()  # hangs when it waits for the later recording
    assert not event.query()
    gate.set()
    event.synchronize()


def an_event_never_recorded_counts_as_reached(backend: Backend, launch: Launch) -> None:
    event, stream = backend.Event(), backend.Stream()
    assert event.query()
    event.synchronize()
    event.wait(stream)
    stream.synchronize()


def the_calling_threads_stream_is_the_default(backend: Backend, launch: Launch) -> None:
    event, stream, seen = backend.Event(), backend.Stream(), []
    event.record()
    event.wait(stream)
    stream.run(lambda: launch(lambda: seen.append(1)))
    event.record(stream)
    event.wait()
    backend.synchronize()
    assert seen == [1]


def elapsed_time_is_in_milliseconds(backend: Backend, launch: Launch) -> None:
    stream, start, end = backend.Stream(), backend.Event(timing=True), backend.Event(timing=True)
    start.record(stream)
    stream.run(lambda: launch(lambda: time.sleep(0.02)))
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) >= 20


def the_backend_synchronizes_every_stream(backend: Backend, launch: Launch) -> None:
    streams, done = [backend.Stream() for _ in range(3)], []
    for stream in streams:
        stream.run(lambda: launch(lambda: (time.sleep(0.01), done.append(1))))
    backend.synchronize()
    assert len(done) == 3


CHECKS: list[Check] = [
    order_within_a_stream_is_kept,
    run_returns_before_the_work_is_done,
    a_stream_waits_for_an_event_of_another,
    an_event_stands_for_its_last_recording_before_the_wait,
    an_event_never_recorded_counts_as_reached,
    the_calling_threads_stream_is_the_default,
    elapsed_time_is_in_milliseconds,
    the_backend_synchronizes_every_stream,
]
