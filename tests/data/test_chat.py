"""Which tokens of a conversation bear loss."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import tokenizer as tokenizers
from hyper_parallel.data.chat import DEFAULT_TEMPLATE
from hyper_parallel.data.corpus import encode
from hyper_parallel.data.document import SWITCHES, Answer, Chat, Document, Text, from_record
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
# Qwen 3's: earlier reasoning is dropped, and the last turn has a block of it.
DROPS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{% if m.content and '</think>' in m.content %}{{ m.content }}{% else %}<think></think>{{ m.content }}{% endif %}"
    "{% elif m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# DeepSeek R1's: the generation prompt opens a block of reasoning that earlier turns do not have.
OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Phi 3's: the end of the text behind the end of the last turn.
ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
# gpt-oss's: the last turn ends with another token.
RETURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULTS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind. {{ strftime_now('%Y') }}<|im_end|>\n{% endif %}"
    + CHATML
)
# Either calls or content.
CALLS = CHATML.replace(
    "m.content", "(m.tool_calls[0].function.arguments if m.tool_calls else m.content | trim)"
)
PARTS = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text | trim }}{% endfor %}")
# Mistral's: tools before the last question.
LATE_TOOLS = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if tools and m == asked[-1] %}[TOOLS]{{ tools | tojson }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
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

REASONED = [
    *TURNS[1:2],
    {"role": "assistant", "content": "<think>Hm.</think>Four."},
    *TURNS[3:4],
    {"role": "assistant", "content": "<think>Hm.</think>Quite sure."},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING = [
    *TURNS[1:2],
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three."},
    *TURNS[3:],
]
LISTED = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS[1:3]]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Two <and> two"}}]


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
        (THINKING, TURNS, "Four.<|im_end|>¦<think></think>Quite sure.<|im_end|>"),
        (DROPS, REASONED, "Four.<|im_end|>¦<think>Hm.</think>Quite sure.<|im_end|>"),
        (DROPS, CALLING, "<call>{'a': 1}<|im_end|>¦Three.<|im_end|>¦<think></think>Quite sure.<|im_end|>"),
        (OPENS, TURNS, "Four.<|im_end|>¦Quite sure.<|im_end|>"),
        (OPENS, REASONED, "Four.<|im_end|>¦Quite sure.<|im_end|>"),
        (ENDS, TURNS, "Four.<|im_end|>¦Quite sure.<|im_end|>\n<|endoftext|>"),
        (
            RETURNS.replace(" and not add_generation_prompt", ""),
            TURNS,
            "Four.<|im_end|>¦Quite sure.<|endoftext|>",
        ),
        (RETURNS, TURNS, "Four.<|im_end|>¦Quite sure.<|endoftext|>"),
        (DEFAULTS, TURNS[1:], "Four.<|im_end|>¦Quite sure.<|im_end|>"),
        (CALLS, CALLING, "{'a': 1}<|im_end|>¦Three.<|im_end|>¦Quite sure.<|im_end|>"),
        (PARTS, LISTED, "Four.<|im_end|>"),
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


def test_parts_are_one_text_to_a_template_of_texts(base: Tokenizer) -> None:
    listed = [TURNS[1], {**TURNS[2], "content": [{"type": "text", "text": part} for part in ("Fo", "ur.")]}]
    assert one(base, chat(listed), CHATML) == one(base, chat(TURNS[1:3]), CHATML)


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


def test_a_template_that_reads_other_answers_is_refused(base: Tokenizer) -> None:
    changes = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content | length }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"^here: .*message 2 .*generation"):
        one(base, chat(TURNS), THINKING + changes)


def test_a_template_that_refuses_the_messages_is_quoted(base: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"^here: .*the user speaks first"):
        one(base, chat(TURNS), STRICT)


@pytest.mark.parametrize(
    ("prompt", "response", "bears"),
    [
        ("Two and two", " are four.", " are four.<|endoftext|>"),
        # A token with characters of both bears loss.
        ("Two and tw", "o are four.", " two are four.<|endoftext|>"),
        ("Two and two ", "are four.", " are four.<|endoftext|>"),
        ("Two and two", "   ", "   <|endoftext|>"),
        ("", "are four.", "are four.<|endoftext|>"),
    ],
)
def test_tokens_with_a_character_of_the_response_bear_loss(
    base: Tokenizer, prompt: str, response: str, bears: str
) -> None:
    whole, found, ids = one(base, Answer("here", prompt, response))
    assert whole == f"{prompt}{response}<|endoftext|>" and found == bears
    assert ids == [*base.transformers(prompt + response)["input_ids"], base.eos]


def test_without_a_padding_token_the_end_of_text_pads(base: Tokenizer) -> None:
    assert base.transformers.pad_token_id is None and base.pad == base.eos


def test_the_name_of_a_special_token_in_a_text_is_that_token(base: Tokenizer) -> None:
    for text in ("a <|im_end|> b", "a <|endoftext|>"):
        whole, bears, ids = one(base, Text("here", text))
        assert whole == bears == f"{text.removesuffix(END_OF_TEXT)}<|endoftext|>"
        assert ids[: len(base.encode(text))] == base.transformers(text)["input_ids"] and ids[-2] != base.eos


def row(base: Tokenizer, template: str, **record: Any) -> tuple[str, str]:
    """The text and the answers of a record."""
    found = from_record({"messages": TURNS, **record}, "here")
    assert found is not None
    return one(base, found, template)[:2]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("listed", [TOOLS, json.dumps(TOOLS)])
def test_what_a_row_gives_to_the_template_reaches_it(base: Tokenizer, template: str, listed: Any) -> None:
    template = "{{ tools | tojson }}{{ documents }}{% if not thinking %}no{% endif %}\n" + template
    kwargs = {"thinking": False}
    whole, bears = row(base, template, tools=listed, documents=[{"title": "a"}], chat_template_kwargs=kwargs)
    assert whole == base.transformers.apply_chat_template(
        TURNS, tools=TOOLS, documents=[{"title": "a"}], thinking=False, tokenize=False
    )
    assert whole.startswith('[{"type": "function"') and "]no<" in whole
    assert bears == "Four.<|im_end|>¦Quite sure.<|im_end|>"


def test_tools_that_move_with_the_last_question(base: Tokenizer) -> None:
    turns = TURNS[1:]
    whole, bears = row(base, LATE_TOOLS, messages=turns, tools=TOOLS)
    assert whole == base.transformers.apply_chat_template(turns, tools=TOOLS, tokenize=False)
    assert bears == "Four.<|endoftext|>¦Quite sure.<|endoftext|>"


def test_an_answer_that_cannot_be_replaced_to_find_it_is_refused(base: Tokenizer) -> None:
    called = "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    follows = called + "{{ raise_exception('no call') }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="around message 1 otherwise"):
        row(base, follows + DROPS, messages=CALLING)


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING])
@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_an_answer_that_is_switched_off_bears_no_loss(
    base: Tokenizer, template: str, key: str, value: Any
) -> None:
    turns = [*TURNS[:2], {**TURNS[2], key: value}, {**TURNS[3], key: value}, {**TURNS[4], key: 1}]
    think = "<think></think>" if template == THINKING else ""
    assert row(base, template, messages=turns)[1] == f"{think}Quite sure.<|im_end|>"
    assert row(base, template)[1] == f"Four.<|im_end|>¦{think}Quite sure.<|im_end|>"


ASKED, SAID = TURNS[1:3]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "message 1 has 'weight' 0.5, .* write 0 or 1"),
        ({"messages": [ASKED, {**SAID, "loss_mask": [0, 1]}]}, "message 1 has 'loss_mask'"),
        ({"messages": [{**ASKED, "train": True}, SAID]}, "message 0 has 'train' True and the role 'user'"),
        ({"messages": [ASKED, {**SAID, "train_detail": []}]}, "message 1 has 'train_detail'"),
        ({"messages": [ASKED, {**SAID, "train": False, "weight": 1}]}, "contradict each other"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, "every answer is switched off"),
        ({"tools": TOOLS}, "does not read 'tools', which would be ignored"),
        ({"tools": "f(x)"}, "'tools' is a string that is not JSON"),
        ({"tools": ["f"]}, "'tools' must be a list of objects"),
        ({"functions": TOOLS}, "'functions' are not read; write them as 'tools'"),
        ({"chat_template_kwargs": {"add_generation_promt": 1}}, "did you mean 'add_generation_prompt'"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "'chat_template_kwargs' has 'tokenize'"),
        ({"chat_template_kwargs": {"tools": TOOLS}}, "'chat_template_kwargs' has 'tools'; write it as a key"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list"),
    ],
)
def test_what_cannot_be_honoured_is_refused(base: Tokenizer, record: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=f"^here: .*{expected}") as raised:
        row(base, CHATML, **record)
    assert "\n" not in str(raised.value)


def test_a_message_that_the_template_leaves_out_is_refused(base: Tokenizer) -> None:
    knows = "{% for m in messages if m.role in ('user', 'assistant') %}" + CHATML.partition("%}")[2]
    turns = [{"role": "developer", "content": "Be brief."}, *TURNS[1:]]
    with pytest.raises(DataError, match="does not show message 0, of the role 'developer'"):
        row(base, knows, messages=turns)
    assert row(base, CHATML, messages=turns)[1] == "Four.<|im_end|>¦Quite sure.<|im_end|>"
    # A message that is written otherwise is shown.
    assert row(base, knows.replace("m.content", "m.content | upper"), messages=TURNS[1:])[1].startswith(
        "FOUR."
    )


def test_marks_that_are_not_one_for_each_answer(base: Tokenizer) -> None:
    split = "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    twice = MARKED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", split)
    assert row(base, twice)[1] == "Four.<|im_end|>¦Quite sure.<|im_end|>"
    with pytest.raises(
        DataError, match="message 2 is to bear no loss, and the chat template marks 4 answers in 2"
    ):
        row(base, twice, messages=[*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]])
