"""The generator leaves the model as it was, and what is drawn depends on its place alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.inference import Generator, engine
from inference.small_models import prompts, small


def test_the_model_is_as_it_was_between_completions() -> None:
    """Also while a caller goes through them, and when it stops before the last."""
    model: Any = copy.deepcopy(small("mixtral"))
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    generator = Generator(model, max_tokens=4)
    assert [module.training for module in model.modules()] == modes
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    for _ in generator.stream(prompts(model)):
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()
        assert torch.equal(model(ids).logits, expected)
        break
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation == "eager"


def test_the_model_is_as_it_was_where_a_pass_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards a Trainer predicts with the model's own `generate`."""
    model: Any = copy.deepcopy(small("mixtral"))
    generator = Generator(model, max_tokens=4)

    def refused(*_: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(engine, "experts_by", refused)
    with pytest.raises(RuntimeError, match="refused"):
        generator(prompts(model))
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation == "eager"


def test_an_answer_is_drawn_by_its_prompt_and_number() -> None:
    """With more answers to each prompt, in other company, and alone."""
    generator = Generator(small("llama"), temperature=1.0, max_tokens=8)
    given = prompts(generator.model)[:3]
    two, three = generator(given, n=2), generator(given, n=3)
    assert [one.tokens for one in two[::2]] == [one.tokens for one in three[::3]]
    assert [one.tokens for one in two[1::2]] == [one.tokens for one in three[1::3]]
    request = generator.request(given[1], generator.settings)
    assert dict(generator.run([request]))[0].tokens == two[2].tokens
    assert generator([given[2], given[1]])[1].tokens == two[2].tokens
    assert generator([given[1]], seed=1)[0].tokens != two[2].tokens


def test_a_model_that_gives_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = copy.deepcopy(small("llama"))
    expected = [one.tokens for one in Generator(model, max_tokens=6)(prompts(model))]
    own: Callable[..., Any] = type(model).forward

    def forward(
        self: Any, input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **rest: Any
    ) -> Any:
        assert "logits_to_keep" not in rest
        return own(self, input_ids, position_ids=position_ids, past_key_values=past_key_values, **rest)

    monkeypatch.setattr(type(model), "forward", forward)
    assert [one.tokens for one in Generator(model, max_tokens=6)(prompts(model))] == expected


def test_more_requests_than_rows_of_a_pass() -> None:
    model = small("llama")
    given = prompts(model) * 6
    crowded = Generator(model, batch=48, rows=32, page=32, max_tokens=6)(given)
    assert [one.tokens for one in crowded] == [
        one.tokens for one in Generator(model, page=32, max_tokens=6)(given)
    ]


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="raise rows or lower page"):
        Generator(small("llama"), page=256)
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        Generator(small("llama"), max_token=8)
    with pytest.raises(ConfigError, match="pages have 32 tokens"):
        Generator(small("llama"))([[1]], page=16)


@pytest.mark.parametrize("prompt", ["ab", [1, 2], [{"role": "user", "content": "ab"}]])
def test_one_prompt_that_is_no_list(prompt: Any) -> None:
    """It would be taken for as many prompts as it has characters, tokens or messages."""
    with pytest.raises(DataError, match="also of one"):
        Generator(small("llama"))(prompt)


def test_half_of_a_character() -> None:
    class Tokens:
        eos_token_id = 0

    with pytest.raises(DataError, match="lone surrogate"):
        Generator(small("llama"), Tokens())(["\ud800"])


@pytest.mark.parametrize("own", [None, 7, [7, 9]])
def test_what_ends_an_answer_is_what_ends_it_in_transformers(own: Any, tmp_path: Path) -> None:
    """A generation config without an end-of-text token stands for none, whatever the config has."""
    model: Any = copy.deepcopy(small("llama"))
    model.config.eos_token_id, model.generation_config.eos_token_id = 5, own
    model.save_pretrained(tmp_path)
    for one in (model, tmp_path):
        assert Generator(one)._engine.eos == frozenset([own] if isinstance(own, int) else own or ())
    (tmp_path / "generation_config.json").unlink()
    assert Generator(tmp_path)._engine.eos == {5}
