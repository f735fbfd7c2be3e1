"""One forward and backward pass of a reduced model on sample inputs, on one device or on simulated ranks, compared.

The inputs are a token batch with its loss, or a recorded call.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fake_tensors
from hyper_parallel.compat.dispatch import float64, leaves_of, mapped
from hyper_parallel.compat.local_tensor import agreed, on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.shard.loss import IGNORED, causal_lm_loss
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.shard.sharded_model import ShardedModel, sharded
from hyper_parallel.strategy import Strategy

Spread = Callable[[nn.Module, Strategy], nn.Module]
"""Puts a strategy into effect on a model, with gathers that simulated ranks can run."""

TOLERANCE = 1e-5
"""Of a gradient's largest element, at least 1e-4 of the gradient's norm. Another order of the same sum rounds by 6e-8
an addition in float32; a term that is missing or counted twice shows as 1e-2 and more."""
PRECISE = 1e-8
"""The same in float64, where an addition rounds by 1e-16."""
COARSE = 1e-3
"""The same where float32 rounds too much and the model cannot be computed in float64."""


@dataclass(frozen=True)
class Outcome:
    """The objective, every parameter's whole gradient and what the pass wrote, on the CPU."""

    objective: float
    gradients: dict[str, Tensor]
    written: dict[str, Tensor] = field(default_factory=dict)
    """The weights and buffers that have other values after the pass than before it."""

    def written_weight(self, model: nn.Module) -> str:
        """The first weight of the model that the pass wrote; empty where it wrote none."""
        return next((name for name, _ in model.named_parameters() if name in self.written), "")


@dataclass(frozen=True)
class Mismatch:
    """The tensor that differs most."""

    tensor: str
    error: float
    """Over the tensor's largest element; infinite where one side has none, NaN where ranks do not agree."""

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"ranks hold different gradients of {self.tensor}"
        if math.isinf(self.error):
            return f"only one side has {self.tensor}"
        return f"{self.tensor} is off by {self.error:.1e} of its largest element"


def run(
    template: nn.Module, strategy: Strategy, call: SampleCall, spread: Spread, *, precise: bool = False
) -> Outcome:
    """One pass of a copy of `template` (with values, on the CPU) under a strategy, in float32 or, `precise`, float64.

    Raises what the model raises.
    """
    with _ranks(strategy.axes.world), float64() if precise else contextlib.nullcontext():
        with one_device():
            model = copy.deepcopy(template).to(torch.float64 if precise else torch.float32).train()
        spread(model, strategy)
        handle = sharded(model)
        with handle.micro_batch(seed=0, step=0, rows=call.rows(handle)):
            part = call.objective(model, handle)
            part.backward()
        total = handle.all_reduce(part.detach(), LOSS_AXES)
        gradients = {
            p.name: agreed(handle.gather(p.grad, p.layout)) for p in handle.parameters() if p.grad is not None
        }
        return Outcome(float(on_rank(total, 0)), gradients, _written(template, handle))


def _written(template: nn.Module, handle: ShardedModel) -> dict[str, Tensor]:
    after = {p.name: agreed(handle.gather(p.local, p.layout)) for p in handle.parameters()}
    after |= {name: agreed(buffer) for name, buffer in handle.model.named_buffers()}
    with one_device():
        before = dict([*template.named_parameters(), *template.named_buffers()])
        return {
            name: value
            for name, value in after.items()
            if name in before and not torch.equal(value, before[name].detach().to(value))
        }


def worst(whole: Outcome, split: Outcome) -> Mismatch:
    """The largest difference between two outcomes of the same values."""
    for name in whole.written.keys() | split.written.keys():
        one, many = whole.written.get(name), split.written.get(name)
        if one is None or many is None or one.shape != many.shape:
            return Mismatch(f"what the forward pass writes to {name}", math.inf)
        scale = max(float(one.abs().max()), 1e-30) if one.numel() else 1.0
        off = float((one.double() - many.double()).abs().max()) / scale if one.numel() else 0.0
        if not off <= TOLERANCE:
            return Mismatch(f"what the forward pass writes to {name}", off)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole.gradients.values()))
    scale = max(abs(whole.objective), 1e-3)
    found = [Mismatch("the objective", abs(whole.objective - split.objective) / scale)]
    for name in whole.gradients | split.gradients:
        one, many = whole.gradients.get(name), split.gradients.get(name)
        if one is None or many is None:
            # What nothing reaches may have a gradient of zeros, or none.
            other = many if one is None else one
            assert other is not None
            found.append(Mismatch(f"a gradient of {name}", math.inf if bool(other.any()) else 0.0))
            continue
        largest = max(float(one.abs().max()) if one.numel() else 0.0, 1e-4 * norm, 1e-30)
        found.append(
            Mismatch(
                name, float((one.double() - many.double()).abs().max()) / largest if one.numel() else 0.0
            )
        )
    return max(found, key=lambda m: math.inf if math.isnan(m.error) else m.error)


def compared(template: nn.Module, strategy: Strategy, call: SampleCall, spread: Spread) -> Mismatch | None:
    """The mistake of a strategy in words; None where it computes what one device computes.

    As `mismatch` decides.
    """
    alone = Strategy(check=False)
    return mismatch(
        lambda precise: (
            run(template, alone, call, spread, precise=precise),
            run(template, strategy, call, spread, precise=precise),
        )
    )


def mismatch(both: Callable[[bool], tuple[Outcome, Outcome]]) -> Mismatch | None:
    """The difference between two outcomes, computed in float32 or, `both(True)`, float64; None where nothing does.

    float32 first; where it differs by more than `TOLERANCE`, float64 decides.
    """
    found = worst(*both(False))
    if found.error <= TOLERANCE:
        return None
    try:
        precise = worst(*both(True))
    # Kernels that know no float64.
    except (RuntimeError, TypeError, ValueError):
        return None if found.error <= COARSE else found
    return None if precise.error <= PRECISE else precise


def in_one_line(error: BaseException) -> str:
    """An error of whatever code, for a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def _ranks(world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    with fake_tensors.set_aside(), simulated_ranks(world):
        yield


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
        """The description of the call, for a digest: equal texts mean equal checks."""
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
