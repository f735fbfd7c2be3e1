"""Packed documents do not see each other in unmodified Transformers models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.data.corpus import Corpus
from hyper_parallel.data.packing import PackedText

VOCAB = 97
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
# Windows are shorter than the documents, so that they matter.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "mistral": {**ROTARY, "sliding_window": 5},
    "qwen2": ROTARY,
    "qwen3": {**ROTARY, "head_dim": 8},
    "gemma3_text": {
        **ROTARY,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {**ROTARY, "pad_token_id": 0, "sliding_window": None},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
LENGTHS = [19, 7, 11, 1, 9]
SEQUENCE = 24


def packed_text(pack: bool) -> PackedText:
    tokens = np.random.default_rng(0).integers(1, VOCAB, sum(LENGTHS)).astype(np.uint16)
    return PackedText(Corpus(tokens, np.cumsum([0, *LENGTHS]).astype(np.int64)), SEQUENCE, pad=0, pack=pack)


def model_of(family: str, attention: str = "sdpa") -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    return model(use_cache=False, **inputs).logits


def difference_from_documents_alone(model: torch.nn.Module, pack: bool, **options: Any) -> float:
    """The largest difference between logits in packed rows and those of each document alone, in one batch."""
    packed = packed_text(pack)
    batch = packed.batch(range(len(packed)))
    with torch.no_grad():
        together = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            **{"use_cache": False, **options},
        ).logits
    worst, tokens = 0.0, 0
    for row, (ids, positions) in enumerate(zip(batch["input_ids"], batch["position_ids"], strict=True)):
        borders = [*torch.nonzero(positions == 0).flatten().tolist(), SEQUENCE]
        for start, stop in itertools.pairwise(borders):
            alone = logits(model, input_ids=ids[None, start:stop])[0]
            worst = max(worst, (together[row, start:stop] - alone).abs().max().item())
            tokens += stop - start
    assert tokens == len(packed) * SEQUENCE
    return worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pack", [True, False])
def test_logits_in_a_row_are_those_of_each_document_alone(family: str, pack: bool) -> None:
    assert difference_from_documents_alone(model_of(family), pack) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_eager_attention_keeps_documents_apart_too(family: str) -> None:
    assert difference_from_documents_alone(model_of(family, "eager"), pack=True) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("option", ["use_cache", "attention_mask"])
def test_a_cache_or_a_mask_of_ones_would_mix_documents(family: str, option: str) -> None:
    # What docs/data.md tells the caller not to pass. Should Transformers mend it, the document can say less.
    ones = torch.ones(len(packed_text(pack=True)), SEQUENCE, dtype=torch.int64)
    options = {"use_cache": True} if option == "use_cache" else {"attention_mask": ones}
    assert difference_from_documents_alone(model_of(family), pack=True, **options) > 1e-3


def test_a_row_of_one_piece_takes_the_causal_path() -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    padded = packed_text(pack=False)
    assert find_packed_sequence_indices(padded.batch(range(len(padded)))["position_ids"]) is None
    packed = packed_text(pack=True)
    assert find_packed_sequence_indices(packed.batch(range(len(packed)))["position_ids"]) is not None
