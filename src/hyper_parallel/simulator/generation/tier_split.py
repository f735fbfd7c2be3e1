"""Tier split of generation: which weights, contexts and experts lie away from the device, and what each tier then
holds.

    device = resident weights + buffers of streamed weights + contexts on the device + staging + workspace of a pass
    tier   = streamed weights + experts + the rest of the contexts + idle contexts                          `footprint`

These are the terms of the engine's budget (docs/design/0011-inference.md). A layer that is streamed is read in every
pass through one of two buffers; so is the part of the running contexts that lies in a tier, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.config.inference import GenerationWorkload
from hyper_parallel.simulator.generation.pass_model import Layer, PassModel

BUFFERS = 2
"""Of streamed layers, and of a layer's contexts: one is read while the other is used."""


@dataclass(frozen=True, kw_only=True)
class TierSplit:
    """The weights and pages in the tier `tier`. The default is none."""

    tier: str = "host"
    layers: int = 0
    """Layers whose weights are streamed, evenly spread over the model."""
    contexts: float = 0.0
    """Share of the running requests' pages, 0 to 1, the oldest ones."""
    experts: int = 0
    """Routed experts of each layer, on each rank; the least popular."""
    experts_computed: Literal["device", "host"] = "device"
    """Where they are computed: `device` fetches those that are chosen, `host` sends their tokens."""
    idle: bool = False
    """Whether contexts of idle conversations and unused shared prompts lie there, instead of on the device."""
    windows: bool = False
    """Whether pages that all of a layer's queries have passed lie there."""

    @property
    def any(self) -> bool:
        """Whether anything that a pass reads is away."""
        return bool(self.layers or self.contexts or self.experts)

    def streamed(self, model: PassModel) -> tuple[bool, ...]:
        """Whether the weights of each layer are streamed."""
        count = len(model.order)
        return tuple((at + 1) * self.layers // count > at * self.layers // count for at in range(count))

    def away(self, model: PassModel, layer: Layer) -> int:
        """Bytes of a layer's experts that are away."""
        local = model.local_experts
        return round(layer.experts * min(self.experts, local) / local) if local else 0


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank by tier, and by what they are."""

    by_tier: Mapping[str, Mapping[str, float]]

    @property
    def device(self) -> float:
        """Bytes on the device."""
        return self.of("device")

    def of(self, tier: str) -> float:
        """Bytes in a tier."""
        return sum(self.by_tier.get(tier, {}).values())


@dataclass(frozen=True)
class Held:
    """Contexts that exist at once on one rank."""

    running: float
    """Bytes of the pages of running requests."""
    seen: float
    """Bytes of them that a query can still see."""
    idle: float = 0.0
    """Bytes of idle contexts and unused shared prompts."""


def held_at_once(model: PassModel, work: GenerationWorkload, batch: int, page: int) -> Held:
    """Contexts where `batch` requests of a rank run at once and its other conversations are idle. A shared beginning is
    held once; the last of a request's pages of `page` tokens is held whole."""
    own = -(-work.context // page) * page - work.shared_tokens // page * page
    prompts = active_prompts(work, model.split, batch)
    running = model.held(own) * batch + prompts * model.held(work.shared_tokens)
    seen = model.held(own, past_windows=False) * batch + prompts * model.held(work.shared_tokens, False)
    idle = 0.0
    if work.turns > 1:
        others = max(0, -(-work.requests // model.split) - batch)
        idle += others * model.held(work.context - work.answer_tokens - work.shared_tokens)
    if work.shared_tokens:
        idle += (work.shared_prompts - prompts) * model.held(work.shared_tokens)
    return Held(running, min(seen, running), idle)


def active_prompts(work: GenerationWorkload, split: int, batch: int) -> int:
    """Shared beginnings that requests which run at once have."""
    if not work.shared_tokens:
        return 0
    each = max(1, -(-work.requests // split) // work.shared_prompts)
    return min(work.shared_prompts, -(-batch // each) + (1 if batch % each else 0))


def footprint(
    model: PassModel, split: TierSplit, held: Held, workspace: float, selected: float = 0.0
) -> Footprint:
    """Bytes that each tier holds. `workspace`: bytes of the largest pass; `selected`: bytes of contexts that sparse
    attention keeps on the device; 0 without it."""
    streamed: list[Layer] = []
    if split.layers:
        streamed = [layer for layer, away in zip(model.layers, split.streamed(model), strict=True) if away]
    resident = sum(layer.weights for layer in streamed)
    experts = sum(split.away(model, layer) for layer in model.layers) if split.experts else 0
    largest = max((layer.weights for layer in streamed), default=0)
    # Experts of streamed layers are streamed with them.
    experts -= sum(split.away(model, layer) for layer in streamed)
    running = held.running
    passed = running - held.seen if split.windows else 0.0
    away = (running - passed) * split.contexts
    if selected:
        away = max(0.0, running - passed - selected)
    attending = max(1, sum(1 for layer in model.layers if layer.attention))
    staging = BUFFERS * away / attending
    device = {
        "weights": float(model.weights - resident - experts),
        "buffers": float(min(BUFFERS * largest, resident)),
        "contexts": running - passed - away,
        "staging": min(staging, away),
        "workspace": workspace,
    }
    if split.experts and split.experts_computed == "device":
        fetched = max((split.away(model, layer) for layer in model.layers), default=0)
        device["buffers"] += fetched
    tier = {"weights": float(resident), "experts": float(experts), "contexts": passed + away}
    (tier if split.idle else device)["idle contexts"] = held.idle
    return Footprint(
        {
            name: {key: value for key, value in parts.items() if value}
            for name, parts in (("device", device), (split.tier, tier))
            if any(parts.values())
        }
    )
