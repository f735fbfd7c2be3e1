"""What stands behind an answer of a conversation is what the chat template writes there, and drawn tokens stay."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.chat_model import CHATML, tokenizer, write_model
from harness.rl_runs import rl_config
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import prompt
from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError
from hyper_parallel.rl.roles.models import rollout_model, tokenizer_of
from hyper_parallel.rl.roles.rollout import Rollout, tokens_behind
from hyper_parallel.rl.sample import Prompted, Sample

Message = dict[str, Any]
QUESTION = [{"role": "user", "content": "Name a colour."}]
TOOL = {"role": "tool", "content": "blue"}


@cache
def chatml() -> Tokenizer:
    return Tokenizer(tokenizer())


def end_of(found: Tokenizer, word: str = "<|im_end|>") -> int:
    return int(found.transformers.convert_tokens_to_ids(word))


def words() -> st.SearchStrategy[str]:
    return st.text(st.sampled_from("ab cB.,\né"), max_size=8)


@given(st.lists(st.tuples(words(), st.sampled_from(["tool", "user"]), words()), max_size=4), st.booleans())
def test_the_tokens_of_a_conversation(turns: list[tuple[str, str, str]], canonical: bool) -> None:
    """However an answer's text was cut into tokens, they stay; the whole is what the template renders."""
    found = chatml()
    messages: list[Message] = list(QUESTION)
    start = found.encode_template([prompt(found.transformers, Chat("here", messages))])[0][0]
    segments = [(start, False)]
    end = end_of(found)
    for answer, role, content in turns:
        pieces = [answer] if canonical else list(answer)
        drawn = [one for ids in found.encode_raw(pieces) for one in ids] + [end]
        message = {"role": role, "content": content}
        behind = tokens_behind(found, messages, answer, message, end)
        segments += [(drawn, True), (behind, False)]
        messages += [{"role": "assistant", "content": answer}, message]
    ids = [one for segment, _ in segments for one in segment]
    rendered = prompt(found.transformers, Chat("here", messages))
    assert found.transformers.decode(ids, skip_special_tokens=False) == rendered
    if canonical:
        assert ids == found.encode_template([rendered])[0][0]


def test_an_answer_that_ended_otherwise() -> None:
    """The template's own end of turn follows it."""
    found = chatml()
    text = "<|im_end|>\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n"
    for last, expected in (
        (end_of(found), text.removeprefix("<|im_end|>")),
        (found.eos, text),
        (None, text),
    ):
        ids = tokens_behind(found, QUESTION, "ab", TOOL, last)
        assert found.transformers.decode(ids, skip_special_tokens=False) == expected


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and messages[loop.index0 + 1].role == 'user' %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}"
    "{% if loop.last and m.role == 'assistant' and '</think>' not in m.content %}<think></think>{% endif %}"
    "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out thoughts before the last question, and marks a last answer without any, as templates of Qwen3 do."""


@pytest.mark.parametrize(
    ("template", "answer", "role", "message"),
    [
        (
            THINKS,
            "a</think>b",
            "user",
            "leaves out a part of an answer once a message of the role 'user' follows",
        ),
        (
            "{{ messages | length }}" + CHATML,
            "a",
            "tool",
            "as it was once a message of the role 'tool' follows",
        ),
        (CHATML.replace("m.content", "m.content | upper"), "a", "tool", "does not keep a conversation"),
        (
            "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML,
            "a",
            "tool",
            "does not take these messages: no tools",
        ),
    ],
)
def test_templates_that_do_not_keep_what_was_said(
    template: str, answer: str, role: str, message: str
) -> None:
    found = Tokenizer(tokenizer(template))
    with pytest.raises(DataError, match=message) as raised:
        tokens_behind(found, QUESTION, answer, {"role": role, "content": "b"}, None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("answer", ["a</think>b", "ab", "a</think>b</think>c"])
def test_thoughts_that_a_tool_does_not_end(answer: str) -> None:
    found = Tokenizer(tokenizer(THINKS))
    ids = tokens_behind(found, QUESTION, answer, TOOL, end_of(found))
    text = "\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n"
    assert found.transformers.decode(ids, skip_special_tokens=False) == text


def test_a_rollout_goes_on_behind_a_message(tmp_path: Path) -> None:
    """Its tokens are prompt, drawn, appended, drawn; log-probabilities are those of the model given all before."""
    folder = write_model(tmp_path / "model")
    config = rl_config(
        tmp_path,
        model={"path": str(folder), "config": None},
        task={"name": None, "settings": {}, "prompts": "none.jsonl"},
        rl={"max_tokens": 40, "temperature": 1.5},
        roles={"rollout": {"devices": 0, "page": 16}},
    )
    found = tokenizer_of(config)
    rollout = Rollout(config, rollout_model(config, found, torch.device("cpu")), found)
    first = Prompted(ticket=1, place=0, row=1, prompt=QUESTION)
    before = shortened(all_of(rollout, first), 5, found)
    again = all_of(rollout, replace(first, before=before, appended=TOOL))
    behind = tokens_behind(found, QUESTION, before.text, TOOL, before.tokens[-1])
    cut = len(before.tokens)
    assert again.prompt == before.prompt
    assert again.tokens[:cut] == before.tokens
    assert list(again.tokens[cut : cut + len(behind)]) == behind
    assert again.drawn == (
        *[True] * cut,
        *[False] * len(behind),
        *[True] * (len(again.tokens) - cut - len(behind)),
    )
    assert again.turns == ({"role": "assistant", "content": before.text}, TOOL)
    assert again.text == found.decode(again.tokens[cut + len(behind) :])
    own = torch.tensor(again.drawn)
    own[:cut] = False  # their log-probabilities are those of a longer answer's
    ids = torch.tensor([[*again.prompt, *again.tokens]])
    with torch.no_grad():
        logits = rollout.model(ids).logits[0, len(again.prompt) - 1 : -1] / 1.5
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(again.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(again.logprobs)[own], exact[own], atol=1e-4, rtol=0)
    [greedy] = rollout.answer([replace(first, before=before, appended=TOOL)], temperature=0.0, seed=0)
    assert greedy.drawn[: cut + len(behind)] == again.drawn[: cut + len(behind)]
    assert greedy.tokens[: cut + len(behind)] == again.tokens[: cut + len(behind)]
    rollout.close()


def all_of(rollout: Rollout, asked: Prompted) -> Sample:
    found = rollout.generate([asked], 100)
    while rollout.busy:
        found += rollout.generate([], 100)
    [one] = found
    return one


def shortened(one: Sample, count: int, found: Tokenizer) -> Sample:
    """Its first tokens, ended by the end of a turn."""
    tokens = (*one.tokens[:count], end_of(found))
    size = len(tokens)
    return replace(
        one,
        tokens=tokens,
        logprobs=(*one.logprobs[: size - 1], -1.0),
        versions=(0,) * size,
        drawn=(True,) * size,
        ended=True,
        text=found.decode(tokens),
    )
