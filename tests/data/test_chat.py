"""Which tokens of a conversation bear loss."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import tokenizer as tokenizers
from hyper_parallel.data.chat import DEFAULT_TEMPLATE
from hyper_parallel.data.corpus import encode
from hyper_parallel.data.document import Answer, Chat, Document, Text
from hyper_parallel.data.tokenizer import END_OF_TEXT, Tokenizer
from hyper_parallel.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 2's manner: no generation prompt, the answer trimmed behind a space of the template's, which is part
# of the token where the vocabulary has the word with its space.
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
# Turns end with a line break alone.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Qwen 3's manner: the last answer is rendered otherwise than the ones before it.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}" + CHATML
)

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure? assistant"},
    {"role": "assistant", "content": "Quite sure."},
]


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    text = tokenizers.train(["Two and two are four. Quite sure, be brief."] * 3, 100, 300)
    rust = tokenizers._rust().Tokenizer.from_str(text)
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=rust, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    )


def one(base: Tokenizer, document: Document, template: str | None = None) -> tuple[str, str, list[int]]:
    """The whole text, the text that bears loss with ¦ between stretches, and the ids."""
    base.transformers.chat_template = template or DEFAULT_TEMPLATE
    [(ids, mask)] = encode([document], base)
    bears = mask if mask is not None else [1] * len(ids)
    assert len(bears) == len(ids)
    stretches: list[list[int]] = []
    for before, now, token in zip([0, *bears], bears, ids, strict=False):
        if now and not before:
            stretches.append([])
        if now:
            stretches[-1].append(token)
    decode = base.transformers.decode
    return decode(ids), "¦".join(decode(stretch) for stretch in stretches), ids


def chat(turns: list[dict[str, Any]]) -> Chat:
    return Chat("here", turns)


@pytest.mark.parametrize(
    ("template", "turns", "answers"),
    [
        (None, TURNS, "Four.<|endoftext|>¦Quite sure.<|endoftext|>"),
        (CHATML, TURNS, "Four.<|im_end|>¦Quite sure.<|im_end|>"),
        (CHATML, TURNS[:4], "Four.<|im_end|>"),
        (CHATML, TURNS[2:], "Four.<|im_end|>¦Quite sure.<|im_end|>"),
        (None, TURNS[2:3], "Four.<|endoftext|>"),
        (INST, TURNS[1:], "Four. <|endoftext|>¦ Quite sure. <|endoftext|>"),
        (PLAIN, TURNS, "Four.\n¦ Quite sure.\n<|endoftext|>"),
        (THINKING, TURNS[:3], "<think></think>Four.<|im_end|>"),
        (MARKED, TURNS, "Four.<|im_end|>¦Quite sure.<|im_end|>"),
    ],
)
def test_only_answers_and_their_ends_bear_loss(
    base: Tokenizer, template: str | None, turns: list[dict[str, Any]], answers: str
) -> None:
    whole, bears, ids = one(base, chat(turns), template)
    assert bears == answers
    expected = base.transformers.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    assert ids == [*expected, base.eos] if template == PLAIN else ids == expected
    assert whole.count("Be brief.") == (turns[0]["role"] == "system")


contents = st.text(st.characters(codec="utf-8", exclude_characters="\x02\x03"), max_size=20)
conversations = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant"]),
        contents,
    ),
    min_size=1,
    max_size=6,
).filter(lambda turns: any(turn["role"] == "assistant" for turn in turns))


@settings(deadline=None, max_examples=150)
@given(conversations, st.sampled_from([None, CHATML]))
def test_any_conversation(base: Tokenizer, turns: list[dict[str, Any]], template: str | None) -> None:
    end = END_OF_TEXT if template is None else "<|im_end|>"
    _, bears, _ = one(base, chat(turns), template)
    assert bears.split("¦") == [
        part for turn in turns if turn["role"] == "assistant" for part in (turn["content"] + end).split("¦")
    ]


def test_a_template_that_changes_earlier_turns_is_refused(base: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"^here: .*message 2 .*generation"):
        one(base, chat(TURNS), THINKING)


def test_a_template_that_refuses_the_messages_is_quoted(base: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"^here: .*the user speaks first"):
        one(base, chat(TURNS), STRICT)


def test_a_prompt_bears_no_loss_and_shares_no_token_with_its_response(base: Tokenizer) -> None:
    whole, bears, _ = one(base, Answer("here", "Two and tw", "o are four."))
    assert whole == "Two and two are four.<|endoftext|>"
    assert bears == "o are four.<|endoftext|>"


def test_without_a_padding_token_the_end_of_text_pads(base: Tokenizer) -> None:
    assert base.transformers.pad_token_id is None and base.pad == base.eos


def test_the_name_of_a_special_token_in_a_text_is_text(base: Tokenizer) -> None:
    whole, bears, ids = one(base, Text("here", "a <|endoftext|> b"))
    assert ids.count(base.eos) == 1 and ids[-1] == base.eos
    assert whole == bears == "a <|endoftext|> b<|endoftext|>"
