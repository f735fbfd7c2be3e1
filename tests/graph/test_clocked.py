"""A graph run with a clock gives the same results, and a Timeline whose parts are the clock's."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.compat import backend
from hyper_parallel.compat.backend import EventClock, HostClock
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.graph import StepGraph, capture, executable, host
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.profile import Profiler


class _Ticks:
    """A clock whose every stamp is a second after the one before."""

    def __init__(self) -> None:
        self.count = 0

    def stamp(self) -> None:
        self.count += 1

    def read(self) -> list[float]:
        count, self.count = self.count, 0
        return [float(at) for at in range(count)]


def _step() -> StepGraph:
    with fake_mode_with_symbols():
        w, x = torch.empty(4, 4), torch.empty(3, 4)

        def step() -> dict[str, torch.Tensor]:
            product = x @ w.t()
            host(HostPoint.CHECK, [product.sum()])
            w.add_(1.0)
            return {"out": product}

        return capture(step, {"w": ("parameter", w), "x": ("input", x)})


def test_a_timeline_has_the_clocks_times() -> None:
    step = _step()
    names = [str(node.target) for node in step.nodes]
    profiler = Profiler(step, _Ticks())
    w, x = torch.randn(4, 4), torch.randn(3, 4)
    expected = executable(step).run({"w": w.clone(), "x": x}, lambda *_: None)["out"]
    seen = w.clone()
    assert torch.equal(profiler.run({"w": seen, "x": x}, lambda *_: None)["out"], expected)
    assert torch.equal(seen, w + 1)
    timeline = profiler.timeline(device="here")
    assert not timeline.predicted
    assert timeline.step == len(names)
    spans = {span.op.name: (span.start, span.end) for span in timeline.spans}
    for at, name in enumerate(names):
        if "host" in name:
            assert spans["host check"] == (at + 1, at + 1)
        else:
            assert spans[name.split(".")[1].rstrip("_")] == (at, at + 1)
    # What the host does in between is idle time of the runtime.
    assert timeline.computing == len(names) - 1
    assert timeline.bubbles.runtime == 1


def test_a_run_that_the_host_ends_is_not_counted() -> None:
    profiler = Profiler(_step(), HostClock())
    tensors = {"w": torch.randn(4, 4), "x": torch.randn(3, 4)}

    def refuse(point: str, values: object) -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        profiler.run(tensors, refuse)
    profiler.run(tensors, lambda *_: None)
    profiler.run(tensors, lambda *_: None)
    assert len(profiler.steps) == 2
    assert all(0 < seconds < 1 for seconds in profiler.steps)


def test_events_give_seconds() -> None:
    cpu = backend("cpu")
    clock = EventClock(cpu)
    for _ in range(3):
        clock.stamp()
    times = clock.read()
    assert times[0] == 0
    assert times == sorted(times)
    assert clock._events == []
