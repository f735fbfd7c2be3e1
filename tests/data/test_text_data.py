"""From the `data` section of a run file to batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.config.data import DataConfig
from hyper_parallel.data import TextData, corpus
from hyper_parallel.errors import ConfigError, DataError

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty text files."""
    for number in range(20):
        words = [WORDS[(number * 7 + index * index) % 10] for index in range(40 + number)]
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number:02}.txt").write_text(f"{number}: " + " ".join(words))
    return tmp_path


def text_data(folder: Path, *, positions: int | None = None, seed: int = 0, **options: Any) -> TextData:
    given = {
        "train": str(folder / "text"),
        "sequence": 32,
        "holdout": 0.2,
        "tokenizer": {"vocab_size": 300},
        "cache": str(folder / "cache"),
    }
    return TextData(DataConfig(**{**given, **options}), seed=seed, positions=positions)


def everything(data: TextData) -> list[torch.Tensor]:
    return [tensor for rows in (data.train, data.eval) for tensor in rows.batch(range(len(rows))).values()]


def test_training_and_held_out_text_are_all_of_it(folder: Path) -> None:
    data = text_data(folder)
    assert data.train.documents + data.eval.documents == 20
    assert data.train.documents and data.eval.documents
    whole = text_data(folder, holdout=0.0)
    assert whole.train.documents == 20 and len(whole.eval) == 0
    ids = data.train.batch(data.order.rows(0, 4))["input_ids"]
    assert ids.shape == (4, 32) and int(ids.max()) < data.tokenizer.vocab_size
    for word in WORDS:
        assert word in data.tokenizer.decode(
            data.train.batch(range(len(data.train)))["input_ids"].flatten().tolist()
        )


def test_the_second_time_comes_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = everything(text_data(folder))

    def never(*_: Any) -> None:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "encode", never)
        again = everything(text_data(folder))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        with pytest.raises(AssertionError, match="tokenized again"):
            text_data(folder, holdout=0.3)
    (folder / "text" / "00.txt").write_text("something else altogether, " * 9)
    changed = everything(text_data(folder))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, changed, strict=True))


@pytest.mark.parametrize("name", ["tokenizer", "tokens", "offsets"])
def test_a_damaged_cache_is_made_again(folder: Path, name: str) -> None:
    first = everything(text_data(folder))
    for path in (folder / "cache").glob(f"*{name}*.array"):
        path.write_bytes(path.read_bytes()[:-1])
    assert all(torch.equal(a, b) for a, b in zip(first, everything(text_data(folder)), strict=True))


def test_the_seed_changes_the_order_alone(folder: Path) -> None:
    one, two = text_data(folder, seed=1), text_data(folder, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(everything(one), everything(two), strict=True))
    assert one.order.rows(0, 20) != two.order.rows(0, 20)


def test_a_holdout_that_takes_everything_takes_nothing(folder: Path) -> None:
    data = text_data(folder, train=str(folder / "text" / "00.txt"), holdout=0.999999)
    assert data.train.documents == 1 and len(data.eval) == 0


def test_evaluation_from_its_own_files(folder: Path) -> None:
    (folder / "held.txt").write_text("alpha beta")
    data = text_data(folder, eval=str(folder / "held.txt"))
    assert data.train.documents == 20 and data.eval.documents == 1
    batch = data.eval.batch([0])
    valid = batch["labels"][0] != -100
    ids = batch["input_ids"][0]
    assert data.tokenizer.decode(ids[: int(valid.sum()) + 1].tolist()) == "alpha beta"
    assert bool((ids[int(valid.sum()) + 1 :] == data.tokenizer.pad).all())


def test_answers_alone_bear_loss_all_the_way_to_the_labels(folder: Path) -> None:
    turns = [{"role": "user", "content": "alpha beta"}, {"role": "assistant", "content": "gamma delta"}]
    records = [{"prompt": "alpha ", "response": "beta gamma"}, {"messages": turns}] * 10
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for pack in (True, False):
        data = text_data(folder, train=str(folder / "a.jsonl"), holdout=0.0, pack=pack, sequence=64)
        assert pack == (len(data.train) < 20)
        labels = data.train.batch(range(len(data.train)))["labels"]
        answers = data.tokenizer.transformers.decode(labels[labels != -100].tolist())
        # The token of a word has the space before it, which is the prompt's.
        assert sorted(answers.split("<|endoftext|>")) == [""] + [" beta gamma"] * 10 + ["gamma delta"] * 10


def test_a_sequence_longer_than_the_models_positions(folder: Path) -> None:
    assert len(text_data(folder, positions=32).train)
    with pytest.raises(ConfigError, match=r"data\.sequence is 33, but the model has 32 positions"):
        text_data(folder, positions=32, sequence=33)


def test_too_little_text(folder: Path) -> None:
    with pytest.raises(DataError, match=r"one sequence needs 100000"):
        text_data(folder, sequence=100_000)
    assert len(text_data(folder, sequence=1000, holdout=0.0, pack=False).train) == 20


def test_no_text_at_all(folder: Path) -> None:
    (folder / "bare").mkdir()
    (folder / "bare" / "a.txt").write_text("\n")
    with pytest.raises(DataError, match=r"data\.train: there is no document with text in .*bare"):
        text_data(folder, train=str(folder / "bare"))
    with pytest.raises(DataError, match=r"data\.eval: there is no document with text in .*bare"):
        text_data(folder, eval=str(folder / "bare"))


def test_a_vocabulary_too_small(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer\.vocab_size is 100"):
        text_data(folder, tokenizer={"vocab_size": 100})
