"""Windows of a long text have the ids of the whole text, or there are none."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from harness.tokenized_texts import draw_text
from harness.tokenizer_kinds import KINDS
from hyper_parallel.data import long_text
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import DataError

NAMES = ("byte-level, no bos", "language before", "bos twice", "NFC")


@pytest.mark.parametrize("expression", long_text._EXPRESSIONS)
def test_windows_of_newer_expressions_have_the_words_of_the_whole_text(expression: str) -> None:
    core = KINDS["byte-level, no bos"]().core
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert long_text.provable(core)
    parts = (
        "\n",
        "  ",
        " \r\n ",
        "\t",
        "we'LL",
        "X's",
        "Fo",
        " the",
        " an",
        "1234567",
        "é",
        "!?",
        "/",
        "中文",
        " ",
    )
    lengths: list[int] = []

    def encode(text: str) -> Any:
        """As if each word were a token, which shows more than ids."""
        lengths.append(len(text))
        words, spans = zip(*core.pre_tokenizer.pre_tokenize_str(text), strict=True)
        return SimpleNamespace(ids=list(words), offsets=spans, word_ids=range(len(words)))

    cut = 0
    for number in range(300):
        draw = random.Random(number)
        text = "".join(draw.choice(parts) * draw.choice((1, 1, 1, 3, 40)) for _ in range(200))
        words = encode(text).ids
        lengths.clear()
        assert long_text.ids_by_windows(encode, text, 90, 30) == words
        cut += max(lengths) < len(text)
    assert cut > 250


@pytest.mark.parametrize("name", NAMES)
def test_windows_have_the_ids_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]()
    owner = kind.tokenizer()
    tokenizer = Tokenizer(kind.tokenizer())
    assert long_text.provable(tokenizer.exact.backend_tokenizer)
    calls: list[str] = []
    call = tokenizer._called
    monkeypatch.setattr(
        tokenizer, "_called", lambda texts, **more: calls.extend(texts) or call(texts, **more)
    )
    for number in range(40):
        draw = random.Random(number)
        text = draw_text(draw, kind, 300) + "1234567" * draw.randint(0, 9)
        right = owner(text)["input_ids"]
        monkeypatch.setattr(long_text, "WINDOW", 10**9)
        assert tokenizer.encode(text) == right
        before, behind = tokenizer._added
        calls.clear()

        def encode(window: str) -> Any:
            return tokenizer._called(
                [window], add_special_tokens=False, return_offsets_mapping=True
            ).encodings[0]

        if long_text.is_provable_text(tokenizer.exact.backend_tokenizer, text):
            assert before + long_text.ids_by_windows(encode, text, 120, 40) + behind == right
            assert len(text) < 400 or max(map(len, calls)) < len(text)


def test_a_long_text_is_encoded_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["bos twice"]()
    owner, tokenizer = kind.tokenizer(), Tokenizer(kind.tokenizer())
    monkeypatch.setattr(long_text, "WINDOW", 3000)
    by_windows, taken = Tokenizer._by_windows, list[int]()

    def counted(self: Tokenizer, text: str) -> list[int]:
        taken.append(len(text))
        return by_windows(self, text)

    monkeypatch.setattr(Tokenizer, "_by_windows", counted)
    texts = ["the answer is four\n" * 500, "the answer", "ab" * 4000]
    assert tokenizer.encode_texts(texts) == [owner(text)["input_ids"] for text in texts]
    assert taken == [9500, 8000]


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {*NAMES, "glm"}))
def test_what_looks_further_has_no_windows(name: str) -> None:
    assert not long_text.provable(KINDS[name]().core)


def test_only_texts_that_are_normalized_have_windows() -> None:
    backend = KINDS["NFC"]().core
    assert long_text.is_provable_text(backend, "\u00e9") and not long_text.is_provable_text(
        backend, "e\u0301"
    )


def test_a_text_that_does_not_fit_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "bytes_in", lambda path, key: 10**9)
    monkeypatch.setattr(long_text, "WINDOW", 10)
    tokenizer = Tokenizer(KINDS["sentencepiece, always"]().tokenizer())
    assert tokenizer.encode("a" * 200)
    monkeypatch.setattr(long_text, "bytes_in", lambda path, key: 10**4)
    with pytest.raises(DataError, match=r"has 200 characters, .* write it as several documents"):
        tokenizer.encode("a" * 200)
    tokenizer.encode("a" * 10)
