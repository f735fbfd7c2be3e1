"""A model under a memory budget: `hp.offload` and `hp.release`, and the forward that replaces the model's own."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.dispatch import leaves_of, transform_around
from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.compat.fsdp import fully_sharded
from hyper_parallel.compat.memory import is_mapped
from hyper_parallel.errors import BudgetError, HyperParallelError
from hyper_parallel.offloading.autograd.budget import ResidentMemory, Swap
from hyper_parallel.offloading.autograd.capture_passes import PassSettings
from hyper_parallel.offloading.autograd.captured_inputs import CallSignature
from hyper_parallel.offloading.autograd.parallel_context import Around, agreed
from hyper_parallel.offloading.autograd.plan_cache import Plans
from hyper_parallel.offloading.autograd.two_passes import Ready, Run, TwoPasses
from hyper_parallel.offloading.expert_overflow import TooUneven, changed_before, wanted
from hyper_parallel.shard.region_check import check_call
from hyper_parallel.shard.sharded_model import is_sharded, sharded
from hyper_parallel.shard.weights_written_in_forward import WrittenBuffers
from hyper_parallel.units import parse_bytes

Model = TypeVar("Model", bound=nn.Module)


def offload(
    model: Model,
    *,
    budget: int | str | Swap,
    host: int | str | None = None,
    flash: str | Path | None = None,
    through: Sequence[str] | None = None,
    keep_results: bool = True,
    cluster: Cluster | None = None,
    check: bool = True,
) -> Model:
    """Keep the forward and the backward pass of `model` within `budget` bytes of its device (``"10GiB"``).

    Returns the same object, with the same parameters, for a training loop as it is:

        model = hp.offload(model, budget="10GiB", host="64GiB")
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()

    `host`: how much of the host's memory may be used; `flash`: a folder on a fast disk for what fits in neither; one of
    them is needed. `through`: the fields of what the model returns through which gradients come back, ``("logits",)``
    where a loop computes the loss itself from several; left out it is the loss, else all that have a gradient.
    `keep_results`: what the model returns beside the loss, logits for example, may be held until `backward` is over;
    False where all of it is let go of before, which needs less.
    `budget` may be ``Swap()`` (`hyper_parallel.Swap`): as much as the passes need when activations that are
    in no use are away. `cluster`: the machine by which moves are planned; it decides how fast a step is, never how much
    it holds.

    Of a model that `parallelize` spread, with ``lowering="traceable"``, `budget`, `host` and `flash` are each rank's,
    and every rank calls this and the model. A loss is asked for with `causal_lm_loss` as ever.

    Losses and gradients have the bits of the model's own passes. Whenever code runs that is not the model's, its
    parameters, buffers and gradients are on the device. Docs: docs/offload-your-loop.md.

    Raises BudgetError for a budget that is none, TierError where the memory cannot be taken. What a call of the model
    raises: `Offloaded.__call__`.
    """
    if host is None and flash is None:
        raise BudgetError(
            "hp.offload: what does not fit within the budget needs a place to go; give it host='64GiB' or flash, a "
            "folder on a fast disk"
        )
    _refuse_wrapper(model)
    device = _device(model)
    release(model)
    for tensor in (*model.parameters(), *model.buffers()):
        _movable(tensor)
    handle = sharded(model) if is_sharded(model) else None
    around = None if handle is None else Around(handle)
    plans = agreed(
        handle,
        lambda: Plans(
            device,
            budget if isinstance(budget, Swap) else _bytes(budget),
            None if host is None else _bytes(host),
            flash,
            cluster,
            PassSettings(None if through is None else tuple(through), keep_results, around),
            check,
        ),
    )
    # Not by the module's own __setattr__, which is for parameters, buffers and modules.
    model.__dict__["forward"] = Offloaded(model, plans, around)
    return model


def release(model: Model) -> Model:
    """Undo `offload`: the model runs as before, and the memory beside the device is given back. Else without effect."""
    found = model.__dict__.get("forward")
    if isinstance(found, Offloaded):
        found.close()
    return model


def _bytes(given: int | str) -> int:
    try:
        found = parse_bytes(given) if isinstance(given, str) else int(given)
    except ValueError as error:
        raise BudgetError(f"hp.offload: {error}") from None
    if found <= 0:
        raise BudgetError(f"hp.offload: {given!r} is no memory; write 10GiB, 512MiB, or a number of bytes")
    return found


def _device(model: nn.Module) -> torch.device:
    """Where all of the model is."""
    state = [*model.named_parameters(), *model.named_buffers()]
    if not state:
        raise BudgetError("hp.offload: the model has no parameters or buffers, so nothing can be offloaded")
    for name, tensor in state:
        if isinstance(tensor, DTensor) or fully_sharded(model):
            raise BudgetError(
                f"hp.offload: {name} is a part of a parameter that PyTorch's FSDP2 or a DTensor splits, which no graph "
                'can follow; spread the model with hp.parallelize(model, strategy, lowering="traceable")'
            )
    devices = sorted({str(tensor.device) for _, tensor in state})
    if len(devices) > 1 or devices == ["meta"]:
        raise BudgetError(
            f"hp.offload: the model's parameters and buffers are on {', '.join(devices)}; move all to the device on "
            "which it is to run first (model.to(device))"
        )
    return torch.device(devices[0])


def _movable(tensor: Tensor) -> None:
    """See to it that the memory of a tensor can be given up and taken again, where nobody else has it."""
    if is_mapped(tensor.untyped_storage()):
        # The values move to memory of the tensor's own.
        tensor.data = tensor.data.clone()


def _refuse_wrapper(model: nn.Module) -> None:
    """Raises BudgetError for a module that exchanges gradients or weights around the forward pass of another."""
    for name, module in model.named_modules():
        for wrapper, advice in _WRAPPERS.items():
            if isinstance(module, wrapper):
                kind = wrapper.__name__
                raise BudgetError(
                    f"hp.offload: {name or 'the model'} is a {kind}, whose hooks no graph of its forward pass has, so "
                    f"that workers would go apart; {advice}"
                )


_WRAPPERS: dict[type[nn.Module], str] = {
    DistributedDataParallel: "offload the model inside it: DistributedDataParallel(hp.offload(model, ...))",
    nn.DataParallel: "offload the model without it",
    FullyShardedDataParallel: 'spread the model with hp.parallelize(model, strategy, lowering="traceable")',
}


log = logging.getLogger(__name__)

_planning: contextvars.ContextVar[bool] = contextvars.ContextVar("planning", default=False)
"""Whether a model is being captured or checked: a model inside it has no plan then."""


class Offloaded:
    """Called as the model's forward. A call that needs no gradients runs the model's own, as it is."""

    __wrapped__: Any

    def __init__(self, model: nn.Module, plans: Plans, around: Around | None = None) -> None:
        """`around`: the surroundings of a model that is spread."""
        self._around = around
        own = around is not None and around.own
        self._buffers = WrittenBuffers(model, around.handle.axes) if around is not None and own else None
        self._model = weakref.ref(model)
        self._own = model.__dict__.get("forward")
        """What stood in the place of the class's forward before, if anything did."""
        self._plans = plans
        self._held = ResidentMemory(model)
        self._run: weakref.ref[Run] | None = None
        self._said: set[str] = set()
        functools.update_wrapper(self, model.forward)
        del self.__wrapped__  # which would keep the model alive
        self.__signature__ = inspect.signature(model.forward)
        self._caches = "use_cache" in self.__signature__.parameters
        weakref.finalize(model, plans.close)

    @property
    def notes(self) -> Sequence[str]:
        """The outcome of each plan, in a line."""
        return tuple(self._plans.notes)

    # This call runs its own graph, so torch.compile of an enclosing model leaves it out.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass within the budget and return what the model's own forward returns.

        It invalidates the backward pass of an earlier call. Every rank of a parallelized model calls it, and if one
        rank cannot run its passes, all raise. Raises CaptureError where the call cannot be captured, BudgetError where
        no plan meets the budget, TierError where a tier fails, and FollowsError where only other ranks have such an
        error.
        """
        model = self._model()
        assert model is not None, "it is being called"
        if not torch.is_grad_enabled() or not _has_gradient(model, args, kwargs):
            return self._forward(*args, **kwargs)
        if _planning.get() or any(is_fake(p) for p in model.parameters()):
            # A part of a model that is being captured, whose budget is around it.
            return self._forward(*args, **kwargs)
        around = transform_around()
        if around is not None:
            self._say_uncaptured(around)
            return self._forward(*args, **kwargs)
        self._give_way()
        if self._caches:
            # Keys and values for later calls: a step of training has no use for them, and they would stay.
            kwargs.setdefault("use_cache", False)
        check_call(model, args, kwargs)
        with self._buffers.alike() if self._buffers is not None else contextlib.nullcontext():
            ready, outputs = self._run_forward(model, args, kwargs)
        self._held.gave(outputs)
        assert ready.seen is not None
        return ready.passes.result(outputs, ready.seen)

    def _say_uncaptured(self, around: str) -> None:
        """Say once of each kind of surroundings that calls inside run without a budget."""
        if around not in self._said:
            self._said.add(around)
            log.warning(
                "hp.offload: calls inside %s run uncaptured, as the model's own code and without a budget",
                around,
            )

    def _run_forward(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Ready, Sequence[Tensor]]:
        """The plan of a call, and what its forward pass gives."""
        handle = self._around.handle if self._around is not None else None
        ready, call = agreed(handle, lambda: self._ready(model, args, kwargs), _digest)
        while True:
            assert ready.seen is not None
            tensors = ready.seen.state | call.named
            tensors |= ready.passes.outside_now(ready.seen) or {}
            run = Run(ready, tensors, self._around, self._plans.load)
            self._run = weakref.ref(run)
            try:
                outputs = TwoPasses.apply(run, ready.passes, *(tensors[name] for name in ready.passes.wanted))
            except TooUneven as uneven:
                ready, call = self._ready_for(uneven.load, ready, lambda: self._ready(model, args, kwargs))
                continue
            run.gave(outputs)
            return ready, outputs

    def _ready(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Ready, CallSignature]:
        """The plan of a call, and the call. No collective."""
        around = self._around
        call = CallSignature.of(args if around is None else (around.given(), *args), kwargs)
        held = self._held.bytes(call.tensors, next(model.parameters()).device)
        planning = _planning.set(True)
        try:
            return self._plans.ready(model, self._captured, call, held), call
        finally:
            _planning.reset(planning)

    def _ready_for(
        self, load: float, before: Ready, make: Callable[[], tuple[Ready, CallSignature]]
    ) -> tuple[Ready, CallSignature]:
        """A plan with memory for experts' rows that are `load` times their even share. A collective."""
        assert self._around is not None
        why = changed_before(before.passes.step)
        if why is not None:
            raise BudgetError(
                f"hp.offload: a rank's experts were to get {load:.3g} times their share of rows: {why}"
            )
        generous, just = wanted(load)
        self._plans.load = generous
        try:
            return agreed(self._around.handle, make, _digest)
        # On every rank, if on any: all try once more.
        except Exception:
            self._plans.load = just
            return agreed(self._around.handle, make, _digest)

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, for a capture; of a spread model the first argument is what it finds around it."""
        if self._around is None:
            return self._forward(*args, **kwargs)
        given, *rest = args
        with self._around.within(given):
            return self._forward(*rest, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        model: Any = self._model()
        return type(model).forward(model, *args, **kwargs)

    def _give_way(self) -> None:
        """Nothing is kept any more for a backward pass that did not come."""
        run = self._run() if self._run is not None else None
        if run is not None:
            run.give_way()

    def close(self) -> None:
        """The model runs as it did before, and the memory beside the device is given back."""
        self._give_way()
        model = self._model()
        if model is not None and model.__dict__.get("forward") is self:
            del model.__dict__["forward"]
            if self._own is not None:
                model.__dict__["forward"] = self._own
        self._held.close()
        self._plans.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model gets its class's forward method, without a budget."""
        model: Any = self._model()
        copy = memo.get(id(model))
        if copy is None:
            self.__reduce_ex__(2)
        return types.MethodType(type(model).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HyperParallelError(
            "a model under hp.offload is not saved as a whole; save model.state_dict(), or call "
            "hyper_parallel.release(model) first"
        )


def _digest(ready: tuple[Ready, CallSignature]) -> bytes:
    return ready[0].program


def _has_gradient(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a backward pass may come: of the model's parameters, or of what it is called with (a soft prompt)."""
    if any(p.requires_grad for p in model.parameters()):
        return True
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of((args, kwargs)))
