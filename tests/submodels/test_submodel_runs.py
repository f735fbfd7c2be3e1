"""Run files with `strategy.submodels`: the losses of one device, and a resume with other devices."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig

from harness.ranks import run_ranks
from harness.vision_folders import loss_and_gradients, make_place, run_file
from hyper_parallel.checkpoint import export, export_adapter
from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.shard import parallelize
from hyper_parallel.step.build import build, unsharded
from hyper_parallel.step.multimodal import model_class
from hyper_parallel.strategy import Strategy
from train.tiny_run import metrics, run

VISION = {"llava": ["model.vision_tower", "model.multi_modal_projector"], "qwen2.5-vl": ["model.visual"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("submodels"), counts=(1, 0, 1, 2, 0, 1, 1, 0))


def file_of(place: Path, model: str, name: str, steps: int, **submodels: Any) -> dict[str, Any]:
    """Without submodels it is a run on one device."""
    strategy: dict[str, Any] = {"version": 1}
    train: dict[str, Any] = {"engine": "eager", "batch": 4, "micro_batch": 1, "steps": steps}
    if submodels:
        vision = {"modules": VISION[model], **submodels.pop("vision")}
        strategy["submodels"] = {"vision": vision, **submodels}
        train |= {"engine": "graph", "micro_batch": None}
    train["eval"] = {"every": 2, "batches": 3}
    held_out = place / "held-out.jsonl"
    # They end before the second batch does.
    rows = (place / "image.jsonl").read_text().splitlines()[:6]
    held_out.write_text("".join(f"{row}\n" for row in rows))
    data = {"eval": str(held_out)}
    return run_file(place, model, name, train=train, data=data, strategy=strategy)


def _runs(rank: int, world: int, files: list[dict[str, Any]]) -> list[Any]:
    found = []
    for file in files:
        config = RunConfig.model_validate(file)
        summary = run(config)
        torch.distributed.barrier()
        found.append(
            ({name: metrics(config, name) for name in ("loss", "grad_norm", "loss_tokens")}, summary)
        )
    return found


def check(found: dict[str, dict[int, float]], one: dict[str, dict[int, float]], steps: range) -> None:
    for name, values in found.items():
        assert values.keys() >= set(steps)
        for step in steps:
            assert values[step] == pytest.approx(one[name][step], rel=5e-4), (name, step)


@pytest.mark.parametrize("model", list(VISION))
def test_a_run_with_submodels_has_the_losses_of_one_device(place: Path, model: str) -> None:
    config = RunConfig.model_validate(file_of(place, model, f"{model}-one", 4))
    run(config)
    held_out = metrics(config, "eval_loss")
    one = {name: metrics(config, name) for name in ("loss", "grad_norm", "loss_tokens")}
    assert one["loss"][4] < one["loss"][1] - 0.3
    first = file_of(
        place, model, f"{model}-parts", 2, vision={"devices": 1}, language={"axes": {"tensor": 2}}
    )
    [(found, _)] = run_ranks(_runs, 3, [first], timeout=240.0)[0]
    check(found, one, range(1, 3))
    found = {"eval_loss": metrics(RunConfig.model_validate(first), "eval_loss")}
    check(found, {"eval_loss": held_out}, range(0, 3, 2))
    # The same run goes on with a pipeline in the place of the tensor axis, and on one device.
    language = {"axes": {"pipeline": 2}}
    rest = file_of(place, model, f"{model}-parts", 3, vision={"devices": 1}, language=language)
    [(found, summary)] = run_ranks(_runs, 3, [rest], timeout=240.0)[0]
    assert summary.resumed_from == 2
    check(found, one, range(1, 4))
    config = RunConfig.model_validate(file_of(place, model, f"{model}-parts", 4))
    assert run(config).resumed_from == 3
    check({name: metrics(config, name) for name in one}, one, range(1, 5))


@pytest.mark.parametrize("model", list(VISION))
def test_adapters_are_those_of_one_device_and_are_exported(place: Path, model: str) -> None:
    base = place / f"{model}-base"
    if not base.exists():
        torch.manual_seed(1)
        kind = AutoConfig.from_pretrained(place / model)
        model_class(kind)(kind).save_pretrained(base)
        for file in (place / model).iterdir():
            if not (base / file.name).exists():
                shutil.copy(file, base)
    parts = {"vision": {"devices": 1}, "language": {"axes": {"tensor": 2}}}

    def adapted(name: str, steps: int, **submodels: Any) -> dict[str, Any]:
        file = file_of(place, model, name, steps, **submodels)
        del file["data"]["tokenizer"]
        return {**file, "model": {"path": str(base), "adapter": {"rank": 3}}}

    config = RunConfig.model_validate(adapted(f"{model}-lora-one", 4))
    run(config)
    one = {name: metrics(config, name) for name in ("loss", "grad_norm", "eval_loss")}
    assert one["eval_loss"][4] < one["eval_loss"][0] - 0.05
    [(found, summary)] = run_ranks(_runs, 3, [adapted(f"{model}-lora", 3, **parts)], timeout=240.0)[0]
    del found["loss_tokens"]
    check(found, one, range(1, 4))
    folder = export_adapter(summary.checkpoint, place / f"{model}-adapter")
    core = model_class(AutoConfig.from_pretrained(base))
    peft = PeftModel.from_pretrained(core.from_pretrained(base), folder, is_trainable=True)
    merged = core.from_pretrained(export(summary.checkpoint, place / f"{model}-merged"))
    _, data = unsharded(config)
    rows = [data.eval.batch([row]) for row in range(len(data.eval))]
    for written in (peft, merged):
        loss, _ = loss_and_gradients(written.eval(), rows)
        assert loss == pytest.approx(summary.eval_after, rel=1e-5)
    # The same run goes on without submodels.
    config = RunConfig.model_validate(adapted(f"{model}-lora", 4))
    assert run(config).resumed_from == 3
    check({name: metrics(config, name) for name in ("loss", "grad_norm")}, one, range(1, 5))


def test_what_a_run_with_submodels_cannot_do_is_refused(place: Path) -> None:
    parts = {"vision": {"devices": 1}, "language": {"axes": {"tensor": 2}}}
    file = file_of(place, "llava", "refused", 1, **parts)

    def refusal(**sections: Any) -> str:
        merged = {key: {**file.get(key, {}), **value} for key, value in sections.items()}
        with pytest.raises(ConfigError) as caught:
            build(from_dict({**file, **merged}))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "set train.engine to graph" in refusal(train={"engine": "eager"})
    assert "memory.device does not work" in refusal(
        strategy={**file["strategy"], "memory": {"device": "1GiB", "host": "1GiB"}}
    )
    assert "are those of each of the 'submodels'" in refusal(
        strategy={**file["strategy"], "axes": {"shard": 2}}
    )
    assert "'launch.workers' is 2" in refusal(launch={"workers": 2})
    copies = {**file["strategy"]["submodels"], "vision": {"modules": VISION["llava"], "devices": 2}}
    assert "a micro-batch of 1 rows (train.micro_batch) must be a multiple of 2" in refusal(
        train={"micro_batch": 1}, strategy={"submodels": copies}
    )
    with pytest.raises(StrategyError, match=r"hp\.parallelize spreads a model as a whole"):
        parallelize(torch.nn.Linear(2, 2), Strategy.model_validate(file["strategy"]))
