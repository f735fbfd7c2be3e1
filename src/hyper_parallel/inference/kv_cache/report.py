"""Counters of a KV cache: bytes moved per tier, requests swapped, tokens that were found instead of computed."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.units import format_bytes


@dataclass(frozen=True)
class TierReport:
    """One tier: its capacity, and the bytes that were written to it and read from it."""

    name: str
    bytes: int
    written: int
    read: int


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """Figures of a run. Tokens are counted once for each request and time."""

    tiers: tuple[TierReport, ...] = ()
    shared: int = 0
    """Tokens of prompts that were found on the device."""
    fetched: int = 0
    """Tokens of prompts that were found in a tier."""
    swapped: int = 0
    """Times that a request was swapped out to a tier."""
    recomputed: int = 0
    """Tokens that are computed again, since no tier had room for them."""
    streamed: int = 0
    """Tokens of contexts that were moved to a tier to be read from there."""

    pinned: int = 0
    """Pages of pinned prompts that are on the device."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Tiers that were set and moved no byte."""
        return tuple(one.name for one in self.tiers if not one.written + one.read)

    def progress(self) -> str:
        """For a progress line; empty where nothing happened."""
        parts = [
            f"{one.name} {format_bytes(one.written)} out, {format_bytes(one.read)} back"
            for one in self.tiers
            if one.written + one.read
        ]
        if self.swapped:
            parts.append(f"{self.swapped} swaps")
        if self.recomputed:
            parts.append(f"{self.recomputed} tokens computed again")
        return "; ".join(parts)
