"""Small encoders and encoder-decoders with their own heads, and a step of them in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import agreed, on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.report import Report, compare
from hyper_parallel.verify.step import StepOutcome

ROWS, LENGTH, VOCABULARY, LABELS = 4, 8, 67, 3

_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "max_position_embeddings": 40,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": LABELS,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 50,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 50,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _text(**more: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, VOCABULARY, ids.shape, generator=generator), **more}


def _images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % LABELS}


def _speech() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_features": torch.randn(ROWS, 8, 32, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator),
    }


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": ("BertForMaskedLM", _BERT, _text),
    "roberta": ("RobertaForMaskedLM", {**_BERT, "pad_token_id": 1}, _text),
    "electra": ("ElectraForMaskedLM", {**_BERT, "embedding_size": 32}, _text),
    "biogpt": ("BioGptForCausalLM", _BERT, _text),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 50},
        _text,
    ),
    "vit": ("ViTForImageClassification", _VIT, _images),
    "deit": ("DeiTForImageClassification", _VIT, _images),
    "clip-vision": ("CLIPForImageClassification", {"vision_config": {**_VIT}, "num_labels": LABELS}, _images),
    "bart": ("BartForConditionalGeneration", {**_BART, "max_position_embeddings": 40}, _text),
    "t5": ("T5ForConditionalGeneration", _T5, _text),
    "t5-gated": (
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _text,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_BART,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 40,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _speech,
    ),
}
"""Name to the class of the model with its head, the fields of its config, and what makes a batch with labels."""


def build(name: str, **fields: Any) -> torch.nn.Module:
    """An unmodified model with values; without dropout unless `fields` ask for it."""
    cls: Any = getattr(transformers, MODELS[name][0])
    settings = {**MODELS[name][1], **fields}
    attention = settings.pop("attn_implementation", "sdpa")
    with one_device():
        torch.manual_seed(0)
        config = cls.config_class(**settings)
        for part in (config, getattr(config, "vision_config", None)):
            for key in [k for k in vars(part) if "drop" in k] if part is not None else ():
                if key not in fields and isinstance(getattr(part, key), float):
                    setattr(part, key, 0.0)
        config._attn_implementation, config.use_cache = attention, False
        return cls(config).train()  # type: ignore[no-any-return]


def step(model: torch.nn.Module, strategy: Strategy, batch: dict[str, torch.Tensor]) -> StepOutcome:
    """Loss and gradients of a model, in a loop that knows nothing but the model's own forward signature."""
    handle = shard.sharded(model)
    shares = strategy.axes.data

    def rows(rank: int) -> torch.Tensor:
        return torch.arange(ROWS).chunk(shares)[handle.data_index_of(rank)]

    mine = {key: per_rank(lambda rank, x=x: x[rows(rank)]) for key, x in batch.items()}
    with handle.micro_batch(seed=3, step=7, rows=per_rank(rows)):
        loss = model(**mine).loss / shares
        loss.backward()
    total = handle.all_reduce(loss.detach(), ("replicate", "shard"))
    parameters = handle.parameters()
    return StepOutcome(
        float(on_rank(total, 0)),
        float(on_rank(handle.grad_norm(), 0)),
        {p.name: agreed(handle.gather(p.grad, p.layout)) for p in parameters if p.grad is not None},
        {p.name: agreed(handle.gather(p.local, p.layout)) for p in parameters},
        {p.name: str(p.layout) for p in parameters},
    )


def report(name: str, strategy: Strategy, rules: dict[str, Any] | None = None, **fields: Any) -> Report:
    """One device against a strategy on simulated ranks."""
    batch = MODELS[name][2]()
    alone = shard.parallelize(build(name, **fields), Strategy())
    one = step(alone, Strategy(), batch)
    if rules is not None:
        strategy = strategy.model_copy(update={"rules": rules})
    with simulated_ranks(strategy.axes.world):
        model = shard.parallelize(build(name, **fields), strategy, lowering="traceable")
        many = step(model, strategy, batch)
    return compare(one, many, name, "simulated", "float32")
