"""Documents of a packed row have the losses of rows of their own, also in models that only hand keywords on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.submodel_models import MODELS
from hyper_parallel.shard.forward import documents_known
from hyper_parallel.shard.loss import causal_lm_loss


def _granite() -> Any:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    torch.manual_seed(0)
    config: Any = GraniteMoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return GraniteMoeForCausalLM(config)


@pytest.mark.parametrize("build", [_granite, MODELS["llava"].build], ids=["granitemoe", "llava"])
def test_documents_do_not_see_each_other(build: Any) -> None:
    model = build().eval()
    ids = torch.randint(1, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    positions = torch.cat([torch.arange(14), torch.arange(10)])[None]
    with torch.no_grad():
        with documents_known(True):
            packed = causal_lm_loss(model, ids, labels, positions, 1.0)
        apart = sum(
            causal_lm_loss(model, ids[:, part], labels[:, part], positions[:, part], 1.0)
            for part in (slice(0, 14), slice(14, 24))
        )
    torch.testing.assert_close(packed, apart)
