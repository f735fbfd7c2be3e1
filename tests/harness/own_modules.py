"""Modules as users write them, of the kinds that a lowering may get wrong, and what one device makes of them.

`compared` trains a variation of `PATTERNS` for a few steps under a strategy, beside the same module
on one device with plain PyTorch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyper_parallel as hp
from harness.own_module_patterns import BRANCHING_AND_WRITING, WIDTH, Pattern
from harness.own_module_reaches import REACHING
from hyper_parallel.errors import HyperParallelError

ROWS, STEPS = 8, 3
PATTERNS = BRANCHING_AND_WRITING | REACHING
RULES = {"up": "colwise", "down": "rowwise"}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "shard 2": {"axes": {"shard": 2}},
    "shard 2 gradients": {"axes": {"shard": 2}, "memory": {"shard": "gradients"}},
    "shard 2 optimizer": {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}},
    "replicate 2": {"axes": {"replicate": 2}},
    "tensor 2": {"axes": {"tensor": 2}, "rules": RULES},
    "replicate 2 shard 2": {"axes": {"replicate": 2, "shard": 2}},
    "shard 2 in 2": {"axes": {"shard": 2}},
    "shard 2 optimizer in 2": {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}},
    "replicate 2 shard 2 in 2": {"axes": {"replicate": 2, "shard": 2}},
    "shard 2 tensor 2": {"axes": {"shard": 2, "tensor": 2}, "rules": RULES},
    "shard 2 traceable": {"axes": {"shard": 2}, "lowering": "traceable"},
    "replicate 2 traceable": {"axes": {"replicate": 2}, "lowering": "traceable"},
    "shard 2 tensor 2 traceable": {
        "axes": {"shard": 2, "tensor": 2},
        "rules": RULES,
        "lowering": "traceable",
    },
    "shard 2 optimizer traceable in 2": {
        "axes": {"shard": 2},
        "memory": {"shard": "optimizer"},
        "lowering": "traceable",
    },
    "replicate 2 shard 2 traceable in 2": {"axes": {"replicate": 2, "shard": 2}, "lowering": "traceable"},
    "shard 2 offload": {"axes": {"shard": 2}, "lowering": "offload"},
    "replicate 2 offload in 2": {"axes": {"replicate": 2}, "lowering": "offload"},
}
"""By name; those that end with "in 2" compute a step in two micro-batches. `lowering`: of `hp.parallelize`; "offload"
is the traceable one under `hp.offload`."""
TOLERANCE = 3e-5


class Own(nn.Module):
    """x to out(run(down(relu(up(x)))))."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 4)
        pattern.build(self)
        self.run_pattern = pattern.run
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.run_pattern(self, torch.cat([x[:, :1], self.down(torch.relu(self.up(x)))[:, 1:]], 1))
        return self.out(hidden)


def made(name: str, seed: int = 0) -> Own:
    """A module of a pattern, always with the same values."""
    torch.manual_seed(seed)
    module = Own(PATTERNS[name])
    PATTERNS[name].after(module)
    return module


def rows_of(step: int) -> Tensor:
    """The rows of a step, [8, 8]. The first features of the workers' rows are alike in the first step only."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    firsts = ((1, 2, 0, 3, 3, 0, 2, 1), (0, 0, 1, 1, 1, 2, 2, 2), (-1, -2, -1, -1, 2, 3, 2, 2))
    x[:, 0] = torch.tensor(firsts[step % len(firsts)]).float()
    return x


def _loss(module: Any, x: Tensor) -> Tensor:
    return module(x).square().sum() + module.penalty


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    # A weight without a gradient is not decayed, and one whose gradient is zero is.
    return torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.5, weight_decay=0.1)


def _declared(strategy: str) -> tuple[hp.Strategy, str]:
    """A strategy of the table, and its lowering."""
    settings = {**STRATEGIES[strategy]}
    lowering = settings.pop("lowering", "fsdp")
    return hp.Strategy(**settings), lowering


def _micro_batches(strategy: str) -> int:
    return 2 if strategy.endswith(" in 2") else 1


def on_one_device(name: str, workers: int, micro_batches: int = 1) -> list[dict[str, Tensor]]:
    """Of each step the loss, every gradient, and every weight and buffer after it; by plain PyTorch."""
    module = made(name)
    optimizer, found = _optimizer(module), []
    if PATTERNS[name].kind == "hooks":
        micro_batches = 1  # a hook is called with the gradient of the step
    for step in range(STEPS):
        optimizer.zero_grad()
        of_workers = [rows.chunk(micro_batches) for rows in rows_of(step).chunk(workers)]
        total = torch.zeros(())
        for parts in zip(*of_workers, strict=True):
            together = parts if PATTERNS[name].alone else (torch.cat(parts),)
            loss = torch.stack([_loss(module, part) for part in together]).sum()
            loss.backward()
            total += loss.detach()
        values = {"loss": total}
        values |= {
            f"gradient {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
        }
        optimizer.step()
        values |= {n: x.detach().clone() for n, x in module.state_dict(keep_vars=True).items()}
        found.append(values)
    return found


def under(name: str, strategy: str) -> list[dict[str, Tensor]]:
    """The same of a parallelized module, on every rank."""
    module, micro_batches = made(name), _micro_batches(strategy)
    declared, lowering = _declared(strategy)
    hp.parallelize(module, declared, lowering="fsdp" if lowering == "fsdp" else "traceable")
    if lowering == "offload":
        hp.offload(module, budget="64MiB", host="16MiB")
    handle = hp.sharded(module)
    optimizer, found = _optimizer(module), []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = torch.arange(ROWS).chunk(declared.axes.data)[handle.data_index]
        total = torch.zeros(())
        for number, part in enumerate(rows.chunk(micro_batches)):
            with handle.micro_batch(seed=0, step=step, rows=part, last=number == micro_batches - 1):
                loss = _loss(module, rows_of(step)[part])
                loss.backward()
            total += loss.detach()
        values = {"loss": handle.all_reduce(total, ("replicate", "shard"))}
        parameters = handle.parameters()
        with torch.no_grad():
            values |= {
                f"gradient {p.name}": handle.gather(p.grad, p.layout).clone()
                for p in parameters
                if p.grad is not None
            }
            optimizer.step()
            values |= {p.name: handle.gather(p.local, p.layout).clone() for p in handle.parameters()}
            values |= {n: x.detach().clone() for n, x in module.named_buffers()}
        found.append(values)
    return found


def difference(right: list[dict[str, Tensor]], ours: list[dict[str, Tensor]]) -> str:
    """What differs first, in words; empty where nothing does."""
    for step, (whole, mine) in enumerate(zip(right, ours, strict=True)):
        # Tied weights have one name in ours.
        for key in whole.keys() | mine.keys():
            if key not in mine or key not in whole:
                if key.startswith("gradient "):
                    return f"step {step}: only {'one device' if key in whole else 'the workers'} has {key}"
                continue
            expected, got = whole[key].double(), mine[key].double()
            if expected.shape != got.shape:
                return f"step {step}: {key} is {list(got.shape)} for {list(expected.shape)}"
            scale = max(float(expected.abs().max()), 1e-2) if expected.numel() else 1.0
            off = float((expected - got).abs().max()) / scale if expected.numel() else 0.0
            if not off <= TOLERANCE:
                return f"step {step}: {key} is off by {off:.1e}"
    return ""


def all_compared(rank: int, world: int, names: tuple[str, ...], strategy: str) -> dict[str, tuple[str, str]]:
    """`compared` of several patterns, one after the other."""
    return {name: compared(rank, world, name, strategy) for name in names}


def compared(rank: int, world: int, name: str, strategy: str) -> tuple[str, str]:
    """Of a rank: (right, refused or WRONG, what differs or why it is refused)."""
    with tempfile.TemporaryDirectory() as cache:
        # What passed is remembered by classes and shapes, which patterns share.
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            ours = under(name, strategy)
        except HyperParallelError as refusal:
            line = str(refusal)
            return ("refused" if "\n" not in line else "WRONG"), line
        workers = _declared(strategy)[0].axes.data
        off = difference(on_one_device(name, workers, _micro_batches(strategy)), ours)
        # Every rank waits for the slowest, so that none ends its connection early.
        dist.barrier()
        return ("WRONG" if off else "right"), off
