"""The tokenizer that is trained, and the one that is read from a folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import tokenizer as tokenizers
from hyper_parallel.data.corpus import encode
from hyper_parallel.data.document import Text
from hyper_parallel.errors import DataError

TEXTS = [f"def f{n}(x):\n    return x + {n}  # naïve — 文字\n" for n in range(50)]
TRAIN = f"""
from hyper_parallel.data import tokenizer
import hashlib
print(hashlib.sha256(tokenizer.train({TEXTS!r}, 1000, 400).encode()).hexdigest())
"""


def trained(folder: Path, vocab_size: int = 400) -> tokenizers.Tokenizer:
    return tokenizers.trained(folder, "key", iter(TEXTS), 1000, vocab_size)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    return trained(tmp_path_factory.mktemp("cache"))


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    assert (
        tokenizer.decode(tokenizer.encode(text)) == text.replace(tokenizers.END_OF_TEXT, "") or "<|" in text
    )


def test_what_it_is_made_of(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizers.SMALLEST < tokenizer.vocab_size <= 400
    assert tokenizer.transformers.convert_ids_to_tokens([tokenizer.eos, tokenizer.pad]) == [
        "<|endoftext|>",
        "<|pad|>",
    ]
    assert tokenizer.beginning == []
    assert len(tokenizer.encode(" return")) == 1


def test_training_gives_the_same_bytes_in_every_process() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
    here = tokenizers.train(TEXTS, 1000, 400)
    assert done.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


def test_only_a_share_of_a_large_text_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_SAMPLE_CHARACTERS", 2**17)
    texts = [f"{n} ".rjust(2**10, "x") for n in range(1024)]
    sample = list(tokenizers._sample(texts, 2**20))
    assert sample == list(tokenizers._sample(texts, 2**20))
    assert 2**16 < sum(map(len, sample)) < 2**18
    assert list(tokenizers._sample(texts, 2**10)) == texts[: 2**8 + 1]


def test_a_saved_tokenizer_is_the_same_again(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    assert again("def f(x): 文")["input_ids"] == tokenizer.encode("def f(x): 文")
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos, tokenizer.pad)
    turns = [{"role": "user", "content": "hi"}]
    assert again.apply_chat_template(turns, tokenize=False) == "<|user|>\nhi<|endoftext|>"
    loaded = tokenizers.load(str(tmp_path))
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert loaded.vocab_size == tokenizer.vocab_size


def test_a_beginning_token_and_a_truncation_of_the_folder_are_minded(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    rust = tokenizers._rust().Tokenizer.from_str(tokenizers.train(TEXTS, 1000, 400))
    rust.add_special_tokens(["<s>", "</s>"])
    rust.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))]
    )
    rust.enable_truncation(3)
    rust.enable_padding(length=64)
    PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>").save_pretrained(
        tmp_path
    )
    loaded = tokenizers.load(str(tmp_path))
    [(ids, mask)] = encode([Text("here", TEXTS[0])], loaded)
    assert mask is None
    names = loaded.transformers.convert_ids_to_tokens(ids)
    assert names[0] == "<s>" and names[-1] == "</s>" and names.count("<s>") == 1
    assert loaded.transformers.decode(ids) == f"<s>{TEXTS[0]}</s>"
    assert loaded.encode(TEXTS[0]) == ids[:-1]
    assert loaded.vocab_size == 1 + max(loaded.transformers.get_vocab().values())


def test_what_the_tokenizer_adds_is_part_of_its_ids(tokenizer: tokenizers.Tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    rust = tokenizers._rust().Tokenizer.from_str(tokenizers.train(TEXTS, 1000, 400))
    end, pad = rust.token_to_id("<|endoftext|>"), rust.token_to_id("<|pad|>")
    special = [("<|endoftext|>", end), ("<|pad|>", pad)]
    digests = {tokenizer.digest}
    for before, behind in (
        ("<|pad|> <|pad|>", ""),
        ("<|pad|>", "<|endoftext|>"),
        ("", "<|endoftext|> <|pad|>"),
    ):
        rust.post_processor = TemplateProcessing(
            single=f"{before} $A {behind}".strip(), special_tokens=special
        )
        owner = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|endoftext|>")
        found = tokenizers.Tokenizer(owner)
        assert found.beginning == [pad] * len(before.split())
        for text in ("", "def f", "<|endoftext|>"):
            ids = owner(text)["input_ids"]
            assert found.encode(text) == ids
            encoding = found.encode_ranges([text])[0]
            assert (encoding.ids, encoding.prefix, encoding.suffix) == (
                ids,
                len(before.split()),
                len(behind.split()),
            )
            [(encoded, _)] = encode([Text("here", text)], found)
            assert encoded == (ids if ids[-1] == end else [*ids, end])
        digests.add(found.digest)
    assert len(digests) == 4


def test_a_text_without_a_token_is_refused_by_its_place() -> None:
    from hyper_parallel.data.tokenizer import character_tokenizer

    found = tokenizers.Tokenizer(character_tokenizer("ab"))
    documents = [Text("line 1", "ab"), Text("line 2", "abc"), Text("line 3", "a")]
    encoded = encode(documents, found)
    assert next(encoded) == ([2, 3, 0], None)
    with pytest.raises(DataError, match=r"^line 2: the tokenizer does not take this text: ") as raised:
        next(encoded)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_ranges_of_characters_is_refused() -> None:
    class Slow:
        is_fast, eos_token_id, eos_token = False, 0, "</s>"

    with pytest.raises(DataError, match=r"Slow is not a fast tokenizer, .* convert it to tokenizer\.json"):
        tokenizers.Tokenizer(Slow()).encode("a")


def test_the_users_object_stays_as_it_is() -> None:
    from harness.tokenizer_kinds import KINDS

    owner = KINDS["byte-level, one word"]().tokenizer()
    owner.backend_tokenizer.enable_truncation(2)
    before = owner.backend_tokenizer.to_str()
    found = tokenizers.Tokenizer(owner)
    assert len(found.encode("the answer is four, yes")) > 2
    assert owner.backend_tokenizer.to_str() == before


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "holds no tokenizer.json"), ("{", "cannot be loaded"), ("{}", "cannot be loaded")],
)
def test_a_folder_that_is_none_is_named(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError) as caught:
        tokenizers.load(str(tmp_path))
    assert expected in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_end_of_text_token(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    rust = tokenizers._rust().Tokenizer.from_str(tokenizers.train(TEXTS, 1000, 400))
    PreTrainedTokenizerFast(tokenizer_object=rust).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-text token"):
        tokenizers.load(str(tmp_path))


def test_a_vocabulary_too_small_for_the_bytes() -> None:
    with pytest.raises(DataError, match=r"vocab_size is 257.*need 258"):
        tokenizers.train(TEXTS, 1000, 257)
