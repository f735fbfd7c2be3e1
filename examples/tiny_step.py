"""The idea of this project in one file, on PyTorch alone: python examples/tiny_step.py

    model + strategy ── capture ──▶ graph ──▶ Program ──┬── run ────▶ what happened, and when
                                                        └── expand ─▶ Trace ── simulate ──▶ what will happen, and when

A model for one device is captured once, as flat operators on tensors without values. A strategy is data: the axis
`tensor` splits matrices, the axis `pipeline` splits the layers. The captured graph becomes a Program: tasks, and for
each rank a list of instructions. `run` executes the Program on two ranks (threads here), `expand` predicts it. Both
read the same instructions, so that what is predicted is what runs; the end of this file checks that, and that the
updated weights are those of one device. Speeds of the machine that is simulated are made up.
"""

from __future__ import annotations

import math
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

RANKS = 2
LEARNING_RATE = 0.1


class Block(nn.Module):
    """A residual block of two matrices: x [B, W] to [B, W]. Nothing in it knows of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


# What a strategy adds to the graph: two operators that compute nothing new, and their mirror in the backward pass.


@torch.library.custom_op("tiny::all_reduce", mutates_args=())
def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over the ranks. Capture writes it down; only `run`, which has links, computes it."""
    raise NotImplementedError("see `run`")


@torch.library.custom_op("tiny::border", mutates_args=())
def border(x: Tensor, stage: int) -> Tensor:
    """x, where it goes on into another stage."""
    return x.clone()


all_reduce.register_fake(torch.empty_like)
border.register_fake(lambda x, stage: torch.empty_like(x))
Change = Callable[[Tensor], Tensor]
ALL_REDUCE, BORDER = torch.ops.tiny.all_reduce.default, torch.ops.tiny.border.default


class Mirrored(torch.autograd.Function):
    """`ahead` in the forward pass, `back` on the gradient; None leaves the value as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Change | None, back: Change | None) -> Tensor:
        ctx.back = back
        return ahead(x) if ahead else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient) if ctx.back else gradient, None, None


def mirrored(ahead: Change | None, back: Change | None) -> Callable[..., Tensor]:
    """A hook on what a module takes, or on what it gives."""
    return lambda _, taken, *given: Mirrored.apply(*(given or taken), ahead, back)


# Strategy: data, and the rules by which it changes the capture of an unmodified model.


@dataclass(frozen=True)
class Strategy:
    """How many ranks each axis has."""

    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 4


SPLIT_DIM = {"up": 0, "down": 1}
"""The dim of a weight [out, in] that the axis `tensor` splits, by the name of its module."""


def local_weights(model: nn.Module, strategy: Strategy, rank: int) -> dict[str, Tensor]:
    """A rank's part of each weight, by the model's own names."""
    weights = {}
    for name, weight in model.state_dict().items():
        dim = SPLIT_DIM[name.split(".")[-2]]
        weights[name] = weight.chunk(strategy.tensor, dim)[rank % strategy.tensor].clone()
    return weights


def install_hooks(blocks: nn.Sequential, strategy: Strategy) -> list[Any]:
    """Put the strategy's operators around the model's modules; returns handles that remove them.

    Where a matrix is split by columns, each rank has a part of its input's gradient; by rows, a part of every sum.
    """
    handles = []
    for number, block in enumerate(blocks):
        if strategy.tensor > 1:
            handles.append(block.up.register_forward_pre_hook(mirrored(None, all_reduce)))
            handles.append(block.down.register_forward_hook(mirrored(all_reduce, None)))
        stage, first = divmod(number * strategy.pipeline, len(blocks))
        if number and not first:
            up, down = partial(border, stage=stage), partial(border, stage=stage - 1)
            handles.append(block.register_forward_pre_hook(mirrored(up, down)))
    return handles


# Capture: forward pass, loss and backward pass of one micro-batch as one graph of ATen operators.


def capture(model: nn.Sequential, strategy: Strategy, rows: int, width: int) -> fx.Graph:
    """The graph of a rank's micro-batch. Its inputs are the weights, x and y; its outputs the loss and gradients."""
    weights = local_weights(model, strategy, 0)
    handles, x, y = install_hooks(model, strategy), torch.zeros(rows, width), torch.zeros(rows, width)

    def step(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        loss = (functional_call(model, leaves, (x,)) - y).square().mean() / strategy.micro_batches
        return loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))

    try:
        graph = make_fx(step, tracing_mode="fake")(weights, x, y).graph
    finally:
        for handle in handles:
            handle.remove()
    graph.eliminate_dead_code()
    return graph


# Program: what every step is, a pipeline or not. Data that can be looked at, run and predicted.


@dataclass(frozen=True)
class Run:
    """Compute a task of a micro-batch."""

    task: str
    micro_batch: int


@dataclass(frozen=True)
class Transfer:
    """Give the value of a node to another rank ("send"), or take it from there ("recv")."""

    way: str
    node: fx.Node
    micro_batch: int
    peer: int


@dataclass(frozen=True)
class Program:
    """One step of all ranks."""

    tasks: Mapping[str, Sequence[fx.Node]]
    instructions: Sequence[Sequence[Run | Transfer]]
    """[rank]"""
    inputs: Sequence[fx.Node]
    """The weights, x and y."""
    gradients: Sequence[fx.Node]
    """Of the weights; a rank has those of the tasks that it runs."""


PASSES = ("forward", "backward")


def stages_of(graph: fx.Graph) -> dict[fx.Node, tuple[int, bool]]:
    """Each operator's stage, and whether it belongs to the backward pass, which is what comes behind the loss.

    Values go up the stages over borders, and gradients come down: an operator belongs to the highest stage that the
    forward pass has brought its inputs to, or to the lowest one that the backward pass has.
    """
    loss = graph.output_node().args[0][0]
    x = [node for node in graph.nodes if node.op == "placeholder"][-2]
    places: dict[fx.Node, tuple[int, bool]] = {x: (0, False)}
    backward = False
    operators = [node for node in graph.nodes if node.op == "call_function"]
    for node in operators:
        stages = [places[source][0] for source in node.all_input_nodes if source in places]
        if node.target is BORDER:
            places[node] = (node.args[1], backward)
        elif stages:
            places[node] = ((min if backward else max)(stages), backward)
        backward = backward or node is loss
    # What is made of weights alone, such as a transposed matrix, is where it is needed first.
    for node in reversed(operators):
        if node not in places:
            places[node] = min((places[user] for user in node.users), key=lambda place: (place[1], place[0]))
    return {node: places[node] for node in operators}


def make_program(graph: fx.Graph, strategy: Strategy) -> Program:
    """Cut the graph into a forward and a backward task of each stage, and order them as 1F1B does."""
    places = stages_of(graph)
    tasks = {
        f"{PASSES[behind]} {stage}": [node for node, place in places.items() if place == (stage, behind)]
        for stage in range(strategy.pipeline)
        for behind in (False, True)
    }
    borders = [node for node in graph.nodes if node.target is BORDER]
    crossing = {(*places[node.args[0]], places[node][0]): node.args[0] for node in borders}
    instructions = []
    for rank in range(RANKS):
        stage = rank % strategy.pipeline
        ahead = min(strategy.pipeline - stage - 1, strategy.micro_batches)
        order = [(False, micro) for micro in range(ahead)]
        for micro in range(strategy.micro_batches):
            order += [(False, micro + ahead)] if micro + ahead < strategy.micro_batches else []
            order.append((True, micro))
        issued: list[Run | Transfer] = []
        for behind, micro in order:
            before, after = (stage + 1, stage - 1) if behind else (stage - 1, stage + 1)
            if (before, behind, stage) in crossing:
                issued.append(Transfer("recv", crossing[before, behind, stage], micro, before))
            issued.append(Run(f"{PASSES[behind]} {stage}", micro))
            if (stage, behind, after) in crossing:
                issued.append(Transfer("send", crossing[stage, behind, after], micro, after))
        instructions.append(issued)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return Program(tasks, instructions, inputs, graph.output_node().args[0][1:])


# Run: one interpreter for every Program.


Links = Mapping[tuple[int, int], "queue.Queue[Tensor]"]
"""A mailbox for each rank that sends and each that receives."""


def run(
    program: Program,
    rank: int,
    links: Links,
    weights: dict[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> list[str]:
    """Run a step on one rank, and update its weights in place; the operations that it issued, by name.

    `batches`: x and y [B, W] of each micro-batch.
    """
    issued: list[str] = []
    values: list[dict[fx.Node, Any]] = [
        dict(zip(program.inputs, [*weights.values(), *batch], strict=True)) for batch in batches
    ]
    for one in program.instructions[rank]:
        held = values[one.micro_batch]
        if isinstance(one, Transfer):
            issued.append(f"{one.way} {one.node.name}")
            if one.way == "send":
                links[rank, one.peer].put(held[one.node])
            else:
                held[one.node] = links[one.peer, rank].get(timeout=60)
            continue
        for node in program.tasks[one.task]:
            issued.append(str(node.target))
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), held.__getitem__)
            if node.target is ALL_REDUCE:
                for peer in range(RANKS):
                    links[rank, peer].put(*args)
                # Added in the order of ranks, so that each has the same bits.
                held[node] = sum(links[peer, rank].get(timeout=60) for peer in range(RANKS))
            else:
                held[node] = node.target(*args, **kwargs)
    for weight, gradient in zip(weights.values(), program.gradients, strict=True):
        if gradient in values[0]:
            weight -= LEARNING_RATE * sum(held[gradient] for held in values)
    return issued


# Expand and simulate: the same instructions, with seconds in the place of tensors.


@dataclass(frozen=True)
class Op:
    """One priced operation."""

    name: str
    seconds: float
    meets: tuple[object, ...] = ()
    """What another rank's operation has to have, too, for the two to be one transfer."""


FLOPS, MEMORY, LINK, LATENCY = 1e12, 1e11, 1e10, 2e-6
"""The simulated device: operations a second, bytes a second of its memory and of its link, seconds of a message."""


def price(node: fx.Node) -> float:
    """Seconds of an operator alone: a product by its FLOPs, all others by the bytes that they read and write."""
    result = node.meta["val"]
    shapes = [source.meta["val"].shape for source in node.all_input_nodes]
    if node.target is torch.ops.aten.mm.default:
        return 2 * math.prod(result.shape) * shapes[0][1] / FLOPS
    moved = 4 * sum(math.prod(shape) for shape in [*shapes, result.shape])
    if node.target is ALL_REDUCE:
        return LATENCY + moved / LINK
    return moved / MEMORY


def expand(program: Program) -> list[list[Op]]:
    """The Trace: each rank's operations in the order in which it issues them."""

    def priced(one: Run | Transfer) -> list[Op]:
        if isinstance(one, Transfer):
            seconds = LATENCY + 4 * one.node.meta["val"].numel() / LINK
            return [Op(f"{one.way} {one.node.name}", seconds, (one.node, one.micro_batch))]
        return [
            Op(str(node.target), price(node), (node, one.micro_batch) if node.target is ALL_REDUCE else ())
            for node in program.tasks[one.task]
        ]

    return [[op for one in instructions for op in priced(one)] for instructions in program.instructions]


def simulate(trace: Sequence[Sequence[Op]]) -> tuple[float, list[float]]:
    """Seconds of the step, and those in which each rank waits. Two operations that meet end together; a send does not
    hold up its rank."""
    clock, waited, place = [0.0] * RANKS, [0.0] * RANKS, [0] * RANKS
    ready: dict[tuple[object, ...], dict[int, float]] = {}
    while place != [len(ops) for ops in trace]:
        before = list(place)
        for rank, ops in enumerate(trace):
            while place[rank] < len(ops):
                op = ops[place[rank]]
                sends = op.name.startswith("send")
                if op.meets:
                    arrived = ready.setdefault(op.meets, {})
                    arrived.setdefault(rank, clock[rank])
                    if len(arrived) < RANKS and not sends:
                        break
                    start = clock[rank] if sends else max(arrived.values())
                    waited[rank] += start - clock[rank]
                    clock[rank] = start
                clock[rank] += 0.0 if sends else op.seconds
                place[rank] += 1
        if place == before:
            raise RuntimeError(f"the ranks wait for each other at {place}")
    return max(clock), waited


def train(model: nn.Sequential, strategy: Strategy, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The weights after a step on RANKS ranks, which is predicted, too."""
    rows = len(x) // strategy.micro_batches
    program = make_program(capture(model, strategy, rows, x.size(1)), strategy)
    batches = list(zip(x.split(rows), y.split(rows), strict=True))
    links: Links = {(a, b): queue.Queue() for a in range(RANKS) for b in range(RANKS)}
    weights = [local_weights(model, strategy, rank) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as ranks:
        issued = list(ranks.map(lambda rank: run(program, rank, links, weights[rank], batches), range(RANKS)))
    trace = expand(program)
    assert issued == [[op.name for op in ops] for ops in trace], "what is predicted is what runs"
    seconds, waited = simulate(trace)
    waits = ", ".join(f"{share:.0%}" for share in (wait / seconds for wait in waited))
    sys.stdout.write(
        f"{strategy}: {len(trace[0])} operations on rank 0, {seconds * 1e6:.0f} µs (simulated), waiting {waits}\n"
    )
    joined = {}
    for number, name in enumerate(weights[0]):
        if strategy.tensor > 1:
            joined[name] = torch.cat([part[name] for part in weights], SPLIT_DIM[name.split(".")[-2]])
        else:
            joined[name] = weights[number * strategy.pipeline // len(weights[0])][name]
    return joined


def main() -> None:
    """Train one step under two strategies, and compare each with one device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(4)))
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    (model(x) - y).square().mean().backward()  # one device
    expected = {
        name: weight.detach() - LEARNING_RATE * weight.grad for name, weight in model.named_parameters()
    }
    for strategy in (Strategy(tensor=2), Strategy(pipeline=2)):
        torch.testing.assert_close(train(model, strategy, x, y), expected, rtol=1e-5, atol=1e-6)
        sys.stdout.write(
            "    the weights are those of one device, and the operations those that were predicted\n"
        )


if __name__ == "__main__":
    main()
