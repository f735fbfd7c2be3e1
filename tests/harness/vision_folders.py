"""Small vision-language and audio models as folders: config, tokenizer, processor, chat template; and images for them.

Nothing is fetched: all is made on the spot. Weights are drawn by the run.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.chat_model import CHATS
from harness.families import FAMILIES
from hyper_parallel.shard.loss import IGNORED

IMAGE = "<|image|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}MEDIA{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template of parts, as processors have it."""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endgeneration %}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}MEDIA{% endif %}{% endfor %}"
    "<|im_end|>{% endif %}\n{% endfor %}"
)
"""The same, with its answers marked."""

LANGUAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tokenizer(*special: str) -> Any:
    """A byte-level BPE tokenizer of the words of `CHATS`, with ChatML's special tokens and those given."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from hyper_parallel.data.tokenizer import END_OF_TEXT, PAD, train

    text = " ".join(word for chat in CHATS for word in chat)
    rust = Tokenizer.from_str(train([f"system user assistant {text}"] * 3, 1000, 300))
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END_OF_TEXT, pad_token=PAD)


def write_llava(folder: Path, template: str = CHATML, size: int = 16) -> Path:
    """LLaVA: a CLIP encoder of `size` × `size` pixels, 16 patches and a class token each, beside a Llama."""
    from transformers import CLIPImageProcessor, LlavaConfig

    own = tokenizer("<image>")
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": size,
        "patch_size": size // 4,
    }
    LlavaConfig(
        vision_config=vision,
        text_config={"model_type": "llama", **LANGUAGE, "vocab_size": len(own)},
        image_token_id=own.convert_tokens_to_ids("<image>"),
    ).save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    ).save_pretrained(folder)
    settings = {
        "processor_class": "LlavaProcessor",
        "patch_size": size // 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return _with_tokenizer(folder, own, template.replace("MEDIA", "<image>"))


def write_qwen(folder: Path, template: str = CHATML) -> Path:
    """Qwen2.5-VL: images of any size, in patches of 4 × 4 pixels that are merged two by two."""
    from transformers import AutoImageProcessor, Qwen2_5_VLConfig, Qwen2VLImageProcessor

    own = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    Qwen2_5_VLConfig(
        text_config={
            "model_type": "qwen2_5_vl_text",
            **LANGUAGE,
            "vocab_size": len(own),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config=FAMILIES["qwen2.5-vl"]["vision_config"],
        **{name: own.convert_tokens_to_ids(token) for name, token in ids.items()},
    ).save_pretrained(folder)
    Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}).save_pretrained(
        folder
    )
    try:
        AutoImageProcessor.from_pretrained(folder)
    except ImportError as error:  # Transformers 5.17 loads it with torchvision alone
        pytest.skip(f"Qwen2.5-VL's images: {str(error).split('.')[0].strip()}")
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    media = "<|vision_start|><|image_pad|><|vision_end|>"
    return _with_tokenizer(folder, own, template.replace("MEDIA", media))


def write_audio(folder: Path, template: str = CHATML) -> Path:
    """Qwen2-Audio: up to a second of sound of 8,000 samples, beside a Qwen2."""
    from transformers import Qwen2AudioConfig, WhisperFeatureExtractor

    own = tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 50,
        },
        text_config={"model_type": "qwen2", **LANGUAGE, "vocab_size": len(own)},
        audio_token_id=own.convert_tokens_to_ids("<|AUDIO|>"),
    ).save_pretrained(folder)
    WhisperFeatureExtractor(
        feature_size=8, sampling_rate=8000, hop_length=80, n_fft=400, chunk_length=1
    ).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2AudioProcessor"}))
    return _with_tokenizer(folder, own, template.replace("MEDIA", "<|audio_bos|><|AUDIO|><|audio_eos|>"))


def _with_tokenizer(folder: Path, own: Any, template: str) -> Path:
    own.chat_template = None
    own.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


MODELS = {"llava": write_llava, "qwen2.5-vl": write_qwen, "qwen2-audio": write_audio}
KIND_OF = {"qwen2-audio": "audio"}
"""What a model takes beside text, where that is no image."""


def draw(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Images of random pixels, each of (width, height), as PNG files below `folder`; their names."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names.append(f"{folder.name}/{number}.png")
    return names


def record(folder: Path, lengths: Sequence[int]) -> list[str]:
    """Recordings of noise, each of so many of 8,000 samples a second, as WAV files below `folder`; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, length in enumerate(lengths):
        samples = np.random.default_rng(number).integers(-(2**14), 2**14, length).astype("<i2")
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(samples.tobytes())
        names.append(f"{folder.name}/{number}.wav")
    return names


SIZES = ((16, 16), (24, 16), (16, 32))
LENGTHS = (8000, 5000, 3000)
COUNTS = (1, 0, 2, 1, 0, 1, 3, 0)
"""Images or recordings of the rows of `write_rows`: several, one, none."""


def write_rows(file: Path, kind: str = "image", counts: Sequence[int] = COUNTS) -> Path:
    """Conversations with so many images or recordings each, as JSON lines beside the folder of these."""
    folder = file.parent / f"{kind}s"
    names = draw(folder, SIZES) if kind == "image" else record(folder, LENGTHS)
    lines, at = [], 0
    for row, count in enumerate(counts):
        asked, said = CHATS[row % len(CHATS)]
        shown = [names[(at + i) % len(names)] for i in range(count)]
        at += count
        content = [*({"type": kind, kind: name} for name in shown), {"type": "text", "text": asked}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": said * (1 + row % 2)}]}
        lines.append({"messages": [{"role": "user", "content": content}, answer]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run_file(place: Path, model: str, name: str = "run", **sections: Any) -> dict[str, Any]:
    """A run on the rows of `place`; `sections` are merged into it, one level deep."""
    file: dict[str, Any] = {
        "version": 1,
        "out": str(place / name),
        "seed": 3,
        "model": {"config": json.loads((place / model / "config.json").read_text())},
        "data": {
            "train": str(place / f"{KIND_OF.get(model, 'image')}.jsonl"),
            "holdout": 0,
            "sequence": 256,
            "cache": str(place / "cache"),
            "tokenizer": {"path": str(place / model)},
        },
        "train": {
            "engine": "eager",
            "steps": 2,
            "batch": 4,
            "optimizer": {"lr": 1e-2},
            "schedule": {"name": "constant"},
            "sample": False,
        },
        "trackers": [],
    }
    for section, values in sections.items():
        file[section] = {**file[section], **values} if isinstance(file.get(section), dict) else values
    return file


def make_place(place: Path, counts: Sequence[int] = COUNTS) -> Path:
    """A folder with the models and the rows."""
    for name, write in MODELS.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        write(place / name)
    for kind in ("image", "audio"):
        write_rows(place / f"{kind}.jsonl", kind, counts)
    return place


def loss_and_gradients(model: Any, rows: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Of an unmodified model, for a token."""
    tokens = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    total = 0.0
    for row in rows:
        given = {name: one for name, one in row.items() if name not in ("labels", "attention_mask")}
        logits = model.train()(**given, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), row["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (loss / tokens).backward()
        total += float(loss.detach() / tokens)
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
