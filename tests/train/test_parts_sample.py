"""Text that parts of a model on several ranks write, and text beside images: that of Transformers' generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_run import LLAMA, run, run_config

from harness import run_ranks
from harness.vision_folders import make_place, run_file
from hyper_parallel.checkpoint import export
from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData
from hyper_parallel.step.build import unsharded
from hyper_parallel.step.multimodal import model_class

TOKENS = 6
GREEDY = {"tokens": TOKENS, "temperature": 0}


def _text(rank: int, world: int, folder: Path, strategy: dict[str, Any]) -> tuple[str | None, str | None]:
    model = {"config": {**LLAMA, "num_hidden_layers": 4}}
    summary = run(run_config(folder, model=model, strategy=strategy, train={"steps": 2, "sample": GREEDY}))
    dist.barrier()
    return summary.sample, summary.checkpoint


@pytest.mark.parametrize(
    "strategy",
    [
        {"axes": {"pipeline": 2}, "memory": {"device": "2MiB", "host": "64MiB"}},
        {"axes": {"pipeline": 2, "tensor": 2}, "pipeline": {"schedule": "zb-v"}, "sequence": True},
    ],
    ids=["budget", "tensor, two stages a rank"],
)
def test_a_pipeline_writes_what_one_device_does(tmp_path: Path, strategy: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    world = 2 * strategy["axes"].get("tensor", 1)
    found = run_ranks(_text, world, tmp_path, strategy)
    folder = export(found[0][1], tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def ", return_tensors="pt")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    written = plain.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0]
    assert written.shape[0] == ids.shape[1] + TOKENS, "the model ended the text: choose another seed"
    assert [text for text, _ in found] == [tokenizer.decode(written)] * world


def _beside(rank: int, world: int, file: dict[str, Any]) -> tuple[str | None, str | None]:
    summary = run(RunConfig.model_validate(file))
    if world > 1:
        dist.barrier()
    return summary.sample, summary.checkpoint


VISION = {"llava": ["model.vision_tower", "model.multi_modal_projector"], "qwen2.5-vl": ["model.visual"]}


@pytest.mark.parametrize("model", list(VISION))
@pytest.mark.parametrize("parts", [False, True], ids=["one mesh", "submodels"])
def test_text_beside_an_image_is_that_of_transformers(tmp_path: Path, model: str, parts: bool) -> None:
    place = make_place(tmp_path, counts=(0, 1, 1, 0))
    strategy: dict[str, Any] = {"version": 1, "axes": {"tensor": 2}}
    if parts:
        vision = {"modules": VISION[model], "devices": 2}
        strategy = {"version": 1, "submodels": {"vision": vision, "language": {"axes": {"tensor": 2}}}}
    engine = "graph" if parts else "eager"
    train = {"engine": engine, "batch": 4, "micro_batch": None, "steps": 2, "sample": GREEDY}
    file = run_file(place, model, train=train, strategy=strategy)
    world = 4 if parts else 2
    found = run_ranks(_beside, world, file, timeout=240.0)
    folder = export(found[0][1], tmp_path / "exported")
    _, data = unsharded(RunConfig.model_validate(file))
    assert isinstance(data, MultimodalData)
    prompt = data.media_prompt()
    # The first row with an image, up to its answer.
    assert prompt.media and prompt.ids == data.train.batch([1])["input_ids"][0, : len(prompt.ids)].tolist()
    given = prompt.inputs(prompt.ids)
    plain = model_class(unsharded(RunConfig.model_validate(file))[0].config).from_pretrained(folder).eval()
    mask = torch.ones_like(given["input_ids"])
    [written] = plain.generate(**given, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
    added = written[len(prompt.ids) :].tolist()
    assert added and not {*added} & {*data.stops}, "the model ended the text: choose another seed"
    [image] = set(data.processor.placeholder_ids.values()) & {*prompt.ids}
    first = prompt.ids.index(image)
    shown = [*prompt.ids[: first + 1], *(one for one in prompt.ids[first:] if one != image)]
    assert [text for text, _ in found] == [data.tokenizer.decode(shown + added)] * world
