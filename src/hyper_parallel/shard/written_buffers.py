"""Buffers that a forward pass writes, on every rank alike.

Ranks see other rows, so that a buffer which depends on them would differ between ranks. Checksums tell, and such a
model is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.process_mesh import ProcessMesh

Checksum = tuple[float, float, float]
"""Elements, their sum, and that of their squares."""
_NOTHING: Checksum = (-1.0, 0.0, 0.0)


class WrittenBuffers:
    """Finds which buffers a forward pass writes, and compares them between the ranks."""

    def __init__(self, model: nn.Module, axes: ProcessMesh) -> None:
        self._model, self._axes = model, axes
        self._before: dict[str, tuple[Tensor, int]] = {}

    def begin(self) -> None:
        """A forward pass begins."""
        self._before = {
            name: (x, x._version) for name, x in self._model.named_buffers() if not x.is_inference()
        }

    def found(self) -> dict[str, Checksum]:
        """What the forward pass wrote."""
        now = dict(self._model.named_buffers())
        return {
            name: checksum(now[name])
            for name, (before, version) in self._before.items()
            if name in now and (now[name] is not before or now[name]._version != version)
        }

    @property
    def names(self) -> list[str]:
        """Those that there were at the beginning."""
        return sorted(self._before)

    @contextlib.contextmanager
    def alike(self, never: bool = False) -> Iterator[None]:
        """Inside, a forward pass runs. A collective, where the model has buffers. `never`: as if it had none.

        Raises StrategyError where ranks write other values.
        """
        if never or torch.is_inference_mode_enabled() or not any(True for _ in self._model.buffers()):
            yield
            return
        self.begin()
        yield
        written = self.found()
        if self._axes.any([bool(written)])[0]:
            refuse_differences(self._model, [], self.names, written, self._axes)


def refuse_differences(
    model: nn.Module,
    weights: Sequence[str],
    buffers: Sequence[str],
    written: Mapping[str, Checksum],
    axes: ProcessMesh,
) -> None:
    """Raise StrategyError where ranks wrote other values. A collective; every rank gives the same names."""
    names = [*weights, *buffers]
    mine = [value for name in names for value in written.get(name, _NOTHING)]
    greatest = axes.greatest([*mine, *(-value for value in mine)])
    high, low = greatest[: len(mine)], [-value for value in greatest[len(mine) :]]
    for at, name in enumerate(names):
        here = slice(3 * at, 3 * at + 3)
        is_buffer = at >= len(weights)
        cached = is_buffer and min(low[3 * at], high[3 * at]) >= 0 and low[3 * at] != high[3 * at]
        # Tables that grow with the longest row differ in size, and are no state.
        if high[here] != low[here] and not cached:
            raise StrategyError(
                f"the forward pass of {type(model).__name__.removeprefix('FSDP')} writes the "
                f"{'buffer' if is_buffer else 'weight'} {name!r}, and not the same on every rank: what it writes "
                "depends on the rows that the rank has; write it outside of the forward pass from what all ranks "
                "know, or set axes.shard and axes.replicate to 1"
            )


def checksum(tensor: Tensor) -> Checksum:
    """Of a tensor's values."""
    values = tensor.detach().double()
    numbers = (float(values.numel()), float(values.sum()), float(values.square().sum()))
    return tuple(-2.0 if value != value else value for value in numbers)  # type: ignore[return-value]
