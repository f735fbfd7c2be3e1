"""A pretrained chat model in small, as a folder: weights, tokenizer, chat template, generation config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Begins with the beginning-of-text token and ends a turn with a token that is not the tokenizer's end of text."""

CHATS = [
    ("Name a colour.", "Blue, as the sea."),
    ("Name a number.", "Seven."),
    ("What is two and two?", "Four, I am sure."),
    ("Say hello.", "Hello to you!"),
    ("Who are you?", "A small model."),
    ("Where is north?", "Up, on most maps."),
]
"""Questions with the answers that a fine-tune learns by heart."""


def tokenizer(template: str | None = CHATML, vocab_size: int = 320) -> Any:
    """A byte-level BPE tokenizer that puts <s> before a text, with the special tokens of ChatML."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    from hyper_parallel.data.tokenizer import train

    text = " ".join(word for chat in CHATS for word in chat)
    rust = Tokenizer.from_str(train([f"system user assistant {text}"] * 3, 1000, vocab_size))
    rust.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    rust.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def write_model(
    folder: Path, *, template: str | None = CHATML, words: bool = True, generation: bool = True, **config: Any
) -> Path:
    """A two-layer Llama with random weights. `words`: with its tokenizer. `generation`: with a generation config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    own = tokenizer(template)
    settings = {
        "vocab_size": len(own) + 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": own.bos_token_id,
        "eos_token_id": own.eos_token_id,
        "tie_word_embeddings": True,
        **config,
    }
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    if generation:
        model.generation_config.repetition_penalty = 1.0
        model.generation_config.max_length = 90
    model.save_pretrained(folder)
    if not generation:
        (folder / "generation_config.json").unlink()
    if words:
        own.save_pretrained(folder)
    return folder


def write_chats(file: Path, chats: list[tuple[str, str]] = CHATS) -> Path:
    """The conversations as JSON lines."""
    lines = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in chats
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
