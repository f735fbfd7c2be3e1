"""A user's own training loop within a memory budget: the loop does not change.

python examples/offload_loop.py
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp


def train(steps: int, budget: str | None) -> tuple[list[float], list[str]]:
    """The loss of each step, and what was planned."""
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    if budget is not None:
        model = hp.offload(model, budget=budget, host="1GiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for _ in range(steps):
        text = torch.randint(256, (16, 64))
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.forward.notes) if budget is not None else []


if __name__ == "__main__":
    moved, notes = train(4, "14MiB")
    free, _ = train(4, None)
    for note in notes:
        sys.stdout.write(f"{note}\n")
    sys.stdout.write(f"losses {', '.join(f'{loss:.4f}' for loss in moved)}\n")
    sys.stdout.write("the same to the bit as without a budget\n" if moved == free else "NOT the same\n")
