"""Costs of encoders and language models from captured graphs: which modules are encoders, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.submodel_models import MODELS
from harness.vision_folders import make_place, run_file
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import from_dict
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.stated_rows import StatedRows, stated_run
from hyper_parallel.estimate.submodel_capture import LANGUAGE, captured_parts, inputs_of_modules
from hyper_parallel.estimate.submodel_costs import submodel_work
from hyper_parallel.shard.vision_and_audio_towers import towers_of
from hyper_parallel.step.batches import MicroBatch

CLUSTER = Cluster.named("h100")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("costs"))


def micro_of(name: str, rows: int = 1) -> tuple[Any, MicroBatch]:
    """A model on the meta device, in bfloat16, and rows of it."""
    made = MODELS[name]
    given = dict(made.inputs(made.draw(rows)))
    ids, labels = given.pop("input_ids"), given.pop("labels")
    positions = given.pop("position_ids", torch.arange(ids.size(1)).repeat(rows, 1))
    model = made.build().to("meta", torch.bfloat16)
    return model, MicroBatch(ids, labels, positions, torch.arange(rows), extra=given)


def test_two_encoders_are_found_by_the_inputs_that_reach_them() -> None:
    model, micro = micro_of("omni")
    names = {id(module): name for name, module in model.named_modules()}
    towers = [names[id(tower)] for tower in towers_of(model)]
    found = inputs_of_modules(model, micro, towers)
    assert found == {"model.audio_tower": {"input_features"}, "model.visual": {"pixel_values"}}
    parts = captured_parts(model, micro, CLUSTER, {"audio": towers[:1], "vision": towers[1:]})
    assert set(parts.names) == {"audio", "vision", LANGUAGE}
    for name in parts.names:
        assert min(parts.seconds(name)) >= 0
        assert parts.seconds(name)[0] > 0
    assert parts.sent("vision") > 0


def test_layers_and_the_rest_are_all_of_a_part() -> None:
    model, micro = micro_of("llava")
    encoders = {"vision": ["model.vision_tower", "model.multi_modal_projector"]}
    whole = captured_parts(model, micro, CLUSTER, encoders, few_layers=False)
    inside, every = whole.seconds(LANGUAGE, whole.layers), whole.seconds(LANGUAGE)
    outside = whole.seconds(LANGUAGE, lambda module: float(not whole.layers(module)))
    assert [a + b for a, b in zip(inside, outside, strict=True)] == pytest.approx(every)
    assert min(inside[0], outside[0]) > 0


def test_two_layers_stand_for_all() -> None:
    found = {}
    for few in (True, False):
        from transformers import LlavaConfig, LlavaForConditionalGeneration

        small, micro = micro_of("llava")
        config = small.config.to_dict()
        config["text_config"]["num_hidden_layers"] = 6
        config["text_config"].pop("layer_types", None)
        with torch.device("meta"):
            model = LlavaForConditionalGeneration(LlavaConfig(**config)).to(torch.bfloat16)
        parts = captured_parts(model, micro, CLUSTER, {"vision": ["model.vision_tower"]}, few_layers=few)
        assert len(parts.layer_weights) == (2 if few else 6)
        found[few] = parts.seconds(LANGUAGE, parts.layers)
    assert found[True] == pytest.approx(found[False], rel=0.02)


def test_a_run_is_priced_from_its_own_rows(place: Path) -> None:
    run = from_dict(run_file(place, "llava"))
    work = submodel_work(run, CLUSTER, 2, lambda said: None)
    (encoder,) = work.costs.encoders
    assert encoder.modules == ("model.vision_tower", "model.multi_modal_projector")
    # As many units as images, which are all of one size here.
    assert {row for step in work.steps for row in step} <= {(0.0,), (1.0,), (2.0,), (3.0,)}
    assert work.largest == (3.0,)
    assert sum(encoder.seconds(2)) > sum(encoder.seconds(1)) > 0
    assert encoder.features == 16 * 32 * 2
    language = work.costs.language
    assert sorted(language.layers) == [1, 2]
    assert language.depth == 2
    assert 0 < language.outside < language.parameters


def test_text_and_folders_without_a_processor_are_refused(place: Path, tmp_path: Path) -> None:
    file = run_file(place, "llava", data={"train": "python-stdlib"})
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a", "response": "b"}\n' * 400)
    file["data"]["train"] = str(text)
    with pytest.raises(ConfigError, match=r"no row of data\.train has any"):
        submodel_work(from_dict(file), CLUSTER, 2, lambda said: None)
    stated = StatedRows(batch=2, sequence=64, images=(1, 2), recordings=(0, 0), size=16, seconds=1.0)
    (tmp_path / "config.json").write_text((place / "llava" / "config.json").read_text())
    with pytest.raises(ConfigError, match="has no processor"):
        stated_run(tmp_path, stated, tmp_path)
    with pytest.raises(ConfigError, match="do not fit; raise --sequence"):
        stated_run(place / "llava", StatedRows(2, 24, (2, 2), (0, 0), 16, 1.0), tmp_path)
    with pytest.raises(ConfigError, match=r"--recordings: the model of .* takes image"):
        stated_run(place / "llava", StatedRows(2, 64, (0, 0), (1, 1), 16, 1.0), tmp_path)
