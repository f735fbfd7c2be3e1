"""Which rule each module follows: from the model's own plan, from its structure, from the user.

Later sources win: Transformers' ``base_model_tp_plan`` (or, for a family that has none, the names that
projections carry across families), then the input embedding and the output head, then `strategy.rules`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from torch import nn

from hyper_parallel.errors import StrategyError, nearest
from hyper_parallel.strategy.strategy import RuleName

_FROM_TRANSFORMERS: Mapping[str, RuleName] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    # Transformers gathers fused projections whole; a fused projection is split part by part here.
    "colwise_gather_output": "colwise",
    "rowwise_split_input": "rowwise",
    "replicated_with_grad_allreduce": "shared",
    "moe_tp_experts": "expert_tensor",
}

# fmt: off
_COLWISE = frozenset((
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "c_attn",
    "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in",
))
# fmt: on
_ROWWISE = frozenset(("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "fc_out"))


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means; `*` stands for any run of characters, dots included."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def matching_or_refuse(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """Like `matching`; a pattern that means nothing is a StrategyError that names the nearest module."""
    names = list(names)
    found = matching(pattern, names)
    if not found:
        hint = nearest(pattern, names) or nearest(
            pattern.rsplit(".", 1)[-1], {n.rsplit(".", 1)[-1] for n in names}
        )
        raise StrategyError(f"{key}: the pattern {pattern!r} matches no module{hint}")
    return found


def is_transformers(model: nn.Module) -> bool:
    """Whether the model is one of Transformers', without importing Transformers to find out."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers")
        for cls in type(model).__mro__
    )


def resolve(model: nn.Module, user: Mapping[str, RuleName], tensor: int) -> tuple[dict[str, RuleName], frozenset[str]]:
    """Module name to rule, and the names whose rule came from the user; `tensor` is the degree of the tensor axes."""
    modules = dict(model.named_modules())
    rules: dict[str, RuleName] = {}
    if is_transformers(model):
        rules.update(_plan_of_transformers(model, modules, tensor) or _plan_from_names(modules))
        rules.update(_ends(model, modules))
    given: set[str] = set()
    for pattern, rule in user.items():
        if rule not in get_args(RuleName):
            raise StrategyError(
                f"strategy.rules: {rule!r} is no rule; the rules are {', '.join(get_args(RuleName))}"
            )
        owners = [
            n for n in matching_or_refuse(pattern, modules, "strategy.rules") if _owns_parameters(modules[n])
        ]
        if not owners:
            raise StrategyError(
                f"strategy.rules: the pattern {pattern!r} matches no module that has weights of its own"
            )
        rules.update(dict.fromkeys(owners, rule))
        given.update(owners)
    return rules, frozenset(given)


def _plan_of_transformers(model: nn.Module, modules: Mapping[str, nn.Module], tensor: int) -> dict[str, RuleName]:
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    rules: dict[str, RuleName] = {}
    for pattern, theirs in plan.items():
        rule = _FROM_TRANSFORMERS.get(theirs)
        found = matching(prefix + pattern, modules)
        if rule is None and found and tensor > 1:
            raise StrategyError(
                f"this family's tensor plan asks for {theirs!r} on {pattern!r}, which the tensor axis cannot do yet; "
                "use tensor: 1, or give strategy.rules for these modules"
            )
        if rule is not None:
            rules.update(dict.fromkeys(found, rule))
    return rules


def _plan_from_names(modules: Mapping[str, nn.Module]) -> dict[str, RuleName]:
    rules: dict[str, RuleName] = {}
    for name, module in modules.items():
        last = name.rsplit(".", 1)[-1]
        if _is_projection(module) and last in _COLWISE | _ROWWISE:
            rules[name] = "colwise" if last in _COLWISE else "rowwise"
    # A projection without its counterpart beside it is left whole.
    parents = {
        rule: {n.rpartition(".")[0] for n, r in rules.items() if r == rule} for rule in ("colwise", "rowwise")
    }
    both = parents["colwise"] & parents["rowwise"]
    return {name: rule for name, rule in rules.items() if name.rpartition(".")[0] in both}


def _ends(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, RuleName]:
    """The input embedding and the output head, which a tie makes one matrix: both split the vocabulary."""
    names = {id(module): name for name, module in modules.items()}
    rules: dict[str, RuleName] = {}
    transformer: Any = model
    embedding, head = transformer.get_input_embeddings(), transformer.get_output_embeddings()
    if isinstance(embedding, nn.Embedding):
        rules[names[id(embedding)]] = "vocab"
    if isinstance(head, nn.Linear):
        rules[names[id(head)]] = "colwise_gather"
    return rules


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _owns_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())
