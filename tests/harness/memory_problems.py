"""Problems of a memory planner without a captured graph: small random ones, and a step shaped like a Llama's.

`llama(...)` writes a step of forward, backward and an update for each parameter, node by node, and notes which storages
each node uses; kinds, sizes and times follow from the shape (FLOPs and bytes over a device's rates). Views and casts
stand as nodes that take next to no time, as in a captured graph, so that the full shape has about 10,000 nodes and
3,300 storages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate

from hyper_parallel.offloading.schedule.problem import (
    Buffer,
    ForcedOffload,
    OffloadTier,
    Problem,
    Rate,
    Update,
    UseInterval,
    Workspace,
)

GiB = 2**30


@dataclass
class Tape:
    """Writes a step down: nodes with their seconds, and the storages that each uses."""

    seconds: list[float] = field(default_factory=list)
    uses: list[dict[int, bool]] = field(default_factory=list)
    """Of each storage: the nodes that use it, and whether they write it."""
    about: list[tuple[int, str, bool, str]] = field(default_factory=list)
    """Of each storage: bytes, kind, state, name."""
    taken: list[Workspace] = field(default_factory=list)

    def new(self, size: int, kind: str, name: str = "", state: bool = False) -> int:
        """A storage; the first node that uses it makes it, unless it is state."""
        self.uses.append({})
        self.about.append((size, kind, state, name))
        return len(self.uses) - 1

    def node(self, seconds: float, reads: list[int], writes: list[int] | None = None, work: int = 0) -> None:
        """One node; `work` are bytes of a workspace."""
        at = len(self.seconds)
        self.seconds.append(seconds)
        for storage in reads:
            self.uses[storage].setdefault(at, False)
        for storage in writes or []:
            self.uses[storage][at] = True
        if work:
            self.taken.append(Workspace(at, at, work))

    def views(self, storage: int, count: int) -> None:
        """Nodes that look at a storage and take next to no time."""
        for _ in range(count):
            self.node(1e-6, [storage])

    def problem(self, spaces: tuple[OffloadTier, ...], budget: int) -> Problem:
        """What was written, to be brought under a budget."""
        held = [
            Buffer(storage, size, kind, _stretches(uses), state, name=name)
            for storage, (uses, (size, kind, state, name)) in enumerate(
                zip(self.uses, self.about, strict=True)
            )
            if uses
        ]
        starts = (0.0, *accumulate(self.seconds))
        return Problem(starts, tuple(held), tuple(self.taken), spaces, budget)


def _stretches(uses: dict[int, bool]) -> tuple[UseInterval, ...]:
    found: list[UseInterval] = []
    for at in sorted(uses):
        if found and found[-1].last + 1 == at:
            found[-1] = UseInterval(found[-1].first, at, found[-1].writes or uses[at])
        else:
            found.append(UseInterval(at, at, uses[at]))
    return tuple(found)


@dataclass(frozen=True)
class Shape:
    """Of a Llama and its step; Llama 3.1 8B, one sequence, unless said otherwise."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    narrow: int = 1024
    """Width of keys and of values."""
    vocabulary: int = 128256
    tokens: int = 4096
    micro_batches: int = 1
    views: int = 6
    """Cheap nodes beside each product."""
    flops: float = 400e12
    bandwidth: float = 3e12
    """Of the device: FLOP/s and B/s."""


SMALL = Shape(
    layers=4,
    hidden=256,
    inner=896,
    narrow=64,
    vocabulary=4096,
    tokens=512,
    views=2,
    flops=1e12,
    bandwidth=2e10,
)


def spaces(gib: float, host: int = 2**50, flash: int | None = None) -> tuple[OffloadTier, ...]:
    """A host behind a link of so many GiB/s each way; with `flash`, a second space eight times as slow."""
    found = [OffloadTier("host", host, Rate(1e-5, gib * GiB), Rate(1e-5, gib * GiB))]
    if flash is not None:
        found.append(OffloadTier("flash", flash, Rate(1e-4, gib * GiB / 8), Rate(1e-4, gib * GiB / 8)))
    return tuple(found)


def under(problem: Problem, share: float) -> Problem:
    """With the budget at a share of the way from the working set (0) to the peak without moves (1)."""
    least, most = problem.working_set, max(problem.profile())
    return replace(problem, budget=least + int(share * (most - least)))


def llama(shape: Shape = SMALL, gib: float = 25.0, seed: int | None = None) -> Problem:
    """A step of the shape; the budget is the peak. `seed` makes times and sizes depart by up to a fifth."""
    tape, draw = Tape(), random.Random(seed)

    def vary(value: float) -> float:
        return value if seed is None else value * draw.uniform(0.8, 1.2)

    def moved(size: float) -> float:
        return vary(2e-6 + size / shape.bandwidth)

    def product(out: int, inner: int) -> float:
        return vary(2e-6 + 2 * shape.tokens * out * inner / shape.flops)

    h, i, w, v, t = shape.hidden, shape.inner, shape.narrow, shape.vocabulary, shape.tokens
    parameters: dict[str, tuple[int, int]] = {}  # name -> (storage, numbers)

    def parameter(name: str, numbers: int) -> None:
        parameters[name] = (tape.new(2 * numbers, "parameter", name, True), numbers)

    parameter("embed", v * h)
    for layer in range(shape.layers):
        for part, numbers in _parts(h, i, w).items():
            parameter(f"layers.{layer}.{part}", numbers)
    parameter("norm", h)
    parameter("head", v * h)
    gradients: dict[str, int] = {}

    def activation(width: int, name: str) -> int:
        return tape.new(int(vary(2 * t * width)), "activation", name)

    def linear(name: str, x: int, out: int, inner: int, small: int = 1) -> int:
        y = activation(out, f"{name}.out")
        tape.views(x, shape.views // 2)
        tape.node(product(out, inner) / small, [x, parameters[name][0]], [y])
        tape.views(y, shape.views - shape.views // 2)
        return y

    def pointwise(xs: list[int], width: int, name: str, kind: str = "activation", size: float = 2) -> int:
        y = tape.new(int(vary(size * t * width)), kind, name)
        tape.node(moved(2.0 * t * width * (len(xs) + size / 2)), xs, [y])
        return y

    def gradient(name: str, numbers: int, dy: int, x: int, seconds: float) -> None:
        if name in gradients:
            fresh = tape.new(2 * numbers, "temporary", f"{name}.part")
            tape.node(seconds, [dy, x], [fresh])
            tape.node(moved(6.0 * numbers), [fresh], [gradients[name]])
        else:
            gradients[name] = tape.new(2 * numbers, "gradient", f"{name}.grad")
            tape.node(seconds, [dy, x], [gradients[name]])

    def back(name: str, dy: int, x: int, out: int, inner: int) -> int:
        """The gradient of a product's input; that of its weight too."""
        tape.views(dy, shape.views)
        gradient(name, parameters[name][1], dy, x, product(out, inner))
        dx = tape.new(2 * t * inner, "temporary", f"{name}.dx")
        tape.node(product(out, inner), [dy, parameters[name][0]], [dx])
        tape.views(dx, shape.views)
        return dx

    def norm(name: str, x: int) -> tuple[int, int]:
        wide = pointwise([x], h, f"{name}.wide", "temporary", 4)
        scale = tape.new(4 * t, "activation", f"{name}.scale")
        tape.node(moved(4.0 * t * h), [wide], [scale])
        y = activation(h, f"{name}.out")
        tape.node(moved(6.0 * t * h), [wide, scale, parameters[name][0]], [y])
        return y, scale

    def norm_back(name: str, dy: int, x: int, scale: int) -> int:
        wide = tape.new(4 * t * h, "temporary", f"{name}.dwide")
        tape.node(moved(8.0 * t * h), [dy, x, scale, parameters[name][0]], [wide])
        gradient(name, h, wide, x, moved(6.0 * t * h))
        dx = tape.new(2 * t * h, "temporary", f"{name}.dx")
        tape.node(moved(6.0 * t * h), [wide, x], [dx])
        return dx

    for batch in range(shape.micro_batches):
        saved: list[dict[str, int]] = []
        ids = tape.new(8 * t, "input", f"ids.{batch}")
        x = activation(h, "embed.out")
        tape.node(moved(4.0 * t * h), [ids, parameters["embed"][0]], [x])
        for layer in range(shape.layers):
            at = f"layers.{layer}."
            kept = {"x": x}
            kept["n1"], kept["s1"] = norm(at + "norm1", x)
            for one, width in (("q", h), ("k", w), ("v", w)):
                kept[one] = linear(at + one, kept["n1"], width, h)
            kept["a"] = activation(h, f"{at}attention.out")
            kept["lse"] = tape.new(4 * t * 32, "activation", f"{at}attention.lse")
            tape.node(
                vary(2 * t * t * h / shape.flops),
                [kept["q"], kept["k"], kept["v"]],
                [kept["a"], kept["lse"]],
                2**20,
            )
            o = linear(at + "o", kept["a"], h, h)
            kept["y"] = pointwise([x, o], h, f"{at}y")
            kept["n2"], kept["s2"] = norm(at + "norm2", kept["y"])
            kept["gate"] = linear(at + "gate", kept["n2"], i, h)
            kept["silu"] = pointwise([kept["gate"]], i, f"{at}silu")
            kept["up"] = linear(at + "up", kept["n2"], i, h)
            kept["mul"] = pointwise([kept["silu"], kept["up"]], i, f"{at}mul")
            down = linear(at + "down", kept["mul"], h, i)
            x = pointwise([kept["y"], down], h, f"{at}x")
            saved.append(kept)
        last, scale = norm("norm", x)
        logits = linear("head", last, v, h)
        wide = pointwise([logits], v, "logits.wide", "activation", 4)
        tape.node(moved(8.0 * t * v), [wide], [])
        dwide = pointwise([wide], v, "logits.dwide", "temporary", 4)
        dlogits = pointwise([dwide], v, "logits.d", "temporary")
        dx = norm_back("norm", back("head", dlogits, last, v, h), x, scale)
        for layer in reversed(range(shape.layers)):
            at, kept = f"layers.{layer}.", saved[layer]
            dmul = back(at + "down", dx, kept["mul"], h, i)
            dup = pointwise([dmul, kept["silu"]], i, f"{at}dup", "temporary")
            dsilu = pointwise([dmul, kept["up"]], i, f"{at}dsilu", "temporary")
            dgate = pointwise([dsilu, kept["gate"]], i, f"{at}dgate", "temporary")
            dn = back(at + "up", dup, kept["n2"], i, h)
            dn = pointwise([dn, back(at + "gate", dgate, kept["n2"], i, h)], h, f"{at}dn2", "temporary")
            dy = pointwise(
                [dx, norm_back(at + "norm2", dn, kept["y"], kept["s2"])], h, f"{at}dy", "temporary"
            )
            da = back(at + "o", dy, kept["a"], h, h)
            heads = {
                one: tape.new(2 * t * width, "temporary", f"{at}d{one}")
                for one, width in (("q", h), ("k", w), ("v", w))
            }
            reads = [da, kept["a"], kept["lse"], kept["q"], kept["k"], kept["v"]]
            tape.node(vary(5 * t * t * h / shape.flops), reads, list(heads.values()), 4 * t * h)
            parts = [
                back(at + one, heads[one], kept["n1"], width, h)
                for one, width in (("q", h), ("k", w), ("v", w))
            ]
            dn = pointwise(parts, h, f"{at}dn1", "temporary")
            dx = pointwise(
                [dy, norm_back(at + "norm1", dn, kept["x"], kept["s1"])], h, f"{at}dx", "temporary"
            )
        gradient("embed", v * h, dx, ids, moved(4.0 * v * h))

    norms = [tape.new(4, "temporary", f"{name}.norm") for name in gradients]
    for (name, grad), length in zip(gradients.items(), norms, strict=True):
        tape.node(moved(2.0 * parameters[name][1]), [grad], [length])
    total = tape.new(4, "temporary", "norm.total")
    tape.node(2e-6, norms, [total])
    for name, (storage, numbers) in parameters.items():
        first, second = (
            tape.new(4 * numbers, "optimizer", f"{name}.{one}", True) for one in ("first", "second")
        )
        wide = tape.new(4 * numbers, "temporary", f"{name}.wide")
        tape.node(moved(6.0 * numbers), [gradients[name], total], [wide])
        for moment in (first, second):
            tape.node(moved(12.0 * numbers), [wide], [moment])
            tape.node(moved(12.0 * numbers), [wide], [moment])
        change = tape.new(4 * numbers, "temporary", f"{name}.change")
        tape.node(moved(8.0 * numbers), [second], [change])
        tape.node(moved(12.0 * numbers), [first], [change])
        tape.views(change, shape.views)
        tape.node(moved(8.0 * numbers), [change], [storage])
    problem = tape.problem(spaces(gib), 0)
    return replace(problem, budget=max(problem.profile()))


def _parts(h: int, i: int, w: int) -> dict[str, int]:
    return {
        "norm1": h, "q": h * h, "k": h * w, "v": h * w, "o": h * h,
        "norm2": h, "gate": h * i, "up": h * i, "down": h * i,
    }  # fmt: skip


def drawn(seed: int, storages: int = 30, nodes: int = 60, room: int = 2**50, tiers: int = 1) -> Problem:
    """A random problem; the budget is the peak. Sizes are of all magnitudes, some storages may not move, and times of
    nodes are of the order of a copy's. `room`: bytes in each space."""
    draw = random.Random(seed)
    seconds = [draw.choice((0.0, 1e-6, 1.0)) * draw.uniform(0.1, 2.0) * 1e-3 for _ in range(nodes)]
    held = []
    for storage in range(storages):
        count = min(nodes, draw.choice((1, 2, 2, 3, 4)))
        uses = {at: draw.random() < 0.4 for at in draw.sample(range(nodes), count)}
        state = draw.random() < 0.5
        if not state:
            uses[min(uses)] = True
        size = int(draw.choice((1, 16, 256, 1024)) * draw.uniform(1, 1024))
        movable = draw.random() < 0.9
        held.append(
            Buffer(
                storage,
                size,
                "parameter" if state else "activation",
                _stretches(uses),
                state,
                movable,
                f"s{storage}",
            )
        )
    taken = []
    for _ in range(nodes // 6):
        at = draw.randrange(nodes)
        taken.append(Workspace(at, min(nodes - 1, at + draw.randrange(3)), draw.randrange(1, 2**19)))
    found = []
    for tier in range(tiers):
        out, back = (Rate(draw.choice((0.0, 1e-5)), draw.uniform(0.2, 2.0) * 1e9 / 8**tier) for _ in range(2))
        found.append(OffloadTier(("host", "flash", "far")[tier], room, out, back))
    problem = Problem((0.0, *accumulate(seconds)), tuple(held), tuple(taken), tuple(found), 0)
    return replace(problem, budget=max(problem.profile()))


def with_update(problem: Problem, size: int = 2**19, seconds: float = 2e-3) -> Problem:
    """With one node more, which begins an update on the host of one parameter more; the budget is the peak."""
    n, first = problem.nodes, len(problem.held)
    must = ForcedOffload(problem.spaces[0].name, n)
    gradient = Buffer(first, size, "gradient", (UseInterval(n - 3, n - 3, True),), False, must=must)
    parameter = Buffer(first + 1, size, "parameter", (UseInterval(2, 2, False),), True, must=must)
    problem = replace(
        problem,
        starts=(*problem.starts, problem.starts[-1] + 1e-3),
        held=(*problem.held, gradient, parameter),
        updates=(Update(n, seconds, gradient.storage, parameter.storage),),
    )
    return replace(problem, budget=max(problem.profile()))
