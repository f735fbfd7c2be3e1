"""`generate` with a TieredCache: tokens and logits are the bits of DynamicCache, and the budget holds."""

from __future__ import annotations

import copy
import gc
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from harness import run_ranks
from harness.chat_model import write_model
from hyper_parallel import Strategy, TieredCache, parallelize
from hyper_parallel.errors import BudgetError, ConfigError, TierError, UnsupportedModelError
from inference.deep_models import LAYERS, deep
from inference.small_models import small

TOKENS = 16
PROMPT = 60


def _generate(model: Any, cache: Any, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """Tokens and logits for three prompts, one of which is padded."""
    torch.manual_seed(0)
    ids = torch.randint(6, model.config.get_text_config().vocab_size, (3, PROMPT))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        past_key_values=cache,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **settings,
    )
    return out.sequences, list(out.logits)


def _same(model: Any, cache: TieredCache, **settings: Any) -> None:
    expected, expected_logits = _generate(model, DynamicCache(config=model.config), **settings)
    found, logits = _generate(model, cache, **settings)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, logits, expected_logits))


def _bytes(model: Any, rows: int = 3) -> int:
    """Of a whole cache of what `_generate` caches."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, PROMPT + TOKENS - 1, dtype=torch.int64), past_key_values=cache)
    return rows * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


GREEDY: dict[str, Any] = {}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}


@pytest.mark.parametrize(
    ("family", "settings", "part"),
    [
        ("llama", GREEDY, 0.85),
        ("llama", GREEDY, 0.5),
        ("llama", DRAWN, 0.5),
        ("llama", BEAMS, 0.5),
        ("gemma3", GREEDY, 0.7),
        ("gemma3", BEAMS, 0.7),
        ("mistral", GREEDY, 0.85),
        ("deepseek-v3", GREEDY, 0.5),
        ("deepseek-v3", BEAMS, 0.5),
        ("gpt-oss", GREEDY, 0.7),
        ("qwen3-moe", GREEDY, 0.5),
    ],
)
def test_bits_are_those_of_a_dynamic_cache(family: str, settings: dict[str, Any], part: float) -> None:
    model: Any = deep(family)
    rows = 3 * settings.get("num_beams", 1)
    with TieredCache(model, device=int(part * _bytes(model, rows)), host="16MiB") as cache:
        _same(model, cache, **settings)
        report = cache.report
        assert report.budget is not None
        assert 0 < report.device <= report.budget
        assert 0 < report.streamed <= LAYERS
        assert report.tiers["host"].read > report.tiers["host"].written > 0
        assert not report.idle


@pytest.mark.parametrize("tiers", [{"flash": True}, {"pool": "8MiB"}, {"host": 100_000, "flash": True}])
def test_tiers(tiers: dict[str, Any], tmp_path: Path) -> None:
    model: Any = deep("llama")
    if "flash" in tiers:
        tiers = {**tiers, "flash": tmp_path / "spill"}
    cache = TieredCache(model, device=_bytes(model) // 2, **tiers)
    _same(model, cache)
    assert all(moved.read for moved in cache.report.tiers.values())
    if "host" in tiers:
        assert cache.report.tiers["host"].held <= 100_000
    if "flash" in tiers:
        assert list(tiers["flash"].iterdir())
    del cache
    gc.collect()
    assert not list(tmp_path.glob("spill/*")), "the files go with the cache"


def test_everything_fits() -> None:
    """The layers are Transformers' own, and a tier that moved nothing says so."""
    model: Any = deep("llama")
    cache = TieredCache(model, device="64MiB", host="1MiB")
    _same(model, cache)
    assert cache.report.idle == ("host",)
    assert "host moved no byte" in str(cache.report)
    without = TieredCache(model)
    _same(model, without)
    assert without.report.tiers == {}


def test_the_smallest_budget_works() -> None:
    model: Any = deep("llama")
    with pytest.raises(BudgetError, match="tokens of a batch of 3 need device=") as refused:
        _generate(model, TieredCache(model, device=20_000, host="16MiB"))
    assert refused.value.floor is not None
    floor = refused.value.floor
    ids = torch.ones(3, PROMPT, dtype=torch.int64)
    with torch.no_grad():
        model(ids, past_key_values=TieredCache(model, device=floor, host="16MiB"))
        with pytest.raises(BudgetError, match=str(floor)):
            model(ids, past_key_values=TieredCache(model, device=floor - 1, host="16MiB"))


def test_assisted_decoding_takes_tokens_back() -> None:
    for family, part in (("llama", 0.6), ("gemma3", 0.8)):
        model: Any = deep(family)
        torch.manual_seed(0)
        ids = torch.randint(6, 131, (1, PROMPT))
        settings: dict[str, Any] = {
            "max_new_tokens": TOKENS,
            "prompt_lookup_num_tokens": 4,
            "pad_token_id": 0,
        }
        expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
        cache = TieredCache(model, device=int(part * _bytes(model, 1)), host="16MiB")
        assert torch.equal(model.generate(ids, past_key_values=cache, **settings), expected)
        assert cache.report.streamed


def test_a_conversation_goes_on() -> None:
    """The same cache for more tokens, in pieces, and again after a reset."""
    model: Any = deep("gemma3")
    own, cache = DynamicCache(config=model.config), TieredCache(model, device=170_000, host="16MiB")
    torch.manual_seed(0)
    for _ in range(2):
        seen = torch.randint(6, 131, (3, 10))
        for length in (17, 1, 60, 5):
            seen = torch.cat([seen, torch.randint(6, 131, (3, length))], 1)
            expected, found = (
                model.generate(seen, past_key_values=one, max_new_tokens=9, prefill_chunk_size=16)
                for one in (own, cache)
            )
            assert torch.equal(found, expected)
            seen = expected
        assert cache.report.streamed
        cache.reset()
        assert cache.report.tiers["host"].held == 0
        own = DynamicCache(config=model.config)


_SMALL = {"vocab_size": 131, "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 1}
_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {**_SMALL, "d_kv": 8, "d_ff": 50, "num_layers": LAYERS, "num_heads": 4},
    "bart": {
        **_SMALL,
        "encoder_layers": 2,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 50,
        "decoder_ffn_dim": 50,
    },
}


@pytest.mark.parametrize("kind", _SEQ2SEQ)
def test_encoder_and_decoder(kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SEQ2SEQ[kind])
    model: Any = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.randint(6, 131, (3, 12))
    settings: dict[str, Any] = {"min_new_tokens": 80, "max_new_tokens": 80, "num_beams": 2}
    expected = model.generate(ids, **settings)
    cache = TieredCache(model, device=700_000, host="16MiB")
    both = EncoderDecoderCache(cache, DynamicCache(config=config))
    assert torch.equal(model.generate(ids, past_key_values=both, **settings), expected)
    assert cache.report.streamed
    with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"):
        model.generate(ids, past_key_values=TieredCache(model, device=700_000, host="16MiB"), **settings)
    crossed = EncoderDecoderCache(
        DynamicCache(config=config), TieredCache(model, device=300_000, host="16MiB")
    )
    with pytest.raises(UnsupportedModelError, match="DynamicCache"):
        model.generate(ids.repeat(1, 3), past_key_values=crossed, **settings)


def _rank(rank: int, world: int) -> list[list[int]]:
    model: Any = copy.deepcopy(deep("llama"))
    parallelize(model, Strategy(axes={"tensor": 2}))
    with TieredCache(model, device=_bytes(model) // 2, host="16MiB") as cache:
        found, _ = _generate(model, cache)
        assert cache.report.streamed
    return found.tolist()


def test_each_rank_has_its_own() -> None:
    expected, _ = _generate(deep("llama"), DynamicCache(config=deep("llama").config))
    for found in run_ranks(_rank, 2):
        assert found == expected.tolist()


def test_refusals(tmp_path: Path) -> None:
    model: Any = deep("llama")
    with pytest.raises(ConfigError, match="set device"):
        TieredCache(model, host="1MiB")
    with pytest.raises(ConfigError, match="no number of bytes"):
        TieredCache(model, device="much")
    with pytest.raises(ConfigError, match="above 0"):
        TieredCache(model, device=0)
    with pytest.raises(ConfigError, match="not str"):
        TieredCache("model", device="1MiB")
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(UnsupportedModelError, match="LinearAttentionLayer"):
        TieredCache(config, device="1MiB", host="1MiB")
    cache = TieredCache(model, device=_bytes(model) // 2, host="16MiB")
    ids = torch.ones(3, PROMPT, dtype=torch.int64)
    with pytest.raises(ConfigError, match="no_grad"):
        model(ids, past_key_values=cache)
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(cache)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ConfigError, match="batch of 3 rows"):
            model(ids[:1], past_key_values=cache)
        cache.close()
        cache.close()
        with pytest.raises(ConfigError, match="closed"):
            model(ids, past_key_values=cache)
        with pytest.raises(TierError, match="have no tier to go to"):
            model(ids, past_key_values=TieredCache(model, device=_bytes(model) // 2))
        with pytest.raises(TierError, match=r"host holds .* of 48\.8 KiB"):
            model(ids, past_key_values=TieredCache(model, device=_bytes(model) // 2, host=50_000))


def test_a_model_that_keeps_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the budget would be held, so it is an error and not silence."""
    kept: list[Any] = []
    own = TieredCache.update

    def update(self: TieredCache, *args: Any, **kwargs: Any) -> Any:
        kept.append(own(self, *args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(TieredCache, "update", update)
    model: Any = small("llama", num_hidden_layers=LAYERS)
    with torch.no_grad(), pytest.raises(BudgetError, match="the model keeps"):
        model(
            torch.ones(3, PROMPT, dtype=torch.int64),
            past_key_values=TieredCache(model, device=_bytes(model) // 2, host="16MiB"),
        )


ROOT = Path(__file__).parents[2]


def test_the_page_runs_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "exported/quickstart", max_position_embeddings=256)
    [shown] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tiered-cache.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(shown, {})
    assert "device" in capsys.readouterr().out


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/tiered_cache.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "the same tokens" in said
    assert "NOT" not in said
    assert "flash written" in said
    assert "need device=" in said
