"""The sample by the inference engine: the text of whole windows, for every strategy, and where a stop ends it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from harness import run_ranks
from hyper_parallel import Strategy, parallelize
from hyper_parallel.inference.ragged_pass import BLOCK
from hyper_parallel.train import cached_sample
from hyper_parallel.train.sample import sample
from inference.small_models import prompts, small

TOKENS = 20


class Numbers:
    """A tokenizer that writes ids."""

    eos, pad = 2, 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _sample(model: Any, *, cached: bool = True, prompt: int = 5, **options: Any) -> str:
    """With the engine, or with whole windows."""
    with pytest.MonkeyPatch.context() as patch:
        if not cached:
            patch.setattr(cached_sample, "_engine", lambda *_: None)
        return sample(
            model,
            Numbers(),  # type: ignore[arg-type]
            prompts(model)[prompt],
            TOKENS,
            device=torch.device("cpu"),
            **{"sequence": 128, "stops": (), **options},
        )


def _passes(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward pass from now on."""
    seen: list[int] = []
    own = type(model).forward

    def forward(self: Any, input_ids: Any = None, **given: Any) -> Any:
        seen.append(input_ids.numel())
        return own(self, input_ids=input_ids, **given)

    monkeypatch.setattr(type(model), "forward", forward)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "gpt2", "mixtral"])
def test_the_text_of_windows(family: str) -> None:
    model: Any = small(family)
    for options in ({}, {"temperature": 0.7, "seed": 3}):
        assert _sample(model, **options) == _sample(model, cached=False, **options)


def test_each_token_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = copy.deepcopy(small("llama"))
    seen = _passes(model, monkeypatch)
    _sample(model)
    assert seen[-(TOKENS - 1) :] == [BLOCK] * (TOKENS - 1)
    seen.clear()
    _sample(model, cached=False)
    assert seen == [128] * TOKENS


def test_a_text_longer_than_the_context() -> None:
    """The engine fills the context, windows go on; a prompt that fills it needs windows alone."""
    model: Any = small("llama")
    for sequence in (70, 75, 60):
        assert _sample(model, sequence=sequence) == _sample(model, cached=False, sequence=sequence)


def test_a_stop_between_tokens() -> None:
    model: Any = small("llama")
    whole = _sample(model).split()
    asked = iter([False] * 7 + [True])
    assert _sample(model, ends=lambda: next(asked)).split() == whole[: 70 + 7]
    answers = whole[70:]
    assert _sample(model, stops={int(answers[4])}).split() == whole[: 70 + answers.index(answers[4])]
    assert not torch.is_inference_mode_enabled()


def test_a_model_that_the_engine_refuses(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = copy.deepcopy(small("llama"))
    model.config.layer_types = ["linear_attention"] * 2
    caplog.set_level("INFO")
    assert _sample(model) == _sample(small("llama"), cached=False)
    assert "without the inference engine" in caplog.text


def _rank(rank: int, world: int, family: str, axes: dict[str, int], compute: str) -> str:
    model = copy.deepcopy(small(family))
    parallelize(model, Strategy(axes=axes, precision={"compute": compute}))
    if axes.get("context"):
        return _sample(model)
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        own = cached_sample._engine
        patch.setattr(cached_sample, "_engine", lambda *given: made.append(own(*given)) or made[-1])
        text = _sample(model)
    assert made[0] is not None
    return text


@pytest.mark.parametrize(
    ("family", "axes", "compute"),
    [
        ("llama", {"tensor": 2}, "float32"),
        ("mixtral", {"shard": 2, "expert": 2}, "float32"),
        ("llama", {"replicate": 2}, "float32"),
        ("llama", {"context": 2}, "float32"),
        ("llama", {"shard": 2}, "bfloat16"),
    ],
)
def test_spread(family: str, axes: dict[str, int], compute: str, request: pytest.FixtureRequest) -> None:
    if compute == "bfloat16":
        request.getfixturevalue("half_attention")
    found = run_ranks(_rank, 2, family, axes, compute)
    assert found[0] == found[1]
    if compute == "float32":
        assert found[0] == _sample(small(family), cached=False)
