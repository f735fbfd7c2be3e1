"""A step predicted from few layers, beside the step of all."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.estimate import few_layers, predict_run

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
