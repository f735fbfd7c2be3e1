"""Sharding rules of each module: from Transformers' plan, from names and structure, from the user.

Later sources win: Transformers' ``base_model_tp_plan`` (or, for a family that has none, the names that
projections carry across families), then the input embedding and the output head, then `strategy.rules`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from torch import nn

from hyper_parallel.errors import StrategyError, nearest
from hyper_parallel.shard.lora_adapters import base_of, is_adapted, name_in_base, without_adapters
from hyper_parallel.shard.model_structure import (
    decoder_of,
    has_encoder,
    input_embedding,
    is_projection,
    is_transformers,
    owns_parameters,
)
from hyper_parallel.strategy.strategy import RuleName

_FROM_TRANSFORMERS: Mapping[str, RuleName] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    # Transformers gathers fused projections whole; a fused projection is split part by part here.
    "colwise_gather_output": "colwise",
    "rowwise_split_input": "rowwise",
    "replicated_with_grad_allreduce": "shared",
    "mla_kv_a_proj": "shared",
    "moe_tp_experts": "expert_tensor",
}

_OF_THEIR_OWN = frozenset(
    {"local_params", "moe_identity_expert", "all_reduce", "replicate", "embedding_rowwise", "vocab"}
)
"""What their plans say of modules around projections, and of the ends, which are known here from the structure."""

# fmt: off
_COLWISE = frozenset((
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "c_attn",
    "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in",
))
# fmt: on
_ROWWISE = frozenset(("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "fc_out"))
# In encoders and encoder-decoders; in decoders such names also stand where projections feed other things.
_ENCODER_COLWISE = _COLWISE | {
    *("q", "k", "v", "wi", "wi_0", "wi_1", "q_lin", "k_lin", "v_lin", "lin1", "intermediate.dense")
}
_ENCODER_ROWWISE = _ROWWISE | {*("o", "wo", "out_lin", "lin2", "output.dense")}

# Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): what makes the latents is applied whole on
# every rank, what makes heads of them is split by heads.
_LATENT: Mapping[str, RuleName] = {
    "q_a_proj": "shared",
    "q_a_layernorm": "shared",
    "kv_a_proj_with_mqa": "shared",
    "kv_a_layernorm": "shared",
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}


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


def pairs_of(rules: Mapping[str, RuleName]) -> dict[str, str]:
    """Colwise or rowwise projection to the module in which it has its counterparts: its own parent, or, where attention
    or MLP keep their projections in modules below them, the parent of that. One without any is left out."""
    parents = {
        kind: {name.rpartition(".")[0] for name, rule in rules.items() if rule == kind}
        for kind in ("colwise", "rowwise")
    }
    # A module with both is an attention or MLP by itself.
    both = parents["colwise"] & parents["rowwise"]
    above = {kind: {p.rpartition(".")[0] for p in found - both} - {""} for kind, found in parents.items()}
    shared = above["colwise"] & above["rowwise"]
    pairs = {}
    for name, rule in rules.items():
        if rule in parents:
            parent = name.rpartition(".")[0]
            if parent in both:
                pairs[name] = parent
            elif parent.rpartition(".")[0] in shared:
                pairs[name] = parent.rpartition(".")[0]
    return pairs


def resolve(
    model: nn.Module, user: Mapping[str, RuleName], tensor: int
) -> tuple[dict[str, RuleName], frozenset[str]]:
    """Module name to rule, and the names whose rule came from the user; `tensor` is the degree of the tensor axes."""
    modules = dict(model.named_modules())
    rules: dict[str, RuleName] = {}
    if is_transformers(model):
        theirs = _plan_of_transformers(model, modules, tensor)
        # A plan that names experts alone, say, leaves attention to the names.
        planned = {name.rpartition(".")[0] for name in theirs}
        by_name = _plan_from_names(model, modules)
        rules.update({name: rule for name, rule in by_name.items() if name.rpartition(".")[0] not in planned})
        rules.update(theirs)
        # Families leave latent attention out of their plans, or have it under other names.
        latent = {name.rpartition(".")[0] for name in modules if name.endswith(".kv_b_proj")}
        children = {f"{parent}.{child}": rule for parent in latent for child, rule in _LATENT.items()}
        rules.update((name, children[name]) for name in sorted(children) if name in modules)
        rules.update(_ends(model, modules))
    # Patterns are written for the model without adapters; an adapted layer goes by the name of what it wraps.
    by_pattern: dict[str, str] = {}
    for name in modules:
        in_base = name_in_base(name, model)
        if in_base is not None:
            by_pattern.setdefault(in_base, name)
    given: set[str] = set()
    for pattern, rule in user.items():
        if rule not in get_args(RuleName):
            raise StrategyError(
                f"strategy.rules: {rule!r} is no rule; the rules are {', '.join(get_args(RuleName))}"
            )
        found = [by_pattern[n] for n in matching_or_refuse(pattern, by_pattern, "strategy.rules")]
        owners = [name for name in found if owns_parameters(base_of(modules[name]))]
        if not owners:
            raise StrategyError(
                f"strategy.rules: the pattern {pattern!r} matches no module that holds weights directly"
            )
        rules.update(dict.fromkeys(owners, rule))
        given.update(owners)
    return rules, frozenset(given)


def _plan_of_transformers(
    model: nn.Module, modules: Mapping[str, nn.Module], tensor: int
) -> dict[str, RuleName]:
    core: Any = without_adapters(model)
    plan = getattr(core.config.get_text_config(), "base_model_tp_plan", None) or {}
    decoder = decoder_of(model)
    prefix = f"{decoder}." if decoder else ""
    rules: dict[str, RuleName] = {}
    for pattern, theirs in plan.items():
        rule = _FROM_TRANSFORMERS.get(theirs)
        found = matching(prefix + pattern, modules)
        if rule is None and theirs not in _OF_THEIR_OWN and found and tensor > 1:
            raise StrategyError(
                f"this family's tensor plan asks for {theirs!r} on {pattern!r}, which the tensor axis cannot do yet; "
                "use tensor: 1, or give strategy.rules for these modules"
            )
        if rule is not None:
            rules.update(dict.fromkeys(found, rule))
    return rules


def _plan_from_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, RuleName]:
    core: Any = without_adapters(model)
    encodes = has_encoder(model)
    colwise = _ENCODER_COLWISE if encodes else _COLWISE
    known = colwise | (_ENCODER_ROWWISE if encodes else _ROWWISE)
    # Beside a decoder that is spread by itself, an encoder is one more stack of layers.
    within = "" if getattr(core.config, "is_encoder_decoder", False) else decoder_of(model)
    rules: dict[str, RuleName] = {}
    for name, module in modules.items():
        if not is_projection(module) or not name.startswith(f"{within}." if within else ""):
            continue
        last = next(
            (n for n in (name.rsplit(".", 1)[-1], ".".join(name.split(".")[-2:])) if n in known), None
        )
        if last is not None:
            rules[name] = "colwise" if last in colwise else "rowwise"
    # A projection without its counterpart beside it is left whole.
    return {name: rules[name] for name in pairs_of(rules)}


def _ends(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, RuleName]:
    """The input embedding and the output head, which a tie makes one matrix: both split the vocabulary, and so do the
    tables of an encoder and a decoder that are tied to them."""
    names = {id(module): name for name, module in modules.items()}
    rules: dict[str, RuleName] = {}
    core: Any = without_adapters(model)
    embedding, head = input_embedding(model), core.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) or (
        embedding is not None and is_adapted(embedding) and isinstance(base_of(embedding), nn.Embedding)
    ):
        rules[names[id(embedding)]] = "vocab"
    if head is not None and isinstance(base_of(head), nn.Linear):
        rules[names[id(head)]] = "colwise_gather"
    shared = {id(p) for name in rules for p in base_of(modules[name])._parameters.values() if p is not None}
    for name, module in modules.items():
        own = {id(p) for p in module._parameters.values() if p is not None} & shared
        if own and name not in rules and base_of(modules[name]) is module:
            if not isinstance(module, nn.Embedding):
                return {}  # who else keeps such a weight may compute with it: a whole vocabulary is right for all
            rules[name] = "vocab"
    return rules
