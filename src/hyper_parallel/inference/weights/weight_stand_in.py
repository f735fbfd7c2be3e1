"""Stand-ins for weights whose bytes are in a tier: shape, dtype and device can be read, values cannot.

An `AwayWeight` stands in a module in place of its parameter. Code that computes with it outside the forward pass of its
module is found at once (`ReadElsewhere`), instead of computing with whatever lies in the buffer then. Of an embedding's
table rows can be looked up (`torch.nn.functional.embedding`), which are gathered where the table lies. Of a stack of
experts one expert's matrix can be taken by its number (`StreamedExperts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from hyper_parallel.compat.dispatch import leaves_of
from hyper_parallel.inference.weights.read_ahead import Choice, ReadAhead
from hyper_parallel.inference.weights.tiers import WeightTiers
from hyper_parallel.inference.weights.units import Unit

Rows = Callable[[Tensor], Tensor]
"""Rows [U, D] of a table, on the device, for their numbers, int64 [U]."""


class ReadElsewhere(Exception):
    """The model's code reads the weight of a module outside of its forward pass. `module`: its name."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


class Experts(Protocol):
    """The experts of a module, which compute one at a time."""

    def choose(self, counts: Sequence[int], each: int) -> None:
        """How many tokens reach each expert, and how many experts each token chooses: before they compute."""

    def weight(self, number: int, expert: int) -> Tensor:
        """An expert's weight, of the module's stack with this number, until another expert's is taken."""


class AwayWeight(Tensor):
    """Stands for a weight of `module` whose `rows` can be looked up, or which is stack `number` of `experts`."""

    module: str
    home: torch.device
    rows: Rows | None
    experts: Experts | None
    number: int

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        module: str,
        rows: Rows | None = None,
    ) -> AwayWeight:
        """For a weight like this, which belongs on `device`."""
        found = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        found.module, found.home, found.rows, found.experts, found.number = module, device, rows, None, 0
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE:
            return args[0].home
        if func in _FREE:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], AwayWeight) and args[0].experts is not None:
            expert = _number(args[1])
            if expert is not None and 0 <= expert < args[0].size(0):
                return args[0].experts.weight(args[0].number, expert)
        away = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, AwayWeight))
        if func is embedding and away.rows is not None:
            return _looked_up(away.rows, *args, **kwargs)
        raise ReadElsewhere(away.module)


def experts_of(module: nn.Module) -> Experts | None:
    """The experts of a module, where they are streamed one by one."""
    standing: Iterable[object] = module._parameters.values()
    return next((one.experts for one in standing if isinstance(one, AwayWeight) and one.experts), None)


def _number(key: object) -> int | None:
    """An index that is one number."""
    if isinstance(key, Tensor) and not key.dim() and not key.is_floating_point() and key.dtype != torch.bool:
        return int(key)
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def _looked_up(
    rows: Rows, ids: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Tensor:
    """As `torch.nn.functional.embedding`. `padding_idx` is for gradients."""
    assert max_norm is None, "such tables stay on the device"
    wanted, places = ids.unique(return_inverse=True)
    return rows(wanted)[places.reshape(-1)].view(*ids.shape, -1)


_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_FREE = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "is_meta", "is_sparse", "grad")
        ),
        *(
            getattr(Tensor, name)
            for name in (
                "size",
                "dim",
                "numel",
                "stride",
                "is_floating_point",
                "is_contiguous",
                "element_size",
            )
        ),
    ]
)
"""What reads no values."""


# Experts of a mixture, read one by one: of a layer only those that its tokens choose, each once in a pass.
#
# The module's own code takes its experts' matrices from the stacks [E, ...] by number, one expert after the other.
# Where it does, an expert that stays on the device is there; one that few tokens reach and that lies in memory of the
# host is computed with there, on a processor without a copy; all others are read to the buffer in the order of their
# numbers, the next ones while one computes.

HOST_TOKENS = 30
"""Tokens that reach an expert, up to which the host computes with it where it lies. A link to an accelerator reads a
weight at a quarter of the speed of the host's memory, and a product of up to about as many rows takes the host as long
as reading the weight. On an accelerator no expert is computed on the host, since its products have other bits."""


class StreamedExperts:
    """The experts of one module: as `weight_stand_in.Experts`."""

    def __init__(
        self,
        units: Sequence[Unit],
        reader: ReadAhead,
        tiers: WeightTiers,
        resident: Mapping[Unit, Tensor],
        host_tokens: int,
    ) -> None:
        """`units`: one for each expert. `resident`: the bytes of those that stay on the device, which change."""
        self.units = tuple(units)
        self.host_tokens = host_tokens
        self.chance = 1.0
        """That a token chooses an expert, K/E, once it is known."""
        self.choice = Choice(sum(sorted(unit.bytes for unit in units)[-2:]))
        self._reader, self._tiers, self._resident = reader, tiers, resident
        self._in_place: set[int] = set()
        self._expert: int | None = None
        self._memory: Tensor | None = None

    def choose(self, counts: Sequence[int], each: int) -> None:
        """As `weight_stand_in.Experts`."""
        self.chance = min(each / len(self.units), 1.0)
        chosen = [
            unit
            for unit, count in zip(self.units, counts, strict=True)
            if count and unit not in self._resident
        ]
        self._in_place = {
            unit.expert
            for unit in chosen
            if unit.expert is not None
            and counts[unit.expert] <= self.host_tokens
            and self._tiers.in_memory(unit)
        }
        self._reader.choose([unit for unit in chosen if unit.expert not in self._in_place])

    def weight(self, number: int, expert: int) -> Tensor:
        """As `weight_stand_in.Experts`."""
        if expert != self._expert:
            self.leave()
            self._memory, self._expert = self._bytes(self.units[expert]), expert
        assert self._memory is not None
        return self.units[expert].parts[number].view(self._memory)

    def begin(self, *_: Any) -> None:
        """The module's forward pass begins."""
        self._reader.reach(self.choice)

    def end(self, *_: Any) -> None:
        """It is over, or failed."""
        self.leave()
        self._in_place = set()
        self._reader.choose(())

    def leave(self) -> None:
        """The expert that was taken last is not used any more."""
        if self._expert is not None:
            self._reader.release(self.units[self._expert])
        self._memory = self._expert = None

    def _bytes(self, unit: Unit) -> Tensor | None:
        if unit in self._resident:
            return self._resident[unit]
        if unit.expert in self._in_place:
            return self._tiers.in_place(unit)
        return self._reader.acquire(unit)
