"""Weight transfer plan: which rank sends which elements of which parameter to which, in messages of bounded size.

Every parameter is resharded with the fewest bytes (`program.reshard.plan_reshard`). With E(p, r) the elements of
parameter p that rank r of the target holds, H(p, r) those that it holds as a rank of the source, and e(p) the bytes of
an element on its way,

    bytes over all links         = Σ_p e(p) · Σ_r |E(p, r) \\ H(p, r)|             `WeightPlan.moved_bytes`
    of it, out of the source     = Σ_p e(p) · |∪_r E(p, r)|   (disjoint groups)   `WeightPlan.crossing_bytes`

so an element that several target ranks need crosses once, to one of them, and they pass it on among themselves.

Ranks of a plan: those of the source first, then those of the target; the same ones where the roles are colocated.

**Rounds.** The boxes between two ranks travel as messages of at most `bucket_bytes`, in rounds that are the same on all
ranks. In each, ranks of the target first receive from the source (`cross`) and then exchange what they have
received so far (`gather`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.errors import WeightsError, nearest
from hyper_parallel.program.reshard import Buffer, Slices, Transfer, cut, elements, plan_reshard
from hyper_parallel.rl.weights.description import FLOATING, ITEM_BYTES, Description, Parameter


@dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    """A parameter on its way."""

    source: str
    """Its name in the source's description."""
    target: str
    dtype: str
    """Of its elements on their way."""

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of one parameter in a message."""

    parameter: PlannedParameter
    give: Slices
    """Into the sender's local tensor: of the source, in a gather of the target."""
    take: Slices
    """Into the receiver's local tensor of the target."""

    @property
    def bytes(self) -> int:
        """Bytes on their way."""
        return elements(self.give) * self.parameter.item_bytes


@dataclass(frozen=True, kw_only=True)
class Message:
    """Boxes from one rank to another, one after the other, those with the largest elements first (so that each is
    aligned)."""

    sender: int
    receiver: int
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parts, without delta encoding."""
        return sum(part.bytes for part in self.parts)

    @property
    def named(self) -> str:
        """The parameters in it, for messages to a user."""
        names = list(dict.fromkeys(part.parameter.target for part in self.parts))
        return " … ".join((names[0], names[-1])) if len(names) > 1 else "".join(names)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Messages that are sent together; those of `gather` need what the `cross` of this and earlier rounds brought."""

    cross: tuple[Message, ...]
    gather: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How the parameters of one role get to another. The same on every rank of both."""

    source: Description
    target: Description
    options: WeightsConfig
    colocated: bool
    """Whether rank r of the source and of the target are one process."""
    parameters: tuple[PlannedParameter, ...]
    local: Mapping[int, tuple[Part, ...]]
    """By rank: copies within it."""
    rounds: tuple[Round, ...]
    digest: bytes
    """[8] bytes, different for plans that differ."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.source.world if self.colocated else self.source.world + self.target.world

    def target_rank(self, rank: int) -> int:
        """The plan's rank of a rank of the target."""
        return rank if self.colocated else self.source.world + rank

    def gives(self, rank: int) -> bool:
        """Whether a rank is one of the source's."""
        return rank < self.source.world

    def takes(self, rank: int) -> bool:
        """Whether a rank is one of the target's."""
        return self.colocated or rank >= self.source.world

    def named(self, rank: int) -> str:
        """A rank by its role, such as ``actor rank 0``."""
        if self.colocated:
            return f"{self.source.role} and {self.target.role} rank {rank}"
        if self.gives(rank):
            return f"{self.source.role} rank {rank}"
        return f"{self.target.role} rank {rank - self.source.world}"

    def messages(self) -> Iterator[Message]:
        """All messages between ranks."""
        return (message for one in self.rounds for message in (*one.cross, *one.gather))

    @property
    def moved_bytes(self) -> int:
        """Bytes over links between ranks, without headers and delta encoding."""
        return sum(message.bytes for message in self.messages())

    @property
    def crossing_bytes(self) -> int:
        """Those of them that leave the source."""
        return sum(message.bytes for message in self.messages() if not self.takes(message.sender))

    def of(self, rank: int) -> tuple[Round, ...]:
        """The messages that one rank sends or receives, round by round."""
        return tuple(
            Round(
                cross=tuple(m for m in one.cross if rank in (m.sender, m.receiver)),
                gather=tuple(m for m in one.gather if rank in (m.sender, m.receiver)),
            )
            for one in self.rounds
        )


def plan_weights(
    source: Description,
    target: Description,
    options: WeightsConfig | None = None,
    *,
    colocated: bool = False,
) -> WeightPlan:
    """The plan that brings the source's parameters to the target. Deterministic.

    `colocated`: rank r of both is one process, which copies what it holds itself.

    Raises WeightsError for parameters that one side lacks, or whose shapes or element types do not fit.
    """
    options = options or WeightsConfig()
    if colocated and source.world != target.world:
        raise WeightsError(
            f"{source.role} has {source.world} ranks and {target.role} {target.world}; colocated roles have the same"
        )
    first = 0 if colocated else source.world
    draft = _Draft(options.bucket_bytes)
    load: dict[int, int] = {}
    parameters = []
    for one, other in _matched(source, target):
        planned = PlannedParameter(
            source=one.name, target=other.name, dtype=_dtype(one, other, source, target, options)
        )
        parameters.append(planned)
        giver = one.device_groups(source.role, 0)[0]
        for taker in other.device_groups(target.role, first):
            for phase in plan_reshard(giver, one.layout, taker, other.layout, load).phases:
                draft.add(planned, phase.transfers, gathers=phase.reads is Buffer.TARGET)
            draft.ready()
    return WeightPlan(
        source=source,
        target=target,
        options=options,
        colocated=colocated,
        parameters=tuple(parameters),
        local={rank: tuple(parts) for rank, parts in sorted(draft.local.items())},
        rounds=draft.rounds(() if colocated else range(first, first + target.world)),
        digest=_digest(source, target, options, colocated),
    )


@dataclass
class _Pair:
    """The messages from one rank to another so far, by round."""

    round: int = 0
    bytes: int = 0
    parts: dict[int, list[Part]] = field(default_factory=dict)

    def add(self, part: Part, least: int, limit: int) -> int:
        """Put a box into the first message that has space, of round `least` or later; its round."""
        if self.round < least:
            self.round, self.bytes = least, 0
        elif self.bytes + part.bytes > limit and self.bytes:
            self.round, self.bytes = self.round + 1, 0
        self.bytes += part.bytes
        self.parts.setdefault(self.round, []).append(part)
        return self.round


class _Draft:
    """Boxes put into messages, parameter by parameter."""

    def __init__(self, limit: int) -> None:
        self.local: dict[int, list[Part]] = {}
        self._limit = limit
        self._cross: dict[tuple[int, int], _Pair] = {}
        self._gather: dict[tuple[int, int], _Pair] = {}
        self._arrived = 0
        """The last round that brings something of this parameter from the source."""

    def add(self, parameter: PlannedParameter, transfers: tuple[Transfer, ...], *, gathers: bool) -> None:
        pairs, least = (self._gather, self._arrived) if gathers else (self._cross, 0)
        for one in transfers:
            if one.sender == one.receiver:
                part = Part(parameter=parameter, give=one.give, take=one.take)
                self.local.setdefault(one.sender, []).append(part)
                continue
            pair = pairs.setdefault((one.sender, one.receiver), _Pair())
            for give, take in _bounded(one.give, one.take, self._limit // parameter.item_bytes):
                placed = pair.add(Part(parameter=parameter, give=give, take=take), least, self._limit)
                if not gathers:
                    self._arrived = max(self._arrived, placed)

    def ready(self) -> None:
        """The next parameter's boxes wait for none of those before."""
        self._arrived = 0

    def rounds(self, takers: Iterable[int]) -> tuple[Round, ...]:
        """All messages. One of the `takers` that none goes to gets an empty one, which carries the version."""
        reached = {receiver for _, receiver in (*self._cross, *self._gather)}
        for taker in takers:
            if taker not in reached:
                self._cross[0, taker] = _Pair(parts={0: []})
        pairs = (*self._cross.values(), *self._gather.values())
        last = max((number for pair in pairs for number in pair.parts), default=-1)
        return tuple(
            Round(cross=_messages(self._cross, number), gather=_messages(self._gather, number))
            for number in range(last + 1)
        )


def _messages(pairs: Mapping[tuple[int, int], _Pair], number: int) -> tuple[Message, ...]:
    return tuple(
        Message(
            sender=sender,
            receiver=receiver,
            parts=tuple(sorted(pair.parts[number], key=lambda part: -part.parameter.item_bytes)),
        )
        for (sender, receiver), pair in sorted(pairs.items(), key=lambda entry: entry[0])
        if number in pair.parts
    )


def _bounded(give: Slices, take: Slices, limit: int) -> Iterator[tuple[Slices, Slices]]:
    """A box in boxes of at most `limit` elements, in their order."""
    count = elements(give)
    if count <= limit:
        yield give, take
        return
    for part in cut(give, take, max(2, math.ceil(count / limit))):
        yield from _bounded(*part, limit)


def _matched(source: Description, target: Description) -> Iterator[tuple[Parameter, Parameter]]:
    """Each parameter of the target with that of the source, in the source's order, then the target's."""
    given = {one.name: one for one in source.parameters}
    order = {name: at for at, name in enumerate(given)}
    pairs, used = [], set()
    for other in target.parameters:
        name = source.ties.get(other.name, other.name)
        if name not in given:
            raise WeightsError(
                f"{target.role} has a parameter {other.name} that {source.role} lacks"
                f"{nearest(other.name, given) or '; both need the same model'}"
            )
        used.add(name)
        pairs.append((given[name], other))
    for name in given:
        if name in used:
            continue
        if name in target.ties:
            raise WeightsError(
                f"{name} is tied to {target.ties[name]} in {target.role}, but has values of its own in {source.role}; "
                "set tie_word_embeddings alike in both"
            )
        raise WeightsError(
            f"{source.role} has a parameter {name} that {target.role} lacks"
            f"{nearest(name, (one.name for one in target.parameters)) or '; both need the same model'}"
        )
    pairs.sort(key=lambda pair: order[pair[0].name])
    for one, other in pairs:
        if one.layout.shape != other.layout.shape:
            raise WeightsError(
                f"{other.name} has the shape {list(one.layout.shape)} in {source.role} and {list(other.layout.shape)} "
                f"in {target.role}; both need the same model"
            )
        for side, layout in ((source, one.layout), (target, other.layout)):
            if any(layout.mesh.size(axis) > 1 for axis in layout.partial):
                raise WeightsError(
                    f"{other.name} is a pending sum in {side.role}; reduce it before it is sent"
                )
        yield one, other


def _dtype(
    one: Parameter, other: Parameter, source: Description, target: Description, options: WeightsConfig
) -> str:
    """The element type of a parameter on its way: the narrower one, since a receiver would round to it anyway."""
    if one.dtype in FLOATING and other.dtype in FLOATING:
        narrow = min((one.dtype, other.dtype), key=FLOATING.__getitem__)
        if options.dtype is not None and FLOATING[options.dtype] < FLOATING[narrow]:
            return options.dtype
        return one.dtype if FLOATING[one.dtype] == FLOATING[narrow] else narrow
    if one.dtype != other.dtype or one.dtype not in ITEM_BYTES:
        raise WeightsError(
            f"{other.name} is {one.dtype} in {source.role} and {other.dtype} in {target.role}; "
            "quantized weights need the same dtype on both sides"
        )
    return one.dtype


def _digest(source: Description, target: Description, options: WeightsConfig, colocated: bool) -> bytes:
    text = json.dumps(
        [source.to_json(), target.to_json(), vars(options), colocated], sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).digest()[:8]
