"""Int8 pages: rounded once, when they are written, so that tokens have the same bits wherever the pages lie."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import run_ranks
from harness.observer import Observer
from harness.small_folder import save_small_llama
from hyper_parallel import Strategy
from hyper_parallel.config.generate import GenerationStrategy, load_plan
from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.inference import Completion, Generator
from hyper_parallel.inference.batch import run_batch
from hyper_parallel.inference.kv_cache.pages import groups_of, pack, packed_size, unpack
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, page_bytes
from inference.opened_tiers import opened
from inference.small_models import prompts, small

SETTINGS: dict[str, Any] = {"page": 16, "max_tokens": 6, "logprobs": True, "kv_dtype": "int8"}
LENGTHS = (90, 40, 3, 17)


def bits(answers: list[Completion]) -> list[object]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


@given(
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.floats(-4, 4),
    st.integers(0, 99),
)
def test_values_are_half_a_step_off_at_most(size: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    x = (torch.randn(5, 2, size, generator=torch.Generator().manual_seed(seed)) * 10**scale).to(dtype)
    packed = pack(x)
    assert packed.shape == (5, 2, packed_size(size))
    assert packed.dtype == torch.int8
    found = unpack(packed, torch.empty_like(x)).double()
    grouped = x.double().unflatten(-1, (groups_of(size), -1))
    most = grouped.abs().amax(-1, keepdim=True)
    # Half a step, of the largest value three quarters, and the rounding of its scale and of the dtype.
    step = most / 127.5 * (1 + 2**-8)
    rounding = torch.finfo(dtype).eps * (grouped.abs() + torch.finfo(dtype).smallest_normal)
    off = (found.unflatten(-1, (groups_of(size), -1)) - grouped).abs()
    assert bool((off <= 0.5 * step + (grouped.abs() > 126 / 127.5 * most) * 0.75 * step + rounding).all())
    assert torch.equal(pack(x[2:3]), packed[2:3]), "a token is rounded by itself"


def test_values_that_are_not_finite_stay_so_and_zeros_are_zeros() -> None:
    x = torch.zeros(4, 1, 64)
    x[0, 0, 3], x[1, 0, 40], x[2, 0, 5] = math.inf, math.nan, 1e-42
    found = unpack(pack(x), torch.full_like(x, 7.0))
    assert not found[0, 0, :32].isfinite().any()
    assert not found[1, 0, 32:].isfinite().any()
    assert not found[0, 0, 32:].any()
    assert not found[2:].any()
    largest = torch.full((1, 1, 32), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert bool(unpack(pack(largest), torch.empty_like(largest)).isfinite().all())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-moe", "gpt2"])
def test_answers_have_the_same_bits_in_any_company(family: str) -> None:
    model = small(family)
    given = prompts(model, LENGTHS)
    generator = Generator(model, **SETTINGS)
    together = generator(given)
    assert bits(together) == bits([generator([one])[0] for one in given])
    # Few pages, so that contexts are scattered, and prompts that share a beginning.
    assert bits(generator([given[0], *given], batch=2, pages=14)) == bits([together[0], *together])
    exact = Generator(model, **{**SETTINGS, "kv_dtype": None})(given)
    assert bits(exact) != bits(together), "nothing was rounded"


@pytest.mark.parametrize(
    ("family", "happened", "lengths", "device", "tiers"),
    [
        ("llama", "swapped", (1, 31, 32, 33, 70), 9, ("host", "pool", "flash")),
        ("gemma3", "streamed", (140, 12, 132), 8, ("flash",)),
        ("deepseek-v3", "streamed", (140, 12, 132), 8, ("pool",)),
        ("gpt-oss", "streamed", (140, 12, 132), 8, ("host",)),
    ],
)
def test_bits_are_those_of_the_device_in_any_tier(
    family: str, happened: str, lengths: tuple[int, ...], device: int, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    model = small(family)
    given = prompts(model, lengths)
    generator = Generator(model, **{**SETTINGS, "max_tokens": 20})
    plain = bits(generator(given))
    cache = generator._engine.cache
    sizes = KVCacheSizes(device=device, **dict.fromkeys(tiers, 60 if happened == "swapped" else 200))
    cache.configure(sizes, opened(tiers, tmp_path))
    try:
        assert bits(generator(given)) == plain
        assert getattr(cache.report, happened)
        assert not cache.report.recomputed
        held = cache._open
        assert held is not None
        assert sum(store.nbytes for store in held[0].stores) == device * page_bytes(
            cache.shapes, cache.stored
        )
        assert bits(generator(given)) == plain
        assert cache.report.fetched + cache.report.shared
    finally:
        generator.close()


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_a_budget_holds(family: str, tmp_path: Path) -> None:
    """Values that a pass unpacks are a part of its workspace."""
    model = small(family)
    given = prompts(model, (90, 40))
    plain = bits(Generator(model, **SETTINGS)(given))
    memory = {"device": "1GiB", "flash": str(tmp_path)}
    with Generator(model, memory=memory, **SETTINGS) as generator:
        assert generator.memory is not None
        least = generator.smallest_budget(given)
        for budget, more in ((least, {}), (least + 200_000, {"pages": 5}), (1 << 30, {})):
            generator.memory.budget = budget
            with Observer(generator.memory.stream.tensors()) as seen:
                assert bits(generator(given, **more)) == plain
            assert seen.peak <= budget
            assert bool(more) <= bool(generator.cache_report.streamed)
            assert generator.memory.plan is not None
            assert generator.memory.plan.device <= budget


def test_pages_take_a_third_of_the_memory() -> None:
    def page(kv_dtype: str | None) -> int:
        generator = Generator(small("llama"), **{**SETTINGS, "kv_dtype": kv_dtype})
        return page_bytes(generator._engine.cache.shapes, 16)

    size = small("llama").config.hidden_size // small("llama").config.num_attention_heads  # type: ignore[union-attr, operator]
    assert page("int8") * 4 * size == page(None) * packed_size(size)


def test_another_dtype_needs_another_generator() -> None:
    generator = Generator(small("llama"), **SETTINGS)
    with pytest.raises(ConfigError, match="kv_dtype: this Generator's pages hold int8; make another one"):
        generator([[1, 2]], kv_dtype=None)


def _rank(rank: int, world: int, folder: str, axes: dict[str, int], tier: dict[str, str]) -> Any:
    """Answers without a budget, and with few pages on the device within one."""
    given = prompts(small("llama"), (190, 40, 17))
    with Generator(folder, strategy=Strategy(axes=axes), **SETTINGS) as generator:
        plain = generator(given)
    strategy = GenerationStrategy.model_validate({"axes": axes, "memory": {"device": "1GiB", **tier}})
    with Generator(folder, strategy=strategy, **SETTINGS) as generator:
        assert generator.memory is not None
        generator.memory.budget = generator.smallest_budget(given, pages=5)
        with Observer(generator.memory.stream.tensors()) as seen:
            found = generator(given[::-1], pages=5)[::-1]
        assert seen.peak <= generator.memory.budget
        return plain, bits(found) == bits(plain), bool(generator.cache_report.streamed)


@pytest.mark.parametrize(("axes", "tier"), [({"tensor": 2}, "host"), ({"context": 2}, "flash")])
def test_ranks_have_the_bits_of_the_device_in_any_tier(
    axes: dict[str, int], tier: str, tmp_path: Path
) -> None:
    model: Any = small("llama")
    model.save_pretrained(tmp_path / "model")
    place = {tier: str(tmp_path / "flash") if tier == "flash" else "64MiB"}
    expected = Generator(model, **SETTINGS)(prompts(model, (190, 40, 17)))
    for plain, same, streamed in run_ranks(_rank, 2, str(tmp_path / "model"), axes, place):
        assert same
        assert streamed
        for own, other in zip(plain, expected, strict=True):
            assert own.tokens == other.tokens
            # Sums in another order are rounded to another one of the 255 values now and then.
            assert own.logprobs == pytest.approx(other.logprobs, abs=0.02)


def test_answers_with_other_pages_are_not_gone_on_with(tmp_path: Path) -> None:
    save_small_llama(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f1(x):"}\n')
    files = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    run_batch(*files, Inference(max_tokens=3, kv_dtype="int8"))
    run_batch(*files, Inference(max_tokens=3, kv_dtype="int8"))
    with pytest.raises(DataError, match="is no answer to these prompts with this model and these settings"):
        run_batch(*files, Inference(max_tokens=3))


def test_predictions_refuse_what_they_do_not_price() -> None:
    with pytest.raises(ConfigError, match="'kv_dtype' \\(int8\\) is not predicted"):
        load_plan(["inference.kv_dtype=int8"])
