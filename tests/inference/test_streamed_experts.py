"""Experts read one by one: the same bits, within the budget, and in each pass only those that are chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as cases
from hypothesis import strategies as st

from harness.observer import OfPyTorch
from hyper_parallel.inference import Completion, Generator
from hyper_parallel.inference.ragged_pass import current
from hyper_parallel.inference.weights import units, weight_stand_in
from hyper_parallel.inference.weights.read_ahead import StreamBuffer
from hyper_parallel.inference.weights.units import ALIGN, stacked_experts, units_of
from inference.small_models import prompts, small

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96},
    "qwen3-moe": {"moe_intermediate_size": 96},
    "gpt-oss": {"intermediate_size": 96},
    "deepseek-v3": {"moe_intermediate_size": 64},
}
LENGTHS = (1, 33, 70)
SETTINGS: dict[str, Any] = {"page": 16, "max_tokens": 4, "logprobs": True}


def memory(tier: str, folder: Path) -> dict[str, Any]:
    return {"device": "1GiB", tier: str(folder) if tier == "flash" else "64MiB"}


def bits(answers: list[Completion]) -> list[object]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("family", "tier"),
    [("mixtral", "host"), ("qwen3-moe", "flash"), ("gpt-oss", "pool"), ("deepseek-v3", "host")],
)
def test_bits_and_the_budget(
    family: str, tier: str, in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stand_in, "HOST_TOKENS", 30 if in_place else 0)
    model = small(family, **FAMILIES[family])
    given = prompts(model, LENGTHS)
    plain = bits(Generator(model, **SETTINGS)(given))
    with Generator(model, memory=memory(tier, tmp_path), **SETTINGS) as generator:
        budget = generator.memory
        assert budget is not None
        expert = max(unit.bytes for unit in budget.stream.units if unit.expert is not None)
        budget.budget = 1 << 30
        generator(given)
        assert budget.plan is not None
        whole, least = budget.plan.device, generator.smallest_budget(given)
        for more in (0, 5 * expert, (whole - least) // 2):
            budget.budget = least + more
            generator.smallest_budget([[1] * 80])  # longer than before: what was there goes
            with OfPyTorch(budget.stream.tensors()) as seen:
                assert bits(generator(given)) == plain
            assert budget.plan.device <= least + more
            assert seen.peak <= least + more
    assert bits(Generator(model, **SETTINGS)(given)) == plain


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_pass_reads_the_experts_that_its_tokens_choose(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, and nothing for the rows that fill the pass up."""
    monkeypatch.setattr(weight_stand_in, "HOST_TOKENS", 0)
    model = copy.deepcopy(small(family, **FAMILIES[family]))
    given = prompts(model, LENGTHS)
    mixtures = [module for module in model.modules() if stacked_experts(module)]
    wanted = rows = 0
    with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, **SETTINGS) as generator:
        budget = generator.memory
        assert budget is not None
        expert = next(unit.bytes for unit in budget.stream.units if unit.expert is not None)
        budget.budget = generator.smallest_budget(given) + 6 * expert
        generator(given, batch=1)
        plan, stream = budget.plan, budget.stream
        assert plan is not None
        streamed = [stream.units[place] for place in plan.streamed]
        assert any(plan.sizes.modules[place].chance < 1 for place in plan.resident)

        def count(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal wanted
            chosen = set(args[1][: len(current().slots)].reshape(-1).tolist())
            wanted += sum(one.bytes for one in streamed if one.module is module and one.expert in chosen)

        def look_up(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal rows
            rows += len(args[0].unique()) * 4 * module.embedding_dim

        hooks = [module.register_forward_pre_hook(count) for module in mixtures]
        if plan.gathered:
            hooks.append(model.get_input_embeddings().register_forward_pre_hook(look_up))
        passes, read = generator.passes, stream.tiers.read["host"]
        generator(given, batch=1)
        for hook in hooks:
            hook.remove()
        always = sum(unit.bytes for unit in streamed if unit.expert is None)
        passes = generator.passes - passes
        assert stream.tiers.read["host"] - read == wanted + rows + passes * always
        assert 0 < wanted < passes * (plan.read - always)


def test_experts_of_few_tokens_are_computed_where_they_lie() -> None:
    model = small("mixtral", **FAMILIES["mixtral"])
    given = prompts(model, (12, 5))
    plain = bits(Generator(model, **SETTINGS)(given))
    with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, **SETTINGS) as generator:
        budget = generator.memory
        assert budget is not None
        budget.budget = generator.smallest_budget(given)
        generator(given)
        assert budget.plan is not None
        streamed = [budget.stream.units[place] for place in budget.plan.streamed]
        assert sum(unit.expert is not None for unit in streamed) > 8
        passes, read = generator.passes, budget.stream.tiers.read["host"]
        assert bits(generator(given)) == plain
        passes, read = generator.passes - passes, budget.stream.tiers.read["host"] - read
        # Rows of the embedding, at most one for each row of a pass.
        rows = read - passes * sum(unit.bytes for unit in streamed if unit.expert is None)
        assert 0 <= rows <= passes * 16 * 4 * model.config.hidden_size


def test_the_smallest_budget_is_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, changes in FAMILIES.items():
        model = small(family, **changes)
        found = []
        for count in (stacked_experts, lambda _: 0):
            monkeypatch.setattr(units, "stacked_experts", count)
            with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, **SETTINGS) as generator:
                found.append(generator.smallest_budget([[1] * 40]))
        assert found[0] < found[1]


def test_a_module_of_another_kind_is_streamed_as_a_whole() -> None:
    """What is divided is decided by what the module is: here its weights are not all stacks of the experts."""
    model: Any = copy.deepcopy(small("mixtral", **FAMILIES["mixtral"]))
    experts = model.model.layers[0].mlp.experts
    experts.scale = torch.nn.Parameter(torch.ones(3))
    found = units_of(model)
    assert not any(unit.module is experts for unit in found)
    assert any(unit.expert is not None for unit in found)
    given = prompts(model, LENGTHS)
    plain = bits(Generator(model, **SETTINGS)(given))
    with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, **SETTINGS) as generator:
        assert generator.memory is not None
        generator.memory.budget = generator.smallest_budget(given)
        assert bits(generator(given)) == plain


def test_a_stack_that_is_read_as_a_whole_stays() -> None:
    """A model whose router looks at all experts' weights."""
    model: Any = copy.deepcopy(small("mixtral", **FAMILIES["mixtral"]))
    block, values = model.model.layers[0].mlp, dict(model.named_parameters())
    values = {name: value.detach().clone() for name, value in values.items()}
    block.gate.register_forward_pre_hook(lambda *_: block.experts.down_proj.sum() and None)
    given = prompts(model, LENGTHS)
    plain = bits(Generator(model, **SETTINGS)(given))
    with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, **SETTINGS) as generator:
        assert generator.memory is not None
        left = {unit.module for unit in generator.memory.stream.units if unit.expert is not None}
        assert left == {model.model.layers[1].mlp.experts}
        generator.memory.budget = generator.smallest_budget(given)
        assert bits(generator(given)) == plain
    for name, value in model.named_parameters():
        assert torch.equal(value, values[name])


def test_a_model_of_other_code_for_experts() -> None:
    """Transformers' grouped products read all of a stack; the model's own code does not, and is compared with."""
    model: Any = copy.deepcopy(small("qwen3-moe", **FAMILIES["qwen3-moe"]))
    model.set_experts_implementation("grouped_mm")
    given = prompts(model, LENGTHS)
    plain = bits(Generator(model, **SETTINGS)(given))
    with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, **SETTINGS) as generator:
        assert generator.memory is not None
        generator.memory.budget = generator.smallest_budget(given)
        assert sum(unit.expert is not None for unit in generator.memory.stream.units) == 16
        assert bits(generator(given)) == plain
    assert model.config._experts_implementation == "grouped_mm"


@cases(
    st.lists(st.integers(1, 9).map(lambda n: n * ALIGN), max_size=8),
    st.integers(1, 9).map(lambda n: n * ALIGN),
    st.integers(1, 40).map(lambda n: n * ALIGN),
)
def test_what_is_read_ahead_leaves_room_for_two_experts(ahead: list[int], expert: int, size: int) -> None:
    buffer = StreamBuffer(size)
    taken = [buffer.take(count, spare=2 * expert) for count in ahead]
    if 2 * expert <= size:
        held = buffer.take(expert)
        assert held is not None
        for _ in range(5):
            after = buffer.take(expert)
            assert after is not None
            buffer.give(held)
            held = after
    elif ahead:
        assert taken == [None] * len(taken)
