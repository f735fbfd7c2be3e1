"""Names of the files that a model's folder has beside its weights, as patterns."""

from __future__ import annotations

PROCESSOR_FILES = ("*processor_config.json",)
TOKENIZER_FILES = (
    "*tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Of a tokenizer, its chat template among them."""
