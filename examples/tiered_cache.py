"""Transformers' `generate` with a KV cache that is larger than its share of the device: the tokens do not change.

python examples/tiered_cache.py
"""

import sys
import tempfile

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.errors import BudgetError


def model_with_new_weights() -> LlamaForCausalLM:
    """A small Llama. In your script: `AutoModelForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size)).eval()
    model.generation_config.eos_token_id = None
    return model


def main() -> None:
    """Beam search with a cache on the device, and with one that may take half of that."""
    model = model_with_new_weights()
    prompt = torch.randint(256, (4, 200))
    settings = {"max_new_tokens": 24, "num_beams": 2, "do_sample": False, "pad_token_id": 0}

    # Transformers' own cache, and its size: 8 layers, keys and values, 8 rows (4 prompts x 2 beams), 223 tokens.
    plain = DynamicCache(config=model.config)
    expected = model.generate(prompt, past_key_values=plain, **settings)
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    sys.stdout.write(f"whole cache {whole / 2**20:.1f} MiB\n")

    # `device` bounds what the cache holds there at any time. What does not fit goes to `host`, and then to `flash`.
    with (
        tempfile.TemporaryDirectory() as folder,
        hp.TieredCache(model, device=whole // 2, host="4MiB", flash=folder) as cache,
    ):
        found = model.generate(prompt, past_key_values=cache, **settings)
        report = cache.report

    sys.stdout.write(f"{report}\n")
    assert report.budget is not None
    assert report.device <= report.budget
    sys.stdout.write("the same tokens\n" if torch.equal(found, expected) else "NOT the same tokens\n")

    # A budget that cannot work is an error before memory is taken, and says which one would.
    try:
        with torch.no_grad():
            model(prompt, past_key_values=hp.TieredCache(model, device="64KiB", host="64MiB"))
    except BudgetError as error:
        sys.stdout.write(f"with 64 KiB: {error}\n")


if __name__ == "__main__":
    main()
