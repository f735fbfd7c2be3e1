"""Executor: compiles a graph to straight-line Python that frees each value after its last use.

A collective's runtime may hold its tensors for a moment after it was waited for (gloo's threads do), and with them
their memory, which under a budget is somebody else's by then. So where memory is planned, what only the graph and
collectives of the host know of is emptied when it dies, whoever still holds a tensor in it.

A function that a graph makes is a generator: at a host point it yields `(point, values)` and is sent the answer. All
its operators go straight to the kernels, under autograd, whose bookkeeping the graph has made needless.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from hyper_parallel.compat.dispatch import below_autograd, kernel
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph.host_nodes import HOST, HostPoint, OperatorCall, update
from hyper_parallel.graph.ir import OPERATORS, StepGraph, Value, is_collective, is_wait, values_of
from hyper_parallel.graph.memory_effects import begun, touched

Host = Callable[[HostPoint, Sequence[torch.Tensor]], torch.Tensor | None]
"""(point, values) to the answer, None where the graph wants none."""

Deliver = Callable[[str, torch.Tensor], None]
"""(name of an output, value), called when the value is computed and the rest of the graph does not use its memory."""

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class GraphFunction:
    """The Python that a graph was compiled to."""

    source: str
    function: Callable[..., Generator[Any, Any, tuple[torch.Tensor, ...]]]
    lines: Mapping[int, fx.Node]
    """Line of the source to the node that it runs."""

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The node in which an error of a run arose; None where it came from elsewhere."""
        found, traceback = None, error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is self.function.__code__:
                found = self.lines.get(traceback.tb_lineno, found)
            traceback = traceback.tb_next
        return found


@dataclass(frozen=True)
class Executable(GraphFunction):
    """A graph ready to run."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, tensors: Mapping[str, torch.Tensor], host: Host | None = None) -> dict[str, torch.Tensor]:
        """Run the step on `tensors`, by the names of the graph's inputs; state is updated in place.

        Raises what `host` raises; nothing behind that host point has run then.
        """
        steps = self.function([tensors[name] for name in self.inputs])
        return dict(zip(self.outputs, run_with_host(steps, host), strict=True))


def run_with_host(
    steps: Generator[Any, Any, tuple[torch.Tensor, ...]], host: Host | None
) -> tuple[torch.Tensor, ...]:
    """Run a graph's generator to its end, and return what it returns. Raises what `host` raises."""
    answer: Any = None
    while True:
        try:
            # Not around the host, which may compute something else, or capture another step.
            with below_autograd():
                point, values = steps.send(answer)
        except StopIteration as stop:
            returned: tuple[torch.Tensor, ...] = stop.value
            return returned
        assert host is not None, f"the graph asks the host at {point!r}"
        answer = host(HostPoint(point), values)
        del values


def refuse_balanced(step: StepGraph) -> None:
    """Raise CaptureError for a step that was captured for costs, whose sizes are of rows that spread evenly."""
    if step.balanced:
        raise CaptureError(
            "this graph takes tokens to spread evenly over the experts, and is right for costs only; capture the step "
            "without a `StepContext.even_load` to run it"
        )


class Cache(Protocol):
    """Runs the cache operators of a graph, and its updates on the host."""

    def store(self, x: torch.Tensor, slot: int, tier: str) -> None: ...
    def prefetch(self, x: torch.Tensor, slot: int, tier: str) -> None: ...
    def wait(self, x: torch.Tensor, slot: int, tier: str) -> None: ...
    def detach(self, x: torch.Tensor, slot: int, tier: str) -> None: ...
    def update(
        self,
        calls: Sequence[OperatorCall],
        moved: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        slots: Sequence[int],
        tier: str,
    ) -> None: ...


def executable(
    step: StepGraph,
    stamp: Callable[[], None] | None = None,
    cache: Cache | None = None,
    *,
    deliver: tuple[str, Deliver] | None = None,
    pauses: Collection[fx.Node] = (),
) -> Executable:
    """The Python function of a graph. `stamp` is called before the first node and after each, when what dies with it
    was let go. `cache` runs the cache operators and updates of a graph that has some. `deliver`: a prefix, and what is
    given the outputs whose names begin with it, each as soon as it is computed; these are not returned, so that they
    need not all be in memory at the end. Outputs that share memory are returned all the same. `pauses`: nodes before
    which the run yields (`HostPoint.PAUSE`, ()); it goes on whatever it is sent.

    Raises CaptureError for a step that was captured for costs, whose sizes are of rows that spread evenly.
    """
    refuse_balanced(step)
    early = ready_outputs(step, deliver[0]) if deliver else {}
    writer = SourceWriter(step, stamp, cache, early, pauses)
    if deliver:
        writer.names["deliver"] = deliver[1]
    source, function = writer.compiled("step graph of")
    names = tuple(entry.name for entry in step.inputs)
    returned = tuple(name for name in step.outputs if name not in writer.delivered)
    return Executable(source, function, writer.lines, names, returned)


class SourceWriter:
    """Writes the source of a graph's function; what has no literal form is given to it by name."""

    def __init__(
        self,
        step: StepGraph,
        stamp: Callable[[], None] | None,
        cache: Cache | None,
        early: Mapping[fx.Node, Sequence[tuple[str, fx.Node]]],
        pauses: Collection[fx.Node] = (),
    ) -> None:
        """`early`: nodes to the outputs that are delivered behind them."""
        self.step, self._cache = step, cache
        self.names: dict[str, Any] = {**step.constants, **({"stamp": stamp} if stamp else {})}
        self.last: dict[fx.Node, list[fx.Node]] = {}
        self._variables: dict[fx.Node, str] = {}
        self._functions: dict[Any, str] = {}
        self.lines: dict[int, fx.Node] = {}
        self._emptied: dict[fx.Node, list[fx.Node]] = {}
        """Node to those whose storages are given up behind it."""
        seen: set[fx.Node] = set()
        for node in reversed(step.graph.nodes):
            for source in (*node.all_input_nodes, node):
                if source not in seen:
                    seen.add(source)
                    self.last.setdefault(node, []).append(source)
        if cache is not None:
            self.names["empty"] = _empty
            dies = {source: node for node, sources in self.last.items() for source in sources}
            for node, behind in _let_go_late(step):
                self.last[dies[node]].remove(node)
                self.last.setdefault(behind, []).append(node)
                self._emptied.setdefault(behind, []).append(node)
        self._early, self._pauses = early, frozenset(pauses)
        self.delivered = {name for outputs in early.values() for name, _ in outputs}
        for behind, outputs in early.items():
            for _, node in outputs:
                self.last[step.output].remove(node)
                self.last.setdefault(behind, []).append(node)

    def compiled(self, kind: str) -> tuple[str, Callable[..., Any]]:
        """The source and the function, which error messages call a `kind` of its number of nodes."""
        source = self.source()
        exec(compile(source, f"<{kind} {len(self.last)} nodes>", "exec"), self.names)
        return source, self.names["step"]

    def source(self) -> str:
        body: list[str] = []
        placeholders = self.step.placeholders
        if placeholders:
            body.append(f"{', '.join(self.variable(node) for node in placeholders)}, = inputs")
        body.append("del inputs")
        stamp = ["stamp()"] if "stamp" in self.names else []
        body += stamp
        for node in self.step.graph.nodes:
            if node in self._pauses:
                body.append(f"yield ({HostPoint.PAUSE.value!r}, ())")
            if node.op == "call_function":
                body.append(self.line(node))
                self.lines[1 + len(body)] = node
            elif node.op == "get_attr":
                body.append(f"{self.variable(node)} = {node.target}")
            elif node.op == "output":
                values = self.step.returned.items()
                kept = tuple(value for name, value in values if name not in self.delivered)
                body.append(f"return {self.rendered(kept)}")
                break
            body += [f"deliver({name!r}, {self.variable(one)})" for name, one in self._early.get(node, [])]
            body += [f"empty({self.variable(source)})" for source in self._emptied.get(node, [])]
            dead = [self.variable(source) for source in self.last.get(node, [])]
            if dead:
                body.append(f"del {', '.join(dead)}")
            if node.op == "call_function":
                body += stamp
        if not any(node.target is HOST for node in self.step.nodes):
            body.append("yield")  # a generator all the same
        return "def step(inputs):\n" + "".join(f"    {line}\n" for line in body)

    def line(self, node: fx.Node) -> str:
        """The statement that runs a node."""
        variable, target = self.variable(node), node.target
        if target is operator.getitem:
            return f"{variable} = {self.rendered(node.args[0])}[{node.args[1]}]"
        if target is HOST:
            point, values = node.args[:2]
            return f"{variable} = yield ({point!r}, {self.rendered(values)})"
        arguments = [self.rendered(arg) for arg in node.args]
        arguments += [f"{key}={self.rendered(value)}" for key, value in node.kwargs.items()]
        return f"{variable} = {self._function(target)}({', '.join(arguments)})"

    def variable(self, node: fx.Node) -> str:
        """The name of a node's result."""
        return self._variables.setdefault(node, f"v{len(self._variables)}")

    def _function(self, target: Any) -> str:
        if target not in self._functions:
            name = f"f{len(self._functions)}_{getattr(target, '__name__', 'call').replace('.', '_')}"
            self._functions[target] = name
            moves = target in (*OPERATORS, update) and self._cache is not None
            self.names[name] = getattr(self._cache, target.__name__) if moves else kernel(target)
        return self._functions[target]

    def rendered(self, value: Any) -> str:
        """An argument as an expression."""
        if isinstance(value, fx.Node):
            return self.variable(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self.rendered(x)}, ' for x in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self.rendered(x) for x in value)}]"
        # inf and nan have no literal.
        if isinstance(value, _PLAIN) and not (isinstance(value, float) and value - value != 0):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


def ready_outputs(step: StepGraph, prefix: str) -> dict[fx.Node, list[tuple[str, fx.Node]]]:
    """The outputs whose names begin with `prefix` and whose memory nothing else has, with their names, by the last
    node that uses their memory."""
    returned = Counter(value.storage for node in step.returned.values() for value in values_of(node))
    kept = set(step.outside)
    died: dict[int, fx.Node] = {}
    for node in step.nodes:
        used = touched(node) | {value.storage for value in values_of(node)}
        if is_wait(node):
            used |= touched(begun(node))
        if node.target is HOST:
            kept |= used
        died.update(dict.fromkeys(used, node))
    found: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
    for name, node in step.returned.items():
        value = node.meta.get("value")
        if not name.startswith(prefix) or node.op != "call_function" or not isinstance(value, Value):
            continue
        if returned[value.storage] == 1 and value.storage not in kept:
            found.setdefault(died[value.storage], []).append((name, node))
    return found


def _empty(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)


def _let_go_late(step: StepGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Of storages that a collective of the host is given or gives, and that the graph alone has: a node with a value
    there, and the last node that uses it."""
    nodes = list(step.nodes)
    kept = set(step.outside)
    handed: set[int] = set()
    died: dict[int, fx.Node] = {}
    value_in: dict[int, fx.Node] = {}
    waited: set[fx.Node] = set()
    for node in (*nodes, step.output):
        used = touched(node)
        if node.op in ("output", "get_attr") or node.target is HOST:
            kept |= used | {value.storage for value in values_of(node)}
        if is_wait(node):
            waited.add(begun(node))
            used |= touched(begun(node))
        used |= {value.storage for value in values_of(node)}
        alone = node.meta.get("value")
        if isinstance(alone, Value):
            value_in.setdefault(alone.storage, node)
        if is_collective(node):
            handed |= used
        for storage in used:
            died[storage] = node
    for node in nodes:
        if is_collective(node) and node not in waited:
            kept |= touched(node) | {value.storage for value in values_of(node)}
    for storage in sorted(handed - kept):
        if step.storages[storage].device.type == "cpu" and storage in value_in:
            yield value_in[storage], died[storage]
