"""A Trace that resembles one rank's step of a Llama, written by hand from its shape: for tests of the reports, and
for their pictures in the docs.

    PYTHONPATH=tests python -m harness.llama_step OUT.html

Layers' weights are sharded over the axis `shard`, gathered one layer ahead and freed after use; `tensor` splits each
layer, with activations split along the sequence between blocks; attention keeps its output. Sizes are bytes of bf16.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hyper_parallel.cluster import Cluster
from hyper_parallel.trace import Bytes, Collective, Kind, Op, Trace
from hyper_parallel.workload.work import Work

TITLE = "A step shaped like Llama 3.1 8B, tensor 8 · shard 8, written by hand"


@dataclass(frozen=True)
class Shape:
    """Of a Llama, and of how it is spread."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    sequence: int = 4096
    micro_batches: int = 2
    tensor: int = 8
    shard: int = 8

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        size = self.hidden // self.heads
        return self.hidden * (2 * self.hidden + 2 * self.kv_heads * size + 3 * self.inner)

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, all ranks together."""
        tokens = self.sequence * self.micro_batches * self.shard
        matrices = self.layers * self.layer + self.hidden * self.vocabulary
        return tokens * (6 * matrices + 12 * self.layers * self.hidden * self.sequence / 2)


@dataclass
class _Writer:
    """Writes ops; the last kernel is what the next one follows."""

    shape: Shape
    ops: list[Op] = field(default_factory=list)
    storages: int = 0
    last: int = -1
    module: str = ""
    phase: str = ""

    def add(self, name: str, queue: str, *after: int, **more: Any) -> int:
        waits = tuple(sorted({index for index in after if index >= 0}))
        self.ops.append(Op(len(self.ops), name, self.module, self.phase, queue, after=waits, **more))
        return len(self.ops) - 1

    def make(self, size: float, kind: Kind, name: str = "") -> Bytes:
        self.storages += 1
        return Bytes(self.storages, int(size), kind, name=name)

    def kernel(self, name: str, work: Work, *after: int, **more: Any) -> int:
        self.last = self.add(name, "compute", *after, work=work, **more)
        return self.last

    def call(self, kind: str, axis: str, size: float, *after: int, **more: Any) -> int:
        tensor, shard = self.shape.tensor, self.shape.shard
        ranks = range(tensor) if axis == "tensor" else range(0, tensor * shard, tensor)
        call = Collective(kind, tuple(ranks), int(size), axis, axis)
        return self.add(f"{kind} ({axis})", f"comm:{axis}", *after, collective=call, **more)

    def matmul(self, name: str, m: int, n: int, k: int, *after: int, **more: Any) -> int:
        return self.kernel(name, Work.of_matmul(m, n, k, dtype="bfloat16"), *after, **more)

    def attention(self, name: str, part: float, **more: Any) -> int:
        shape = self.shape
        size = shape.hidden // shape.heads
        backward = name.startswith("d ")
        work = Work(
            "attention",
            flops=(10 if backward else 4) * shape.sequence**2 * shape.hidden / shape.tensor / 2,
            read=(6 if backward else 3) * part,
            written=(3 if backward else 1) * part,
            dtype="bfloat16",
            shape=(1, shape.heads // shape.tensor, shape.sequence, shape.sequence, size),
            layout="backward causal" if backward else "forward causal",
        )
        return self.kernel(name, work, **more)

    def pointwise(
        self,
        name: str,
        count: float,
        *after: int,
        kind: Literal["elementwise", "reduce"] = "elementwise",
        **more: Any,
    ) -> int:
        work = Work(kind, vector_flops=4 * count, read=4 * count, written=2 * count, dtype="bfloat16")
        return self.kernel(name, work, *after, **more)

    def free(self, *held: Bytes) -> None:
        """The last kernel is the last to use these."""
        op = self.ops[self.last]
        self.ops[self.last] = replace(op, frees=(*op.frees, *(one.storage for one in held)))


def llama_step(shape: Shape | None = None) -> Trace:
    """The Trace; all ranks are of one class."""
    shape = shape or Shape()
    write = _Writer(shape)
    t, s = shape.tensor, shape.shard
    own = shape.layer // (t * s)
    head = shape.hidden * shape.vocabulary // (t * s)
    resident = []
    sizes = {f"model.layers.{layer}": own for layer in range(shape.layers)}
    for name, count in {**sizes, "model.embed_tokens": head, "lm_head": head}.items():
        resident += [
            write.make(4 * count, "parameter", f"{name}.weight"),
            write.make(8 * count, "optimizer", f"{name}.moments"),
        ]
    gradients: dict[str, Bytes] = {}
    for batch in range(shape.micro_batches):
        saved = _forward(write, own)
        _loss(write)
        _backward(write, own, saved, gradients, first=batch == 0)
    _update(write, own, gradients)
    ranks = dict.fromkeys(range(t * s), "all")
    return Trace({"all": tuple(write.ops)}, ranks, {"all": tuple(resident)}, shape.flops, shape.micro_batches)


def _gather(write: _Writer, layer: int, own: int, phase: str, after: int) -> tuple[int, Bytes]:
    kept = write.module, write.phase
    write.module, write.phase = f"model.layers.{layer}", phase
    whole = write.make(2 * own * write.shape.shard, "parameter", f"model.layers.{layer}.weight.gathered")
    gathered = write.call("all_gather", "shard", 2 * own, after, allocates=(whole,))
    write.module, write.phase = kept
    return gathered, whole


def _forward(write: _Writer, own: int) -> list[list[Bytes]]:
    shape, saved = write.shape, []
    tokens, part = shape.sequence, 2 * shape.sequence * shape.hidden
    gathered, whole = _gather(write, 0, own, "forward", write.last)
    write.module, write.phase = "model.embed_tokens", "forward"
    write.pointwise("embedding", shape.sequence * shape.hidden / shape.tensor)
    for layer in range(shape.layers):
        begun = write.last
        ahead = _gather(write, layer + 1, own, "forward", begun) if layer + 1 < shape.layers else None
        kept = _layer(write, layer, gathered, tokens, part)
        # The layer's weights are freed once its last product has run.
        write.free(whole)
        saved.append(kept)
        if ahead:
            gathered, whole = ahead
    return saved


def _layer(write: _Writer, layer: int, gathered: int, tokens: int, part: int) -> list[Bytes]:
    shape, t = write.shape, write.shape.tensor
    size = shape.hidden // shape.heads
    kept: list[Bytes] = []
    for block, width in (("self_attn", shape.hidden), ("mlp", shape.inner)):
        norm = "input_layernorm" if block == "self_attn" else "post_attention_layernorm"
        write.module, write.phase = f"model.layers.{layer}.{norm}", "forward"
        kept.append(write.make(part / t, "activation"))
        normed = write.pointwise("rms_norm", tokens * shape.hidden / t, gathered, allocates=(kept[-1],))
        write.module = f"model.layers.{layer}.{block}"
        whole = write.make(part, "temporary")
        spread = write.call("all_gather", "tensor", part / t, normed, allocates=(whole,))
        if block == "self_attn":
            wide = (shape.hidden + 2 * shape.kv_heads * size) // t
            kept.append(write.make(2 * tokens * wide, "activation"))
            write.matmul("q, k, v", tokens, wide, shape.hidden, spread, allocates=(kept[-1],))
            write.free(whole)
            write.pointwise("rope", tokens * shape.hidden / t)
            kept.append(write.make(part / t, "activation"))
            write.attention("flash_attention", part / t, allocates=(kept[-1],))
        else:
            kept.append(write.make(3 * 2 * tokens * width / t, "activation"))
            write.matmul("gate", tokens, width // t, shape.hidden, spread, allocates=(kept[-1],))
            write.matmul("up", tokens, width // t, shape.hidden, frees=(whole.storage,))
            write.pointwise("silu · up", tokens * width / t)
        summed = write.make(part, "temporary")
        down = write.matmul(
            "o" if block == "self_attn" else "down", tokens, shape.hidden, width // t, allocates=(summed,)
        )
        reduced = write.call("reduce_scatter", "tensor", part, down, frees=(summed.storage,))
        write.pointwise("add", tokens * shape.hidden / t, reduced)
    return kept


def _loss(write: _Writer) -> None:
    shape = write.shape
    write.module, write.phase = "lm_head", "loss"
    logits = write.make(2 * shape.sequence * shape.vocabulary / shape.tensor, "activation")
    write.matmul(
        "logits", shape.sequence, shape.vocabulary // shape.tensor, shape.hidden, allocates=(logits,)
    )
    write.pointwise("cross_entropy", shape.sequence * shape.vocabulary / shape.tensor, kind="reduce")
    total = write.call("all_reduce", "tensor", 8 * shape.sequence, write.last)
    write.phase = "backward"
    write.matmul("d logits", shape.sequence, shape.hidden, shape.vocabulary // shape.tensor, total)
    write.free(logits)


def _backward(
    write: _Writer, own: int, saved: list[list[Bytes]], gradients: dict[str, Bytes], *, first: bool
) -> None:
    shape, t = write.shape, write.shape.tensor
    tokens, part = shape.sequence, 2 * shape.sequence * shape.hidden
    gathered, whole = _gather(write, shape.layers - 1, own, "backward", write.last)
    for layer in reversed(range(shape.layers)):
        ahead = _gather(write, layer - 1, own, "backward", write.last) if layer else None
        write.phase = "backward"
        grown = write.make(2 * own * shape.shard, "gradient")
        out: tuple[Bytes, ...] = (grown,)
        for block, width in (("mlp", shape.inner), ("self_attn", shape.hidden)):
            write.module = f"model.layers.{layer}.{block}"
            spread = write.call("all_gather", "tensor", part / t, write.last)
            write.matmul("d out", tokens, width // t, shape.hidden, spread, gathered, allocates=out)
            out = ()
            write.matmul("d weight out", shape.hidden, width // t, tokens)
            if block == "mlp":
                write.pointwise("d silu", tokens * width / t)
                products = 2
            else:
                write.attention("d flash_attention", part / t)
                products = 1
            for _ in range(products):
                write.matmul("d in", tokens, shape.hidden, width // t)
            scattered = write.call("reduce_scatter", "tensor", part, write.last)
            for _ in range(products):
                write.matmul("d weight in", shape.hidden, width // t, tokens)
            write.pointwise("d rms_norm", tokens * shape.hidden / t, scattered)
        write.free(whole, *saved[layer])
        write.module = f"model.layers.{layer}"
        made: tuple[Bytes, ...] = ()
        if first:
            gradients[f"model.layers.{layer}"] = write.make(4 * own, "gradient")
            made = (gradients[f"model.layers.{layer}"],)
        write.call(
            "reduce_scatter",
            "shard",
            2 * own * shape.shard,
            write.last,
            allocates=made,
            frees=(grown.storage,),
        )
        if ahead:
            gathered, whole = ahead


def _update(write: _Writer, own: int, gradients: dict[str, Bytes]) -> None:
    shape = write.shape
    reduced = next(op.index for op in reversed(write.ops) if op.queue == "comm:shard")
    write.module, write.phase = "", "clip"
    write.pointwise("norms", own * shape.layers, reduced, kind="reduce")
    norm = write.call("all_reduce", "shard", 4, write.last)
    write.phase = "optimizer"
    for name, gradient in gradients.items():
        write.module = name
        work = Work("optimizer", vector_flops=12 * own, read=16 * own, written=12 * own)
        write.kernel("adamw", work, norm, frees=(gradient.storage,))


if __name__ == "__main__":
    from hyper_parallel.report import page
    from hyper_parallel.simulator import simulate

    predicted = simulate(llama_step(), Cluster.named("h100x64"))
    Path(sys.argv[1]).write_text(page(predicted, TITLE), encoding="utf-8")
