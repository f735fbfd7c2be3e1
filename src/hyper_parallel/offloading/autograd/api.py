"""`hp.offload` and `hp.release`: a model under a memory budget, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fsdp import fully_sharded
from hyper_parallel.compat.live_storages import is_mapped
from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading.autograd.activation_swap import Swap
from hyper_parallel.offloading.autograd.offloaded_forward import Offloaded
from hyper_parallel.offloading.autograd.parallel_context import Around
from hyper_parallel.offloading.autograd.plan_cache import Plans
from hyper_parallel.offloading.autograd.rank_agreement import agreed
from hyper_parallel.shard.sharded_model import is_sharded, sharded
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
            None if through is None else tuple(through),
            keep_results,
            around,
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
