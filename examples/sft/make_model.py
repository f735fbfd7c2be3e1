"""Write a small model folder to fine-tune where no pretrained one is at hand: new weights, tokenizer, chat template.

python examples/sft/make_model.py [FOLDER]      (default: runs/sft/model)

The folder has what `save_pretrained` of Transformers writes for a pretrained chat model: config.json, safetensors
weights, tokenizer.json, a chat template and generation_config.json. With a real model, leave this script out and set
`model.path` in the run file to that model's folder. Takes seconds, needs no network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATS = Path(__file__).with_name("chats.jsonl")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML. A turn ends with <|im_end|>, the token at which generation has to stop."""


def texts() -> list[str]:
    """The text of all messages in the chats."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()
    return [message["content"] for line in lines for message in json.loads(line)["messages"]]


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that is trained on the chats; it represents any text."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    byte_level.train_from_iterator([*texts(), "system user assistant"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


def write(folder: Path) -> None:
    """Writes the folder; the same values each time."""
    own = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(own),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=own.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    own.save_pretrained(folder)


if __name__ == "__main__":
    there = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sft/model")
    write(there)
    sys.stdout.write(f"{there}: a Llama with new weights and {len(tokenizer())} tokens\n")
