"""Norms over split features: the module's own formula is found, and computes the same from a part of the features."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.tensor.norm import distributed_norm, formula_of

NORMS = {
    "llama": lambda: LlamaRMSNorm(16, 1e-5),
    "gemma": lambda: Gemma3RMSNorm(16),
    "gpt-oss": lambda: GptOssRMSNorm(16),
    "rms": lambda: nn.RMSNorm(16, eps=1e-5),
    "layer": lambda: nn.LayerNorm(16),
    "layer without bias": lambda: nn.LayerNorm(16, bias=False),
    "cohere": lambda: CohereLayerNorm(16),
    "olmo": lambda: OlmoLayerNorm(16),
}


def _drawn(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.to(dtype)


@pytest.mark.parametrize("name", NORMS)
def test_the_formula_is_the_modules_own_in_low_precision_too(name: str) -> None:
    formula = formula_of(name, NORMS[name](), 16)
    module = _drawn(NORMS[name](), torch.bfloat16)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    parameters = module._parameters
    ours = formula(x, parameters.get("weight"), parameters.get("bias"), 16, lambda part: part)
    theirs = module(x)
    assert float((ours != theirs).float().mean()) < 0.02


def test_formulas_tell_families_apart() -> None:
    found = {name: formula_of(name, NORMS[name](), 16) for name in ("llama", "gemma", "gpt-oss", "layer")}
    assert [found["llama"].kind, found["layer"].kind] == ["rms", "layer"]
    assert (found["llama"].offset, found["gemma"].offset) == (0.0, 1.0)
    assert (found["llama"].cast, found["gemma"].cast, found["gpt-oss"].cast) == ("before", "after", "after")
    assert found["llama"].epsilon == 1e-5


def test_a_norm_of_another_kind_is_refused_by_name() -> None:
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / x.abs().pow(3).mean(-1, keepdim=True).pow(1 / 3)

    with pytest.raises(StrategyError, match=r"'layers\.0\.norm' \(Cubic\).*tensor_y: 1"):
        formula_of("layers.0.norm", Cubic(), 16)


@pytest.mark.parametrize("name", ["rms", "layer", "layer without bias"])
def test_gradients_of_a_quarter_of_the_features(name: str) -> None:
    module = _drawn(NORMS[name](), torch.float64)
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1
    weight = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    whole = x.clone().requires_grad_()
    out = module(whole)
    (out * weight).sum().backward()
    assert whole.grad is not None
    formula = formula_of(name, NORMS[name](), 16)
    own = {key: p.detach().clone() for key, p in module._parameters.items() if p is not None}
    with simulated_ranks(4):
        mesh = Mesh(("tensor_x", 4))
        axes = ProcessMesh.of(mesh)

        def part(full: torch.Tensor) -> torch.Tensor:
            return per_rank(lambda rank: full[..., rank * 4 : rank * 4 + 4].clone())

        split = nn.Module()
        for key, value in own.items():
            split.__dict__.setdefault("_parameters", {})[key] = part(value).requires_grad_()
        mine = part(x).requires_grad_()
        got = distributed_norm(formula, split, 16, axes["tensor_x"])(None, mine)
        (got * part(weight)).sum().backward()
        pairs = [(got.detach(), out.detach()), (mine.grad, whole.grad)]
        pairs += [(split._parameters[key].grad, module._parameters[key].grad) for key in own]
        with one_device():
            for ours, full in pairs:
                for rank, local in each_rank(ours).items():
                    torch.testing.assert_close(
                        local, full[..., rank * 4 : rank * 4 + 4], rtol=1e-12, atol=1e-12
                    )
