"""PassModel of a model's own code: one pass of generation, captured on fake tensors as one rank of any strategy.

Every operator of a pass but attention is affine in the pass's rows T and rows of logits A, so that three captures
give it for all passes (`pass_model.fitted`): at (t, a), (2t, a) and (t, 2a). Attention and the cache are taken out of
the graph: a custom operator stands for attention, and what `Cache.update` is given says what is cached. Latents are
cached where that is not what attention then reads. Of each kind of layers two are captured at most.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from hyper_parallel.compat.fake_tensors import fake_ranks, faked
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError, ConfigError
from hyper_parallel.graph import capture
from hyper_parallel.graph.ir import GivenTensor, module_state
from hyper_parallel.graph.lower import Lowered, lowered
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.forward import inference, parameters_of
from hyper_parallel.shard.layer_kinds import layer_kinds, layers_in, with_layers
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.simulator.generation.pass_model import (
    GRANULE,
    Affine,
    AttentionSizes,
    Layer,
    PassModel,
    PassOp,
    fitted,
)
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Op
from hyper_parallel.workload.work import Work

_KEPT = 2
"""Layers of each kind that are captured; the last stands for the others."""
_REFUSED = ("context", "pipeline")
_PRODUCTS = frozenset({"grouped_mm", "_grouped_mm"})


def captured_pass(
    model: nn.Module, strategy: Strategy, name: str = "", say: Callable[[str], None] = lambda _: None
) -> PassModel:
    """A pass of a rank of `strategy`. `model` is on the meta device, and is not changed.

    Raises ConfigError for axes that generation does not split, StrategyError, or CaptureError for a model that cannot
    be written down as a graph.
    """
    refuse_axes(strategy)
    plan = make_plan(model, strategy)
    found = layers_in(model, plan)
    if found is None or plan.layers is None:
        raise CaptureError(
            f"{type(model).__name__} has no list of decoder layers, which a prediction of its passes needs"
        )
    kinds = layer_kinds(model, plan, strategy)
    keep = sorted(index for kind in kinds for index in kind[:_KEPT])
    smaller, smaller_strategy = with_layers(model, plan, strategy, keep)
    settings = _Experts.of(model)
    rows = GRANULE * 3 * strategy.axes.tensor * settings.period
    points = ((rows, GRANULE), (2 * rows, GRANULE), (rows, 2 * GRANULE))
    say(f"capturing a pass: {len(keep)} of {len(found)} layers as rank 0 of {strategy.axes.world}")
    passes = [_Pass.of(smaller, smaller_strategy, *point) for point in points]
    return _Builder(plan.layers, keep, kinds, passes, points, model, strategy, settings).result(name)


def refuse_axes(strategy: Strategy) -> None:
    """Raise ConfigError for axes that a prediction of generation does not know."""
    for axis in _REFUSED:
        if getattr(strategy.axes, axis) > 1:
            raise ConfigError(
                f"strategy.axes.{axis}: predictions of generation know tensor, expert, shard and replicate; set it to 1"
            )


@dataclass(frozen=True)
class _Experts:
    """Routed experts of a layer."""

    experts: int = 0
    chosen: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> _Experts:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config(decoder=True) if config is not None else None
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        experts = next((int(n) for one in names if (n := getattr(text, one, None))), 0)
        chosen = next(
            (int(n) for one in ("num_experts_per_tok", "moe_topk") if (n := getattr(text, one, None))), 0
        )
        return cls(experts, chosen) if chosen else cls()

    @property
    def period(self) -> int:
        """Tokens after which every expert has equally many rows."""
        return self.experts // math.gcd(self.experts, self.chosen) if self.experts else 1


class _Pass:
    """One captured pass, and what attention and the cache were given in it."""

    def __init__(self, found: Lowered, attention: list[AttentionSizes]) -> None:
        self.lowered, self.attention = found, attention
        self.sizes = {held.storage: held.bytes for op in found.ops for held in op.allocates}

    @classmethod
    def of(cls, model: nn.Module, strategy: Strategy, rows: int, answers: int) -> _Pass:
        model = copy.deepcopy(model)
        seen = Seen()
        with fake_ranks(strategy.axes.world, 0):
            parallelize(model, strategy, lowering="traceable")
            register()
            whole: Any = model
            whole.set_attn_implementation(NAME)
            mode = fake_mode_with_symbols()
            with faked(model, mode), replace(current_step(), even_load=1.0, pads_values=True).installed():
                graph = _graph(model, mode, seen, rows, answers)
                return cls(lowered(graph, views=True), seen.sizes(rows))


def _graph(model: nn.Module, mode: Any, seen: Seen, rows: int, answers: int) -> Any:
    whole: Any = model
    with mode:
        ids = torch.zeros(1, rows, dtype=torch.int64)
        positions = torch.zeros(1, rows, dtype=torch.int64)
        kept = torch.zeros(answers, dtype=torch.int64)
    keeps = "logits_to_keep" in parameters_of(type(model).forward)
    layers = int(whole.config.get_text_config(decoder=True).num_hidden_layers)

    def step() -> dict[str, Tensor]:
        with noting(seen):
            with inference(model):
                given = {"logits_to_keep": kept} if keeps else {}
                out = whole(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=SeenCache(layers, seen),
                    use_cache=True,
                    **given,
                )
            logits = out.logits[0] if keeps else out.logits[0, kept]
            return {"tokens": logits.float().argmax(-1)}

    tensors = module_state(model) | {
        name: GivenTensor("input", tensor)
        for name, tensor in (("ids", ids), ("positions", positions), ("kept", kept))
    }
    with mode:
        graph = capture(step, tensors, model)
        graph.groups = sharded(model).axes.process_groups()
        graph.balanced = True
    return graph


# From captures to a PassModel.


class _Builder:
    def __init__(
        self,
        prefix: str,
        keep: Sequence[int],
        kinds: Sequence[Sequence[int]],
        passes: Sequence[_Pass],
        points: Sequence[tuple[int, int]],
        model: nn.Module,
        strategy: Strategy,
        experts: _Experts,
    ) -> None:
        self._index = re.compile(rf"(?:^|(?<=\.)){re.escape(prefix)}\.(\d+)(?=\.|$)")
        self._keep, self._kinds, self._passes, self._points = keep, kinds, passes, points
        self._model, self._strategy, self._experts = model, strategy, experts
        counts = {len(one.lowered.ops) for one in passes}
        names = {tuple(op.name for op in one.lowered.ops) for one in passes}
        if len(counts) > 1 or len(names) > 1:
            raise CaptureError(
                "passes of different numbers of tokens run different operators, so that none can stand for others"
            )
        self._attention = iter(passes[0].attention)

    def result(self, name: str) -> PassModel:
        """The PassModel."""
        before: list[PassOp] = []
        after: list[PassOp] = []
        layers: dict[int, list[PassOp]] = {at: [] for at in range(len(self._keep))}
        sizes: dict[int, AttentionSizes] = {}
        for at in range(len(self._passes[0].lowered.ops)):
            ops = tuple(one.lowered.ops[at] for one in self._passes)
            layer = self._layer(ops[0].module)
            into = layers[layer] if layer is not None else after if any(layers.values()) else before
            if ops[0].name.endswith(OPERATOR):
                if layer is None or layer in sizes:
                    raise CaptureError(f"attention in {ops[0].module!r}: a layer has one attention")
                sizes[layer] = next(self._attention)
                into += _attending(sizes[layer], ops[0].module)
            elif ops[0].work is not None or ops[0].collective is not None:
                into.append(self._op(ops))
        resident = self._passes[0].lowered.resident
        weights = [[0, 0] for _ in self._keep]
        outer = 0
        for held in resident:
            if not held.name.startswith("parameter."):
                continue
            layer = self._layer(held.name)
            if layer is None:
                outer += held.bytes
            else:
                weights[layer][0] += held.bytes
                weights[layer][1] += held.bytes if _is_experts(held.name) else 0
        kinds, order = [], [0] * sum(len(kind) for kind in self._kinds)
        for number, kind in enumerate(self._kinds):
            at = self._keep.index(kind[:_KEPT][-1])
            kinds.append(Layer(tuple(layers[at]), weights[at][0], weights[at][1], sizes.get(at)))
            for index in kind:
                order[index] = number
        axes = self._strategy.axes
        return PassModel(
            name=name,
            before=tuple(before),
            kinds=tuple(kinds),
            order=tuple(order),
            after=(*after, PassOp("read tokens", kind="host", op="item")),
            outer_weights=outer,
            live=tuple(self._live()),
            parameters=sum(p.numel() for p in self._model.parameters()),
            experts=self._experts.experts,
            chosen=self._experts.chosen,
            routed=max(1, axes.expert // axes.tensor) if self._experts.experts else 1,
            world=axes.world,
            split=axes.data,
        )

    def _layer(self, name: str) -> int | None:
        found = self._index.search(name)
        return int(found[1]) if found else None

    def _op(self, ops: Sequence[Op]) -> PassOp:
        one = ops[0]
        module = self._index.sub("", one.module).lstrip(".")
        if one.collective is not None:
            given = fitted(self._points, [op.collective.bytes for op in ops if op.collective])
            return PassOp(one.name, module, collective=replace(one.collective, bytes=0), read=given)
        works = [op.work for op in ops if op.work is not None]

        def of(value: Callable[[Work], float]) -> Affine:
            return fitted(self._points, [value(work) for work in works])

        work = works[0]
        shape = tuple(of(lambda work, at=at: work.shape[at]) for at in range(len(work.shape)))  # type: ignore[misc]
        routed = one.name in _PRODUCTS and _is_experts(one.module)
        return PassOp(
            one.name,
            module,
            kind=work.kind,
            dtype=work.dtype,
            op=work.op,
            layout=work.layout,
            flops=of(lambda work: work.flops),
            vector_flops=of(lambda work: work.vector_flops),
            read=of(lambda work: work.read),
            written=of(lambda work: work.written),
            fresh=of(lambda work: work.fresh),
            shape=shape,
            role="experts" if routed else "",
        )

    def _live(self) -> Iterator[tuple[Affine, Affine]]:
        for at in range(len(self._passes[0].lowered.ops)):
            made, freed = [], []
            for one in self._passes:
                op = one.lowered.ops[at]
                made.append(sum(held.bytes for held in op.allocates))
                freed.append(sum(one.sizes.get(storage, 0) for storage in op.frees))
            if any(made) or any(freed):
                yield fitted(self._points, made), fitted(self._points, freed)


def _attending(sizes: AttentionSizes, module: str) -> list[PassOp]:
    """Writing a pass's keys and values to their pages, and attention."""
    moved = Affine(0, sizes.token)
    write = PassOp(
        "write pages", module, kind="copy", dtype=sizes.dtype, op="aten.index_copy", read=moved, written=moved
    )
    return [write, PassOp("attention", module, kind="attention", dtype=sizes.dtype, role="attention")]


def _is_experts(name: str) -> bool:
    return re.search(r"(^|\.)experts(\.|$)", name) is not None


# Attention and cache of a captured pass: custom operators and notes of sizes in their place.
#
# Transformers' attention interface gets an operator that is captured and never run; a cache notes what it is given of a
# token.

NAME = "hyper_parallel_estimated"
"""The attention's name in Transformers."""
OPERATOR = "estimated_attention"


@torch.library.custom_op(f"hyper_parallel::{OPERATOR}", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise AssertionError("only captured, never run")


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(1, query.size(2), query.size(1), value.size(3))


@dataclass
class Seen:
    """What attention and the cache were given, in order."""

    attended: list[tuple[int, int, int, int, int, str, int]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    """Elements of a token of both values that each layer caches."""

    def sizes(self, rows: int) -> list[AttentionSizes]:
        """Of each attention."""
        if len(self.attended) != len(self.cached):
            raise CaptureError(
                f"{len(self.attended)} attentions and {len(self.cached)} layers that cache; a prediction of "
                "passes knows "
                "layers with one of each"
            )
        found = []
        for (heads, kv_heads, key, value, window, dtype, element), cached in zip(
            self.attended, self.cached, strict=True
        ):
            plain = (kv_heads * key, kv_heads * value)
            latent = None if cached == plain else cached
            found.append(AttentionSizes(heads, kv_heads, key, value, window, latent, element, dtype))
        return found


_current: list[Seen] = []


@contextmanager
def noting(seen: Seen) -> Iterator[None]:
    """Inside, attention notes its sizes in `seen`."""
    _current.append(seen)
    try:
        yield
    finally:
        _current.pop()


class _SeenLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of the cache of a capture, which keeps nothing."""

    is_compileable = False
    is_sliding = False

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Note the sizes of what is cached, [1, H, T, D]."""
        self._seen.cached.append(
            (key_states.size(1) * key_states.size(3), value_states.size(1) * value_states.size(3))
        )
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of an empty cache."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0."""
        return 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum."""
        return -1


class SeenCache(Cache):  # type: ignore[misc]
    """The cache of a capture, which keeps nothing."""

    def __init__(self, layers: int, seen: Seen) -> None:
        super().__init__(layers=[_SeenLayer(seen) for _ in range(layers)])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """As of the layer."""
        return self.layers[0].update(key_states, value_states)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    window = given.get("sliding_window") or 0
    dtype = str(query.dtype).removeprefix("torch.")
    sizes = (
        query.size(1),
        key.size(1),
        query.size(3),
        value.size(3),
        int(window),
        dtype,
        query.dtype.itemsize,
    )
    _current[-1].attended.append(sizes)
    return _attend(query, key, value), None


def register() -> None:
    """Make the attention known to Transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
