"""Greedy tokens in float32 are those of Transformers' `generate`, one request at a time, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hyper_parallel.inference import Generator, paged_attention
from inference.small_models import DECODERS, made, prompts, small

TOKENS = 24
TIE = 1e-4
"""Two logits that are nearer are a tie, which rounding decides."""


def reference(model: Any, prompt: list[int], tokens: int) -> list[tuple[int, torch.Tensor]]:
    """Tokens and logits of `generate`."""
    ids = torch.tensor([prompt])
    # Without a mask, `generate` takes tokens of a prompt that have the padding's id for padding.
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return list(
        zip(found.sequences[0, len(prompt) :].tolist(), [one[0] for one in found.logits], strict=True)
    )


@pytest.mark.parametrize("family", DECODERS)
def test_tokens_are_those_of_transformers(family: str) -> None:
    model = small(family)
    given = prompts(model)
    answers = Generator(model, max_tokens=TOKENS)(given)
    ties = 0
    for prompt, answer in zip(given, answers, strict=True):
        for token, (expected, logits) in zip(answer.tokens, reference(model, prompt, TOKENS), strict=True):
            if token != expected:
                assert logits.max() - logits[token] <= TIE, f"prompt of {len(prompt)} tokens"
                ties += 1
                break
    assert ties <= 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "deepseek-v3", "mixtral"])
def test_bits_do_not_depend_on_the_company(family: str) -> None:
    model = small(family)
    given = prompts(model)
    settings = {"max_tokens": 12, "logprobs": True}
    together = Generator(model, **settings)(given)
    generator = Generator(model, **settings, batch=1)
    alone = [generator([prompt])[0] for prompt in given]
    backwards = Generator(model, **settings, batch=3)(given[::-1])[::-1]
    for one, other, third in zip(together, alone, backwards, strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert one.logprobs == other.logprobs == third.logprobs


def test_bits_do_not_depend_on_the_company_with_two_threads() -> None:
    """Of 64 rows, which two threads of MKL add up in another order than 32 where K is large and N small."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = made("llama", {**sizes, **heads})
    given = prompts(model, (3,) * 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generator = Generator(model, max_tokens=6, logprobs=True, batch=64)
        together = generator(given)
        alone = [generator([prompt])[0] for prompt in given[:2]]
    finally:
        torch.set_num_threads(threads)
    assert [one.logprobs for one in together[:2]] == [one.logprobs for one in alone]


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_pages_in_several_runs_change_nothing(family: str) -> None:
    """Long and short requests, in memory for a few of them, so that free pages are scattered."""
    model = small(family)
    given = [prompt * 2 for prompt in prompts(model)] * 3
    lengths = [3 + 7 * (place % 5) for place in range(len(given))]
    generator = Generator(model, page=16, batch=6, pages=18)
    settings = [generator.settings.model_copy(update={"max_tokens": length}) for length in lengths]
    requests = [generator.request(ids, chosen) for ids, chosen in zip(given, settings, strict=True)]
    found = dict(generator.run(requests))
    plain = Generator(model, page=16)
    for place, (ids, chosen) in enumerate(zip(given, settings, strict=True)):
        assert found[place].tokens == plain([ids], max_tokens=chosen.max_tokens)[0].tokens


@pytest.mark.parametrize("family", DECODERS)
def test_log_probabilities_are_those_of_a_forward_pass(family: str) -> None:
    model: Any = small(family)
    given = prompts(model)
    for prompt, answer in zip(given, Generator(model, max_tokens=TOKENS, logprobs=True)(given), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.tokens]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(answer.tokens)[:, None]
        )
        assert answer.logprobs is not None
        assert (torch.tensor(answer.logprobs) - expected[:, 0]).abs().max() <= 5e-5


def test_what_attention_gives_is_contiguous() -> None:
    """Some models view it (AFMoE, JetMoE)."""
    seen = []

    def attention(*given: Any, **more: Any) -> Any:
        seen.append(paged_attention.attention(*given, **more))
        return seen[-1]

    model = small("llama")
    generator = Generator(model, max_tokens=2)
    ALL_ATTENTION_FUNCTIONS.register(paged_attention.NAME, attention)
    try:
        generator([[1, 2, 3], [4] * 40])
    finally:
        paged_attention.register(paged_attention.NAME, paged_attention.attention, paged_attention.ragged_mask)
    assert seen
    assert all(out.is_contiguous() for out, _ in seen)
