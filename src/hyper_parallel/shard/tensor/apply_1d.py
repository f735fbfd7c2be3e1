"""1D tensor parallelism put into effect: activations moved at the boundaries that the plan names.

Everything between boundaries is the model's own code on plain local tensors. Where a region's gathered input is not
kept, it is gathered again in the backward pass (`GatheredInput`).
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import each_rank, per_rank_int
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import chunk
from hyper_parallel.shard.dropout import Stretch
from hyper_parallel.shard.hooks import (
    Forward,
    Wrapper,
    all_positions,
    at_edges,
    change_input,
    change_output,
    wrap,
)
from hyper_parallel.shard.lora_adapters import adapted_layers, base_of
from hyper_parallel.shard.loss.cross_entropy import leaves_split
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import Heads, features_of, is_conv1d, is_projection
from hyper_parallel.shard.plan.plan import ModulePlan, Plan, Region
from hyper_parallel.shard.tensor.norm import distributed_norm

SEQUENCE_DIM = 1
POSITIONS = -2
"""The dim of positions of what a region is given, [batch, sequence, features] or [positions, features]."""


def apply_boundaries(model: nn.Module, plan: Plan, tensor: Axis) -> dict[str, Stretch]:
    """Wrap the modules that the plan names. Parameters are given their local tensors elsewhere.

    Returns, by parent module, the stretches in which activations are split over features.
    """
    stretches: dict[str, Stretch] = defaultdict(Stretch)
    for name, module_plan in plan.modules.items():
        module = model.get_submodule(name)
        _module(module, module_plan, tensor)
        if module_plan.rule in ("colwise", "rowwise"):
            stretch = stretches[module_plan.pair]
            stretches[name.rpartition(".")[0]] = stretch
            colwise = module_plan.rule == "colwise"
            wrap(module, _entering(stretch, module_plan.features) if colwise else _leaving(stretch))
    for name, _ in adapted_layers(model):
        # What an adapter drops is the layer's own input: split before a rowwise projection, else whole.
        planned = plan.modules.get(name)
        if planned is not None or name.rpartition(".")[0] in plan.regions:
            split, features = (planned.rule == "rowwise", planned.features) if planned else (False, 0)
            stretches[name] = Stretch(split, features, inside=True)
    for name, region in plan.regions.items():
        module = model.get_submodule(name)
        enter = _gather_sequence(name, region, tensor) if region.enters == "gather" else tensor.copy
        if region.enters == "gather" and not region.keeps:
            _gather_again(model, plan, name, enter)
        elif region.enters != "as it is":
            wrap(module, change_input(enter))
        if region.heads is not None:
            _localise_heads(module, region.heads, tensor.size)
            stretches[name].heads = region.heads.query
    if plan.tensor2d is None:
        for name in plan.whole:
            wrap(
                model.get_submodule(name),
                all_positions(
                    lambda x: tensor.gather(x, SEQUENCE_DIM), lambda x: tensor.split(x, SEQUENCE_DIM)
                ),
            )
    return dict(stretches)


def apply_edges(model: nn.Module, plan: Plan, tensor: Axis) -> None:
    """Split the sequence on the way into the first layer, and gather it on the way out of the last; after all else that
    is put around layers."""
    if plan.sequence and plan.tensor2d is None:
        assert plan.layers is not None
        at_edges(
            model.get_submodule(plan.layers),
            lambda x: _split_sequence(x, tensor),
            lambda x: tensor.gather(x, SEQUENCE_DIM),
        )


def _gather_sequence(name: str, region: Region, tensor: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    def gather(x: torch.Tensor) -> torch.Tensor:
        # An MLP may be given its positions without a batch dim: a shared expert is, in some families.
        if x.dim() != 3 and (region.heads is not None or x.dim() != 2):
            raise StrategyError(
                f"sequence: true expects activations [batch, sequence, features] at {name!r}; they have {x.dim()} dims"
            )
        return tensor.gather_sum(x, POSITIONS)

    return gather


def _gather_again(
    model: nn.Module, plan: Plan, name: str, gather: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The region's input is gathered again in the backward pass, once for the products that share it."""
    given = GatheredInput()
    wrap(model.get_submodule(name), given.region(gather))
    for child, module_plan in plan.modules.items():
        if module_plan.rule == "colwise" and child.rpartition(".")[0] == name:
            wrap(model.get_submodule(child), given.saved)


def _split_sequence(x: torch.Tensor, tensor: Axis) -> torch.Tensor:
    if x.dim() != 3:
        raise StrategyError(
            f"sequence: true expects activations [batch, sequence, features] between layers; they have {x.dim()} dims; "
            "leave it out for this model"
        )
    length = x.size(SEQUENCE_DIM)
    if length % tensor.size:
        raise StrategyError(
            f"sequence: true splits {length} positions over axes.tensor = {tensor.size}, which does not divide them; "
            "pad the sequence to a multiple of it"
        )
    return tensor.split(x, SEQUENCE_DIM)


def _entering(stretch: Stretch, features: int) -> Wrapper:
    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        stretch.split, stretch.features = True, features
        return output

    return wrapper


def _leaving(stretch: Stretch) -> Wrapper:
    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        stretch.split = False
        return forward(*args, **kwargs)

    return wrapper


def _module(module: nn.Module, plan: ModulePlan, tensor: Axis) -> None:
    if plan.rule == "vocab":
        assert isinstance(module, nn.Embedding)
        _vocabulary(module, tensor)
        return
    if plan.rule == "rowwise":
        _rowwise(module, plan, tensor)
        return
    if plan.formula is not None:
        wrap(module, distributed_norm(plan.formula, module, plan.features, tensor))
        return
    if is_conv1d(base_of(module)):
        conv: Any = base_of(module)
        features = int(conv.weight.shape[1])
        conv.nf = per_rank_int(
            lambda rank: tensor.interval(features, rank)[1] - tensor.interval(features, rank)[0]
        )
    if plan.enters == "copy":
        wrap(module, change_input(tensor.copy))
    elif plan.enters == "gather":
        wrap(module, change_input(lambda x: tensor.gather_sum(x, POSITIONS)))
    if plan.leaves == "gather":
        wrap(
            module,
            change_output(lambda x: x if leaves_split(module) else tensor.gather(x, -1, plan.features)),
        )


def _rowwise(module: nn.Module, plan: ModulePlan, tensor: Axis) -> None:
    """The partial products are summed first and the bias, which is whole, is added once after."""
    base = base_of(module)

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with bias_left_out(base) as bias:
            output = forward(*args, **kwargs)
        output = tensor.reduce(output) if plan.leaves == "reduce" else tensor.reduce_split(output, POSITIONS)
        return output if bias is None else output + bias

    wrap(module, wrapper)


@contextlib.contextmanager
def bias_left_out(linear: nn.Module) -> Iterator[torch.Tensor | None]:
    """Inside, a linear map adds no bias. Gives the bias; None where there is none."""
    parameters: Any = linear._parameters
    bias, weight = parameters.get("bias"), parameters["weight"]
    if bias is None:
        yield None
        return
    # Conv1D's forward cannot do without a bias; nn.Linear's can.
    parameters["bias"] = torch.zeros_like(weight[0]) if is_conv1d(linear) else None
    try:
        yield bias
    finally:
        parameters["bias"] = bias


def _vocabulary(module: nn.Embedding, tensor: Axis) -> None:
    """Each rank looks up the rows that it has; the others contribute zero to the sum."""
    rows = int(module.weight.shape[0])
    padding = module.padding_idx
    # nn.Embedding would look for its padding row among the local ones; it is kept from gradients here.
    module.padding_idx = None
    start = per_rank_int(lambda rank: tensor.interval(rows, rank)[0])
    stop = per_rank_int(lambda rank: tensor.interval(rows, rank)[1])
    last = chunk(rows, tensor.size, tensor.size - 1)
    if last[0] == last[1]:
        wrap(module, _with_one_row_more(module))

    def wrapper(forward: Forward, ids: torch.Tensor) -> Any:
        elsewhere = (ids < start) | (ids >= stop)
        output = forward((ids - start).masked_fill(elsewhere, 0))
        if padding is not None:
            output = torch.where((ids == padding).unsqueeze(-1), output.detach(), output)
        return tensor.reduce(output.masked_fill(elsewhere.unsqueeze(-1), 0))

    wrap(module, wrapper)


def _with_one_row_more(module: nn.Embedding) -> Wrapper:
    """Where the last ranks have no rows: a row of zeros more on every rank, so that there is one to look up."""

    def wrapper(forward: Forward, ids: torch.Tensor) -> Any:
        weight = module._parameters["weight"]
        assert weight is not None
        module._parameters["weight"] = nn.functional.pad(weight, (0, 0, 0, 1))  # type: ignore[assignment]
        try:
            return forward(ids)
        finally:
            module._parameters["weight"] = weight

    return wrapper


class _LocalConfig:
    """A model's config in which some values are this rank's; the rest is looked up in the config itself."""

    def __init__(self, config: object, **local: int) -> None:
        self.__dict__.update(local)
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _LocalConfig:
        local = {k: v for k, v in self.__dict__.items() if k != "_config"}
        return _LocalConfig(copy.deepcopy(self._config, memo), **local)


def _localise_heads(module: Any, heads: Heads, size: int) -> None:
    """Tell an attention module how many heads it has here."""
    query, kv = heads.query // size, max(heads.kv // size, 1)
    local = {
        "num_heads": query,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "num_key_value_groups": query // kv,
        "split_size": query * heads.size,
    }
    if getattr(module, "kv_heads", None) == heads.kv:
        local["kv_heads"] = kv
    if any(
        sum(heads.fused) == features_of(child, output=True)
        for child in module.children()
        if is_projection(child)
    ):
        # A fused projection's output is taken apart by lengths that the attention keeps.
        lengths = {heads.query * heads.size: query * heads.size, heads.kv * heads.size: kv * heads.size}
        kept = {
            name: value
            for name, value in vars(module).items()
            if name.endswith("_dim") and name != "head_dim"
        }
        local |= {name: lengths[value] for name, value in kept.items() if value in lengths}
    # Names that elsewhere mean other things are this where they have its value.
    if getattr(module, "n_heads", None) == heads.query:
        local["n_heads"] = query
    for name in ("inner_dim", "all_head_size"):
        if getattr(module, name, None) == heads.query * heads.size:
            local[name] = query * heads.size
    for name, value in local.items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, value)
    if hasattr(module, "config"):
        module.config = _LocalConfig(module.config, num_attention_heads=query, num_key_value_heads=kv)


# Regathered inputs: shards are saved and gathered again in the backward pass.
#
# The model's own linear layers save their input for the gradient of their weights. While they run, hooks on saved
# tensors see what autograd keeps: where it is the gathered tensor, only the means to gather it again are kept. Layers
# that share an input (q, k and v; gate and up) share one gather in the backward pass too.
#
# Reducing what is kept by gathering again: arXiv 2205.05198, section 4.2.2 (for one axis with the sequence split).

Gather = Callable[[torch.Tensor], torch.Tensor]


class GatheredInput:
    """The input that a region's products share, and how autograd saves it while they run."""

    def __init__(self) -> None:
        self._saving: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def enter(self, shard: torch.Tensor, gather: Gather, keeps: bool = False) -> torch.Tensor:
        """`gather(shard)`; unless the region `keeps` it, products that run in `saving` save the shard."""
        if keeps:
            return gather(shard)
        whole, self._saving = gather_again(shard, gather)
        return whole

    def region(self, gather: Gather, keeps: bool = False) -> Wrapper:
        """A wrapper of the module whose products share the input: what it is given is gathered."""
        change = change_input(lambda shard: self.enter(shard, gather, keeps))

        def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            try:
                return change(forward, *args, **kwargs)
            finally:
                self.leave()

        return wrapper

    def leave(self) -> None:
        """Let go of the input."""
        self._saving = contextlib.nullcontext

    def saving(self) -> AbstractContextManager[None]:
        """The context that products of the input last given run in."""
        return self._saving()

    def saved(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """A wrapper of a product."""
        with self._saving():
            return forward(*args, **kwargs)


class _Again:
    """One gathered tensor: what it was gathered from, and how often autograd wants it."""

    def __init__(self, shard: torch.Tensor, gather: Gather) -> None:
        self.shard, self.gather = shard.detach(), gather
        self.wanted = self.left = 0
        self.made: torch.Tensor | None = None

    def want(self) -> None:
        self.wanted += 1
        self.left += 1

    def take(self) -> torch.Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.gather(self.shard)
        made = self.made
        self.left -= 1
        if self.left == 0:  # the last one frees it; a second backward pass starts over
            self.made, self.left = None, self.wanted
        return made


class _Saved:
    """A view of the gathered tensor that autograd saved."""

    def __init__(self, again: _Again, like: torch.Tensor) -> None:
        self.again, self.shape = again, like.shape
        again.want()

    def unpack(self) -> torch.Tensor:
        return self.again.take().view(self.shape)


def gather_again(
    shard: torch.Tensor, gather: Gather
) -> tuple[torch.Tensor, Callable[[], AbstractContextManager[None]]]:
    """`gather(shard)`, and a context in which autograd saves that tensor as its shard.

    Saved tensors are recognised by their storage, so that a view as a matrix counts; a transposed view does not.
    """
    whole = gather(shard)
    if not torch.is_grad_enabled() or whole is shard:
        return whole, contextlib.nullcontext
    again = _Again(shard, gather)
    storage, count, alive = _storage(whole), whole.numel(), weakref.ref(whole)

    def pack(saved: torch.Tensor) -> Any:
        # A storage is known by its address, which says nothing any more once the tensor is gone.
        same = alive() is not None and _storage(saved) == storage
        return _Saved(again, saved) if same and saved.numel() == count and saved.is_contiguous() else saved

    def unpack(packed: Any) -> torch.Tensor:
        return packed.unpack() if isinstance(packed, _Saved) else packed

    @contextlib.contextmanager
    def saving() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    return whole, saving


def _storage(tensor: torch.Tensor) -> int:
    """What tells whether two tensors lie in the same memory; that of one rank where several are simulated."""
    mine = next(iter(each_rank(tensor).values()))
    return int(mine.untyped_storage()._cdata)
