"""What a framework computes again that no gradient needs: seconds, and their way into the price of a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.estimate import Prediction, cluster_of, predict_run
from hyper_parallel.estimate.stage_price import left_out_seconds
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Collective, Op
from hyper_parallel.workload.work import Work

DEVICE = Device("d", {"float32": 1e12}, {"float32": 1e12}, Tier("device", 1e12, 1e12, 1e12))
CLUSTER = Cluster(device=DEVICE, links={"node": Link("node", 1e12, 0.0)}, name="c")


def product(index: int, module: str, seconds: float, phase: str = "forward", again: bool = False) -> Op:
    """A product."""
    work = Work("matmul", flops=seconds * 1e12, dtype="float32")
    return Op(index, "mm", module, phase, work=work, recomputed=again)


def test_products_and_collectives_of_layers_that_are_computed_again_and_of_no_others() -> None:
    sums = Collective("all_reduce", (0, 1), 4 * 10**12, "tensor_x", "tensor_x")
    ops = [
        product(0, "model.layers.0.up", 3.0),
        product(1, "model.layers.0.down", 2.0),
        Op(2, "all_reduce", "model.layers.0", "forward", "comm:tensor_x", collective=sums, after=(1,)),
        product(3, "model.layers.1.up", 3.0),
        product(4, "model.layers.1.down", 2.0),
        product(5, "lm_head", 7.0),
        product(6, "model.layers.0.up", 3.0, "backward", again=True),
        product(7, "model.layers.0.down", 4.0, "backward"),
    ]
    # Layer 0: its second product and the sum over two ranks behind it. Layer 1 is not computed again.
    assert left_out_seconds(ops, Costs(CLUSTER)) == pytest.approx(2.0 + 4.0)
    assert left_out_seconds(ops[:6], Costs(CLUSTER)) == 0.0


def _predicted(**context: Any) -> Prediction:
    data = {
        "version": 1,
        "out": "runs/small",
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        },
        "data": {"train": "python-stdlib", "sequence": 512},
        "train": {"batch": 4, "micro_batch": 1},
        "strategy": {"axes": {"pipeline": 2}, "memory": {"recompute": "layer"}},
    }
    run = config.from_dict(data, source="test")
    with replace(current_step(), **context).installed():
        return predict_run(run, cluster_of("h100", run))


def test_a_stage_takes_longer_where_layers_are_computed_again_as_a_whole_and_shorter_where_products_add_up() -> (
    None
):
    plain = _predicted()
    assert plain.pipeline is not None
    whole, summed = _predicted(recomputes_whole=True), _predicted(sums_in_products=True)
    assert whole.pipeline is not None and summed.pipeline is not None
    for before, longer, shorter in zip(
        plain.pipeline.stages, whole.pipeline.stages, summed.pipeline.stages, strict=True
    ):
        assert longer.weight > before.weight > shorter.weight
        assert longer.forward == before.forward == shorter.forward
