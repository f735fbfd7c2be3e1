"""A reward model's scores are those of Transformers' own model for each row alone, under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from harness.ranks import run_ranks
from harness.reward_folders import SHAPE, plain_scores, reward_folder
from hyper_parallel.config.rl_roles import RewardRole
from hyper_parallel.errors import CheckpointError, ConfigError, DataError, UnsupportedModelError
from hyper_parallel.rl.roles.models import RewardModel

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama without padding": {"pad_token_id": None},
    "llama padded with the end of text": {"pad_token_id": 0},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
}
TEXTS = [("53142=", "12345"), ("1=", "2"), ("0" * 20, "9" * 12), ("77", ""), ("31=", "13"), ("9=", "9")]
CHATS = [
    [{"role": "user", "content": "53="}],
    [{"role": "system", "content": "0"}, {"role": "user", "content": "12345="}],
]
ASKED: list[list[tuple[Any, str]]] = [TEXTS, [(chat, "123") for chat in CHATS], [("8", "8")], []]
AXES = [{"shard": 2}, {"tensor": 2}, {"replicate": 2}]


def role(folder: Path, axes: dict[str, int] | None = None, **keys: Any) -> RewardRole:
    given = {"devices": list(range(2 if axes else 1)), "strategy": {"axes": axes or {}}, "batch": 2, **keys}
    return RewardRole.model_validate({"model": str(folder), **given})


def model_of(folder: Path, **keys: Any) -> RewardModel:
    return RewardModel(role(folder, **keys), torch.device("cpu"))


def rows_of(folder: Path) -> list[list[list[int]]]:
    """As a user of Transformers encodes them."""
    words: Any = AutoTokenizer.from_pretrained(folder)

    def row(prompt: Any, answer: str) -> list[int]:
        if isinstance(prompt, str):
            return list(words(prompt + answer)["input_ids"])
        said = [*prompt, {"role": "assistant", "content": answer}]
        return list(words.apply_chat_template(said, tokenize=True, return_dict=True)["input_ids"])

    return [[row(*one) for one in group] for group in ASKED]


def close(got: list[list[float | None]], expected: list[list[float]]) -> None:
    assert [len(one) for one in got] == [len(one) for one in expected]
    for own, other in zip(got, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_one_device(family: str, tmp_path: Path) -> None:
    reward_folder(tmp_path, family.split()[0], **FAMILIES[family])
    expected = [plain_scores(tmp_path, rows) for rows in rows_of(tmp_path)]
    assert max(abs(one - expected[0][0]) for one in expected[0]) > 0.1
    close(model_of(tmp_path).scores(ASKED), expected)


def scores(rank: int, world: int, folder: str, axes: dict[str, int]) -> list[list[float | None]]:
    return RewardModel(role(Path(folder), axes), torch.device("cpu")).scores(ASKED)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_scores_under_a_strategy(axes: dict[str, int], family: str, tmp_path: Path) -> None:
    reward_folder(tmp_path, family, **FAMILIES[family])
    expected = [plain_scores(tmp_path, rows) for rows in rows_of(tmp_path)]
    for got in run_ranks(scores, 2, str(tmp_path), axes):
        close(got, expected)


def test_a_split_sequence(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    expected = [plain_scores(tmp_path, rows) for rows in rows_of(tmp_path)]
    for got in run_ranks(split_sequence, 2, str(tmp_path)):
        close(got, expected)


def split_sequence(rank: int, world: int, folder: str) -> list[list[float | None]]:
    given = role(Path(folder), {"tensor": 2}, strategy={"axes": {"tensor": 2}, "sequence": True})
    return RewardModel(given, torch.device("cpu")).scores(ASKED)


def test_a_score_depends_on_its_group_only(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    model = model_of(tmp_path, batch=4)
    together = model.scores(ASKED)
    assert together == [model.scores([group])[0] for group in ASKED]


def test_bfloat16(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    strategy = {"precision": {"param": "bfloat16", "compute": "bfloat16"}}
    model = model_of(tmp_path, strategy=strategy)
    assert {one.dtype for one in model.model.parameters()} == {torch.bfloat16}
    [got, *_] = model.scores(ASKED)
    assert got != model_of(tmp_path).scores(ASKED)[0]
    assert got == pytest.approx(plain_scores(tmp_path, rows_of(tmp_path)[0]), abs=0.1)


def test_a_row_that_is_too_long_has_no_score(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    short, long = ("1=", "1"), ("1=", "1" * 70)
    expected = plain_scores(tmp_path, [[3, 12, 3]])[0]
    assert model_of(tmp_path).scores([[long, short]]) == [[None, pytest.approx(expected, abs=1e-5)]]
    got = model_of(tmp_path, max_length=8).scores([[("1=", "1" * 6), ("1=", "1" * 7), ("", "")]])
    assert [one is None for one in got[0]] == [False, True, True]


def test_a_score_that_is_not_finite(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    model = model_of(tmp_path)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[5] = float("nan")  # type: ignore[operator]
    [got] = model.scores([[("3", "3"), ("1", "1")]])
    assert got[0] is None
    assert got[1] is not None


def test_the_end_of_text(tmp_path: Path) -> None:
    reward_folder(tmp_path, pad_token_id=None)
    with_end = plain_scores(tmp_path, [[3, 12, 3, 0]])[0]
    assert model_of(tmp_path, append_eos=True).scores([[("1=", "1")]]) == [
        [pytest.approx(with_end, abs=1e-5)]
    ]


def two_labels(folder: Path) -> None:
    reward_folder(folder, num_labels=2)


def causal(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=13, num_labels=1)).save_pretrained(folder)


def token_classifier(folder: Path) -> None:
    config = LlamaConfig(**SHAPE, vocab_size=13, num_labels=1)
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)


def encoder(folder: Path) -> None:
    reward_folder(folder)
    config = BertConfig(**{key: SHAPE[key] for key in ("hidden_size", "num_attention_heads")}, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)


def without_a_tokenizer(folder: Path) -> None:
    reward_folder(folder)
    (folder / "tokenizer.json").unlink()


def small_vocabulary(folder: Path) -> None:
    reward_folder(folder, vocab_size=10)


def other_weights(folder: Path) -> None:
    reward_folder(folder)
    (folder / "model.safetensors").unlink()
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=13)).save_pretrained(folder / "other")
    (folder / "other/model.safetensors").rename(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (two_labels, UnsupportedModelError, "has 2 labels.*num_labels=1"),
        (causal, UnsupportedModelError, "is a LlamaForCausalLM, which gives no score.*num_labels=1"),
        (token_classifier, UnsupportedModelError, "LlamaForTokenClassification, which gives no score"),
        (encoder, UnsupportedModelError, "BertForSequenceClassification.*no head 'score'"),
        (without_a_tokenizer, DataError, r"roles\.reward\.model"),
        (small_vocabulary, ConfigError, "has 10 tokens, and its tokenizer 13"),
        (other_weights, CheckpointError, r"score\.weight"),
        (lambda folder: None, ConfigError, r"roles\.reward\.model: .*config\.json does not exist"),
    ],
)
def test_folders_that_are_no_reward_models(
    write: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(error, match=message) as caught:
        model_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_messages_that_the_template_does_not_take(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    words: Any = AutoTokenizer.from_pretrained(tmp_path)
    words.chat_template = "{{ raise_exception('no system messages') }}"
    words.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"roles\.reward\.model: .*no system messages"):
        model_of(tmp_path).scores([[(CHATS[1], "1")]])


def test_a_text_without_tokens(tmp_path: Path) -> None:
    reward_folder(tmp_path)
    with pytest.raises(DataError, match=r"roles\.reward\.model: .*has no tokens for 'abc'"):
        model_of(tmp_path).scores([[("ab", "c")]])
