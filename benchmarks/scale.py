"""What `hyper-parallel inspect` tells of 2,048 ranks, how long it takes, and the same worked out by hand.

    python benchmarks/scale.py

Each inspection runs in a process of its own, whose time from start to end and largest resident memory are measured.
The hand computation is plain arithmetic on the numbers of the models' papers; it knows nothing of this package's
plans. Ceilings are those of uneven shards. What is gathered, and the peak, depend on the order of the step's graph, and
are recorded without a computation by hand. The last part is a million tokens: activations of a rank of 32 that split
the positions, against one device.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import time
from typing import Any

from commandline import run
from measure import ROOT
from pages import Benchmark
from processes import fresh, scratch

BENCHMARK = Benchmark("scale")
LIMIT_SECONDS, LIMIT_BYTES, LIMIT_OFF = 60.0, 4 * 2**30, 0.03
FP32, BF16, INT64 = 4, 2, 8
MILLION = """\
version: 1
out: runs/million
model:
  config: {model_type: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32,
           num_attention_heads: 32, num_key_value_heads: 8, max_position_embeddings: 1048576}
data: {train: python-stdlib, sequence: 1048576}
train: {batch: 1}
strategy: {axes: {context: 32}, precision: {compute: bfloat16}, memory: {recompute: layer}}
"""


def up(length: int, *ranks: int) -> int:
    """Rows of the largest shard when `length` rows are split over ranks, and what is left over others."""
    for count in ranks:
        length = -(-length // count)
    return length


def by_hand(kept: int, activations: int) -> dict[str, int]:
    """Bytes of a rank that keeps so many parameters in fp32, and Adam's moments."""
    size = kept * FP32
    return {"parameters": size, "gradients": size, "optimizer": 2 * size, "activations": activations}


def stream(layers: int, tokens: int, tensor: int, h: int, vocabulary: int, rotary: int) -> int:
    """Bytes of activations along the layers of a rank with its part of the sequence."""
    return (
        (layers - 1)
        * (tokens // tensor)
        * h
        * BF16  # each layer's input, of this rank's part of the sequence
        + tokens * h * BF16  # the first one's: the embedding's output, whole
        + tokens * h * (FP32 + 2 * BF16)  # the last norm: its input in fp32, scaled, and the head's input
        + tokens * (vocabulary // tensor) * BF16  # logits
        + 2 * tokens * rotary * BF16  # rotary cosines and sines
    )


def llama_405b() -> dict[str, int]:
    """Llama 3.1 405B (arXiv 2407.21783, table 3): replicate 2, shard 128, tensor 8 with sequence, micro-batch 1."""
    h, e, layers, vocabulary, heads, kv, head = 16384, 53248, 126, 128256, 128, 8, 128
    shard, tensor, tokens = 128, 8, 8192
    one_layer = (
        up(heads * head, tensor, shard) * h
        + 2 * up(kv * head, tensor, shard) * h
        + up(h, shard) * (heads * head // tensor)
        + 2 * up(e, tensor, shard) * h
        + up(h, shard) * (e // tensor)
        + 2 * up(h, shard)
    )
    ends = 2 * up(vocabulary, tensor, shard) * h + up(h, shard)
    return by_hand(layers * one_layer + ends, stream(layers, tokens, tensor, h, vocabulary, head))


def deepseek_v3() -> dict[str, int]:
    """DeepSeek-V3 (arXiv 2412.19437, section 4.2): shard 256, tensor 8 with sequence, expert 64, micro-batch 1."""
    h, dense, inner, layers, first, vocabulary = 7168, 18432, 2048, 61, 3, 129280
    heads, q_rank, kv_rank, nope, rope, value, experts, chosen = 128, 1536, 512, 128, 64, 128, 256, 8
    shard, tensor, expert, tokens = 256, 8, 64, 4096
    attention = (
        up(q_rank, shard) * h
        + up(q_rank, shard)
        + up(heads * (nope + rope), tensor, shard) * q_rank
        + up(kv_rank + rope, shard) * h
        + up(kv_rank, shard)
        + up(heads * (nope + value), tensor, shard) * kv_rank
        + up(h, shard) * (heads * value // tensor)
        + 2 * up(h, shard)
    )
    dense_mlp = 2 * up(dense, tensor, shard) * h + up(h, shard) * (dense // tensor)
    shared = 2 * up(inner, tensor, shard) * h + up(h, shard) * (inner // tensor)
    routed = experts // expert * 3 * inner * h // (shard * tensor // expert)
    router = up(experts, shard) * h
    ends = 2 * up(vocabulary, tensor, shard) * h + up(h, shard)
    kept = layers * attention + first * dense_mlp + (layers - first) * (shared + routed + router) + ends
    # Where rows went and come back from, at the sender and the owner.
    places = (layers - first) * 4 * (tokens // tensor * chosen) * INT64
    return by_hand(kept, stream(layers, tokens, tensor, h, vocabulary, rope) + places)


def inspection(*arguments: str) -> tuple[dict[str, Any], int]:
    """What the command tells in JSON, in this process, and its largest resident memory in bytes."""
    from hyper_parallel.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main(["inspect", *arguments, "--json"])
    return json.loads(printed.getvalue()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def inspected(file: str, *overrides: str) -> tuple[dict[str, Any], float, int]:
    """What the command tells, the seconds of its process, and its largest resident memory in bytes."""
    begun = time.perf_counter()
    told, memory = fresh(inspection, file, *overrides, threads=2)
    return told, time.perf_counter() - begun, memory


def compared(name: str, file: str, hand: dict[str, int]) -> dict[str, Any]:
    """One model: told and by hand, in bytes of rank 0."""
    told, seconds, memory = inspected(str(ROOT / file))
    inspect = {what: told["totals"][what] for what in hand}
    total = {"inspect": sum(inspect.values()), "hand": sum(hand.values())}
    print(f"\n{name}: {told['world']} ranks, {seconds:.1f} s, {memory / 2**30:.2f} GiB resident")
    print(f"  {'':12} {'inspect GiB':>12} {'by hand GiB':>12} {'off':>8}")
    for what, size in {**inspect, "sum": total["inspect"]}.items():
        other = hand.get(what, total["hand"])
        print(f"  {what:12} {size / 2**30:12.3f} {other / 2**30:12.3f} {size / other - 1:8.2%}")
    off = max(abs(size / hand[what] - 1) for what, size in inspect.items())
    return {
        "model": name,
        "ranks": told["world"],
        "axes": told["axes"],
        "seconds": round(seconds, 1),
        "resident_bytes": memory,
        "inspect": inspect,
        "hand": hand,
        "gathered": told["totals"]["gathered"],
        "transient": told["totals"]["transient"],
        "peak": told["peak"],
        "collectives": told["collectives"],
        "largest_difference": off,
        "within": seconds < LIMIT_SECONDS and memory < LIMIT_BYTES and off < LIMIT_OFF,
    }


def million() -> dict[str, Any]:
    """Activations at a million tokens, 32 ranks along context against one device."""
    with scratch() as folder:
        file = folder / "million.yaml"
        file.write_text(MILLION)
        split, _, _ = inspected(str(file))
        one, _, _ = inspected(str(file), "strategy.axes={}")
    mine, whole = split["totals"]["activations"], one["totals"]["activations"]
    share = mine * 32 / whole
    print(f"\na million tokens: {mine / 2**30:.2f} GiB of activations on each of 32 ranks along context,")
    print(f"  {whole / 2**30:.2f} GiB on one device: {share:.3f} / 32")
    return {"context": 32, "rank": mine, "one_device": whole, "share": share, "within": share <= 1.1}


def main() -> bool:
    """Inspect, compare, keep; whether a figure is outside of its limit."""
    models = [
        compared("Llama 3.1 405B", "examples/llama-405b.yaml", llama_405b()),
        compared("DeepSeek-V3", "examples/deepseek-v3.yaml", deepseek_v3()),
    ]
    tokens = million()
    BENCHMARK.keep({"models": models, "million_tokens": tokens})
    return not all(part["within"] for part in [*models, tokens])


if __name__ == "__main__":
    run(main)
