"""Auxiliary losses: the terms that a Transformers model's own forward pass adds to the cross-entropy, over all ranks.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.experts.dispatch import count
from hyper_parallel.shard.experts.routing import around_layers, has_own_tokens
from hyper_parallel.shard.hooks import Forward, StandIn, wrap
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.model_structure import features_of, is_transformers, text_config
from hyper_parallel.shard.plan.plan import Plan
from hyper_parallel.shard.process_mesh import LOSS_AXES, ProcessMesh

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
    """The terms that are added to the cross-entropy."""

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
class _BalancingStandIn:
    """The stand-in of the load-balancing function."""

    variable: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    arguments: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.arguments = (*args, *kwargs.values())
        return self.variable


def _probed(core: Any, router_logits: bool) -> OwnTerms:
    forward = inspect.unwrap(type(core).forward)
    balancing, head = _BalancingStandIn(), core.get_output_embeddings()
    features, vocabulary = (features_of(head, output) for output in (False, True))
    logits = torch.zeros(1, 2, vocabulary, requires_grad=True)
    probe = copy.copy(core)
    stand_ins = {core.base_model_prefix: StandIn(_BaseOutput(torch.zeros(1, 2, features)))}
    stand_ins |= {name: StandIn(logits * 1) for name, module in core.named_children() if module is head}
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
    options = {"output_router_logits": True} if router_logits else {}
    with _NoCrossEntropy():
        loss = run(probe, input_ids=zeros, labels=zeros, **options).loss
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


class _BaseOutput:
    """A base model's output that has hidden states, and nothing in any other field."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key]


# The auxiliary loss of a mixture of experts: the model's own load-balancing term, over all ranks.
#
# As Transformers' ``load_balancing_loss_func`` has it (Switch Transformer, arXiv 2101.03961, equations 4 to 6), over
# the R rows that routers see: all layers, all tokens of a global micro-batch:
#
#     L = E · Σ_e f_e · P_e,    f_e = (times that e is among the k chosen) / R,    P_e = (sum of e's probabilities) / R
#
# Both are taken over all ranks that see other tokens, so that neither the value nor its gradient depends on the axes.
# f has no gradient; each rank's part is linear in its own probabilities. Whether a family adds the loss, and with what
# coefficient, E and k, its own forward pass says. A family whose function is another one (Doge) has that one called,
# where one rank sees all tokens.


@dataclass(eq=False)
class Balancing:
    """The routers' logits of the last forward pass of the training. `of` makes one that watches a model."""

    term: BalancingTerm
    own_tokens: bool
    """Ranks of the tensor axes see different tokens."""
    published: bool
    """The family's function is the one above."""
    watching: bool = False
    """A forward pass of the training is running; recomputed layers and evaluation are not recorded."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[T, E] of each router."""

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, term: BalancingTerm | None) -> Balancing | None:
        """Watch the model's routers; None where its loss has no such term.

        Raises StrategyError where ranks see different tokens and the family's function is not the one above.
        """
        if term is None:
            return None
        balancing = cls(term, has_own_tokens(plan), _is_published(term))
        parts = [axis for axis in LOSS_AXES if plan.mesh.size(axis) > 1]
        if not balancing.published and (parts or balancing.own_tokens):
            raise StrategyError(
                f"{type(model).__name__} has a load-balancing loss of its own, which is not summed over ranks that see "
                f"other tokens; set {' and '.join(f'axes.{axis}' for axis in parts) or 'axes.tensor'} to 1, or "
                "output_router_logits to false in the model's config"
            )
        wrap(around_layers(model, plan), balancing._watch)
        for module, index in _routers(model):
            wrap(module, balancing._recorder(index))
        return balancing

    def loss(self, axes: ProcessMesh) -> torch.Tensor:
        """Return this rank's part of the last forward pass's auxiliary loss, its coefficient included; fp32 [].

        The sum of the parts over LOSS_AXES is the loss of the global micro-batch; ranks along the tensor axes hold the
        same part. A collective. Tokens are counted whether they bear loss or not, as in Transformers without an
        attention mask.
        """
        term, logits = self.term, [*self.logits]
        self.logits.clear()
        if not self.published:
            return term.coefficient * term(tuple(logits)).float()
        chosen, mine, rows = _statistics(logits, term)
        counted = torch.cat([chosen, rows.view(1)])
        summed: tuple[str, ...] = LOSS_AXES
        if self.own_tokens:
            summed = (*LOSS_AXES, *axes.mesh.atoms(axes.mesh.tensor))
            # Each rank of the tensor axes has a part of the tokens, and then holds the loss of all of them.
            mine = axes[axes.mesh.tensor].reduce(mine)
        counted = axes.all_reduce(counted, summed)
        fractions, total = counted[:-1] / counted[-1], counted[-1]
        return term.coefficient * term.experts * (fractions * (mine / total)).sum()

    def _watch(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.logits.clear()
        self.watching = torch.is_grad_enabled()
        try:
            return forward(*args, **kwargs)
        finally:
            self.watching = False

    def _recorder(self, index: int) -> Any:
        def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.watching:
                self.logits.append(output[index] if isinstance(output, tuple) else output)
            return output

        return wrapper


def _is_published(term: BalancingTerm) -> bool:
    """Whether the family's function is the one above, by its value for random logits."""
    if len(term.arguments) != 2:
        return False
    with outside_modes(), torch.device("cpu"), torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        logits = [torch.randn(7, term.experts, generator=draw) for _ in range(2)]
        chosen, probabilities, rows = _statistics(logits, term)
        expected = term.experts * (chosen / rows * (probabilities / rows)).sum()
        return torch.allclose(term(tuple(logits)).to(expected.dtype), expected, rtol=1e-4)


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output, at an index, Transformers records as the router's logits."""
    targets: dict[type[nn.Module], int] = {}
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in recorded if isinstance(recorded, list) else [recorded]:
            target = getattr(one, "target_class", one)
            if isinstance(target, type):
                targets[target] = int(getattr(one, "index", 0))
    for module in model.modules():
        index = next((i for target, i in targets.items() if isinstance(module, target)), None)
        if index is not None:
            yield module, index


def _statistics(
    logits: list[torch.Tensor], term: BalancingTerm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of all layers: how often each expert is chosen, fp32 [E]; the sums of their probabilities, [E]; the
    rows, []."""
    chosen, probabilities, rows = [], [], []
    for layer in logits:
        shares = torch.softmax(layer, dim=-1)
        chosen.append(count(shares.topk(term.top_k, dim=-1).indices.flatten(), layer.size(-1)))
        probabilities.append(shares.float().sum(0))
        rows.append(torch.ones_like(layer[:, 0], dtype=torch.float32).sum())
    return torch.stack(chosen).sum(0).float(), torch.stack(probabilities).sum(0), torch.stack(rows).sum()
