"""Token ids of prompts, and what ends answers, beside Transformers' own."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from harness import chat_model
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.generation_settings import generation_settings, stop_tokens
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.inference import Generator
from hyper_parallel.inference.request import prompt_ids
from hyper_parallel.rl.roles.models import ends_of

CHAT = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hel"}]
WITH_TOOLS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% if short is defined %}{{ short }}{% endif %}{% if add_generation_prompt %}:{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
]


@functools.cache
def _tokenizer(template: str = chat_model.CHATML) -> Tokenizer:
    return Tokenizer(chat_model.tokenizer(template))


@pytest.mark.parametrize("text", ["Blue", "<|im_start|>user\nBlue<|im_end|>", "<s>Blue", " Blue", "a</s>b"])
def test_a_text_has_the_ids_of_the_tokenizers_own_call(text: str) -> None:
    own = _tokenizer().transformers
    assert prompt_ids(_tokenizer(), text) == own(text).input_ids
    read_as_text = prompt_ids(_tokenizer(), text, special_tokens=False)
    assert read_as_text == [
        own.bos_token_id,
        *own(text, add_special_tokens=False, split_special_tokens=True).input_ids,
    ]
    assert not set(read_as_text[1:]) & set(own.all_special_ids)


@pytest.mark.parametrize("count", [1, 2])
def test_a_conversation_is_rendered_up_to_the_answer_or_to_its_beginning(count: int) -> None:
    own, ends = _tokenizer().transformers, {1: "add_generation_prompt", 2: "continue_final_message"}
    expected = own.apply_chat_template(CHAT[:count], tokenize=True, return_dict=True, **{ends[count]: True})
    assert prompt_ids(_tokenizer(), CHAT[:count]) == expected["input_ids"]


def test_tools_and_settings_reach_the_template_and_others_are_refused() -> None:
    tokenizer, options = _tokenizer(WITH_TOOLS), {"tools": TOOLS, "short": "yes"}
    expected = tokenizer.transformers.apply_chat_template(
        CHAT[:1], tokenize=True, return_dict=True, add_generation_prompt=True, **options
    )
    assert prompt_ids(tokenizer, CHAT[:1], options) == expected["input_ids"]
    assert prompt_ids(tokenizer, CHAT[:1], options) != prompt_ids(tokenizer, CHAT[:1])
    with pytest.raises(DataError, match=r"the chat template does not read 'shrt'.*short"):
        prompt_ids(tokenizer, CHAT[:1], {"shrt": "yes"})


def test_a_prompt_without_tokens_is_refused() -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda text, special_tokens: [])
    with pytest.raises(DataError, match="the prompt has no tokens"):
        prompt_ids(tokenizer, "日本")
    with pytest.raises(DataError, match="the prompt is empty"):
        prompt_ids(tokenizer, "")


ENDS: dict[str, tuple[Any, Any]] = {
    "one": (3, 5),
    "several": ([3, 7], 5),
    "of config.json": (None, [5, 7]),
    "nowhere": (None, None),
    "none beside config.json": ("null", 5),
}
"""`eos_token_id` of generation_config.json (None: there is no such file) and of config.json."""


@pytest.mark.parametrize("case", ENDS)
def test_answers_end_where_transformers_ends_them(case: str, tmp_path: Path) -> None:
    """Of a folder with a tokenizer, whose end-of-text token counts where the folder names no token."""
    generation, of_config = ENDS[case]
    folder = chat_model.write_model(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": of_config}))
    if generation is not None:
        value = None if generation == "null" else generation
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    own = model.generation_config.eos_token_id
    tokenizer = _tokenizer()
    expected = {tokenizer.eos} if own is None else set(own if isinstance(own, list) else [own])
    assert Generator(folder)._engine.eos == expected
    assert ends_of(SimpleNamespace(config=model.config), tokenizer, str(folder)) == expected
    assert stop_tokens(generation_settings(folder, model.config), tokenizer) == expected


def test_a_file_that_is_no_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json is no generation config"):
        generation_settings(tmp_path, None)
