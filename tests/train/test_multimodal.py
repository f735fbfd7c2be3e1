"""Training on rows of images and text: every strategy that is accepted has the gradients of one device, though ranks
have different numbers of images, or none."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor

from harness.forked_command import run_command
from harness.ranks import run_ranks
from harness.vision_folders import MODELS, loss_and_gradients, make_place, run_file
from hyper_parallel.checkpoint import export
from hyper_parallel.cli.main import main
from hyper_parallel.compat import backend
from hyper_parallel.config import RunConfig, from_dict, load
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto import entry
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import build, fill, unsharded
from hyper_parallel.step.multimodal import model_class
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import accumulate
from train.tiny_run import metrics, run

STRATEGIES: dict[str, dict[str, Any]] = {
    "replicate 2": {"axes": {"replicate": 2}},
    "shard 2": {"axes": {"shard": 2}},
    "tensor 2": {"axes": {"tensor": 2}},
    "shard 2, recompute": {"axes": {"shard": 2}, "memory": {"recompute": "layer"}},
    "shard 2, optimizer": {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}},
}
ROWS = 8
"""In a step: as many as there are, so that every image and every row without one counts."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("images"))


def config_of(
    place: Path,
    model: str,
    strategy: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    **train: Any,
) -> RunConfig:
    strategy = {"version": 1, **(strategy or {})}
    file = run_file(place, model, train={"batch": ROWS, "micro_batch": 1, **train}, strategy=strategy)
    file["model"]["adapter"] = adapter
    return RunConfig.model_validate(file)


def draw_second_maps(handle: ShardedModel) -> None:
    """Give every adapter's B values in place of zeros, so that every gradient says something."""
    draws = torch.Generator().manual_seed(5)
    for one in sorted(handle.parameters(), key=lambda one: one.name):
        if ".lora_B." in one.name:
            whole = 0.1 * torch.randn(one.layout.shape, generator=draws)
            with torch.no_grad():
                one.local.copy_(handle.cut(whole, one.layout).view_as(one.local))


def step_of(
    rank: int,
    world: int,
    place: Path,
    cases: list[tuple[str, dict[str, Any]]],
    adapter: dict[str, Any] | None = None,
) -> list[Any]:
    """Loss, whole gradients and the images of each micro-batch of this rank, of one step of each case."""
    found = []
    for model, strategy in cases:
        config = config_of(place, model, strategy, adapter)
        built = build(config)
        fill(built, config, torch.device("cpu"))
        draw_second_maps(sharded(built.model))
        handle, recipe = sharded(built.model), Recipe.of(config, built.model)
        text = built.text
        batches = Batches(text.train, text.order, ROWS, config.micro_batch, handle, torch.device("cpu"))
        batch = batches.load(0, 0)
        loss = accumulate(built.model, handle, batch, recipe.tokens(batch), config.seed)
        loss = handle.all_reduce(loss, ("replicate", "shard"))
        gradients = {
            p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None
        }
        images = [any(x.is_floating_point() for x in one.extra.values()) for one in batch.micro]
        found.append((float(loss), {k: v.clone() for k, v in gradients.items()}, images))
    return found


def plain_step(
    place: Path, model: str, adapter: dict[str, Any] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """The same by the unmodified model, or by peft's, a row at a time, without padding."""
    config = config_of(place, model, adapter=adapter)
    built = build(config)
    fill(built, config, torch.device("cpu"))
    draw_second_maps(sharded(built.model))
    plain = model_class(built.model.config)(built.model.config)
    if adapter is not None:
        rank, targets = adapter["rank"], adapter["targets"]
        plain = get_peft_model(plain, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    plain.load_state_dict(built.model.state_dict())
    return loss_and_gradients(plain, rows_of(place, model))


def rows_of(place: Path, model: str) -> list[dict[str, Tensor]]:
    """Each row, as it is without others."""
    _, data = unsharded(config_of(place, model))
    return [data.train.batch([row]) for row in range(len(data.train))]


@pytest.mark.parametrize("model", list(MODELS))
def test_every_strategy_has_the_gradients_of_one_device(place: Path, model: str) -> None:
    loss, expected = plain_step(place, model)
    assert any(part in name for name in expected for part in ("vision", "visual", "audio"))
    by_rank = run_ranks(step_of, 2, place, [(model, strategy) for strategy in STRATEGIES.values()])
    for at, name in enumerate(STRATEGIES):
        for found, gradients, _ in (rank[at] for rank in by_rank):
            assert found == pytest.approx(loss, rel=1e-5), name
            for parameter, wanted in expected.items():
                scale = float(wanted.abs().max()) + 1e-4
                error = float((gradients[parameter] - wanted).abs().max()) / scale
                assert error < 1e-5, f"{name}: {parameter} differs by {error:.1e}"
    # Somewhere one rank has an image and the other none, and somewhere both have none.
    beside = list(zip(*(rank[0][2] for rank in by_rank), strict=True))
    assert any(left != right for left, right in beside), beside


@pytest.mark.parametrize("model", list(MODELS))
def test_adapters_have_the_gradients_of_one_device(place: Path, model: str) -> None:
    adapter = {"rank": 3, "targets": "all-linear"}
    loss, expected = plain_step(place, model, adapter)
    assert all(".lora_" in name for name in expected)
    assert any(part in name for name in expected for part in ("vision", "visual", "audio"))
    chosen = ("replicate 2", "shard 2, recompute", "tensor 2")
    cases = [(model, STRATEGIES[name]) for name in chosen]
    for rank in run_ranks(step_of, 2, place, cases, adapter):
        for name, (found, gradients, _) in zip(chosen, rank, strict=True):
            assert found == pytest.approx(loss, rel=1e-5), name
            for parameter, wanted in expected.items():
                scale = float(wanted.abs().max()) + 1e-4
                error = float((gradients[parameter] - wanted).abs().max()) / scale
                assert error < 1e-5, f"{name}: {parameter} differs by {error:.1e}"


def train(rank: int, world: int, place: Path, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of these files, one after the other: steps to losses, held-out losses and positions, and the summary."""
    found = []
    for file in files:
        config = RunConfig.model_validate(file)
        summary = run(config)
        if world > 1:
            dist.barrier()
        names = ("loss", "eval_loss", "tokens", "grad_norm")
        found.append({**{name: metrics(config, name) for name in names}, "summary": summary})
    return found


def trained(place: Path, model: str, name: str, strategy: dict[str, Any], **train: Any) -> dict[str, Any]:
    settings = {"batch": 4, "micro_batch": 1, "eval": {"every": 2, "batches": 2}, **train}
    data = dict(run_file(place, model)["data"])
    data["eval"] = data["train"]
    return run_file(place, model, name, train=settings, data=data, strategy={"version": 1, **strategy})


def test_a_run_is_the_same_on_one_device_and_on_two_and_goes_on_elsewhere(place: Path) -> None:
    model = "qwen2.5-vl"
    [one] = train(0, 1, place, [trained(place, model, "one", {}, steps=4)])
    assert one["eval_loss"].keys() == {0, 2, 4}
    assert one["eval_loss"][4] < one["eval_loss"][0] - 0.3
    # Two steps on two data ranks, and two more of the same run on one.
    first = trained(place, model, "two", {"axes": {"shard": 2}}, steps=2)
    [[two], _] = run_ranks(train, 2, place, [first])
    [rest] = train(0, 1, place, [trained(place, model, "two", {}, steps=4)])
    assert rest["summary"].resumed_from == 2
    for name in ("loss", "eval_loss", "grad_norm"):
        for step, value in {**two[name], **rest[name]}.items():
            assert value == pytest.approx(one[name][step], rel=2e-4), (name, step)
    # Positions are those that are computed: rows beside one another have as many as the longest of them.
    assert 0 < one["tokens"][1] < two["tokens"][1] <= 4 * 256
    assert two["tokens"].keys() == {1, 2}


@pytest.mark.usefixtures("half_attention")
@pytest.mark.parametrize("model", list(MODELS))
def test_an_exported_model_has_its_processor_and_is_trained_on(place: Path, model: str) -> None:
    from transformers import AutoConfig

    [found] = train(0, 1, place, [trained(place, model, f"{model}-exported", {}, steps=1)])
    folder = export(found["summary"].checkpoint, place / f"{model}-export")
    for name in (
        "preprocessor_config.json",
        "processor_config.json",
        "chat_template.jinja",
        "tokenizer.json",
    ):
        assert (folder / name).read_bytes() == (place / model / name).read_bytes()
    # Transformers computes the held-out loss of the run from the folder, and so does a run that begins with it.
    loss, _ = loss_and_gradients(
        model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder), rows_of(place, model)
    )
    assert loss == pytest.approx(found["eval_loss"][1], rel=1e-5)
    for compute, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2)):
        file = trained(place, model, f"{model}-{compute}", {"precision": {"compute": compute}}, steps=1)
        file["model"] = {"path": str(folder)}
        del file["data"]["tokenizer"]
        [again] = train(0, 1, place, [file])
        assert again["eval_loss"][0] == pytest.approx(loss, rel=tolerance)


REFUSED = [
    (
        {"axes": {"pipeline": 2}},
        {"engine": "graph"},
        "strategy.axes.pipeline does not work with rows of images",
    ),
    ({"axes": {"context": 2}}, {}, "strategy.axes.context does not work with rows of images"),
    ({"axes": {"tensor_y": 2}}, {}, "strategy.axes.tensor_y does not work with rows of images"),
    ({"axes": {"tensor": 2}, "sequence": True}, {}, "strategy.sequence is not proved with rows of images"),
    (
        {"memory": {"device": "1GiB", "host": "1GiB"}},
        {"engine": "graph"},
        "strategy.memory.device does not work with rows of images",
    ),
    ({}, {"engine": "graph", "compile": True}, "train.compile: rows with images or sound have other shapes"),
    ({}, {"engine": "graph", "profile": {}}, "train.profile: rows with images or sound have other shapes"),
    (
        {"axes": {"shard": 2}, "precision": {"compute": "bfloat16", "modules": {"model.visual*": "float32"}}},
        {},
        "strategy.precision.modules: model.visual has another dtype than the model",
    ),
]


@pytest.mark.parametrize(("strategy", "train", "expected"), REFUSED)
def test_what_does_not_work_is_refused(
    place: Path, strategy: dict[str, Any], train: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(config_of(place, "qwen2.5-vl", strategy, **train))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_models_placeholders_are_the_processors(place: Path) -> None:
    file = run_file(place, "qwen2.5-vl")
    file["model"]["config"]["image_token_id"] -= 1
    with pytest.raises(
        ConfigError, match=r"its config has image_token_id \d+, and the processor of .* has \d+"
    ):
        build(RunConfig.model_validate(file))
    del file["model"]["config"]["image_token_id"]
    found = build(RunConfig.model_validate(file)).model.config
    assert (
        found.image_token_id == json.loads((place / "qwen2.5-vl/config.json").read_text())["image_token_id"]
    )


def test_the_graph_engine_says_in_one_line_that_steps_run_eagerly(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert build(config_of(place, "llava", engine="graph")).graphs is None
    assert "rows with images or sound have other shapes in each step, and are not captured" in caplog.text


def test_a_model_of_images_needs_rows_with_some(place: Path) -> None:
    (place / "text.jsonl").write_text(json.dumps({"text": "no image here, at all " * 30}) + "\n")
    file = run_file(place, "llava")
    file["data"] = {**file["data"], "train": str(place / "text.jsonl"), "sequence": 8}
    with pytest.raises(ConfigError, match="llava is trained on rows with images or sound, and no row"):
        build(RunConfig.model_validate(file))


def test_a_lost_image_ends_a_run_on_several_workers_in_one_line(tmp_path: Path) -> None:
    """It is there when the run begins, and gone when one rank wants it."""
    make_place(tmp_path)
    file = trained(tmp_path, "llava", "lost", {"axes": {"replicate": 2}}, steps=3)
    del file["data"]["eval"]
    file["train"]["eval"] = {"every": 0}
    file["launch"] = {"workers": 2, "device": "cpu"}
    (tmp_path / "run.yaml").write_text(json.dumps(file))
    # The index is cached; the files are looked at again, so that one is damaged and not removed.
    config = RunConfig.model_validate(file)
    build(config.model_copy(update={"strategy": config.strategy.on_one_device}))
    image = tmp_path / "images/0.png"
    size, changed = image.stat().st_size, image.stat().st_mtime_ns
    image.write_bytes(b"\0" * size)
    os.utime(image, ns=(changed, changed))
    ended = run_command("train", "run.yaml", folder=tmp_path)
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("hyper-parallel: error:")]
    assert len(lines) == 1 and "images/0.png cannot be read as an image" in lines[0], ended.stderr
    assert "image.jsonl, line " in lines[0] and "Traceback" not in ended.stderr


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "examples"))
    script = runpy.run_path(str(root / "examples/draw_images.py"))
    script["write_model"](tmp_path / "runs/images/model")
    for name, rows in (("train", 32), ("eval", 16)):
        script["write_rows"](tmp_path / "runs/images", name, rows, seed=0)
    monkeypatch.chdir(tmp_path)
    config = load(root / "examples/images.yaml", ["train.steps=8", "launch.workers=1", "train.eval.every=0"])
    [found] = train(0, 1, tmp_path, [config.model_dump(mode="json")])
    assert found["eval_loss"][8] < found["eval_loss"][0] - 0.5


@pytest.mark.parametrize("command", ["verify", "simulate"])
def test_commands_that_know_text_alone_refuse_such_runs(
    place: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_file(place, "llava", strategy={"version": 1, "axes": {"shard": 2}})))
    arguments = ["--cluster", "h100x8", "--ranks", "2"] if command == "simulate" else []
    with pytest.raises(SystemExit) as ended:
        main([command, str(path), *arguments])
    assert ended.value.code == 2
    expected = {"verify": "has images or sound; give it text", "simulate": "does not know models of images"}
    assert expected[command] in capsys.readouterr().err


def test_the_planner_refuses_models_of_images(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "broadcast_text", lambda key, text: text)
    file = run_file(place, "llava", strategy="auto", launch={"workers": 2})
    worker = Worker(0, 0, 1, 1, torch.device("cpu"), backend("cpu"))
    with pytest.raises(
        ConfigError, match=r"the planner does not know models of images or sound yet \(llava\)"
    ):
        entry.together(from_dict(file), worker)
