"""Checks a captured call once against the model's own code, bit by bit.

The model's own passes and the planned passes run on the call's tensors, from the same random state and with the same
gradients of the results. The check compares results, gradients, buffers and the random state afterwards. It keeps
digests of the first run's bits, not the values.

Both runs stay within the budget: the planned passes by their plan, the model's own passes by demand paging
(`offloading.paging`), which holds the working set of one operator beside inputs, buffers and whatever
else the plan counts.

The check uses a separate random state, so that it detects a forward pass that seeds a generator or keeps one that the
graph does not know. Where bits differ, both run again and are compared by random projections (`tensor_digest`), since
kernels may add in another order each time. A difference above rounding (`TOLERANCE`) is refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hyper_parallel.compat import Backend
from hyper_parallel.compat.dispatch import leaves_of, outside_modes, without_autocast
from hyper_parallel.compat.fake_tensors import aliased
from hyper_parallel.compat.hf_conversions import computed_once
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph.capture_overrides import set_state
from hyper_parallel.graph.capture_overrides import state_of as random_state_of
from hyper_parallel.graph.ir import state_tensors
from hyper_parallel.offloading.autograd.budget import WHOLES
from hyper_parallel.offloading.autograd.capture_passes import ModelCall, Passes, staying
from hyper_parallel.offloading.autograd.captured_inputs import following
from hyper_parallel.offloading.autograd.side_effects import Transaction
from hyper_parallel.offloading.autograd.two_passes import (
    SEED,
    Ready,
    Run,
    TensorDigest,
    digest_of,
)
from hyper_parallel.offloading.paging import NoRoomError, Paged
from hyper_parallel.offloading.runtime import whole
from hyper_parallel.offloading.tiers import Tier

log = logging.getLogger(__name__)


class Check:
    """Holds one plan against the model's own passes."""

    def __init__(self, call: ModelCall, ready: Ready, backend: Backend) -> None:
        self._model, self._forward, self._call, self._state = (
            call.model,
            call.forward,
            call.signature,
            call.state,
        )
        self._ready, self._backend = ready, backend
        self._outside = ready.passes.outside_now(call.state) or {}
        self._device = next(call.model.parameters()).device
        self._generators = _generators(ready.passes)
        self._saved: list[tuple[Tensor, Tensor]] = []
        """Buffers and inputs as uint8 [n], and their copies."""

    def run(self, tiers: Mapping[str, Tier], budget: int, reserve: Callable[[], None]) -> None:
        """Raises CaptureError where the planned passes give something else than the model's own.

        `tiers`: with nothing in them that is needed. `budget`: bytes of the device. `reserve` gives the plan its slots
        in the tiers again. Nothing is left behind: neither in buffers and inputs nor in random generators.
        """
        with self._kept():
            try:
                own = self._own(tiers, budget, False)
            except NoRoomError as error:
                log.warning(
                    "hp.offload: the plan (inputs: %s) was not checked against the model's own passes, which need more "
                    "memory beside the device than there is: %s. A larger host= or flash= lets it be checked; "
                    "check=False asks for no check",
                    self._call,
                    error,
                )
                with outside_modes():
                    reserve()
                return
            with outside_modes():
                reserve()
            planned = self._planned(False)
            if own == planned:
                return
            again = self._own(tiers, budget, True)
            with outside_modes():
                reserve()
            self._judge(own, again, self._planned(True))

    def _judge(
        self,
        own: Mapping[str, TensorDigest],
        again: Mapping[str, TensorDigest],
        planned: Mapping[str, TensorDigest],
    ) -> None:
        """Refuse what differs by more than rounding; `again`: what the model's own passes gave the second time."""
        if own.keys() != again.keys():
            raise CaptureError(_unsteady(f"{min(own.keys() ^ again.keys())} comes of one of them only"))
        if own.keys() != planned.keys():
            raise CaptureError(_refusal(f"{min(own.keys() ^ planned.keys())} comes of one of them only"))
        unsteady = [name for name, seen in again.items() if own[name].digest != seen.digest]
        off = {name: again[name].off(seen) for name, seen in planned.items()}
        wrong = {name: by for name, by in off.items() if by > again[name].tolerance}
        if not wrong:
            most = max(off.values())
            if most:
                log.warning(
                    "hp.offload: the plan gives what the model's own passes give to within rounding (%.1e), and not "
                    "the same bits%s",
                    most,
                    "; nor do those when they run twice" if unsteady else "",
                )
            return
        name, by = max(wrong.items(), key=lambda item: (item[1] < math.inf, item[1]))
        what = f"{name} differs" + ("" if by == math.inf else f" by {by:.2g} of its norm")
        others = f", and so do {len(wrong) - 1} more" if len(wrong) > 1 else ""
        if set(wrong) & set(unsteady):
            raise CaptureError(_unsteady(what + others))
        raise CaptureError(_refusal(what + others))

    # The runs.

    def _own(self, tiers: Mapping[str, Tier], budget: int, closely: bool) -> dict[str, TensorDigest]:
        """The outcome of the model's own passes, paged."""
        model, call, passes = self._model, self._call, self._ready.passes
        state = state_tensors(model)
        shared = staying(state, call.tensors)
        moving = [x for name, x in state.items() if name.startswith("parameter.") and name not in shared]
        ids = {id(x) for x in moving}
        fixed = [*(x for x in state.values() if id(x) not in ids), *call.tensors, *self._outside.values()]
        # Of what inputs are parts of, `fixed` has all.
        held = sum(count for what, count in self._ready.held.items() if what != WHOLES)
        room = budget - held - _bytes(fixed, self._device)
        with outside_modes():
            paged = Paged(tiers, room, self._device, passes.step)
        paged.stay(fixed)
        paged.give(moving)
        self._seed()
        python = Transaction(self._state)
        try:
            with paged, aliased(model), following(model, self._state), computed_once(model):
                found = self._run_own(closely)
        finally:
            python.undo()
            self._state.clear_caches()
            paged.restore()
            torch.clear_autocast_cache()
        return found | self._after(closely)

    def _run_own(self, closely: bool) -> dict[str, TensorDigest]:
        call, passes = self._call, self._ready.passes
        given = [x.detach().requires_grad_(x.requires_grad) for x in call.tensors]
        named = state_tensors(self._model) | dict(zip(call.names, given, strict=True))
        with torch.enable_grad():
            tensors = [x for x in leaves_of(call.run(self._forward, given)) if isinstance(x, Tensor)]
        tensors += [x for effect in passes.effects for x in effect.left(self._state)]
        if len(tensors) != len(passes.outputs):
            raise CaptureError(
                _refusal(f"the model returns {len(tensors)} tensors, and {len(passes.outputs)} when captured")
            )
        found = self._results(tensors, closely)
        through = [x for x, output in zip(tensors, passes.outputs, strict=True) if output.through]
        kept = [x for x, output in zip(tensors, passes.outputs, strict=True) if output.kept]
        del tensors
        if not all(x.requires_grad for x in through):
            raise CaptureError(_refusal("a result has a gradient when captured, and here it has none"))
        wanted = {name: x for name, x in named.items() if x.requires_grad}
        with torch.autograd.set_multithreading_enabled(False), without_autocast():
            gradients = torch.autograd.grad(
                through, list(wanted.values()), self._gradients(through), allow_unused=True
            )
        del through, kept
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                found[f"the gradient of {_named(name)}"] = digest_of(gradient, closely)
        return found

    def _planned(self, closely: bool) -> dict[str, TensorDigest]:
        """The outcome of the plan."""
        self._seed()
        # Gradients are let go of before the random state, which takes memory of the host, is looked at.
        return self._run_planned(closely) | self._after(closely)

    def _run_planned(self, closely: bool) -> dict[str, TensorDigest]:
        passes = self._ready.passes
        tensors = {**state_tensors(self._model), **self._call.named}
        run = Run(self._ready, tensors | self._outside)
        with torch.no_grad():
            outputs = run.forward()
            found = self._results(outputs, closely)
            answers: list[Tensor | None] = [
                self._gradients([x])[0] if output.through else None
                for x, output in zip(outputs, passes.outputs, strict=True)
            ]
            run.gave(outputs)
            outputs.clear()
            gradients = run.backward(answers)
        for name, gradient in zip(passes.wanted, gradients, strict=True):
            if gradient is not None:
                found[f"the gradient of {_named(name)}"] = digest_of(gradient, closely)
        return found

    def _results(self, tensors: Sequence[Tensor], closely: bool) -> dict[str, TensorDigest]:
        outputs = self._ready.passes.outputs
        return {
            f"result {at}{f' ({output.name})' if output.name else ''}": digest_of(x.detach(), closely)
            for at, (x, output) in enumerate(zip(tensors, outputs, strict=True))
        }

    def _after(self, closely: bool) -> dict[str, TensorDigest]:
        """Digests of what both runs leave behind."""
        found = {
            f"the random state of {name}": digest_of(_tensor(state), closely)
            for name, state in self._states().items()
        }
        for name, tensor in state_tensors(self._model).items():
            if name.startswith("buffer."):
                found[f"{_named(name)} afterwards"] = digest_of(tensor, closely)
        return found

    def _gradients(self, through: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of results: 1 for a number; else drawn, of norm 1, the same for results of the same shape."""
        found = []
        for x in through:
            gradient = torch.ones_like(x, memory_format=torch.contiguous_format)
            if x.dim():
                drawn = torch.Generator(self._device).manual_seed(SEED)
                gradient.bernoulli_(0.5, generator=drawn).mul_(2).sub_(1).div_(math.sqrt(max(x.numel(), 1)))
            found.append(gradient.detach())
        return found

    # What is as before when it is over.

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Afterwards the random state, the buffers and the inputs are what they are now. Copies of the latter two lie
        in the host's memory."""
        states = self._states()
        tensors = [x for name, x in state_tensors(self._model).items() if name.startswith("buffer.")]
        tensors += [*self._call.tensors, *self._outside.values()]
        storages = {x.untyped_storage().data_ptr(): x for x in tensors if x.numel()}
        with outside_modes():
            memory = self._backend.host_pages(sum(x.untyped_storage().nbytes() for x in storages.values()))
            self._saved = _copies(storages.values(), memory.tensor)
            for own, copy in self._saved:
                copy.copy_(own)
        try:
            yield
        finally:
            self._restore()
            self._set(states)
            self._saved.clear()
            memory.close()

    def _restore(self) -> None:
        with outside_modes():
            for own, copy in self._saved:
                own.copy_(copy)

    def _seed(self) -> None:
        """Begin a run: buffers and inputs as they were, and generators in a state of this check's own."""
        self._restore()
        devices = {
            name: self._generators[name].device if name in self._generators else name
            for name in self._states()
        }
        fresh = {name: torch.Generator(of).manual_seed(SEED).get_state() for name, of in devices.items()}
        self._set({name: state.numpy().tobytes() for name, state in fresh.items()})

    def _states(self) -> dict[str, bytes]:
        found = {name: random_state_of(torch.device(name)) for name in {"cpu", str(self._device)}}
        found |= {name: generator.get_state() for name, generator in self._generators.items()}
        # Not as tensors, which would be there beside the budget.
        return {name: state.numpy().tobytes() for name, state in found.items()}

    def _set(self, states: Mapping[str, bytes]) -> None:
        for name, state in states.items():
            if name in self._generators:
                self._generators[name].set_state(_tensor(state))
            else:
                set_state(_tensor(state), torch.device(name))


_MEND = (
    "call hyper_parallel.release(model) to train without a budget, or give hp.offload check=False to go on"
)


def _refusal(what: str) -> str:
    return (
        f"the passes of this call do not give as a graph what the model's own code gives: {what}. The forward pass "
        "depends on something that changes from call to call and that a graph does not see (a counter or a random "
        f"number of Python's, a generator that it seeds itself, memory that it keeps); {_MEND}"
    )


def _unsteady(what: str) -> str:
    return (
        "the model's own passes differ from one run to the next, on the same values and from the same state of "
        f"PyTorch's random generators ({what}), so that no graph of them can be checked; {_MEND}"
    )


def _named(name: str) -> str:
    return name.partition(".")[2] if name.startswith(("parameter.", "buffer.")) else name


def _generators(passes: Passes) -> dict[str, torch.Generator]:
    """Generators that the graph draws from beside the default ones."""
    found: dict[int, torch.Generator] = {}
    for node in passes.step.nodes:
        for leaf in leaves_of((node.args, node.kwargs)):
            if isinstance(leaf, torch.Generator):
                found[id(leaf)] = leaf
    return {f"generator {at}": generator for at, generator in enumerate(found.values())}


def _bytes(tensors: Sequence[Tensor], device: torch.device) -> int:
    """Bytes of their storages on the device, each once."""
    found = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.device == device
    }
    return sum(found.values())


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _copies(tensors: Iterable[Tensor], memory: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The storages of tensors as uint8 [n], each with a part of `memory` of its size."""
    found, at = [], 0
    for x in tensors:
        own = whole(x.detach())
        found.append((own, memory[at : at + own.numel()]))
        at += own.numel()
    return found
