"""Pipelines predicted from a run file: stages add up to the micro-batch, and memory is that of their tasks."""

from __future__ import annotations

import functools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from harness.families import FAMILIES
from hyper_parallel import config
from hyper_parallel.cli.main import command
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError, StrategyError
from hyper_parallel.estimate import Prediction, cluster_of, predict_run, stage_capture
from hyper_parallel.estimate.prediction import model_of
from hyper_parallel.estimate.stage_capture import capture_stages
from hyper_parallel.estimate.stage_price import StagePrice, node_seconds, price_stage
from hyper_parallel.graph.stage_cut import flops_cost
from hyper_parallel.step.pipeline_plan import merged_pairs
from hyper_parallel.trace import Op

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SIZE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZE},
    "mixtral": {**FAMILIES["mixtral"], **SIZE},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 32000,
        "n_embd": 4096,
        "n_layer": 4,
        "n_head": 32,
        "n_positions": 2048,
    },
}


def _config(axes: dict[str, int], model: str = "llama", *, batch: int = 16, **strategy: Any) -> RunConfig:
    return config.from_dict(
        {
            "version": 1,
            "out": "unused",
            "model": {"config": MODELS[model]},
            "data": {"train": ["unused"], "sequence": 2048},
            "train": {"batch": batch, "micro_batch": 1},
            "strategy": {
                "version": 1,
                "axes": axes,
                "check": False,
                "precision": {"param": "float32", "compute": "bfloat16", "reduce": "float32"},
                **strategy,
            },
        }
    )


def _predicted(axes: dict[str, int], model: str = "llama", **strategy: Any) -> Prediction:
    return _of(json.dumps([axes, model, strategy]))


@functools.cache
def _of(given: str) -> Prediction:
    axes, model, strategy = json.loads(given)
    run = _config(axes, model, **strategy)
    return predict_run(run, cluster_of("h100", run))


def _prices(run: RunConfig) -> list[StagePrice]:
    cluster = Cluster.named("h100")
    ranks = range(run.strategy.axes.world // run.strategy.axes.pipeline)
    found = capture_stages(
        model_of(run, []), run, lambda step: node_seconds(step, cluster, ranks, None), lambda _: None, []
    )
    prices = [price_stage(found, stage, cluster, ranks) for stage in found.partition.stages]
    return [prices[place] for place in found.captured]


@functools.cache
def _whole(tensor: int) -> StagePrice:
    """One stage with all layers."""
    run = _config({"pipeline": 2, "tensor": tensor}, pipeline={"layers": [4, 0]})
    first, last = _prices(run)
    whole = {
        name: getattr(first, name) + getattr(last, name) for name in ("forward", "input", "weight", "update")
    }
    return StagePrice(
        **whole,
        exposed=0,
        parts={},
        memory=first.memory,
        resident=first.resident,
        gathered=0,
    )


@pytest.mark.parametrize(
    ("axes", "counts"), [({"pipeline": 2, "tensor": 2}, [2, 2]), ({"pipeline": 4, "tensor": 2}, None)]
)
def test_the_stages_times_add_up_to_those_of_the_whole_micro_batch(
    axes: dict[str, int], counts: list[int] | None
) -> None:
    prices = _prices(_config(axes, pipeline={} if counts is None else {"layers": counts}))
    whole = _whole(2)
    assert sum(one.micro_batch for one in prices) == pytest.approx(whole.micro_batch, rel=0.01)
    # What the batch alone decides is computed in each stage.
    assert whole.forward < sum(one.forward for one in prices) < 1.02 * whole.forward
    # Each stage clips by the norm of all.
    assert whole.update <= sum(one.update for one in prices) < 1.05 * whole.update


def test_a_micro_batch_of_all_stages_takes_what_the_step_without_a_pipeline_takes() -> None:
    plain = _predicted({"tensor": 2})
    found = _predicted({"pipeline": 2, "tensor": 2})
    assert found.pipeline is not None
    micro_batch = sum(one.seconds for one in found.pipeline.stages)
    phases = {name: one.compute + one.communication for name, one in plain.timeline.by_phase().items()}
    assert 16 * micro_batch == pytest.approx(
        sum(phases[name] for name in ("forward", "loss", "recompute", "backward")), rel=0.01
    )
    assert plain.timeline.step / 2 < found.timeline.step < plain.timeline.step


def test_stages_that_are_alike_are_captured_once_with_the_same_numbers() -> None:
    axes = {"pipeline": 4, "shard": 2}
    found = _predicted(axes, pipeline={"layers": [1, 1, 1, 1], "schedule": "1f1b"})
    assert any("3 of the 4 layers were captured, in 3 of the 4 stages" in note for note in found.notes)
    stages = _stages(found)
    assert stages[1].seconds == stages[2].seconds
    # Cut so that all stages differ, the sum is the same.
    other = _stages(_predicted(axes, pipeline={"layers": [0, 1, 2, 1], "schedule": "1f1b"}))
    assert sum(one.seconds for one in other) == pytest.approx(sum(one.seconds for one in stages), rel=0.01)


def test_a_stage_before_one_without_layers_is_like_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the rows that the head takes, gathered from the tensor ranks."""
    axes, settings = {"pipeline": 4, "tensor": 2}, {"layers": [2, 1, 1, 0], "schedule": "1f1b"}
    found = _predicted(axes, sequence=True, pipeline=settings)
    monkeypatch.setattr(stage_capture, "_alike", lambda counts, *_: tuple(range(len(counts))))
    run = _config(axes, sequence=True, pipeline=settings)
    apart = predict_run(run, cluster_of("h100", run))
    assert found.timeline.step == pytest.approx(apart.timeline.step, rel=1e-9)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_tensor_with_pipeline_holds_less_than_tensor_with_copies_on_as_many_devices(model: str) -> None:
    alone = _predicted({"replicate": 2, "tensor": 8}, model)
    both = _predicted({"pipeline": 2, "tensor": 8}, model)
    assert both.timeline.peak.bytes <= 0.8 * alone.timeline.peak.bytes


def test_peaks_are_state_and_what_is_in_flight() -> None:
    found = _predicted({"pipeline": 4, "tensor": 2}, pipeline={"schedule": "1f1b"})
    assert found.pipeline is not None
    for group, stage in zip(found.pipeline.groups, found.pipeline.stages, strict=True):
        assert group.in_flight == 4 - group.group
        least = group.resident + group.in_flight * stage.saved
        assert least <= group.peak < 1.5 * least
    gpipe = _predicted({"pipeline": 4, "tensor": 2}, pipeline={"schedule": "gpipe"})
    assert gpipe.pipeline is not None
    assert [one.in_flight for one in gpipe.pipeline.groups] == [16] * 4
    assert gpipe.timeline.peak.bytes > 2 * found.timeline.peak.bytes


def test_gathers_and_reductions_once_a_step_are_in_no_task() -> None:
    by_level = {
        level: _predicted({"pipeline": 2, "shard": 4}, memory={"shard": level})
        for level in ("parameters", "gradients", "optimizer")
    }
    exposed = {level: sum(one.exposed for one in _stages(found)) for level, found in by_level.items()}
    phases = {level: found.timeline.by_phase() for level, found in by_level.items()}
    assert exposed["parameters"] > exposed["gradients"] > exposed["optimizer"] == pytest.approx(0.0)
    assert "gather" not in phases["parameters"]
    assert phases["gradients"]["gather"].communication > 0
    assert "reduce" not in phases["gradients"]
    assert phases["optimizer"]["reduce"].communication > 0
    state = {level: found.pipeline.groups[0].resident for level, found in by_level.items() if found.pipeline}
    assert state["parameters"] < state["gradients"] < state["optimizer"]


def _stages(found: Prediction) -> Any:
    assert found.pipeline is not None
    return found.pipeline.stages


def test_recomputation_takes_time_and_saves_memory() -> None:
    axes, pipeline = {"pipeline": 2, "tensor": 2}, {"schedule": "1f1b", "layers": [2, 2]}
    kept = _predicted(axes, pipeline=pipeline)
    again = _predicted(axes, pipeline=pipeline, memory={"recompute": "layer"})
    assert _stages(again)[0].saved < 0.3 * _stages(kept)[0].saved
    assert again.timeline.peak.bytes < kept.timeline.peak.bytes
    assert 1.15 < again.timeline.step / kept.timeline.step < 1.5


def test_each_layer_of_a_stage_that_is_recomputed_saves_memory() -> None:
    layers = [1, 3]
    axes, pipeline = {"pipeline": 2, "tensor": 2}, {"schedule": "1f1b", "layers": layers}
    found = [_predicted(axes, pipeline=pipeline)]
    for count in range(1, max(layers) + 1):
        memory = {"recompute": "layer", "recompute_layers": count}
        found.append(_predicted(axes, pipeline=pipeline, memory=memory))
    last = [_stages(one)[-1].saved for one in found]
    assert last == sorted(last, reverse=True) and len(set(last)) == len(last)
    peaks = [one.timeline.peak.bytes for one in found]
    assert peaks == sorted(peaks, reverse=True)
    steps = [one.timeline.step for one in found]
    assert steps == sorted(steps)
    every = _predicted(axes, pipeline=pipeline, memory={"recompute": "layer"})
    assert (every.timeline.step, every.timeline.peak.bytes) == (steps[-1], peaks[-1])
    # A stage with fewer layers recomputes all of them.
    first = [_stages(one)[0].saved for one in found]
    assert len(set(first)) == layers[0] + 1


def test_stages_whose_recomputed_layers_differ_are_captured_apart() -> None:
    pipeline = {"layers": [1, 1, 1, 1], "schedule": "1f1b"}
    memory = {"recompute": "layer", "recompute_layers": [0, 1, 0, 0]}
    saved = [one.saved for one in _stages(_predicted({"pipeline": 4}, pipeline=pipeline, memory=memory))]
    assert saved[1] < 0.2 * saved[2]


@pytest.mark.parametrize("axes", [{"pipeline": 2}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "shard": 2}])
def test_a_tied_embedding_is_summed_over_the_groups_that_use_it(axes: dict[str, int]) -> None:
    apart = _predicted({"pipeline": 2, "tensor": 2})
    tied = _predicted(axes, "gpt2", pipeline={"layers": [2, 2]}, memory={"shard": "gradients"})
    assert "reduce" not in apart.timeline.by_phase()
    assert tied.timeline.by_phase()["reduce"].communication > 0
    # Hidden states cross in bfloat16, and no weights.
    assert _stages(tied)[0].sent == pytest.approx(2048 * 4096 * 2, rel=0.01)


def _sums(found: Prediction, rank: int) -> list[Op]:
    """The sums of gradients that several stages have parts of, which a rank makes at the end of its step."""
    trace = found.timeline.trace
    return [op for op in trace.ops[trace.classes[rank]] if op.name.startswith("sum of ")]


def test_weights_of_stages_that_are_alike_are_not_summed() -> None:
    axes = {"pipeline": 4, "shard": 2}
    found = _predicted(axes, pipeline={"layers": [1, 1, 1, 1], "schedule": "1f1b"})
    assert not any(_sums(found, rank) for rank in range(8))


def test_a_tied_embedding_of_two_stages_of_one_rank_is_summed_on_it() -> None:
    stages = {"schedule": "zb-v", "layers": [1, 1, 1, 1]}
    # Weights are reduced in each micro-batch, or once a step.
    for shard, parts in (("parameters", 2), ("optimizer", 1)):
        found = _predicted({"pipeline": 2, "shard": 2}, "gpt2", pipeline=stages, memory={"shard": shard})
        (one,) = _sums(found, 0)
        assert one.collective is None and not _sums(found, 2)
        (held,) = one.allocates
        assert one.work is not None and (one.work.read, one.work.written) == (2 * held.bytes, held.bytes)
        assert held.bytes == 32000 * 4096 // parts * 4


def test_auto_is_no_longer_than_1f1b() -> None:
    axes = {"pipeline": 4, "tensor": 2}
    auto = _predicted(axes)
    named = _predicted(axes, pipeline={"schedule": "1f1b"})
    assert auto.timeline.step <= named.timeline.step * (1 + 1e-9)


SMALL = (
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=4",
    "data.sequence=64",
    "train.micro_batch=1",
)
CUT = ("strategy.axes={pipeline: 2, shard: 2}", "strategy.sequence=false", "launch.workers=4")


def _run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(command, ["simulate", str(QUICKSTART), *SMALL, *CUT, *arguments])
    return found.exit_code, found.output if found.exception is None else str(found.exception)


def test_the_command_tells_stages_and_bubbles_and_draws_them(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    code, said = _run("--cluster", "h100x4", "--trace", str(trace), "--html", str(page))
    assert code == 0, said
    assert said.startswith("simulated: a step takes ")
    assert "predicted step of 4 ranks in 2 classes on h100x4" in said
    assert "predicted: device groups of the pipeline" in said
    assert "simulated bubble" in said
    assert "slowest is group" in said
    assert json.loads(trace.read_text())["traceEvents"]
    text = page.read_text()
    drawing = text[text.index("<svg role") : text.index("</svg>") + 6]
    assert ElementTree.fromstring(drawing).findall(".//rect")
    assert "device groups of the pipeline" in text


def test_json_has_the_pipeline() -> None:
    code, said = _run("--cluster", "h100", "--json")
    assert code == 0, said
    found = json.loads(said)
    assert found["axes"]["pipeline"] == 2
    pipeline = found["pipeline"]
    assert sum(pipeline["layers"]) == 4
    assert pipeline["bubble"]["bubble"] == pytest.approx(
        sum(pipeline["bubble"][cause] for cause in ("fill", "waiting", "drain"))
    )
    assert max(one["peak"] for one in pipeline["groups"]) == found["memory"]["peak"]
    assert found["step"] == pytest.approx(
        found["computing"] + found["exposed"] + sum(found["waiting"].values())
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("strategy.pipeline.virtual=4",),
            "= 8 stages, and the model has 4 layers .* at most 6 stages; make axes",
        ),
        (
            ("strategy.pipeline.schedule=zb-h2", "train.batch=4"),
            "2 micro-batches on 2 ranks are too few.*smaller train.micro_batch",
        ),
        (("strategy.pipeline.layers=[2,1]",), "places 3 layers, and the model has 4"),
        (
            ("strategy.pipeline.layers=[4]",),
            "has 1 stages, and axes.pipeline · pipeline.virtual = 2; give 2 counts",
        ),
        (
            ("strategy.pipeline.virtual=2", "strategy.pipeline.layers=[2,0,0,2]"),
            "leaves stage 1 without layers; only the first and the last stage",
        ),
        (
            ("strategy.memory={recompute: layer, recompute_layers: 4}",),
            "recompute_layers: 4 is too large: the largest stage has . layers",
        ),
    ],
)
def test_what_cannot_be_is_told_in_a_line(arguments: tuple[str, ...], told: str) -> None:
    run = config.load(QUICKSTART, (*SMALL, *CUT, *arguments))
    with pytest.raises(HyperParallelError, match=told):
        predict_run(run, Cluster.named("h100"))


def test_an_unknown_schedule_is_told_with_the_nearest() -> None:
    code, said = _run("--cluster", "h100", "strategy.pipeline.schedule=1f2b")
    assert code != 0
    assert "did you mean '1f1b'" in said
    with pytest.raises(StrategyError, match="places 5 layers, and the model has 4"):
        _predicted({"pipeline": 2, "tensor": 2}, pipeline={"layers": [2, 3]})


def test_forward_passes_beside_backward_passes_hide_collectives_of_the_stages() -> None:
    axes = {"pipeline": 2, "tensor": 4}
    apart = _predicted(axes, sequence=True, pipeline={"schedule": "1f1b"})
    together = _predicted(
        axes, sequence=True, pipeline={"schedule": "1f1b", "overlap_forward_backward": True}
    )
    assert apart.pipeline is not None and together.pipeline is not None
    assert together.pipeline.pairs == 13 + 15 and apart.pipeline.pairs == 0
    assert "28 forward passes beside backward passes" in together.pipeline.line()
    exposed = max(one.exposed for one in apart.pipeline.stages)
    saved = apart.timeline.step - together.timeline.step
    # At most all that is exposed, of each micro-batch.
    assert 0.2 * 16 * exposed < saved < 16 * exposed
    # Twice as many micro-batches in flight on the first rank.
    assert [one.in_flight for one in together.pipeline.groups] == [4, 2]


def test_a_task_is_merged_at_the_price_at_which_it_is_simulated() -> None:
    run = _config({"pipeline": 2, "tensor": 4}, sequence=True)
    cluster = cluster_of("h100", run)
    found = capture_stages(model_of(run, []), run, flops_cost, lambda said: None, [])
    stages = found.partition.stages
    ranks = tuple(range(4))
    costs = [node_seconds(stage.step, cluster, ranks, None) for stage in stages]
    merged = merged_pairs(stages, costs, [(0, 1), (1, 1)])
    prices = [price_stage(found, stage, cluster, ranks) for stage in stages]
    for (ahead, back), one in merged.items():
        assert one.apart == pytest.approx(prices[ahead].forward + prices[back].input, rel=0.02)


def test_pairs_that_hide_nothing_are_not_made_and_that_is_said() -> None:
    found = _predicted(
        {"pipeline": 2, "replicate": 2}, pipeline={"schedule": "1f1b", "overlap_forward_backward": True}
    )
    assert found.pipeline is not None and found.pipeline.pairs == 0
    assert any(note.startswith("pipeline.overlap_forward_backward has no effect") for note in found.notes)
