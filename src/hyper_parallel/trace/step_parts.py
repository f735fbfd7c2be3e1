"""Parts of a step: what its seconds are spent on, by class of operator, exposed collective and cause of waiting.

    step = Σ kernels by class + Σ exposed communication by collective + waiting          mean over ranks

Kernels of two engines that run at the same time share that time in proportion to their seconds. Each part is seconds,
so that parts of two steps, or of a step and an estimate, can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hyper_parallel.trace.bubbles import exposed_calls
from hyper_parallel.trace.op import is_compute
from hyper_parallel.trace.timeline import Timeline

CLASSES = {
    "matmul": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "reduce": "elementwise",
    "copy": "elementwise",
    "view": "elementwise",
    "optimizer": "optimizer",
}
"""Class of operators by kind of `Work`; norms, activations, residuals and copies are one: all are bound by memory."""
PIPELINE, HOST, OTHER, TASKS = "pipeline", "host", "waiting", "tasks"


def step_parts(timeline: Timeline, tasks: Mapping[str, float] | None = None) -> dict[str, float]:
    """Seconds of a step by part; they add up to `Timeline.step`.

    `tasks`: seconds by part of what an op without work stands for, a pipeline's task, whose time is shared out so.
    """
    kernels: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, float] = defaultdict(float)
    world = timeline.trace.world
    for name in timeline.trace.ops:
        spans = timeline.of(name)
        share = sum(one == name for one in timeline.trace.classes.values()) / world
        for span in spans:
            if is_compute(span.op.queue) and span.end > span.start:
                kernels[_class_of(span.op.sort, span.op.phase)] += share * (span.end - span.start)
        for call, seconds in exposed_calls(spans, timeline.step).items():
            calls[call] += share * seconds
    total = sum(kernels.values())
    scale = timeline.computing / total if total else 0.0
    parts = {kind: seconds * scale for kind, seconds in kernels.items()}
    parts |= calls
    bubbles = timeline.bubbles
    # In a measurement, what nothing explains is no certain work of the host.
    host = bubbles.runtime if timeline.predicted else 0.0
    waiting = bubbles.imbalance + bubbles.copies + bubbles.runtime - host
    parts |= {PIPELINE: bubbles.fill_drain, HOST: host, OTHER: waiting}
    whole = sum(tasks.values()) if tasks else 0.0
    for name, seconds in (tasks or {}).items():
        parts[name] = parts.get(name, 0.0) + seconds / whole * parts.get(TASKS, 0.0)
    if whole:
        parts.pop(TASKS, None)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _class_of(sort: str, phase: str) -> str:
    return "optimizer" if phase in ("clip", "optimizer") else CLASSES.get(sort, TASKS)
