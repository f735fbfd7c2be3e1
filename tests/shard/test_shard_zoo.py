"""Families without a line of their own anywhere: each is right or refused with a reason, never wrong."""

from __future__ import annotations

import pytest
from families import FAMILIES, build, one_device_step, simulated_step

from harness.families import SHAPE
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.parallelize import on_simulated_ranks as spread
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.region_check import check
from hyper_parallel.shard.region_check.outcome import TokenCall
from hyper_parallel.strategy import Strategy

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS_OF_8 = {"gemma", "glm", "glm4", "helium", "cohere2"}
# fmt: off
OTHERS = (
    "olmo", "olmo2", "granite", "stablelm", "starcoder2", "cohere", "cohere2", "gemma", "glm", "glm4",
    "exaone4", "smollm3", "helium", "phi", "gpt_neox", "falcon", "bloom", "ernie4_5", "arcee", "nemotron", "persimmon",
    "mpt", "jetmoe", "llama4_text", "lfm2", "bitnet", "diffllama", "recurrent_gemma", "mamba",
)
# fmt: on
STRATEGIES = {
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 2 sequence": {"axes": {"tensor": 2}, "sequence": True},
    "shard 2": {"axes": {"shard": 2}},
}


@pytest.mark.matrix
@pytest.mark.parametrize("family", OTHERS)
def test_right_or_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"model_type": family, **SHAPE, **_IDS, **({"head_dim": 8} if family in _HEADS_OF_8 else {})}
    monkeypatch.setitem(FAMILIES, family, fields)
    expected = one_device_step(family)
    for name, declared in STRATEGIES.items():
        try:
            got = simulated_step(family, Strategy(**declared))
        except StrategyError as refused:
            print(f"{family} × {name}: refused: {refused}")
            if name == "shard 2":  # there is nothing about the data axes that a family could not do
                raise
            continue
        except RuntimeError:
            # Simulated ranks are not checked before; what training says instead is a refusal.
            model = build(family)
            plan = make_plan(model, Strategy(**declared))
            calls = [TokenCall(FAMILIES[family]["vocab_size"], 0, 0)]
            found = check._on_a_copy(model, Strategy(**declared), plan, calls, spread)
            assert isinstance(found, str), f"{family} × {name} is not refused before training: {found}"
            continue
        assert got.gradients.keys() == expected.gradients.keys()
        for parameter, gradient in expected.gradients.items():
            scale = max(float(gradient.abs().max()), 1e-4 * expected.norm)
            worst = float((got.gradients[parameter] - gradient).abs().max()) / scale
            assert worst < 1e-5, f"{family} × {name}: gradient of {parameter} is off by {worst:.1e}"
