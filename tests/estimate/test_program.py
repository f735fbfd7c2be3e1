"""A step with a few layers and micro-batches captured is, repeated, the step with all of them captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate.build_trace import trace_of
from hyper_parallel.estimate.prediction import model_of
from hyper_parallel.graph import Pass
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.simulator import simulate
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Op, Trace

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SMALL = (
    "model.config.hidden_size=32",
    "model.config.intermediate_size=48",
    "data.sequence=32",
    "train.batch=8",
    "strategy.sequence=false",
)
BF16 = "strategy.precision.compute=bfloat16"
MODELS = {
    "llama": ("model.config.num_hidden_layers=7",),
    "gemma2": (
        "model.config={model_type: gemma2, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 12, "
        "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, sliding_window: 16, vocab_size: 256}",
    ),
    "deepseek": (
        "model.config={model_type: deepseek_v3, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, "
        "num_hidden_layers: 8, num_attention_heads: 4, num_key_value_heads: 4, n_routed_experts: 8, n_group: 2, "
        "topk_group: 1, num_experts_per_tok: 2, first_k_dense_replace: 1, q_lora_rank: 16, kv_lora_rank: 16, "
        "qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8, n_shared_experts: 1, vocab_size: 256}",
    ),
}


def _passes(strategy: Strategy) -> tuple[Pass, ...]:
    return passes(strategy, ordered=False)


def _ordered(strategy: Strategy) -> tuple[Pass, ...]:
    return passes(strategy, Cluster.named(f"h100x{strategy.axes.world}"))


def _both(
    *overrides: str, rewrites: Callable[[Strategy], Sequence[Pass]] = _passes
) -> tuple[Trace, Trace, list[str]]:
    run = config.load(QUICKSTART, [*SMALL[2:], *overrides])
    model = model_of(run, [])
    classes = dict.fromkeys(range(run.effective_strategy.axes.world), "all")
    notes: list[str] = []
    repeated = trace_of(model, run, classes, views=True, passes_of=rewrites, notes=notes)
    return repeated, trace_of(model, run, classes, views=True, whole=True, passes_of=rewrites), notes


def _same(op: Op) -> tuple[object, ...]:
    """All that an op is, without the numbers of storages; of one about every layer's norm less."""
    held = tuple((one.bytes, one.kind, one.name) for one in op.allocates)
    if op.phase == "clip" and op.name in ("stack", "sum") and not op.module and held and held[0][0] < 4096:
        return op.name, op.queue, op.after, len(op.frees)
    return (
        op.name,
        op.module,
        op.phase,
        op.queue,
        op.work,
        op.collective,
        op.after,
        held,
        len(op.frees),
        op.recomputed,
    )


def _check(repeated: Trace, whole: Trace) -> None:
    repeated.check()
    assert list(map(_same, repeated.ops["all"])) == list(map(_same, whole.ops["all"]))
    resident = [
        sorted((one.name, one.bytes, one.kind) for one in of.resident["all"]) for of in (repeated, whole)
    ]
    assert resident[0] == resident[1]
    ours, theirs = (simulate(of, Cluster.preset("h100"), masking=False) for of in (repeated, whole))
    assert ours.step == pytest.approx(theirs.step, rel=1e-6)
    assert abs(ours.peak.bytes - theirs.peak.bytes) < 4096
    assert ours.exposed == pytest.approx(theirs.exposed, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("llama", ("strategy.axes={shard: 2, tensor: 2}", "strategy.sequence=true")),
        ("llama", ("strategy.axes={shard: 4}", "strategy.memory={recompute: layer}", BF16)),
        ("llama", ("strategy.axes={shard: 4}", "strategy.memory={recompute: layer, recompute_layers: 1}")),
        ("llama", ("strategy.axes={tensor: 2}", "strategy.memory={recompute: selective}")),
        ("gemma2", ("strategy.axes={replicate: 2}",)),
    ],
)  # fmt: skip
def test_layers(model: str, strategy: tuple[str, ...]) -> None:
    repeated, whole, notes = _both(*MODELS[model], *(SMALL[:2] if model == "llama" else ()), *strategy)
    _check(repeated, whole)
    assert any("layers were captured" in note for note in notes), notes


def test_micro_batches_and_layers() -> None:
    repeated, whole, notes = _both(
        *MODELS["llama"], *SMALL[:2], "strategy.axes={shard: 2}", "strategy.memory.shard=optimizer",
        "train.batch=12", "train.micro_batch=1",
    )  # fmt: skip
    _check(repeated, whole)
    assert [note.split()[0] for note in notes] == ["5", "one"]


@pytest.mark.parametrize("micro_batches", [7, 14])
def test_micro_batches_in_pairs_whose_collectives_are_ordered(micro_batches: int) -> None:
    repeated, whole, notes = _both(
        "model.config.num_hidden_layers=2", *SMALL[:2], "strategy.axes={shard: 2}",
        f"train.batch={2 * micro_batches}", "train.micro_batch=1", rewrites=_ordered,
    )  # fmt: skip
    assert len(repeated.ops["all"]) == len(whole.ops["all"])
    _check(repeated, whole)
    assert [note.split()[0] for note in notes] == ["one"]


def test_experts_behind_a_dense_layer() -> None:
    repeated, whole, notes = _both(*MODELS["deepseek"], "strategy.axes={shard: 4, expert: 2}")
    repeated.check()
    assert any("layers were captured" in note for note in notes), notes
    # Each layer's loads are looked at in the clipping, a few numbers at a time, which is not repeated.
    ours, theirs = ([_same(op)[:6] for op in of.ops["all"] if op.phase != "clip"] for of in (repeated, whole))
    assert ours == theirs
    steps = [simulate(of, Cluster.preset("h100"), masking=False).step for of in (repeated, whole)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-2)
