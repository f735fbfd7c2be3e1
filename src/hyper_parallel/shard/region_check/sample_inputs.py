"""Sample inputs of a region check: a token batch with its loss, or a recorded call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hyper_parallel.compat.local_tensor import one_device, per_rank
from hyper_parallel.compat.pytree import leaves_of, mapped
from hyper_parallel.shard.loss import IGNORED, causal_lm_loss
from hyper_parallel.shard.sharded_model import ShardedModel

FIRST_ID = 64
"""Token ids below are left to special tokens, which some models treat apart."""


class SampleCall(Protocol):
    """One call of a model."""

    def objective(self, model: nn.Module, handle: ShardedModel) -> Tensor:
        """This rank's part of a scalar, as the loss of a step is: the sum over the ranks that see other data is it."""
        ...

    def rows(self, handle: ShardedModel) -> Tensor:
        """int64[B]: the index in the batch of each row that this rank computes."""
        ...

    def described(self) -> str:
        """What the call is, for a digest: equal texts mean equal checks."""
        ...


@dataclass(frozen=True)
class TokenCall:
    """Tokens in, the loss of a causal language model out."""

    vocabulary: int
    count: int
    """Rows of the batch, over all ranks."""
    length: int
    positions: bool = True
    """Rows hold two documents each, told by positions that start again."""

    def objective(self, model: nn.Module, handle: ShardedModel) -> Tensor:
        with one_device():
            draw = torch.Generator().manual_seed(0)
            first = min(FIRST_ID, self.vocabulary // 2)
            ids = torch.randint(first, self.vocabulary, (self.count, self.length), generator=draw)
            labels = ids.roll(-1, 1)
            labels[:, -1] = IGNORED
            positions = torch.arange(self.length).repeat(self.count, 1)
            if self.positions:
                at = self.length // 3
                positions[:, at:] -= at
                labels[:, at - 1] = IGNORED
            tokens = float((labels != IGNORED).sum())

        def mine(whole: Tensor) -> Tensor:
            return per_rank(lambda rank: whole[self._interval(handle, rank)])

        return causal_lm_loss(
            model, mine(ids), mine(labels), mine(positions) if self.positions else None, tokens
        )

    def rows(self, handle: ShardedModel) -> Tensor:
        return per_rank(lambda rank: torch.arange(self.count)[self._interval(handle, rank)])

    def _interval(self, handle: ShardedModel, rank: int) -> slice:
        share = self.count // handle.strategy.axes.data
        start = handle.data_index_of(rank) * share
        return slice(start, start + share)

    def described(self) -> str:
        return f"tokens {self.vocabulary} {self.count} {self.length} {self.positions}"


@dataclass(frozen=True)
class SeenCall:
    """The arguments of a call: integers and booleans as they were, floats drawn anew in the same shapes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 0) -> SeenCall:
        """The call with its tensors on the CPU, without autograd."""
        draw = torch.Generator().manual_seed(seed)

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.is_floating_point():
                return torch.randn(leaf.shape, generator=draw)
            return leaf.detach().to("cpu").clone()

        args, kwargs = mapped(plain, (args, dict(kwargs)))
        return cls(args, kwargs)

    def objective(self, model: nn.Module, handle: ShardedModel) -> Tensor:
        args, kwargs = mapped(_on_every_rank, (self.args, dict(self.kwargs)))
        outputs = [
            leaf
            for leaf in leaves_of(model(*args, **kwargs))
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
        ]
        if not outputs:
            raise NothingToCompare("the call returns no tensor that depends on the parameters")
        total = torch.zeros(())
        for at, output in enumerate(outputs):
            shape = tuple(int(size) for size in output.shape)
            with one_device():
                draw = torch.Generator().manual_seed(at)
                # Neither a plain sum nor zero-mean: what normalises its output would give no gradient.
                weights = torch.randn(shape, generator=draw).to(output.dtype) / max(output.numel(), 1) ** 0.5
            part: Tensor = (output * _on_every_rank(weights)).sum()
            total = total + part
        return total / handle.strategy.axes.data

    def rows(self, handle: ShardedModel) -> Tensor:
        first = next(
            (leaf for leaf in leaves_of((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)), None
        )
        return torch.arange(first.size(0) if first is not None and first.dim() else 1)

    def described(self) -> str:
        def shape(leaf: Any) -> str:
            return f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:200]

        return f"call {mapped(shape, (self.args, dict(self.kwargs)))}"


class NothingToCompare(Exception):
    """A call from which no gradient follows."""


def _on_every_rank(leaf: Any) -> Any:
    return per_rank(lambda _: leaf.clone()) if isinstance(leaf, Tensor) else leaf
