"""One experts module in float64 against the model's own loop over experts: tokens of any distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hyper_parallel.compat.local_tensor import each_rank, on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.experts.dispatch import compute
from hyper_parallel.shard.experts.placement import Placement, Places, add_places, set_places
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.strategy import Strategy

EXPERTS, HIDDEN = 8, 4
TOLERANCE = 1e-12


def experts_module(kind: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 6, "num_local_experts": EXPERTS}
    module: Any = (
        MixtralExperts(MixtralConfig(**sizes)) if kind == "mixtral" else GptOssExperts(GptOssConfig(**sizes))
    )
    module.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def check(
    kind: str,
    by_rank: list[torch.Tensor],
    replicas: tuple[int, ...] = (),
    order: list[int] | None = None,
) -> None:
    """`by_rank`: int64[T, k], the experts that each rank's tokens choose. `order`: the expert at each place, where
    places are data."""
    n = len(by_rank)
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(len(ids), HIDDEN, generator=generator, dtype=torch.float64) for ids in by_rank]
    weights = [torch.rand(ids.shape, generator=generator, dtype=torch.float64) for ids in by_rank]
    module = experts_module(kind)
    x = torch.cat(xs).requires_grad_()
    scores = torch.cat(weights).requires_grad_()
    expected = module(x, torch.cat(by_rank), scores)
    expected.square().sum().backward()

    with simulated_ranks(n):
        mesh = Mesh.of(Strategy(axes={"shard": n, "expert": n}))
        axis = ProcessMesh.of(mesh)["expert"]
        home = torch.tensor(order or range(EXPERTS))
        places = Places.fixed(EXPERTS, replicas, x.device)
        if order is not None:
            add_places(module, EXPERTS, len(replicas), x.device)
            set_places(module, Placement(tuple(order), replicas))
            places = Places.of(module)
        local = {
            name: per_rank(lambda rank, w=w: w.detach()[home].chunk(n)[rank].clone()).requires_grad_()
            for name, w in module.named_parameters()
        }
        mine = per_rank(lambda rank: xs[rank].clone()).requires_grad_()
        given = per_rank(lambda rank: weights[rank].clone()).requires_grad_()
        ids = per_rank(lambda rank: by_rank[rank])
        out = compute(module, local, mine, ids, axis, EXPERTS, places)
        out = (out * given.unsqueeze(-1)).sum(1)
        out.square().sum().backward()

        def whole(tensor: torch.Tensor | None) -> torch.Tensor:
            assert tensor is not None, "a gradient of zero, not none"
            with one_device():
                return torch.cat([on_rank(tensor, rank) for rank in each_rank(tensor)])

        close(whole(out), expected)
        close(whole(mine.grad), x.grad)
        close(whole(given.grad), scores.grad)
        for name, parameter in module.named_parameters():
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            close(whole(local[name].grad), own[home])


def close(got: torch.Tensor, expected: torch.Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(got, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("replicas", [(), (3,), (7, 0, 3)])
def test_all_tokens_to_one_expert_and_seven_without_any(kind: str, replicas: tuple[int, ...]) -> None:
    check(kind, [torch.full((5, 1), 3), torch.full((2, 1), 3)], replicas)


def test_every_expert_has_replicas() -> None:
    check("mixtral", [torch.arange(8).view(4, 2), torch.arange(8).flip(0).view(4, 2)], tuple(range(8)))


def test_a_token_may_choose_an_expert_twice() -> None:
    check("gpt-oss", [torch.tensor([[5, 5, 1], [0, 0, 0]]), torch.tensor([[1, 5, 1]])], (1,))


def test_ranks_without_tokens() -> None:
    check("mixtral", [torch.zeros(0, 2, dtype=torch.int64), torch.tensor([[0, 7]])], (7,))


@st.composite
def chosen(draw: st.DrawFn) -> tuple[list[torch.Tensor], tuple[int, ...], list[int] | None]:
    k = draw(st.integers(1, 3))
    row = st.lists(st.integers(0, EXPERTS - 1), min_size=k, max_size=k)
    ranks = draw(st.sampled_from([2, 4, 8]))
    ids = [draw(st.lists(row, max_size=5)) for _ in range(ranks)]
    if not any(ids):
        ids[0] = [[0] * k]
    replicas = draw(st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=3))
    order = draw(st.none() | st.permutations(range(EXPERTS)))
    return [torch.tensor(i, dtype=torch.int64).view(-1, k) for i in ids], tuple(replicas), order


@settings(max_examples=25, deadline=None)
@given(chosen())
def test_any_choice_and_placement_of_experts(
    case: tuple[list[torch.Tensor], tuple[int, ...], list[int] | None],
) -> None:
    check("mixtral", *case)
