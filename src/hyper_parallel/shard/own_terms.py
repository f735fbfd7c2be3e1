"""The terms that a Transformers model's own forward pass adds to the cross-entropy of its labels.

Families name the coefficients of such terms as they like (`router_aux_loss_coef`, `aux_loss_coef`,
`ffn_config.moe_loss_weight`, `z_loss_coefficient`), so nothing is looked up by name: the forward pass of the outermost
module is run once on stand-ins, and says what it would add. The base model and the output head are stand-ins, the
cross-entropy is 0, by whichever name the family calls it (`loss_function`, PyTorch's own), and the load-balancing
function returns a variable; the derivative of the loss by that variable is the coefficient, and a derivative by the
logits tells a term of theirs (Bamba's z-loss).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.shard.lora_adapters import base_of, without_adapters
from hyper_parallel.shard.model_structure import dim_of_features, text_config
from hyper_parallel.shard.rules import is_transformers

log = logging.getLogger(__name__)

BALANCING = "load_balancing_loss_func"
"""The name by which every family of Transformers calls its load-balancing loss."""


@dataclass(frozen=True)
class BalancingTerm:
    """A coefficient times the load-balancing loss of the routers' logits."""

    coefficient: float
    function: Callable[..., Any]
    """The family's own."""
    arguments: tuple[Any, ...]
    """Those between the logits and the attention mask: the number of experts, and of those chosen."""

    def __call__(self, logits: tuple[Tensor, ...]) -> Tensor:
        """The owner's loss of these logits, without the coefficient."""
        loss: Tensor = self.function(logits, *self.arguments, None)
        return loss

    @property
    def experts(self) -> int:
        """The number of experts of a layer."""
        return int(self.arguments[0])

    @property
    def top_k(self) -> int:
        """The number of experts that a token chooses."""
        return int(self.arguments[-1])


@dataclass(frozen=True)
class OwnTerms:
    """What is added to the cross-entropy."""

    balancing: BalancingTerm | None = None
    of_logits: bool = False
    """There is a term of the logits, a mean over all positions."""


def asks_for_router_logits(model: nn.Module) -> bool:
    """Whether the config, in the section of the language model, asks for the routers' logits and so for their loss."""
    return bool(getattr(text_config(model), "output_router_logits", False))


def own_terms(model: nn.Module) -> OwnTerms:
    """The terms that the model's forward pass adds to the loss, as its config says now; none where it cannot be told.

    `model`: not parallelized yet, with or without values.
    """
    core: Any = without_adapters(model) if is_transformers(model) else None
    if core is None or "labels" not in inspect.signature(type(core).forward).parameters:
        return OwnTerms()
    try:
        with outside_modes(), torch.device("cpu"), torch.enable_grad():
            return _probed(core, asks_for_router_logits(model))
    # A forward pass that needs more than its base model and its head. The owner check compares its loss.
    except Exception as error:
        log.debug("the terms of %s's own loss are not known: %s", type(core).__name__, error)
        return OwnTerms()


@dataclass
class _Balancing:
    """The stand-in of the load-balancing function."""

    variable: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    arguments: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.arguments = (*args, *kwargs.values())
        return self.variable


def _probed(core: Any, router_logits: bool) -> OwnTerms:
    forward = inspect.unwrap(type(core).forward)
    balancing, head = _Balancing(), core.get_output_embeddings()
    linear: Any = base_of(head)
    features, vocabulary = (
        int(linear.weight.shape[dim_of_features(linear, output=out)]) for out in (False, True)
    )
    logits = torch.zeros(1, 2, vocabulary, requires_grad=True)
    probe = copy.copy(core)
    stand_ins = {core.base_model_prefix: _Fixed(_Output(torch.zeros(1, 2, features)))}
    stand_ins |= {name: _Fixed(logits * 1) for name, module in core.named_children() if module is head}
    probe.__dict__["_modules"] = {**core._modules, **stand_ins}
    probe.__dict__["_loss_function"] = lambda *_, **__: torch.zeros(())
    run = FunctionType(
        forward.__code__,
        {**forward.__globals__, BALANCING: balancing},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    run.__kwdefaults__ = forward.__kwdefaults__
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    asked = {"output_router_logits": True} if router_logits else {}
    with _NoCrossEntropy():
        loss = run(probe, input_ids=zeros, labels=zeros, **asked).loss
    if not loss.requires_grad:
        return OwnTerms()
    coefficient, of_logits = torch.autograd.grad(loss, [balancing.variable, logits], allow_unused=True)
    term = None
    if coefficient is not None and float(coefficient):
        # The routers' logits come first, the attention mask last.
        arguments = balancing.arguments[1:-1]
        term = BalancingTerm(float(coefficient), forward.__globals__[BALANCING], arguments)
    return OwnTerms(term, of_logits is not None)


class _NoCrossEntropy(TorchFunctionMode):
    """PyTorch's cross-entropy is 0."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.nn.functional.cross_entropy:
            return torch.zeros(())
        return function(*args, **(kwargs or {}))


class _Fixed(nn.Module):
    """Returns the same, whatever it is given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class _Output:
    """A base model's output that has hidden states, and nothing in any other field."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key]
