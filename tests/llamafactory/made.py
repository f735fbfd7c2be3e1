"""What a run of LlamaFactory needs, made on the spot: chats, a tokenizer with a chat template, small models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "river",
    "stone",
    "light",
    "garden",
    "paper",
    "window",
    "morning",
    "silver",
    "engine",
    "forest",
    "music",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 96
"""Enough for 24 steps of 4 rows: a run of 30 begins a second epoch."""


def chats(folder: Path) -> None:
    """A data set of chats of one or two turns, of uneven lengths, and the file by which LlamaFactory finds it."""
    draw = random.Random(0)

    def sentence(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    rows = []
    for _ in range(ROWS):
        messages = []
        for _ in range(draw.randint(1, 2)):
            messages.append({"role": "user", "content": sentence(2, 12)})
            messages.append({"role": "assistant", "content": sentence(1, 16)})
        rows.append({"messages": messages})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chats.json").write_text(json.dumps(rows))
    about = {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps({"chats": about}))


def tokenizer() -> Any:
    """Byte-level pieces of the words above; the size of its vocabulary is odd."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=331, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    rust.train_from_iterator([" ".join(WORDS), *WORDS], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    return made


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        **_SIZES,
    },
    "openai-gpt": {"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 4},
}


def model(name: str, folder: Path) -> None:
    """A folder as `save_pretrained` writes it, in float32, with the same values each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    words = tokenizer()
    sizes = dict(MODELS[name])
    config = AutoConfig.for_model(
        sizes.pop("model_type"),
        vocab_size=len(words),
        eos_token_id=words.eos_token_id,
        bos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)


def everything(folder: Path) -> None:
    """The chats in `data`, and each model in a folder of its name."""
    chats(folder / "data")
    for name in MODELS:
        model(name, folder / name)


def options(folder: Path, model: str, out: Path, workers: int = 1, **more: Any) -> dict[str, Any]:
    """A run file of LlamaFactory: 30 steps of four rows in all, in float32, with what `everything` made."""
    return {
        "model_name_or_path": str(folder / model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "chats",
        "dataset_dir": str(folder / "data"),
        "cutoff_len": 128,
        "output_dir": str(out),
        "per_device_train_batch_size": 4 // workers,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "max_steps": 30,
        "logging_steps": 1,
        "save_steps": 15,
        "report_to": "none",
        "use_cpu": True,
        **more,
    }
