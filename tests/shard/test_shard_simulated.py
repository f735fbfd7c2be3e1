"""Every family under every strategy, all ranks in one process, against one device: gradients, not only losses."""

from __future__ import annotations

import functools

import pytest
import torch
from families import FAMILIES, STRATEGIES, Step, build, cells, one_device_step, simulated_step

from hyper_parallel import shard
from hyper_parallel.strategy import Strategy

# A sum over ranks adds the same terms in another order: a few units in the last place of float32 on gradients
# of size 0.1, which is what was measured (1e-7), with a factor of five.
GRADIENT_TOLERANCE = 5e-7

SAMPLE = {
    ("llama", "tensor 2"),
    ("gemma3", "shard 2"),
    ("phi3", "tensor 4 sequence"),
    ("qwen3", "shard 2 tensor 2"),
}
SAMPLE |= {("gpt2", "replicate 2 shard 2 tensor 2 sequence recompute"), ("mistral", "replicate 2 shard 2")}
SAMPLE |= {
    ("llama-dropout", "tensor 2 shard 2 sequence"),
    ("qwen2", "replicate 2"),
    ("gpt2-dropout", "tensor 4 sequence"),
    ("gemma2", "tensor 2 shard 2 sequence"),
    ("gpt-oss", "tensor 4 sequence"),
    ("deepseek-v3", "tensor 2 shard 2 sequence"),
    ("deepseek-v3-whole-query", "tensor 2"),
    ("qwen2.5-vl", "replicate 2 shard 2 tensor 2 sequence recompute"),
}

expected_step = functools.cache(one_device_step)


def assert_same_step(got: Step, expected: Step) -> None:
    assert got.loss == pytest.approx(expected.loss, abs=2e-6)
    assert got.norm == pytest.approx(expected.norm, rel=1e-5)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(got.values[name], expected.values[name]), f"initial values of {name} differ"
        worst = float((got.gradients[name] - gradient).abs().max())
        assert worst <= GRADIENT_TOLERANCE, f"gradient of {name} is off by {worst:.1e}"


@pytest.mark.parametrize(("family", "name"), cells(FAMILIES, STRATEGIES, SAMPLE))
def test_simulated_ranks_compute_what_one_device_computes(family: str, name: str) -> None:
    assert_same_step(simulated_step(family, Strategy(**STRATEGIES[name])), expected_step(family))


def test_accumulating_micro_batches_is_one_batch() -> None:
    from families import step

    model = build("gpt2-dropout")
    shard.parallelize(model, Strategy())
    shard.init_weights(model, seed=1)
    assert_same_step(step(model, Strategy(), micro_batches=4), expected_step("gpt2-dropout"))


def test_recompute_changes_nothing() -> None:
    got = one_device_step("gpt2", memory={"recompute": "layer"})
    expected = expected_step("gpt2")
    assert all(torch.equal(got.gradients[n], g) for n, g in expected.gradients.items())


def test_parallelized_model_keeps_its_object_its_names_and_its_classes() -> None:
    model = build("llama")
    names, classes = [n for n, _ in model.named_parameters()], [type(m).__name__ for m in model.modules()]
    kinds = [isinstance(m, torch.nn.Linear) for m in model.modules()]
    assert shard.parallelize(model, Strategy(precision={"compute": "bfloat16"})) is model
    assert [n for n, _ in model.named_parameters()] == names
    assert [type(m).__name__ for m in model.modules()] == classes
    assert [isinstance(m, torch.nn.Linear) for m in model.modules()] == kinds


def test_tied_weights_stay_one_parameter() -> None:
    model = build("llama-tied")
    shard.parallelize(model, Strategy())
    shard.init_weights(model, seed=1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_padding_row_gets_no_gradient_from_look_ups() -> None:
    # Untied, so that the embedding's gradient comes from look-ups alone.
    strategy = Strategy(axes={"tensor": 2})
    got, expected = simulated_step("phi3", strategy), expected_step("phi3")
    row = FAMILIES["phi3"]["pad_token_id"]
    assert not expected.gradients["model.embed_tokens.weight"][row].any()
    assert not got.gradients["model.embed_tokens.weight"][row].any()
