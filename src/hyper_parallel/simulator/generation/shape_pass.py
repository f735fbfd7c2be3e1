"""PassModel from a model's dimensions: the operators that Transformers' decoders run in a pass, without their code.

Matrix products are those of `workload.shape`. Elementwise operators are counted as eager code runs them: 6 of a norm,
10 of rotary positions, 2 of a gate, and the additions of the residual stream, each reading and writing its tensors.
Tensor parallelism splits heads and features and reduces behind attention and MLP; experts are split over `expert`
ranks, which exchange rows. `estimate.generate_capture` gives the same from the model's own code, and a test holds
them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.errors import ConfigError
from hyper_parallel.simulator.generation.pass_model import (
    Affine,
    AttentionSizes,
    Layer,
    PassModel,
    PassOp,
)
from hyper_parallel.trace import Collective
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.work import bytes_of


class _Writer:
    """Writes the operators of a model on one of `tensor` ranks, whose experts are split over `expert`."""

    def __init__(self, shape: Shape, tensor: int, expert: int, dtype: str) -> None:
        self.shape, self.tensor, self.expert, self.dtype = shape, tensor, expert, dtype
        self.size = bytes_of(dtype)

    def product(self, name: str, features: int, out: int, answers: bool = False) -> PassOp:
        """Rows times a matrix."""
        size, one = self.size, Affine(0, 0, 1) if answers else Affine(0, 1)
        return PassOp(
            name,
            kind="matmul",
            dtype=self.dtype,
            op="aten.mm",
            layout="nt",
            flops=_times(one, 2 * features * out),
            read=_plus(_times(one, size * features), size * features * out),
            written=_times(one, size * out),
            fresh=_times(one, size * out),
            shape=(Affine(1), one, Affine(out), Affine(features)),
        )

    def elementwise(self, name: str, count: int, read: float, written: float) -> Iterator[PassOp]:
        """Add `count` operators that together read and write these elements of each row."""
        for _ in range(count):
            yield PassOp(
                name,
                kind="elementwise",
                dtype=self.dtype,
                op="aten.mul.Tensor",
                vector_flops=Affine(0, max(read, written) / count),
                read=Affine(0, self.size * read / count),
                written=Affine(0, self.size * written / count),
                fresh=Affine(0, self.size * written / count),
            )

    def norm(self, features: int) -> Iterator[PassOp]:
        """A root-mean-square norm of each row."""
        return self.elementwise("norm", 6, 4 * features, 3 * features)

    def reduced(self) -> Iterator[PassOp]:
        """Partial sums of the tensor ranks."""
        if self.tensor > 1:
            yield self.call("all_reduce", "tensor_x", self.tensor, self.size * self.shape.hidden)

    def call(self, kind: str, axis: str, ranks: int, given: float, answers: bool = False) -> PassOp:
        """Add a collective of neighbouring ranks that give these bytes of each row."""
        found = Collective(kind, tuple(range(ranks)), 0, axis, axis)
        read = Affine(0, 0, given) if answers else Affine(0, given)
        return PassOp(kind, collective=found, read=read)

    def attention(self) -> tuple[list[PassOp], AttentionSizes]:
        """Norm, projections, rotation, attention, output."""
        shape, tensor = self.shape, self.tensor
        heads, kv_heads = shape.heads // tensor, max(1, shape.kv_heads // tensor)
        hidden, size = shape.hidden, shape.head_dim
        ops = [*self.norm(hidden)]
        if shape.latent is None:
            ops += [
                self.product("q_proj", hidden, heads * size + shape.gate // tensor),
                self.product("k_proj", hidden, kv_heads * size),
                self.product("v_proj", hidden, kv_heads * size),
            ]
            ops += self.elementwise(
                "rotary", 10, 7 * (heads + kv_heads) * size, 5 * (heads + kv_heads) * size
            )
            found = AttentionSizes(heads, kv_heads, size, size, element=self.size, dtype=self.dtype)
            out = heads * size
        else:
            one = shape.latent
            key, cached = one.plain + one.rotary, (one.key_rank, one.rotary)
            if one.query_rank:
                ops += [self.product("q_a_proj", hidden, one.query_rank), *self.norm(one.query_rank)]
            ops.append(self.product("q_b_proj", one.query_rank or hidden, heads * key))
            ops += [self.product("kv_a_proj", hidden, sum(cached)), *self.norm(one.key_rank)]
            ops.append(self.product("kv_b_proj", one.key_rank, heads * (one.plain + one.value)))
            ops += self.elementwise("rotary", 10, 7 * heads * key, 5 * heads * key)
            found = AttentionSizes(heads, heads, key, one.value, 0, cached, self.size, self.dtype)
            out = heads * one.value
        ops.append(PassOp("attention", kind="attention", dtype=self.dtype, role="attention"))
        ops += [self.product("o_proj", out, hidden), *self.reduced()]
        ops += self.elementwise("residual", 1, 2 * hidden, hidden)
        return ops, found

    def mlp(self, features: int) -> Iterator[PassOp]:
        """Norm and an MLP without experts."""
        hidden = self.shape.hidden
        yield from self.norm(hidden)
        yield from self.feed(features // self.tensor)
        yield from self.reduced()
        yield from self.elementwise("residual", 1, 2 * hidden, hidden)

    def feed(self, features: int) -> Iterator[PassOp]:
        """The products of an MLP."""
        if self.shape.gated:
            yield self.product("gate_proj", self.shape.hidden, features)
        yield self.product("up_proj", self.shape.hidden, features)
        yield from self.elementwise("act", 2, 3 * features, 2 * features)
        yield self.product("down_proj", features, self.shape.hidden)

    def routed(self) -> Iterator[PassOp]:
        """Norm, router, exchange, experts, exchange, and the shared experts."""
        shape, ranks = self.shape, self.expert
        hidden = shape.hidden
        yield from self.norm(hidden)
        yield self.product("gate", hidden, shape.experts)
        yield from self.elementwise("route", 5, 4 * shape.experts, 3 * shape.experts)
        # Ranks of the tensor axis have the same rows, and each dispatches its part.
        part = min(self.tensor, ranks)
        rows = shape.chosen / part
        yield from self.elementwise("permute", 12, 2 * rows * hidden, 2 * rows * hidden)
        if ranks > 1:
            yield self.call("all_to_all", "expert", ranks, self.size * rows * hidden)
        yield from self.grouped(ranks, part)
        if ranks > 1:
            yield self.call("all_to_all", "expert", ranks, self.size * rows * hidden)
        yield from self.elementwise("unpermute", 4, 3 * rows * hidden, 3 * rows * hidden)
        if part > 1:
            yield self.call("all_gather", "tensor_x", part, self.size * hidden / part)
        if shape.shared_ffn:
            yield from self.feed(shape.shared_ffn // self.tensor)
            yield from self.reduced()
        yield from self.elementwise("residual", 2, 4 * hidden, 2 * hidden)

    def grouped(self, ranks: int, part: int) -> Iterator[PassOp]:
        """Products of rows with their experts. Every rank gets as many rows as it gives."""
        shape, size = self.shape, self.size
        inside = shape.expert_hidden or shape.hidden
        local = shape.experts // ranks
        rows = shape.chosen / part
        # Features are split over tensor ranks that share no experts.
        features = shape.expert_ffn // max(1, self.tensor // ranks)
        for name, k, n in (
            ("gate_up", inside, features * (shape.matrices - 1)),
            ("down", features, inside),
        ):
            yield PassOp(
                name,
                kind="matmul",
                dtype=self.dtype,
                op="aten._grouped_mm",
                layout="nt",
                flops=Affine(0, 2 * rows * k * n),
                read=Affine(size * local * k * n, size * rows * k),
                written=Affine(0, size * rows * n),
                fresh=Affine(0, size * rows * n),
                shape=(Affine(local), Affine(0, rows / local), Affine(n), Affine(k)),
                role="experts",
            )


def of_shape(
    shape: Shape, *, tensor: int = 1, expert: int = 1, copies: int = 1, dtype: str = "bfloat16"
) -> PassModel:
    """The pass of one of tensor · copies ranks. `copies`: ranks (of groups) with different requests.

    Raises ConfigError for a model with other token mixers than attention, and for degrees that do not divide it.
    """
    if shape.mix is not None:
        raise ConfigError(
            f"the model {shape.name!r} mixes tokens by recurrences, whose state generation does not page; give a "
            "decoder "
            "with attention"
        )
    problems = [
        f"{name} {size} is not divisible by tensor {tensor}"
        for name, size in (("heads", shape.heads), ("features", shape.ffn), ("vocabulary", shape.vocabulary))
        if size % tensor
    ]
    if expert > 1 and (not shape.experts or shape.experts % expert or (tensor * copies) % expert):
        problems.append(f"{shape.experts} experts cannot be split over {expert} of {tensor * copies} ranks")
    if problems:
        raise ConfigError(f"the model {shape.name!r} cannot be split so: {'; '.join(problems)}")
    writer = _Writer(shape, tensor, expert, dtype)
    kinds, order = _layers(writer)
    size, hidden = writer.size, shape.hidden
    columns = shape.vocabulary // tensor
    before = (*writer.elementwise("embed", 1, hidden, hidden), *writer.reduced())
    after = [*writer.norm(hidden), writer.product("lm_head", hidden, columns, answers=True)]
    if tensor > 1:
        after.append(writer.call("all_gather", "tensor_x", tensor, float(size * columns), answers=True))
    outer = size * (hidden + columns * hidden * (1 if shape.tied else 2))
    return PassModel(
        name=shape.name,
        before=before,
        kinds=kinds,
        order=order,
        after=tuple(after),
        outer_weights=outer,
        live=_live(kinds, hidden, size),
        parameters=shape.parameters,
        experts=shape.experts,
        chosen=shape.chosen,
        routed=max(1, expert // tensor) if shape.experts else 1,
        world=tensor * copies,
        split=copies,
    )


def _layers(writer: _Writer) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """The kinds of layers, and the kind of each: dense ones first, windowed ones evenly spread."""
    shape = writer.shape
    kinds: list[Layer] = []
    places: dict[tuple[bool, bool], int] = {}
    order = []
    for at in range(shape.layers):
        routed = bool(shape.experts) and at >= shape.dense_layers
        windowed = bool(shape.window) and int((at + 1) * shape.windowed + 1e-9) > int(
            at * shape.windowed + 1e-9
        )
        key = (routed, windowed)
        if key not in places:
            places[key] = len(kinds)
            kinds.append(_layer(writer, *key))
        order.append(places[key])
    return tuple(kinds), tuple(order)


def _layer(writer: _Writer, routed: bool, windowed: bool) -> Layer:
    shape = writer.shape
    ops, sizes = writer.attention()
    if windowed:
        sizes = replace(sizes, window=shape.window)
    ops += writer.routed() if routed else writer.mlp(shape.ffn)
    experts = sum(op.read.fixed for op in ops if op.role == "experts")
    weights = sum(op.read.fixed for op in ops if op.kind == "matmul") + 2 * writer.size * shape.hidden
    return Layer(tuple(ops), round(weights), round(experts), sizes)


def _live(kinds: Sequence[Layer], hidden: int, size: int) -> tuple[tuple[Affine, Affine], ...]:
    """Beside the residual stream and a layer's input, what two neighbouring operators make is alive."""
    found = [(Affine(0, 3 * size * hidden), Affine())]
    for layer in kinds:
        before = Affine()
        for op in layer.ops:
            fresh = op.fresh
            if op.role == "attention" and layer.attention is not None:
                fresh = Affine(0, size * layer.attention.heads * layer.attention.value)
            found.append((fresh, before))
            before = fresh
        found.append((Affine(), before))
    return tuple(found)


def _times(one: Affine, factor: float) -> Affine:
    return Affine(one.fixed * factor, one.row * factor, one.answer * factor)


def _plus(one: Affine, fixed: float) -> Affine:
    return Affine(one.fixed + fixed, one.row, one.answer)
