"""Log-probabilities of generation beside a full forward pass: python benchmarks/generate_logprobs.py

For each family of the training matrix that reads text, with a small model of new weights: greedy answers with
log-probabilities, in one batch, and the log-probabilities of the same tokens from the model's own forward pass over
prompt and answer. In bfloat16 also those of a forward pass of the same weights in float32: what bfloat16 itself costs.
Differences are in nats. Writes ``benchmarks/results/generate_logprobs.json`` and the table in ``docs/inference.md``.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from measure import write
from pages import DOCS, put
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.inference import Generator
from hyper_parallel.verify.families import FAMILIES, WITH_IMAGES

LENGTHS, TOKENS = (1, 3, 31, 32, 33, 70, 5, 12), 32


def model_of(family: str, dtype: torch.dtype) -> Any:
    """A family of the matrix; no token ends an answer."""
    torch.manual_seed(0)
    fields = {**FAMILIES[family], "max_position_embeddings": 512}
    kind, attention = fields.pop("model_type"), fields.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(kind, **fields)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=torch.float32
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    # Logits that are far enough apart for a greedy choice.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.to(dtype).eval()


def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Float32 logits [len(tokens), V] of the model's own forward pass, before each token."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    return found[len(prompt) - 1 : -1]


def logprobs_of(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Of the tokens."""
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def spread(parts: list[torch.Tensor]) -> dict[str, float]:
    """Of absolute differences."""
    whole = torch.cat(parts).abs()
    return {
        "median": float(whole.median()),
        "p99": float(whole.quantile(0.99)),
        "largest": float(whole.max()),
    }


def measured(family: str, dtype: torch.dtype) -> dict[str, Any]:
    """One family."""
    model = model_of(family, dtype)
    draws = torch.Generator().manual_seed(1)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [torch.randint(vocabulary, (length,), generator=draws).tolist() for length in LENGTHS]
    answers = Generator(model, max_tokens=TOKENS, logprobs=True)(prompts)
    exact = copy.deepcopy(model).float() if dtype != torch.float32 else None
    forward, in_float32, scale = [], [], 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        own = torch.tensor(answer.logprobs)
        logits = logits_of(model, prompt, answer.tokens)
        scale = max(scale, float(logits.abs().max()))
        forward.append(own - logprobs_of(logits, answer.tokens))
        if exact is not None:
            in_float32.append(own - logprobs_of(logits_of(exact, prompt, answer.tokens), answer.tokens))
    result: dict[str, Any] = {"largest_logit": scale, "forward": spread(forward)}
    if in_float32:
        result["forward_in_float32"] = spread(in_float32)
    return result


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/inference.md."""
    yield (
        "| Family | float32: largest | of the largest logit | bfloat16: median, 99%, largest | against float32: "
        "median, 99%, largest |"
    )
    yield "|---|---|---|---|---|"
    for family, of in result["families"].items():
        single, half = of["float32"], of["bfloat16"]
        largest = single["forward"]["largest"]
        share = largest / max(single["largest_logit"], 1.0)
        columns = [
            ", ".join(f"{half[which][name]:.2g}" for name in ("median", "p99", "largest"))
            for which in ("forward", "forward_in_float32")
        ]
        yield f"| {family} | {largest:.1e} | {share:.1e} | {columns[0]} | {columns[1]} |"


def main() -> int:
    """Measure; 1 where a family is farther than 5e-5 in float32, of logits above 1 as a share of the largest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="only these, separated by commas; nothing is written")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = sorted(set(FAMILIES) - set(WITH_IMAGES))
    families: dict[str, Any] = {}
    far = 0
    for family in given.families.split(",") if given.families else known:
        families[family] = {
            str(dtype).removeprefix("torch."): measured(family, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        single = families[family]["float32"]
        far += single["forward"]["largest"] > 5e-5 * max(single["largest_logit"], 1.0)
        print(family, families[family], flush=True)
    if not given.families:
        result = {"answers": len(LENGTHS), "tokens": TOKENS, "families": families}
        write("generate_logprobs", result)
        put(DOCS / "inference.md", "generate_logprobs.py", page(result))
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main())
