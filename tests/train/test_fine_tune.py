"""Training goes on from a folder's weights with that folder's tokenizer, and what is exported stops."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from harness.chat_model import CHATML, CHATS, tokenizer, write_chats, write_model
from hyper_parallel.checkpoint import export
from hyper_parallel.cli.main import main
from hyper_parallel.config import RunConfig, load
from hyper_parallel.data.tokenizer import train as train_tokenizer
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.step.build import unsharded
from hyper_parallel.train.trainer import Trainer
from train.tiny_run import LLAMA


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine-tune")
    write_model(folder / "base")
    (folder / "base" / "preprocessor_config.json").write_text('{"do_resize": true}\n')
    write_chats(folder / "chats.jsonl")
    return folder


def run_config(place: Path, **changes: Any) -> RunConfig:
    """`changes` by dotted key, with two underscores for the dot."""
    file: dict[str, Any] = {
        "version": 1,
        "out": str(place / "run"),
        "model": {"path": str(place / "base")},
        "data": {
            "train": str(place / "chats.jsonl"),
            "holdout": 0,
            "sequence": 48,
            "cache": str(place / "cache"),
        },
        "train": {
            "steps": 2,
            "batch": 3,
            "engine": "eager",
            "optimizer": {"lr": 5e-3},
            "schedule": {"name": "constant"},
            "sample": {"tokens": 24, "temperature": 0},
        },
        "trackers": [],
    }
    (place / "run.yaml").write_text(json.dumps(file))
    return load(
        place / "run.yaml",
        [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()],
    )


@pytest.fixture(scope="module")
def learnt(place: Path) -> tuple[Any, Path]:
    """The summary of a run that learns the answers by heart, and the folder that is exported from it."""
    summary = Trainer(run_config(place, train__steps=80)).run()
    return summary, export(summary.checkpoint, place / "exported")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_models_own_tokenizer_is_used_and_kept(place: Path, learnt: tuple[Any, Path]) -> None:
    _, text = unsharded(run_config(place))
    row = text.train.batch([0])["input_ids"][0]
    assert tokenizer().decode(row[:8]).startswith("<s><|im_start|>user")
    source, exported = contents(place / "base"), contents(learnt[1])
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
    ):
        assert exported[name] == source[name], name


def test_conversations_are_what_the_template_renders_and_texts_begin_and_end_once(place: Path) -> None:
    own = tokenizer()
    _, text = unsharded(run_config(place, data__pack=False, data__sequence=100))
    documents = {tuple(row) for row in text.train.batch(range(len(text.train)))["input_ids"].tolist()}
    for asked, said in CHATS:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        ids = own.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
        assert ids.count(own.bos_token_id) == 1
        assert any(row[: len(ids)] == tuple(ids) for row in documents)

    (place / "text.txt").write_text("Blue, as the sea. Seven. " * 20)
    text_only = run_config(place, data__train=str(place / "text.txt"), data__sequence=32)
    corpus = unsharded(text_only)[1].train._corpus.tokens.tolist()
    assert (corpus[0], corpus[-1]) == (own.bos_token_id, own.eos_token_id)
    assert corpus.count(own.bos_token_id) == corpus.count(own.eos_token_id) == 1


def test_what_is_exported_stops_by_itself(learnt: tuple[Any, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary, folder = learnt
    assert summary.final_loss < 0.05
    model, own = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    end = own.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [own.eos_token_id, end]
    for asked, said in CHATS:
        prompt = own.apply_chat_template(
            [{"role": "user", "content": asked}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**prompt, max_length=90, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert int(ids[-1]) == end and own.decode(ids[:-1]) == said
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["repetition_penalty"] == 1.0 and settings["max_length"] == 90  # as the folder had them


def test_no_folder_of_this_machine_is_named(place: Path, learnt: tuple[Any, Path]) -> None:
    for name, data in contents(learnt[1]).items():
        assert str(place).encode() not in data and b"name_or_path" not in data, name


def test_files_that_name_their_origin_lose_that_and_nothing_else(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    file = tmp_path / "base" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "name_or_path": "/home/somebody/model"}))
    config = run_config(place, model__path=str(tmp_path / "base"), out=str(tmp_path / "run"), train__steps=1)
    out = export(Trainer(config).run().checkpoint, tmp_path / "out")
    kept = json.loads((out / "tokenizer_config.json").read_text())
    assert "name_or_path" not in kept and kept["eos_token"] == "</s>"


def test_the_sample_asks_in_the_template_and_stops(place: Path, learnt: tuple[Any, Path]) -> None:
    asked, said = CHATS[0]
    assert learnt[0].sample == f"user\n{asked}\nassistant\n{said}"
    again = run_config(
        place, train__steps=80, train__sample={"prompt": CHATS[1][0], "tokens": 30, "temperature": 0}
    )
    text = unsharded(again)[1]
    prompt = text.tokenizer.transformers.decode(text.prompt(CHATS[1][0]))
    assert prompt == f"<s><|im_start|>user\n{CHATS[1][0]}<|im_end|>\n<|im_start|>assistant\n"


def test_no_sample_at_all(place: Path, tmp_path: Path) -> None:
    config = run_config(place, train__sample=False, train__steps=1, out=str(tmp_path / "run"))
    assert config.train.sample is False
    assert Trainer(config).run().sample is None
    assert load(tmp_path / "run" / "run.yaml").train.sample is False


@pytest.mark.parametrize("generation", [True, False])
def test_a_new_model_ends_with_its_answers(place: Path, tmp_path: Path, generation: bool) -> None:
    """Trained from scratch with a tokenizer of its own: the built-in template ends turns with the end of text."""
    config = run_config(
        place,
        model={"config": LLAMA},
        train__steps=1,
        out=str(tmp_path / "run"),
        data__tokenizer={"path": str(place / "base")} if generation else {"vocab_size": 300},
    )
    out = export(Trainer(config).run().checkpoint, tmp_path / "out")
    found = json.loads((out / "generation_config.json").read_text())
    own = tokenizer() if generation else None
    ends = [own.eos_token_id, own.convert_tokens_to_ids("<|im_end|>")] if own else 0
    assert found["eos_token_id"] == ends
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == (own.eos_token_id if own else 0)


# What is refused.


def refused(place: Path, **changes: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        unsharded(run_config(place, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_without_a_tokenizer(place: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "bare", words=False)
    said = refused(place, model__path=str(tmp_path / "bare"))
    assert f"{tmp_path / 'bare'} has no tokenizer.json" in said and "data.tokenizer.path" in said
    run_config(place, model__path=str(tmp_path / "bare"))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(place / "run.yaml"), f"model.path={tmp_path / 'bare'}", f"out={tmp_path / 'run'}"])
    assert ended.value.code == 2
    assert not (tmp_path / "run").exists()
    # Named, it is taken: nothing says that it is another one.
    named = run_config(place, model__path=str(tmp_path / "bare"), data__tokenizer__path=str(place / "base"))
    assert unsharded(named)[1].tokenizer.vocab_size == len(tokenizer())


def test_ids_beyond_the_embedding(place: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "small", vocab_size=len(tokenizer()) - 1)
    said = refused(place, model__path=str(tmp_path / "small"))
    assert f"vocab_size is {len(tokenizer()) - 1}" in said and f"ids up to {len(tokenizer()) - 1}" in said
    assert str(tmp_path / "small") in said


def test_ids_beyond_the_embedding_of_a_model_of_ones_own(place: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 8)

        def get_input_embeddings(self) -> nn.Module:
            return self.words

    with pytest.raises(ConfigError, match="vocab_size is 30"):
        unsharded(run_config(place), Words())


def test_another_tokenizer_needs_a_word(place: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer.from_str(train_tokenizer(["another text altogether"] * 9, 100, 290))
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    other = {"path": str(tmp_path), "chat_template": "builtin"}
    said = refused(place, data__tokenizer=other)
    assert "is not the tokenizer" in said and "data.tokenizer.replace" in said
    config = run_config(
        place,
        data__tokenizer={**other, "replace": True},
        out=str(tmp_path / "run"),
        train__steps=1,
        train__sample=False,
    )
    out = export(Trainer(config).run().checkpoint, tmp_path / "out")
    found = json.loads((out / "generation_config.json").read_text())
    assert found["eos_token_id"] == 0  # none of the ids that the folder's other tokenizer had
    assert (out / "tokenizer.json").read_bytes() != (place / "base" / "tokenizer.json").read_bytes()
    assert "assistant" in (out / "chat_template.jinja").read_text()


def test_a_new_tokenizer_for_loaded_weights(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size.* trains a new tokenizer"):
        run_config(place, data__tokenizer__vocab_size=300)
    with pytest.raises(ConfigError, match="name both"):
        run_config(place, data__tokenizer__replace=True)


def test_the_same_tokenizer_by_another_name(place: Path, tmp_path: Path) -> None:
    tokenizer(None).save_pretrained(tmp_path)
    assert "need a chat template" in refused(place, data__tokenizer__path=str(tmp_path))


@pytest.mark.parametrize("given", ["builtin", "file"])
def test_conversations_without_a_template(place: Path, tmp_path: Path, given: str) -> None:
    write_model(tmp_path / "plain", template=None, generation=False)
    said = refused(place, model__path=str(tmp_path / "plain"))
    assert "chats.jsonl" in said and "data.tokenizer.chat_template" in said and "builtin" in said
    (tmp_path / "template.jinja").write_text(CHATML)
    named = "builtin" if given == "builtin" else str(tmp_path / "template.jinja")
    config = run_config(
        place,
        model__path=str(tmp_path / "plain"),
        data__tokenizer__chat_template=named,
        train__steps=1,
        out=str(tmp_path / "run"),
    )
    out = export(Trainer(config).run().checkpoint, tmp_path / "out")
    template = (out / "chat_template.jinja").read_text()
    assert (template == CHATML) == (given == "file")
    own = tokenizer()
    ends = own.eos_token_id
    if given == "file":
        ends = [ends, own.convert_tokens_to_ids("<|im_end|>")]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == ends


def test_a_template_file_that_is_not_there(place: Path) -> None:
    assert "nowhere.jinja" in refused(place, data__tokenizer__chat_template="nowhere.jinja")


def test_a_broken_generation_config(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text("[1, 2")
    config = run_config(place, model__path=str(tmp_path / "base"), out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"generation_config\.json is no generation config"):
        Trainer(config).run()


def test_the_weights_are_those_that_were_loaded_and_trained(place: Path, learnt: tuple[Any, Path]) -> None:
    before = load_file(place / "base" / "model.safetensors")
    after = load_file(learnt[1] / "model.safetensors")
    assert before.keys() == after.keys()
    assert os.path.getsize(place / "base" / "model.safetensors") > 0
    assert all(not torch.equal(before[name], after[name]) for name in before)
