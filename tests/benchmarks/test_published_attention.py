"""Attention with sinks is captured as one kernel with its window, forward and backward."""

from __future__ import annotations

from published_pricing import fuse

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate import predict_run
from hyper_parallel.estimate.prediction import model_of

SMALL = {
    "version": 1,
    "out": "runs/small",
    "model": {
        "config": {
            "model_type": "gpt_oss",
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "data": {"train": "python-stdlib", "sequence": 256},
    "train": {"batch": 1, "micro_batch": 1},
    "strategy": {"precision": {"param": "float32", "compute": "bfloat16"}},
}


def test_a_kernel_forward_and_one_backward_for_each_layer_with_its_window() -> None:
    run = config.from_dict(SMALL, source="test")
    model = model_of(run, [])
    fuse(model)
    ops = predict_run(run, Cluster.named("h100"), model=model).timeline.trace.ops["all"]
    kernels = [op.work for op in ops if op.work is not None and op.work.kind == "attention"]
    assert [work.op.split("_attention_")[1].split(".")[0] for work in kernels] == ["forward"] * 2 + [
        "backward"
    ] * 2
    # Keys that a query reads: 31 back and its own on average, as a window both ways is counted; and all.
    assert sorted(work.shape[3] for work in kernels) == [64, 64, 256, 256]
    assert not any(op.name in ("_softmax", "bmm") and "self_attn" in op.module for op in ops)
