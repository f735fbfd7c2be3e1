"""What a run file cannot have of a pipeline is one line with its mend, before any worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.cli.main import main
from hyper_parallel.config import from_dict, load
from hyper_parallel.launch.external_launcher import run_joined
from hyper_parallel.launch.rendezvous import WorkerPlace

RUN = """\
version: 1
out: runs/x
model: {config: {model_type: llama, num_hidden_layers: 4, max_position_embeddings: 64}}
data: {train: text.txt, sequence: 32}
train: {batch: 8, micro_batch: 1}
strategy: {axes: {pipeline: 2}, pipeline: {schedule: 1f1b}}
"""
SMALLER = "make 'train.batch' larger, 'train.micro_batch' smaller, or axes.pipeline smaller"


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line that the command writes, without its beginning."""
    with pytest.raises(SystemExit) as ended:
        main(("train", "run.yaml", *overrides))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("hyper-parallel: error: ")
    assert not Path("runs").exists()
    return said.removeprefix("hyper-parallel: error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.micro_batch=8"], "run.yaml: 'train.batch' (8) is 1 micro-batch of 8 rows for each data rank, and "
         f"a pipeline of 2 needs at least 2; {SMALLER}"),
        (["strategy.pipeline.schedule=dualpipev", "train.micro_batch=4"], "pipeline: schedule dualpipev: 2 "
         "micro-batches on 2 ranks are too few; it needs at least 4. Raise their number (train.batch larger, or "
         "train.micro_batch smaller), or choose 1f1b, which takes any number"),
        (["strategy.pipeline.schedule=interleaved", "train.batch=7"], "pipeline: schedule interleaved-1f1b: 7 "
         "micro-batches are not a multiple of the 2 ranks; take 8 micro-batches (by train.batch and "
         "train.micro_batch), or another schedule"),
        (["strategy.axes.pipeline=8"], "pipeline: 8 stages (axes.pipeline 8 · 1 on each rank), and the model has 4 "
         "layers; make axes.pipeline or pipeline.virtual smaller, so that there are at most 4 stages"),
        (["strategy.pipeline.schedule=interleaved", "strategy.pipeline.virtual=4"], "pipeline: 8 stages (axes.pipeline "
         "2 · 4 on each rank), and the model has 4 layers; make axes.pipeline or pipeline.virtual smaller, so that "
         "there are at most 4 stages"),
        (["strategy.pipeline.layers=[1,1,2]"], "pipeline.layers has 3 numbers, and there are 2 stages (axes.pipeline 2 "
         "· 1 on each rank); give one number for each stage, or leave pipeline.layers out"),
        (["strategy.pipeline.layers=[1,2]"], "pipeline.layers: [1, 2] places 3 layers, and the model has 4; change the "
         "counts to sum to 4, or leave pipeline.layers out"),
        (["strategy.pipeline={schedule: zb-v, layers: [2,0,1,1]}"], "pipeline.layers: [2, 0, 1, 1] leaves stage 1 "
         "without layers, and nothing else is there to compute; give each stage but the first and the last at least "
         "one"),
        (["strategy.memory={recompute: layer, recompute_layers: [1,1,1]}"], "memory.recompute_layers has 3 numbers, "
         "and there are 2 stages; give one number for each stage, or a single number for all of them"),
        (["strategy.memory={recompute: layer, recompute_layers: 4}", "strategy.pipeline.layers=[1,3]"],
         "memory.recompute_layers: 4 is too large: the largest stage has 3 layers; give at most 3, or leave "
         "recompute_layers out to recompute every layer"),
        (["strategy={axes: {shard: 2}, memory: {recompute: layer, recompute_layers: 5}}"],
         "memory.recompute_layers: 5 is too large: the model has 4 layers; give at most 4, or leave recompute_layers "
         "out to recompute every layer"),
        (["strategy.pipeline.schedule=1f2b"], "override strategy.pipeline.schedule=1f2b: strategy.pipeline.schedule: "
         "schedule '1f2b' is not known; did you mean '1f1b'?; there are gpipe, 1f1b, 1f1b-split, interleaved-1f1b, "
         "zb-h1, zb-h2, zb-v, v-half, v-min, dualpipev, auto"),
        (["strategy.pipeline.virtual=2"], "pipeline: schedule 1f1b has 1 stage on each rank, and 2 were given; choose "
         "interleaved-1f1b for more"),
        (["strategy.pipeline={schedule: gpipe, overlap_forward_backward: true}"], "pipeline.overlap_forward_backward: "
         "gpipe has no forward pass beside a backward pass of another micro-batch on every rank; set pipeline.schedule "
         "to 1f1b, interleaved-1f1b, dualpipev or auto, or leave overlap_forward_backward out"),
        (["strategy.pipeline={schedule: zb-v, virtual: 3}"], "pipeline: schedule zb-v has 2 stages on each rank, and 3 "
         "were given; cut the model into 4 stages"),
        (["train.engine=eager"], "run.yaml: 'axes.pipeline': stages are cut from the captured step; set train.engine "
         "to graph, or leave the pipeline out"),
        (["train.profile={cluster: h100}"], "run.yaml: 'train.profile.cluster' compares a step that is one graph with "
         "its prediction, and parts of a model on several ranks are traced; leave cluster out, and see hyper-parallel "
         "simulate for the prediction"),
        (["strategy.axes={pipeline: 2, tensor: 2}", "launch.workers=2"], "run.yaml: the strategy's axes multiply to 4 "
         "(pipeline 2 · tensor_x 2), but 'launch.workers' is 2; make them equal, leave 'launch.workers' out, or set it "
         "to 1 for the one-device run"),
        (["train.batch=7", "train.micro_batch=2"], "override train.micro_batch=2: train: 'micro_batch' (2) must "
         "divide 'batch' (7)"),
        (["strategy.axes={shard: 2, pipeline: 2}", "train.micro_batch=8"], "run.yaml: 'train.micro_batch' (8) must "
         "divide a worker's share of the batch (8 / 2 = 4)"),
        (["strategy.axes={shard: 2, pipeline: 2}", "train.batch=7"], "run.yaml: 'train.batch' (7) must be a multiple "
         "of replicate · shard (2), so that every worker gets as many sequences"),
        (["strategy.axes={tensor: 2}"], "override strategy.axes={tensor: 2}: strategy: section 'pipeline' says how "
         "the stages of a pipeline run, and axes.pipeline is 1; set axes.pipeline to the number of device groups, or "
         "leave the section out"),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_be_is_one_line_before_any_worker_starts(
    run_file: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], told: str
) -> None:
    assert refused(capsys, *overrides) == told


def test_the_layers_of_a_models_folder_count_too(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = run_file.parent / "hub"
    hub.mkdir()
    (hub / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    (hub / "tokenizer.json").touch()
    said = refused(capsys, "model={path: hub}", "strategy.axes.pipeline=6")
    assert said.startswith(
        "pipeline: 6 stages (axes.pipeline 6 · 1 on each rank), and the model has 2 layers"
    )


@pytest.mark.parametrize("overrides", [[], ["train.engine=eager"]])
def test_the_one_device_run_has_no_pipeline_to_refuse(run_file: Path, overrides: list[str]) -> None:
    config = load(run_file, ["launch.workers=1", "train.micro_batch=null", *overrides])
    assert config.effective_strategy.axes.pipeline == 1 and config.micro_batches == 1


def test_the_default_sample_is_no_wish(run_file: Path) -> None:
    written = load(run_file).model_dump(mode="json")
    assert written["train"]["sample"]["tokens"] > 0
    assert from_dict(written).effective_strategy.axes.pipeline == 2


def test_a_launchers_number_of_workers_is_told_beside_the_product(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(run_file, ["strategy.axes={pipeline: 2, shard: 2}"])
    place = WorkerPlace("torchrun", 0, 3, 0, 3, "localhost", 1)
    assert run_joined(config, "none:none", place) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: torchrun started 3 workers, but the strategy's axes multiply to 4 (pipeline 2 · shard "
        "2); start 4, or change the axes\n"
    )
