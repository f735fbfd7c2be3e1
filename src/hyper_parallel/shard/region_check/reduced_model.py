"""Reduced model: a small copy on which the strategy has the same plan.

Three things are reduced, and each reduction serves only while the plan stays the same (`same_plan`):

- **Layers**: the first ones, up to the last layer that is unlike all before it.
- **Widths**: every size in a Transformers config that counts features is divided by one common factor; numbers of
  heads, of experts and of anything else stay. Ratios stay, so the code between them sees what it expects.
- **Ranks**: replicas go, `shard` stays only where experts fold over it, `context` and `expert` shrink if they must.

A module that is not Transformers' has no config to shrink; it keeps its widths.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.likeness import kinds
from hyper_parallel.shard.lora_adapters import is_adapted, without_adapters
from hyper_parallel.shard.model_structure import copied, is_transformers, layers_of
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.shard.rules import matching
from hyper_parallel.strategy import EXPERT_SPANS, Strategy

SMALL = 4 << 20
"""Parameters of a copy that is run at its own widths."""
LARGEST = 256 << 20
"""Parameters of the largest copy that is run at all: about 6 GiB with both sides' gradients."""
RANKS = 32
"""Ranks above which axes are reduced."""
VOCABULARY = 512
FACTORS = (32, 16, 8, 4, 2)

_WIDTH = re.compile(
    r"(^|_)(size|sizes|dim|dims|rank|width|inner|embd|ffn|features|d_model|d_ff|d_kv|channels)(_|$)|ffn_dim|d_model|hidden"
)
_NO_WIDTH = re.compile(
    r"vocab|window|chunk|patch|image|kernel|block|block_size|position|^num_|_num_|^n_(?!embd|inner)|layers?$|heads?$|"
    r"experts?$|groups?$|stride|spatial|max_|act(ivation)?$|probs?$|dropout|scale|theta|token"
)


@dataclass(frozen=True)
class Reduced:
    """The copy, with random values on the CPU, and the strategy for it."""

    model: nn.Module
    strategy: Strategy
    plan: Plan
    layers: int
    factor: int
    """What widths were divided by."""


def distinct_prefix(model: nn.Module) -> int:
    """How many of the model's first layers hold one of each kind, at least two; 0 where it has no list of layers."""
    found = layers_of(model)
    if found is None:
        return 0
    return min(max(1, *(layers[0] for layers in kinds(found[1]))) + 1, len(found[1]))


def reduced_strategies(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy without what no layer's arithmetic depends on, on few ranks; then on fewer."""
    for context, expert in ((None, None), (4, None), (2, 8), (2, 4), (2, 2)):
        axes = {axis: strategy.axes.degree(axis) for axis in strategy.axes.order}
        axes["replicate"] = 1
        if context is not None:
            axes["context"] = math.gcd(axes["context"], context)
        experts = strategy.axes.expert if expert is None else math.gcd(strategy.axes.expert, expert)
        spanned = math.prod(size for axis, size in axes.items() if axis in EXPERT_SPANS and axis != "shard")
        axes["shard"] = experts // math.gcd(experts, spanned)
        axes["expert"] = experts
        if math.prod(axes.values()) // axes["expert"] > RANKS and (context, expert) != (2, 2):
            continue
        # A copy has at least as many experts as ranks of the expert axis.
        balance = strategy.expert_balance
        if balance is not None:
            balance = balance.model_copy(update={"replicas": min(balance.replicas, axes["expert"])})
        memory = {"gathered": strategy.memory.gathered, "recompute": strategy.memory.recompute}
        yield Strategy(
            axes=axes,
            context=strategy.context,
            sequence=strategy.sequence,
            rules=strategy.rules,
            expert_replicas=strategy.expert_replicas,
            expert_balance=balance,
            memory=memory,
            check=False,
        )


def reduce(model: nn.Module, plan: Plan, strategy: Strategy) -> Iterator[Reduced]:
    """Copies that serve, the smallest first. What cannot be built is left out."""
    prefix = distinct_prefix(model)
    for factor in _factors(model, prefix):
        # A config may describe its layers in ways that fewer of them do not fit (Zamba).
        template = _copy(model, prefix, factor) or _copy(model, 0, factor)
        if template is None:
            continue
        for small in reduced_strategies(strategy):
            small = _with_rules_of(template, small)
            try:
                found = make_plan(template, small)
            except StrategyError:
                continue
            if same_plan(plan, found):
                yield Reduced(template, small, found, prefix, factor)
                break


def same_plan(whole: Plan, small: Plan) -> bool:
    """Whether the small model's plan does to each of its modules what the whole one's does."""
    effects = _effects(whole)
    return all(effects.get(place) == effect for place, effect in _effects(small).items())


def _effects(plan: Plan) -> dict[tuple[str, str], tuple[Any, ...]]:
    """The effects of a plan, by kind and name of the module or parameter; no sizes."""
    context = plan.context
    ways = (context.method, context.ring > 1, context.ulysses > 1) if context is not None else ()
    return {
        ("plan", ""): (plan.sequence, ways, plan.tensor2d is None),
        **{("module", name): (m.rule, m.enters, m.leaves) for name, m in plan.modules.items()},
        **{("region", name): (r.enters, r.keeps, r.heads is None) for name, r in plan.regions.items()},
        **{("experts", name): (e.rule, e.features, e.own_tokens) for name, e in plan.experts.items()},
        **{("parameter", name): _ways_of(p) for name, p in plan.parameters.items()},
    }


def _ways_of(parameter: Any) -> tuple[Any, ...]:
    """What the tensor and expert axes do to a parameter, and whether they divide it evenly."""
    layout, mesh = parameter.computed, parameter.layout.mesh
    splits = []
    for dim, axes in enumerate(layout.dims):
        size = math.prod(mesh.size(axis) for axis in axes)
        if size > 1:
            kinds = tuple("expert" if "expert" in axis else "tensor" for axis in axes if mesh.size(axis) > 1)
            splits.append((dim, kinds, layout.shape[dim] % size == 0))
    return (tuple(splits), parameter.chosen is not None)


def _factors(model: nn.Module, prefix: int) -> Iterator[int]:
    found = layers_of(model)
    skipped = sum(p.numel() for layer in ([*found[1]][prefix:] if found else ()) for p in layer.parameters())
    inside = (
        sum(p.numel() for p in (found[1].parameters() if found else ())) if is_transformers(model) else None
    )
    total = sum(p.numel() for p in model.parameters()) if inside is None else inside
    if total - skipped <= SMALL:
        yield 1
        return
    if is_transformers(model):
        yield from FACTORS
    yield 1


def _copy(model: nn.Module, prefix: int, factor: int) -> nn.Module | None:
    """A copy with random values on the CPU; None where it cannot be built."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = (
                _from_config(model, prefix, factor) if is_transformers(model) else _from_module(model, prefix)
            )
    # Whatever the model's own code raises at sizes that it was not written for.
    except Exception:
        return None
    if small is not None:
        fill(small)
    return small


def _from_config(model: nn.Module, prefix: int, factor: int) -> nn.Module | None:
    core: Any = without_adapters(model)
    config = copy.deepcopy(core.config)
    found = layers_of(model)
    _reduce_config(config, len(found[1]) if found else 0, prefix, factor)
    built: Any = type(core)
    options = {"attn_implementation": core.config._attn_implementation, "experts_implementation": "eager"}
    # Counted before it takes memory.
    with torch.device("meta"):
        _refuse_large(built._from_config(copy.deepcopy(config), **options).parameters())
    made: nn.Module = built._from_config(config, **options).to(torch.float32)
    trained = {name: parameter.requires_grad for name, parameter in core.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    if core is not model:
        adapted: Any = model
        import peft

        made = peft.get_peft_model(made, copy.deepcopy(adapted.peft_config[adapted.active_adapter]))  # type: ignore[arg-type]
        if not any(is_adapted(module) for module in made.modules()):
            return None
    return made


def _reduce_config(config: Any, layers: int, prefix: int, factor: int) -> None:
    """Fewer layers and smaller widths, in the config and in those inside of it."""
    for inner in vars(config).values():
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            _reduce_config(inner, layers, prefix, factor)
    aliases = getattr(config, "attribute_map", {})
    vocabulary = None
    for key, value in [*vars(config).items()]:
        if key.startswith("_") or isinstance(value, bool) or key in aliases:
            continue
        if prefix and key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and value == layers:
            setattr(config, key, prefix)
        elif prefix and isinstance(value, list) and len(value) == layers > prefix:
            setattr(config, key, [_narrow(key, item, factor) for item in value[:prefix]])
        elif key == "vocab_size" and isinstance(value, int) and factor > 1 and value > 2 * VOCABULARY:
            vocabulary = VOCABULARY + value % VOCABULARY if value % 64 else VOCABULARY
            config.vocab_size = vocabulary
        else:
            narrow = _narrow(key, value, factor)
            if narrow != value:
                setattr(config, key, narrow)
    if vocabulary is not None:
        for key, value in [*vars(config).items()]:
            if re.search(r"token_(id|index)$|_id$", key) and isinstance(value, int) and value >= vocabulary:
                setattr(config, key, value % 61)
            elif re.search(r"token_ids?$", key) and isinstance(value, list):
                setattr(config, key, [item % 61 if isinstance(item, int) else item for item in value])


def _narrow(key: str, value: Any, factor: int) -> Any:
    """A width divided by the factor where it divides it; anything else as it is."""
    if factor == 1 or isinstance(value, bool) or not _WIDTH.search(key) or _NO_WIDTH.search(key):
        return value
    if isinstance(value, int) and value > factor and value % factor == 0:
        return value // factor
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return [_narrow(key, item, factor) for item in value]
    return value


def _from_module(model: nn.Module, prefix: int) -> nn.Module:
    """The module with its buffers' values and fewer layers; its parameters are still to be filled."""
    found = layers_of(model)
    left_out = {id(p) for layer in ([*found[1]][prefix:] if found else ()) for p in layer.parameters()}
    # One layer may stand in several places.
    left_out -= {id(p) for layer in ([*found[1]][:prefix] if found else ()) for p in layer.parameters()}
    _refuse_large(p for p in model.parameters() if id(p) not in left_out)

    def empty(parameter: Tensor) -> Tensor:
        device = "meta" if id(parameter) in left_out else "cpu"
        return torch.empty(parameter.shape, device=device, dtype=torch.float32)

    def on_host(x: Tensor) -> Tensor:
        return torch.zeros_like(x, device="cpu") if x.is_meta else x.detach().cpu().clone()

    reduced = copied(model, empty, on_host)
    if found and prefix and prefix < len(found[1]):
        layers = reduced.get_submodule(found[0])
        assert isinstance(layers, nn.ModuleList)
        del layers[prefix:]
    return reduced


def _refuse_large(parameters: Iterable[nn.Parameter]) -> None:
    size = sum(p.numel() for p in parameters)
    if size > LARGEST:
        raise StrategyError(f"a copy of {size} parameters is too large to be run")


def fill(model: nn.Module) -> None:
    """Random values that excite every path: weights of unit gain, scales around one, biases around zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
            draw = torch.Generator().manual_seed(digest)
            values = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() >= 2:
                values /= max(parameter.shape[-1], 1) ** 0.5
            else:
                values = 0.2 * values + (0.0 if "bias" in name.rpartition(".")[2] else 1.0)
            parameter.copy_(values)


def _with_rules_of(model: nn.Module, strategy: Strategy) -> Strategy:
    """Without patterns that mean only layers which the copy does not have."""
    names = [name for name, _ in model.named_modules()]
    rules: Mapping[str, Any] = {p: rule for p, rule in strategy.rules.items() if matching(p, names)}
    replicas = {p: e for p, e in strategy.expert_replicas.items() if matching(p, names)}
    return strategy.model_copy(update={"rules": dict(rules), "expert_replicas": replicas})
