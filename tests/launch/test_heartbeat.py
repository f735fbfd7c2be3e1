"""What a heartbeat says of where the main thread is."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from harness import run_ranks
from hyper_parallel.compat.process_groups import collectives_begun
from hyper_parallel.launch.heartbeat import Beat, Pulse


def test_a_beat_has_the_step_and_the_innermost_operation() -> None:
    pulse = Pulse()
    assert (pulse.beat().step, pulse.beat().operation, pulse.beat().patient) == (0, "starting", True)
    with pulse.step(3):
        assert (pulse.beat().step, pulse.beat().operation, pulse.beat().patient) == (3, "step", False)
        with pulse.operation("capturing a step"):
            assert (pulse.beat().operation, pulse.beat().patient) == ("capturing a step", True)
        assert pulse.beat().operation == "step"
    assert pulse.beat().step == 3


def test_progress_grows_with_steps_operations_and_collectives_and_with_nothing_else() -> None:
    pulse = Pulse()
    begun = 0
    pulse.count_collectives(lambda: begun)
    seen = [pulse.beat().progress]
    with pulse.step(1):
        seen.append(pulse.beat().progress)
        begun = 5
        seen.append(pulse.beat().progress)
        with pulse.operation("saving"):
            seen.append(pulse.beat().progress)
    seen.append(pulse.beat().progress)
    assert seen == sorted(set(seen)), seen
    assert pulse.beat().progress == seen[-1]


def test_a_steps_time_is_without_what_is_captured_in_it() -> None:
    pulse = Pulse()
    with pulse.step(1), pulse.operation("capturing a step"):
        time.sleep(0.3)
    step_time = pulse.beat().step_time
    assert step_time is not None and step_time < 0.25


def test_a_beat_of_a_main_thread_that_stands_still_has_its_line() -> None:
    pulse, beats, seen = Pulse(), list[Beat](), threading.Event()

    def listen() -> None:
        beats.extend([pulse.beat(), pulse.beat()])
        seen.set()

    threading.Thread(target=listen).start()
    _waits_for(seen)
    assert beats[0].where == "" and beats[1].progress == beats[0].progress
    assert ":" in beats[1].where and not beats[1].waits


def _waits_for(event: threading.Event) -> None:
    assert event.wait(60)


def _count(rank: int, world: int) -> list[int]:
    seen = [collectives_begun()]
    dist.all_reduce(torch.ones(1))
    seen.append(collectives_begun())
    group = dist.new_group(list(range(world)))
    before = collectives_begun()
    dist.all_reduce(torch.ones(1), group=group)
    return [seen[1] - seen[0], collectives_begun() - before]


def test_collectives_are_counted_over_all_groups() -> None:
    assert run_ranks(_count, 2) == [[1, 1], [1, 1]]
