"""Suspended execution: a forward pass that stops before its backward pass, as one autograd function.

Digests of tensors tell whether inputs changed between the two passes, and how far two runs differ.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import random
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.compat.dispatch import below_autograd, outside_modes, version
from hyper_parallel.compat.memory import is_movable
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import Executable
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.offloading import Runtime
from hyper_parallel.offloading.autograd.capture_passes import Passes
from hyper_parallel.offloading.autograd.parallel_context import Around, program_digest
from hyper_parallel.offloading.autograd.state_snapshot import Snapshot
from hyper_parallel.offloading.expert_overflow import TooUneven
from hyper_parallel.offloading.runtime import whole


@dataclass(eq=False)
class Ready:
    """Two passes with their moves."""

    passes: Passes
    executable: Executable
    runtime: Runtime
    held: Mapping[str, int]
    """What else may be on the device meanwhile."""
    late: frozenset[str]
    """What may not change between the passes (`passes.late`)."""
    number: int
    """By which the plans know it."""
    load: float | None
    """How many times their even share of the rows a rank's experts may get; None where no size depends on it."""
    budget: int
    """Bytes of the device that they keep within."""
    exact: frozenset[str] = frozenset()
    """Inputs that may not change between the passes in any way, since copies of them come back or are computed with
    (`capture_passes.exact`)."""
    seen: Snapshot | None = None
    """Python state under which the passes are known to hold."""

    @functools.cached_property
    def program(self) -> bytes:
        """The digest that is the same on every rank (`program_digest`)."""
        return program_digest(self.passes.step)


class Run:
    """One call of a model and, later, its backward pass. Alive, it holds what the backward pass needs."""

    def __init__(
        self,
        ready: Ready,
        tensors: Mapping[str, Tensor],
        around: Around | None = None,
        load: float = 1.0,
    ) -> None:
        """`tensors`: state and inputs by their names. `around`: where a spread model's passes leave what they leave.
        `load`: how many times their even share of the rows experts may get, the same on every rank; the plan's own is
        as much or more."""
        self._ready, self._around, self._load = ready, around, load
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._steps: Generator[Any, Any, tuple[Tensor, ...]] | None = ready.executable.function(
            [self._tensors.get(name, _NOTHING) for name in ready.executable.inputs]
        )
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._prints: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        self._results: list[weakref.ref[Tensor] | None] = []
        self._beside: list[tuple[str, weakref.ref[Tensor]]] = []
        """Results that have a gradient which does not come back."""
        self._forward_runs = True
        self._over = ""
        """Why there is no backward pass any more."""

    def forward(self) -> list[Tensor]:
        """The model's results, outside of autograd.

        Raises TooUneven before there is memory for experts' rows that are more than planned for, on every rank.
        """
        point, values = self._send(None)
        while point == HostPoint.ROWS:
            load = float(values[0])
            if load > self._load:
                self._stop("the plan has no memory for as many rows as the model's experts were to get")
                raise TooUneven(load)
            point, values = self._send(None)
        assert point == HostPoint.TURN, point
        self._forward_runs = False
        passes = self._ready.passes
        shown = values[: len(passes.outputs)]
        looked_at = {f"output.{at}": tensor for at, tensor in enumerate(shown)} | self._tensors
        self._versions = {
            name: (tensor.detach(), version(tensor))
            for name, tensor in looked_at.items()
            if name in self._ready.late
        }
        self._prints = {
            name: (x, fingerprint(x)) for name, x in self._tensors.items() if name in self._ready.exact
        }
        # Not the run's own tensors: those would come to hold, by autograd, the run that holds them.
        return [tensor.detach() for tensor in shown]

    def gave(self, results: Sequence[Tensor]) -> None:
        """Remember the caller's results, weakly; `backward` checks that those the plan does not keep were released."""
        self._beside = [
            (output.name, weakref.ref(tensor))
            for tensor, output in zip(results, self._ready.passes.outputs, strict=True)
            if output.differentiable and not output.through
        ]
        self._results = [
            None if output.kept else weakref.ref(tensor)
            for tensor, output in zip(results, self._ready.passes.outputs, strict=True)
        ]

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of `passes.wanted`, of those of the outputs."""
        self._check(gradients)
        passes = self._ready.passes
        pending = [
            gradient.detach().to(output.dtype).contiguous().view(-1)
            for output, gradient in zip(passes.outputs, gradients, strict=True)
            if output.through and gradient is not None
        ]
        pending.reverse()
        answer: Tensor | None = pending.pop()
        while True:
            try:
                self._send(answer)
            except StopIteration as stop:
                found = dict(zip(self._ready.executable.outputs, stop.value, strict=True))
                break
            answer = pending.pop() if pending else None
        self._steps, self._tensors, self._over = None, {}, _RAN
        if self._around is not None:
            self._around.leave(
                {what: None if name is None else found[name] for what, name in passes.left.items()}
            )
        # Tensors of nobody else's: of one that a thread of gloo still holds, autograd would keep a copy.
        made = [found.get(f"gradient.{name}") for name in passes.wanted]
        return tuple(None if gradient is None else gradient.detach() for gradient in made)

    def _check(self, gradients: Sequence[Tensor | None]) -> None:
        """Raises HyperParallelError for what the graph is not of."""
        if self._steps is None:
            raise HyperParallelError(self._over)
        if torch.is_grad_enabled():
            raise HyperParallelError(
                "create_graph=True: a model under hp.offload has no gradients of gradients; "
                "call hyper_parallel.release(model) first to compute them"
            )
        outputs = self._ready.passes.outputs
        came = [o.name for o, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        meant = [o.name for o in outputs if o.through]
        if came != meant:
            names = ", ".join(repr(name) for name in dict.fromkeys(came))
            raise HyperParallelError(
                f"gradients came back for {_listed(came)} of what the model returned, and the plan is for "
                f"{_listed(meant)}; say so beforehand: hp.offload(model, …, through=({names},))"
            )
        for name, (tensor, before) in self._versions.items():
            if version(tensor) != before:
                raise HyperParallelError(
                    f"{name} was changed in place after the model was called, and its backward pass needs it as it "
                    "was; change a clone, or change it after backward()"
                )
        for name, (tensor, print_before) in self._prints.items():
            if not is_movable(tensor.untyped_storage()):
                raise HyperParallelError(
                    f"the memory of {name} was shared (share_memory, or a view of NumPy's) after the model was "
                    "called, and its backward pass gives it up and takes it again; share it before the model is called"
                )
            if fingerprint(tensor) != print_before:
                raise HyperParallelError(
                    f"the values of {name} were changed (through .data, or in memory that it shares) after the model "
                    "was called, and its backward pass brings back, or computes with, what they were; change them "
                    "after backward(), or give hp.offload a larger budget"
                )
        for name, reference in self._beside:
            if _wants_gradient(reference()):
                raise HyperParallelError(_no_gradient(name))
        self._versions, self._prints = {}, {}  # with which some of the results would stay
        for output, released in zip(outputs, self._results, strict=True):
            if released is not None and released() is not None:
                raise HyperParallelError(
                    f"the model's {output.name!r} is still held as its backward pass begins, and the plan gives its "
                    "memory to others (keep_results=False); let go of it before backward(), or leave "
                    "keep_results=False out"
                )

    def _send(self, answer: Tensor | None) -> tuple[str, Sequence[Tensor]]:
        assert self._steps is not None
        # Some kernels ask whether gradients are wanted: an LSTM's keeps its workspace only then.
        try:
            with below_autograd(), torch.set_grad_enabled(self._forward_runs):
                found: tuple[str, Sequence[Tensor]] = self._steps.send(answer)
                return found
        except StopIteration:
            raise
        except BaseException as error:
            self._stop(f"the passes of this call were stopped: {error}")
            raise

    def give_way(self) -> None:
        """There is no backward pass of it any more, and nothing is kept for one: the model is called again."""
        if self._steps is not None:
            self._stop(_GAVE_WAY)

    def _stop(self, why: str) -> None:
        """It goes no further: the model's state is on the device, and no copy is under way."""
        assert self._steps is not None
        self._steps.close()
        self._steps, self._over, self._versions, self._prints = None, why, {}, {}
        state = {name: x for name, x in self._tensors.items() if not name.startswith("input.")}
        self._ready.runtime.stopped(state)
        self._tensors = {}


_NOTHING = torch.empty(0)
"""In the place of an input that nobody looks at."""
_RAN = (
    "the backward pass of a model under hp.offload runs once, and this one has run; call the model again "
    "(retain_graph=True keeps nothing of it)"
)
_GAVE_WAY = (
    "a model under hp.offload was called again before the backward pass of this call, for which nothing is kept any "
    "more: its plan is for one forward pass and its backward pass. Call backward() first, give all inputs to one "
    "call, or make the other call inside torch.no_grad()"
)


def _wants_gradient(result: Tensor | None) -> bool:
    return result is not None and bool(result.retains_grad or result._backward_hooks)


def _no_gradient(name: str) -> str:
    return (
        f"the gradient of {name!r} is asked for (retain_grad, or a hook), and a model under hp.offload computes those "
        "of its parameters and inputs alone; call hyper_parallel.release(model) first to compute it"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in dict.fromkeys(names)) or "nothing"


class TwoPasses(torch.autograd.Function):
    """A run's two passes as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, run: Run, passes: Passes, *wanted: Tensor) -> tuple[Tensor, ...]:
        """The outputs. `wanted`: the tensors that have a gradient."""
        ctx.set_materialize_grads(False)
        ctx.run = run
        outputs = run.forward()
        ctx.mark_non_differentiable(
            *(x for x, output in zip(outputs, passes.outputs, strict=True) if not output.differentiable)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of each argument."""
        return (None, None, *ctx.run.backward(gradients))


# Tensor digests: the bits of a tensor, and random projections that measure how far two tensors differ.
#
# ‖a − b‖² ≈ mean_k ⟨s_k, a − b⟩²,        s_k: signs                            Achlioptas, JCSS 66 (2003)

SEED = 0x5EED
TOLERANCE = 1e-5
"""Of a tensor's norm, or 3 units in the last place of its dtype where that is more."""
_CHUNK = 1 << 16
"""Elements that are looked at at once; fewer of small tensors."""
_PROJECTIONS = 8
HOST_DEVICE = "cpu"
"""Whose memory this process reads."""


@dataclass(frozen=True)
class TensorDigest:
    """Digest of one tensor: its bits, its norm and its random projections."""

    digest: bytes
    dtype: torch.dtype
    norm: float = 0.0
    projections: tuple[float, ...] = ()

    def off(self, other: TensorDigest) -> float:
        """How far the other is off, of this one's norm."""
        if self.digest == other.digest:
            return 0.0
        if self.dtype != other.dtype or not math.isfinite(self.norm + other.norm):
            return math.inf
        apart = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(apart) / len(apart)) / max(self.norm, 1e-300)

    @property
    def tolerance(self) -> float:
        """The difference that rounding explains."""
        return max(TOLERANCE, 3 * torch.finfo(self.dtype).eps) if self.dtype.is_floating_point else 0.0


def digest_of(x: Tensor, closely: bool) -> TensorDigest:
    """A digest of a tensor's bits, whatever its strides; `closely`: its projections too."""
    digest = hashlib.blake2b(str((tuple(x.shape), x.dtype)).encode(), digest_size=16)
    norm, projections, at = 0.0, [0.0] * _PROJECTIONS, 0
    direct = x.device.type == HOST_DEVICE and not closely
    for part in _parts(x.detach(), x.numel() if direct else max(256, min(_CHUNK, x.numel() // 16))):
        # NumPy's view of a storage would forbid ever to give its memory up.
        there = part.contiguous() if direct else part.to(HOST_DEVICE, copy=True)
        if there.numel():
            digest.update((ctypes.c_char * there.nbytes).from_address(there.data_ptr()))
        if closely:
            values = there.to(torch.float64)
            norm += float(values.square().sum())
            for k, signs in enumerate(_signs(at, values.numel())):
                projections[k] += float((values * signs).sum())
            at += values.numel()
    return TensorDigest(digest.digest(), x.dtype, math.sqrt(norm), tuple(projections))


def fingerprint(x: Tensor) -> tuple[int, ...]:
    """Numbers that change when a tensor's storage does, at the speed of its memory: the sum of its words, which any one
    change alters, that of every seventh word, which knows the order too, and the bytes behind the last word."""
    with outside_modes():
        storage = whole(x.detach())
        words = storage[: storage.numel() // 8 * 8].view(torch.int64)
        # Number by number: what is kept on the device would be there beside the budget.
        return (int(words.sum()), int(words[::7].sum()), *storage[words.numel() * 8 :].tolist())


def _parts(x: Tensor, count: int) -> Iterator[Tensor]:
    """The elements in order, at most `count` at a time, in one dim."""
    if x.is_contiguous():
        yield from x.view(-1).split(max(count, 1))
    elif x.dim() <= 1:
        yield from x.split(max(count, 1))
    else:
        for row in x.unbind(0):
            yield from _parts(row, count)


def _signs(first: int, count: int) -> Iterator[Tensor]:
    """Signs of the elements from `first` on, for each projection: 1 or −1, a hash of the element's place."""
    place = torch.arange(first, first + count, dtype=torch.int64)
    for factor in _FACTORS:
        mixed = place * factor
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[0]
        yield 1 - 2 * ((mixed >> 41) & 1).to(torch.float64)


_draw = random.Random(SEED)
_FACTORS = tuple(_draw.getrandbits(62) | 1 for _ in range(_PROJECTIONS))
