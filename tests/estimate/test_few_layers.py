"""A step predicted from few layers, beside the step of all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.estimate import few_layers, predict_run
from hyper_parallel.estimate.build_trace import of_micro_batch
from hyper_parallel.estimate.prediction import model_of
from hyper_parallel.estimate.repeat_jobs import LayerRun, jobs_of_all
from hyper_parallel.overlap.list_scheduling import arrange, replayed
from hyper_parallel.overlap.order_search import Overlap, Tried
from hyper_parallel.step.capture_train_step import capture_few

LAYERS = 14


def _run(batch: int = 16, **memory: Any) -> config.RunConfig:
    return config.from_dict(
        {
            "version": 1,
            "out": "runs/test",
            "model": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": 32000,
                    "hidden_size": 2048,
                    "intermediate_size": 5632,
                    "num_hidden_layers": LAYERS,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 4096,
                    "tie_word_embeddings": False,
                }
            },
            "data": {"train": "text.txt", "sequence": 4096},
            "train": {"batch": batch, "micro_batch": 1, "optimizer": {"name": "adamw"}},
            "strategy": {
                "axes": {"shard": 8},
                "memory": {"shard": "parameters", **memory},
                "precision": {"param": "float32", "compute": "bfloat16", "reduce": "float32"},
            },
        },
        source="a test",
    )


@pytest.mark.parametrize(
    "memory", [{}, {"recompute": "layer"}, {"recompute": "layer", "recompute_layers": 6}], ids=str
)
def test_it_is_as_the_step_of_all(memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2% in time and 1% in bytes, in the order that a search for all chooses; and its parts add up."""
    monkeypatch.setattr(few_layers, "MANY", LAYERS - 1)
    run, cluster = _run(**memory), Cluster.named("h100x8").for_workers(8)
    found = few_layers.predict_few_layers(run, cluster, None, lambda _: None)
    assert found is not None and found.seconds is not None and found.fits
    whole = predict_run(run, cluster)
    assert found.seconds == pytest.approx(whole.timeline.step, rel=0.02)
    assert found.peak == pytest.approx(whole.timeline.peak.bytes, rel=0.01)
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.01)
    assert found.mfu == pytest.approx(whole.timeline.mfu, rel=0.02)
    assert found.least < whole.timeline.step


def test_micro_batches_are_few_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 micro-batches, of which 3 and 4 pairs are simulated."""
    monkeypatch.setattr(few_layers, "MANY", LAYERS - 1)
    run, cluster = _run(batch=160), Cluster.named("h100x8").for_workers(8)
    found = few_layers.predict_few_layers(run, cluster, None, lambda _: None)
    assert found is not None
    timeline = predict_run(run, cluster).timeline
    assert found.seconds == pytest.approx(timeline.step, rel=0.02)
    assert found.peak == pytest.approx(timeline.peak.bytes, rel=1e-3)


def test_what_holds_too_much_or_takes_too_long_is_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "MANY", LAYERS - 1)
    cluster = Cluster.named("h100x8").for_workers(8)
    found = few_layers.predict_few_layers(_run(), cluster, 1e9, lambda _: None)
    assert found is not None and found.seconds is None and found.peak > 1e9 and not found.fits
    slow = few_layers.predict_few_layers(_run(), cluster, None, lambda _: None, quickest=1e-3)
    assert slow is not None and slow.seconds is None and slow.fits and slow.least > 1e-3


def test_steps_of_few_layers_are_predicted_whole() -> None:
    cluster = Cluster.named("h100x8").for_workers(8)
    assert few_layers.predict_few_layers(_run(), cluster, None, lambda _: None) is None


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("again", [0, 4], ids=["kept", "4 again"])
def test_repeated_jobs_are_those_of_all_layers(buckets: bool, again: int) -> None:
    """From 6 layers of a kind to 9, to the byte and the second, as the code is written and arranged."""
    run, cluster = _run(), Cluster.named("h100x8").for_workers(8)
    with fake_ranks(8, 0):
        graphs = of_micro_batch(
            model_of(run, []), run, run.effective_strategy, partial(capture_few, micro_batches=2)
        )
    assert graphs is not None
    runs = [LayerRun(9, 6)] if not again else [LayerRun(again, again), LayerRun(9, 6)]
    order = Overlap(cluster)
    tried = Tried(buckets=buckets, together=1, window=1e-2, seconds=0.0, bytes=0)
    few, every = (
        few_layers._FewLayerStep.of(run, cluster, graphs, layers, again).search(order).jobs(tried)
        for layers in (sum(one.captured for one in runs), sum(one.total for one in runs))
    )
    made, jobs = jobs_of_all(few, runs).jobs, every.jobs
    assert [len(one.uses) for one in made] == [len(one.uses) for one in jobs]
    for ours, theirs in (
        (replayed(made), replayed(jobs)),
        (arrange(made, window=1e-2), arrange(jobs, window=1e-2)),
    ):
        assert ours.order == theirs.order
        assert ours.bytes == theirs.bytes
        # The norm of all gradients reads a number more for each of them.
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-6)
