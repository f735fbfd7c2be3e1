"""Checks that the k-th send of each channel meets the k-th receive, and the k-th Reduce its fellows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from hyper_parallel.program.defects import Defect, DefectKind, at
from hyper_parallel.program.instructions import Recv, Reduce, Send
from hyper_parallel.program.program import Program

Place = tuple[str, int]
"""A group and the index of an instruction in its list."""
Channel = tuple[str, str]
"""Sending and receiving group."""


def channels(
    program: Program,
) -> tuple[dict[Channel, list[tuple[Place, Send]]], dict[Channel, list[tuple[Place, Recv]]]]:
    """Sends and receives of each channel, in the order in which their group issues them."""
    sends: dict[Channel, list[tuple[Place, Send]]] = {}
    receives: dict[Channel, list[tuple[Place, Recv]]] = {}
    for group, instructions in program.instructions.items():
        for index, one in enumerate(instructions):
            if isinstance(one, Send):
                sends.setdefault((group, one.to), []).append(((group, index), one))
            elif isinstance(one, Recv):
                receives.setdefault((one.source, group), []).append(((group, index), one))
    return sends, receives


def reductions(program: Program) -> dict[frozenset[str], dict[str, list[tuple[int, Reduce]]]]:
    """By the set of groups, and by group: the indices of its Reduces over that set, in order."""
    found: dict[frozenset[str], dict[str, list[tuple[int, Reduce]]]] = {}
    for group, instructions in program.instructions.items():
        for index, one in enumerate(instructions):
            if isinstance(one, Reduce):
                found.setdefault(frozenset(one.over), {}).setdefault(group, []).append((index, one))
    return found


def channel_defects(program: Program) -> list[Defect]:
    """Transfers of which one end is missing, and orders that differ between the two ends."""
    return [Defect(DefectKind.CHANNEL, text) for text in (*_transfers(program), *_reductions(program))]


def _transfers(program: Program) -> Iterator[str]:
    sends, receives = channels(program)
    for channel in sorted({*sends, *receives}):
        out, into = sends.get(channel, []), receives.get(channel, [])
        sent = {(one.port, one.micro_batch) for _, one in out}
        received = {(one.port, one.micro_batch) for _, one in into}
        for (group, index), send in out:
            if (send.port, send.micro_batch) not in received:
                yield f"{at(group, index, send)} has no matching Recv in {channel[1]}"
        for (group, index), receive in into:
            if (receive.port, receive.micro_batch) not in sent:
                yield f"{at(group, index, receive)} has no matching Send in {channel[0]}"
        if sent != received or len(out) != len(sent) or len(into) != len(received):
            continue
        for (source, send), (target, receive) in zip(out, into, strict=True):
            if (send.port, send.micro_batch) != (receive.port, receive.micro_batch):
                yield (
                    f"from {channel[0]} to {channel[1]} the order of sends is not that of receives: "
                    f"{at(*source, send)} would meet {at(*target, receive)} since transfers between two groups have "
                    "no tags; put both in one order"
                )
                break


def _reductions(program: Program) -> Iterator[str]:
    for over, by_group in reductions(program).items():
        names = sorted(over)
        lists = [[one.port for _, one in by_group.get(name, [])] for name in names]
        for ports in zip_longest(*lists):
            if len(set(ports)) > 1:
                texts = ", ".join(f"{name}: {port}" for name, port in zip(names, ports, strict=True))
                yield f"the groups {', '.join(names)} do not reduce the same ports in one order ({texts})"
                break
        for port in {port for ports in lists for port in ports}:
            held = program.ports[port]
            layouts = {name: held.layout_in(name) for name in names}
            first = layouts[names[0]]
            for name, layout in layouts.items():
                if (layout.dims, layout.parts, layout.shape) != (first.dims, first.parts, first.shape) or (
                    layout.mesh != first.mesh
                ):
                    yield f"port {port!r} is reduced as {first} in {names[0]} and as {layout} in {name}"
