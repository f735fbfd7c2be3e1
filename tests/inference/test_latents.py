"""Latents are attended to as they are cached, where the layer that expands them is linear in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.paged_cache import Latents, Matrices
from hyper_parallel.inference.paged_attention import _Kernel
from hyper_parallel.inference.ragged_pass import Segment
from inference.small_models import prompts, small
from inference.test_identical_tokens import TIE, reference

TOKENS = 20


def _latent_model() -> Any:
    return copy.deepcopy(small("deepseek-v3"))


def _rows_expanded(model: Any) -> list[int]:
    """Of the last layer, as passes come."""
    found: list[int] = []
    model.model.layers[-1].self_attn.kv_b_proj.register_forward_hook(
        lambda _, args, __: found.append(args[0].numel() // args[0].size(-1))
    )
    return found


def _same_as_transformers(model: Any, page: int = 32) -> None:
    given = prompts(model, (3, 33, 150, 129, 200))
    answers = Generator(model, max_tokens=TOKENS, page=page)(given)
    for prompt, answer in zip(given, answers, strict=True):
        for token, (expected, logits) in zip(answer.tokens, reference(model, prompt, TOKENS), strict=True):
            if token != expected:
                assert logits.max() - logits[token] <= TIE
                break


def test_contexts_are_not_expanded() -> None:
    model = _latent_model()
    generator = Generator(model, max_tokens=TOKENS)
    rows = _rows_expanded(model)
    generator(prompts(model, (150, 129, 33)))
    config = model.config
    units = config.kv_lora_rank + config.qk_rope_head_dim + 1
    # Matrices are found in the first pass of a run, and all later ones need no rows.
    assert rows[0] == -(-units // 16) * 16
    assert set(rows[1:]) == {16}


@torch.no_grad()
def test_matrices_are_found_again_when_weights_change() -> None:
    model, other = _latent_model(), _latent_model()
    for layer in other.model.layers:
        layer.self_attn.kv_b_proj.weight.mul_(-1.5)
    given = prompts(model, (40, 7))
    generator = Generator(model, max_tokens=TOKENS)
    before = [one.tokens for one in generator(given)]
    model.load_state_dict(other.state_dict())
    after = [one.tokens for one in generator(given)]
    assert after == [one.tokens for one in Generator(other, max_tokens=TOKENS)(given)] != before


@pytest.mark.parametrize("page", [32, 128])
def test_pieces_of_many_rows_are_expanded(page: int) -> None:
    model = _latent_model()
    generator = Generator(model, max_tokens=2, page=page)
    rows = _rows_expanded(model)
    (alone,) = generator(prompts(model, (300,)))
    assert max(rows) >= 256 if page == 128 else max(rows) <= 64
    together = generator([*prompts(model, (150, 129)), *prompts(model, (300,))])
    assert together[2].tokens == alone.tokens
    _same_as_transformers(model, page)


class _Bent(nn.Linear):
    """Not linear in what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_is_not_linear_is_given_all(bias: bool) -> None:
    model = _latent_model()
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        kind = nn.Linear if bias else _Bent
        new = kind(old.in_features, old.out_features, bias=bias).requires_grad_(False)
        new.weight = old.weight
        layer.self_attn.kv_b_proj = new
    rows = _rows_expanded(model)
    _same_as_transformers(model)
    assert max(rows) > 256


def test_values_that_depend_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _latent_model()
    kind = type(model.model.layers[0].self_attn)
    own = kind.expand_kv

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = own(self, kv_nope, k_rot)
        return keys, values + 0.5 * k_rot.sum(-1, keepdim=True)

    monkeypatch.setattr(kind, "expand_kv", expand_kv)
    rows = _rows_expanded(model)
    _same_as_transformers(model)
    # Those of passes without a cache apart.
    assert rows.count(16) > TOKENS


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_absorbed_attention_is_that_to_expanded_values(
    softcap: float | None, sinks: bool, masked: bool
) -> None:
    draws = torch.Generator().manual_seed(0)
    heads, count, length, first, second, size = 3, 4, 9, 16, 8, 12

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draws, dtype=torch.float64)

    one, other = drawn(1, 1, length, first), drawn(1, 1, length, second)
    matrices = Matrices(
        drawn(heads, first + second, size), drawn(heads, first + second, size), first, one_in_values=False
    )
    both = torch.cat([one, other], 3)
    keys, values = (both @ x for x in (matrices.keys, matrices.values))
    mask = torch.ones(count, length).tril(length - count).bool() if masked else None
    kernel = _Kernel(0.3, softcap, drawn(heads) if sinks else None)
    queries = drawn(1, heads, count, size)
    found = kernel.absorbed(queries, one, other, matrices, mask)
    torch.testing.assert_close(found, kernel(queries, keys, values, mask), rtol=1e-5, atol=1e-5)


def test_what_several_heads_cache_is_no_latent() -> None:
    latents = Latents(absorb=True, keep=False)
    context = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    keys, _ = latents.given(*(x[:, :, :1] for x in context), [Segment(0, 1, 4, ())], lambda _: context)
    assert latents.linear is False
    assert torch.equal(keys[:, :, :5], context[0])


@pytest.mark.parametrize("keep", [False, True])
def test_matrices_are_kept_where_that_is_asked(keep: bool) -> None:
    """With a byte budget they are not: the cache outlives runs, and memory is counted."""
    latents = Latents(absorb=True, keep=keep)
    cached = torch.randn(1, 1, 1, 6), torch.randn(1, 1, 1, 2)
    weight = torch.randn(3, 8, 5)
    segments = [Segment(0, 1, 4, ())]
    for passed in range(2):
        rows = torch.cat(latents.given(*cached, segments, lambda _: cached), 3)
        assert bool(rows.any()) == (passed == 0 or not keep)
        matrices = latents.learn(rows @ weight, rows @ weight[:, :, :2])
        assert matrices is not None
        torch.testing.assert_close(matrices.keys, weight)
