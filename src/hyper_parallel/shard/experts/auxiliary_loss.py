"""The auxiliary loss of a mixture of experts: the model's own load-balancing term, over all ranks.

As Transformers' ``load_balancing_loss_func`` has it (Switch Transformer, arXiv 2101.03961, equations 4 to 6), over the
R rows that routers see: all layers, all tokens of a global micro-batch:

    L = E · Σ_e f_e · P_e,    f_e = (times that e is among the k chosen) / R,    P_e = (sum of e's probabilities) / R

Both are taken over all ranks that see other tokens, so that neither the value nor its gradient depends on the axes.
f has no gradient; each rank's part is linear in its own probabilities. Whether a family adds the loss, and with what
coefficient, E and k, its own forward pass says (`shard.own_terms`). A family whose function is another one (Doge)
has that one called, where one rank sees all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.experts.dispatch import count
from hyper_parallel.shard.experts.load_balancing import around_layers, has_own_tokens
from hyper_parallel.shard.hooks import Forward, wrap
from hyper_parallel.shard.own_terms import BalancingTerm
from hyper_parallel.shard.plan.types import Plan
from hyper_parallel.shard.sharded_model import LOSS_AXES, ShardedModel


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


def auxiliary_loss(handle: ShardedModel) -> torch.Tensor:
    """This rank's part of the last forward pass's auxiliary loss, its coefficient included; a zero-dim fp32 tensor.

    The sum of the parts over LOSS_AXES is the loss of the global micro-batch; ranks along the tensor axes hold the
    same part. A collective, unless the model's own loss has no such term: then it is zero. Tokens are counted whether
    they bear loss or not, as in Transformers without an attention mask.
    """
    balancing = handle.balancing
    if balancing is None or not balancing.logits:
        return torch.zeros((), device=handle.device)
    term, logits = balancing.term, [*balancing.logits]
    balancing.logits.clear()
    if not balancing.published:
        return term.coefficient * term(tuple(logits)).float()
    chosen, mine, rows = _statistics(logits, term)
    counted = torch.cat([chosen, rows.view(1)])
    axes: tuple[str, ...] = LOSS_AXES
    if balancing.own_tokens:
        axes = (*LOSS_AXES, *handle.mesh.atoms(handle.mesh.tensor))
        # Each rank of the tensor axes has a part of the tokens, and then holds the loss of all of them.
        mine = handle.axes[handle.mesh.tensor].reduce(mine)
    counted = handle.all_reduce(counted, axes)
    fractions, total = counted[:-1] / counted[-1], counted[-1]
    return term.coefficient * term.experts * (fractions * (mine / total)).sum()


def _statistics(
    logits: list[torch.Tensor], term: BalancingTerm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all layers: how often each expert is chosen, fp32 [E]; the sums of their probabilities, [E]; the rows, []."""
    chosen, probabilities, rows = [], [], []
    for layer in logits:
        shares = torch.softmax(layer, dim=-1)
        chosen.append(count(shares.topk(term.top_k, dim=-1).indices.flatten(), layer.size(-1)))
        probabilities.append(shares.float().sum(0))
        rows.append(torch.ones_like(layer[:, 0], dtype=torch.float32).sum())
    return torch.stack(chosen).sum(0).float(), torch.stack(probabilities).sum(0), torch.stack(rows).sum()
