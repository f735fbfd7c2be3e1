"""Generation within a byte budget: the same tokens, never more live bytes, and a floor that is tight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from harness.observer import OfPyTorch
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference import Generator
from hyper_parallel.inference.weights import units
from inference.small_models import prompts, small

WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4},
    "llama-tied": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4},
    "mixtral": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
    "gpt-oss": {},
    "deepseek-v3": {},
}
"""Families, with weights that are more than what a pass computes where their shape allows it."""
ROOMY = {"device": "1GiB", "host": "64MiB"}
TOKENS = 4
LENGTHS = (1, 33, 70)


def tokens(generator: Generator, given: list[list[int]]) -> list[list[int]]:
    return [answer.tokens for answer in generator(given)]


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "gpt-oss", "deepseek-v3"])
def test_the_budget_holds_and_changes_no_token(family: str) -> None:
    model = small(family, **WIDE[family])
    given = prompts(model, LENGTHS)
    plain = tokens(Generator(model, max_tokens=TOKENS), given)
    with Generator(model, memory=ROOMY, max_tokens=TOKENS) as generator:
        assert tokens(generator, given) == plain
        assert generator.memory is not None
        assert generator.memory.plan is not None
        assert generator.memory.plan.read == 0
        whole, least = generator.memory.plan.device, generator.smallest_budget(given)
        for budget in (least, least + (whole - least) // 3):
            generator.memory.budget = budget
            generator.smallest_budget([[1] * 80])  # longer than before: what was there goes
            with OfPyTorch(generator.memory.stream.tensors()) as seen:
                assert tokens(generator, given) == plain
            assert generator.memory.plan.device <= budget
            assert seen.peak <= budget
        generator.memory.budget = least - 1
        with pytest.raises(ConfigError, match=f"needs at least {least} "):
            generator(given)
    assert tokens(Generator(model, max_tokens=TOKENS), given) == plain


def test_weights_are_read_once_in_each_pass() -> None:
    model = small("llama", **WIDE["llama"])
    given = prompts(model, LENGTHS)
    with Generator(model, memory=ROOMY, max_tokens=TOKENS) as generator:
        memory, engine = generator.memory, generator._engine
        assert memory is not None
        memory.budget = generator.smallest_budget(given) + 300_000
        generator(given)
        assert memory.plan is not None
        assert 0 < memory.plan.read < memory.plan.sizes.weights
        before, passes = memory.stream.tiers.read["host"], engine.passes
        generator(given)
        read = memory.stream.tiers.read["host"] - before
        rows = read - (engine.passes - passes) * memory.plan.read
        # Rows of the embedding, at most one for each token of a pass.
        table = 4 * model.config.hidden_size
        assert bool(memory.plan.gathered) == (rows > 0)
        assert 0 <= rows <= (engine.passes - passes) * generator.settings.rows * table


def test_a_model_in_memory_has_its_weights_again() -> None:
    model = small("llama-tied", **WIDE["llama-tied"])
    parameters = dict(model.named_parameters())
    values = {name: value.detach().clone() for name, value in parameters.items()}
    with Generator(model, memory=ROOMY) as generator:
        assert generator.memory is not None
        generator.memory.budget = generator.smallest_budget([[1, 2, 3]])
        generator([[1, 2, 3]], max_tokens=2)
        assert sum(x.untyped_storage().nbytes() for x in parameters.values()) < sum(
            x.nbytes for x in values.values()
        )
    for name, value in model.named_parameters():
        assert value is parameters[name]
        assert torch.equal(value, values[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight


class Impatient(nn.Module):
    """An MLP that reads the weights of its projections itself."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(linear(x, self.gate_proj.weight)) * self.up_proj(x))


def test_weights_that_are_read_elsewhere_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SPLIT", 1)
    model: Any = small("llama", **WIDE["llama"], vocab_size=100)
    model.model.layers[1].mlp = Impatient(model.model.layers[1].mlp)
    given = prompts(model, LENGTHS)
    plain = tokens(Generator(model, max_tokens=TOKENS), given)
    with Generator(model, memory=ROOMY, max_tokens=TOKENS) as generator:
        assert generator.memory is not None
        names = [unit.name for unit in generator.memory.stream.units]
        assert "model.layers.1.mlp.gate_proj" not in names
        assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= set(names)
        generator.memory.budget = generator.smallest_budget(given)
        assert tokens(generator, given) == plain
    assert tokens(Generator(model, max_tokens=TOKENS), given) == plain


@pytest.mark.parametrize("advice", [{"max_tokens": 40}, {"page": 16}])
def test_what_the_error_says_would_help_does(advice: dict[str, int]) -> None:
    model, given = small("llama", **WIDE["llama"], max_position_embeddings=2048), [[1] * 200]
    settings = {"max_tokens": 1500, "page": 64}
    with Generator(model, memory=ROOMY, **settings) as generator:
        assert generator.memory is not None
        least = generator.smallest_budget(given)
        generator.memory.budget = 1000
        with pytest.raises(ConfigError, match=f"lower inference.{next(iter(advice))}"):
            generator(given)
    with Generator(model, memory=ROOMY, **settings | advice) as generator:
        assert generator.smallest_budget(given) < least


def test_without_a_tier_only_the_cache_gives_way() -> None:
    model = small("llama", **WIDE["llama"])
    given = prompts(model, LENGTHS)
    with Generator(model, memory={"device": "1GiB"}, max_tokens=TOKENS) as generator:
        plain = tokens(generator, given)
        assert generator.memory is not None
        generator.memory.budget = generator.smallest_budget(given)
        assert tokens(generator, given) == plain
        generator.memory.budget -= 1
        with pytest.raises(ConfigError, match=r"set memory\.host"):
            generator(given)


@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_a_folder_is_read_into_the_tiers(family: str, tmp_path: Path) -> None:
    model: Any = small(family, **WIDE[family])
    model.save_pretrained(tmp_path / "model")
    given = prompts(model, LENGTHS)
    spill = tmp_path / "spill"
    plain = tokens(Generator(tmp_path / "model", max_tokens=TOKENS), given)
    with Generator(model, memory=ROOMY, max_tokens=TOKENS) as generator:
        least = generator.smallest_budget(given)
    memory = {"device": least + 40_000, "flash": str(spill), "host": "100KiB"}
    with (
        OfPyTorch([]) as seen,
        Generator(tmp_path / "model", memory=memory, max_tokens=TOKENS) as generator,
    ):
        assert tokens(generator, given) == plain
        assert seen.peak <= least + 40_000
        assert generator.memory is not None
        assert "flash" in generator.memory.report
        assert list(spill.iterdir())
    assert not list(spill.iterdir())


@pytest.mark.parametrize("key", ["update", "recompute", "shard", "expert_load", "gathered"])
def test_keys_of_training_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'memory.{key}' is for training"):
        Generator(small("llama"), memory={"device": "1GiB", key: "auto"})


def test_tiers_need_a_budget() -> None:
    with pytest.raises(ConfigError, match="set device"):
        Generator(small("llama"), memory={"host": "1GiB"})


def test_auto_takes_what_is_free() -> None:
    with Generator(small("llama"), memory={"device": "auto"}) as generator:
        assert generator.memory is not None
        assert generator.memory.budget > 1 << 28
        assert generator([[1, 2, 3]], max_tokens=2)[0].tokens
