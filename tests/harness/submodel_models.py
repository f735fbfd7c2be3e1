"""Models of unlike submodels, small, with batches for them: rows whose first dim is rows, and what the model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.equivalence import build_model, draw_batch
from harness.families import FAMILIES

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class MultiModel:
    """A model of several submodels."""

    build: Callable[[], nn.Module]
    """With the values of a seed."""
    draw: Callable[[int], Rows]
    """So many rows."""
    inputs: Callable[[Rows], Rows] = dict
    """What the model takes of some of them."""


_LLAMA = {"model_type": "llama", "intermediate_size": 48}
_MIXTRAL = {
    "model_type": "mixtral",
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def _llava(language: Mapping[str, Any] = _LLAMA, tied: bool = False) -> nn.Module:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    text = {
        **language,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 120,
    }
    torch.manual_seed(0)
    config: Any = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=119, tie_word_embeddings=tied
    )
    return LlavaForConditionalGeneration(config)


def _llava_rows(rows: int) -> Rows:
    """An image of 16 patches in each."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 100, (rows, 24), generator=draws)
    ids[:, 2:18] = 119
    return {
        "input_ids": ids,
        "labels": _labels(ids, slice(1, 17)),
        "pixel_values": torch.randn(rows, 3, 16, 16, generator=draws),
    }


def _packed_rows(rows: int) -> Rows:
    found = _llava_rows(rows)
    found["position_ids"] = torch.cat([torch.arange(20), torch.arange(4)]).repeat(rows, 1)
    return found


def _labels(ids: Tensor, image: slice) -> Tensor:
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[:, image] = -100
    return labels


def _skewed_rows(rows: int) -> Rows:
    """A large image, none, none, none, a small one and so on; the patches of small ones are filled up."""
    found = draw_batch(FAMILIES["qwen2.5-vl"], rows)
    for row in range(rows):
        if row % 5 == 0:
            continue
        if row % 5 == 4:
            found["image_grid_thw"][row] = torch.tensor([1, 4, 4])
            found["input_ids"][row, 7:11] = 5
        else:
            found["image_grid_thw"][row] = 0
            found["input_ids"][row, 3:11] = 5
    return found


def _qwen_inputs(rows: Rows) -> Rows:
    """The patches of all images one after the other, those that there are; neither where there is none."""
    made = dict(rows)
    grid, pixels = made.pop("image_grid_thw"), made.pop("pixel_values")
    counts = grid.prod(1).tolist()
    if any(counts):
        made["pixel_values"] = torch.cat([one[:count] for one, count in zip(pixels, counts, strict=True)])
        made["image_grid_thw"] = grid[grid.prod(1) > 0]
    made["position_ids"] = made["position_ids"].transpose(0, 1)
    return made


def _omni() -> nn.Module:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    torch.manual_seed(0)
    config: Any = Qwen2_5OmniThinkerConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 40,
            "n_window": 8,
            "output_dim": 32,
        },
        vision_config={
            key: value
            for key, value in FAMILIES["qwen2.5-vl"]["vision_config"].items()
            if key != "model_type"
        },
        text_config={
            "vocab_size": 140,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "max_position_embeddings": 128,
        },
        image_token_id=130,
        audio_token_id=131,
        video_token_id=132,
        vision_start_token_id=133,
        vision_end_token_id=134,
        audio_start_token_id=135,
        audio_end_token_id=136,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def _omni_rows(rows: int) -> Rows:
    """An image and 32 frames of sound, 8 tokens, in each."""
    found = draw_batch(FAMILIES["qwen2.5-vl"], rows)
    found["input_ids"][:, 12:20] = 131
    found["labels"] = _labels(found["input_ids"], slice(2, 20))
    found["input_features"] = torch.randn(rows, 16, 32, generator=torch.Generator().manual_seed(3))
    found["feature_attention_mask"] = torch.ones(rows, 32, dtype=torch.int64)
    return found


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config: Any = T5Config(
        vocab_size=120,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _t5_rows(rows: int) -> Rows:
    draws = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(1, 100, (rows, length), generator=draws)
        for name, length in (("input_ids", 20), ("labels", 12), ("decoder_input_ids", 12))
    }


MODELS = {
    "llava": MultiModel(_llava, _llava_rows),
    "qwen2.5-vl": MultiModel(lambda: build_model(FAMILIES["qwen2.5-vl"], "cpu"), _skewed_rows, _qwen_inputs),
    "omni": MultiModel(_omni, _omni_rows, _qwen_inputs),
    "t5": MultiModel(_t5, _t5_rows),
    "llava tied": MultiModel(lambda: _llava(tied=True), _llava_rows),
    "llava mixture": MultiModel(lambda: _llava(_MIXTRAL), _llava_rows),
    # Two documents in each row.
    "llava packed": MultiModel(_llava, _packed_rows),
}
