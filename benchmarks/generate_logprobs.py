"""Log-probabilities of generation beside a full forward pass: python benchmarks/generate_logprobs.py

For each family of the training matrix that reads text, with a small model of new weights: greedy answers with
log-probabilities, in one batch, and the log-probabilities of the same tokens from the model's own forward pass over
prompt and answer. In bfloat16 also those of a forward pass of the same weights in float32: what bfloat16 itself costs.
Differences are in nats. Writes ``benchmarks/results/generate_logprobs.json`` and the table in ``docs/inference.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from commandline import run
from measure import quiet
from pages import Benchmark, table
from shapes import new_model, random_prompts

from harness.families import FAMILIES, WITH_IMAGES
from hyper_parallel.inference import Generator

LENGTHS, TOKENS = (1, 3, 31, 32, 33, 70, 5, 12), 32
SPREAD = ("median", "p99", "largest")


def family_model(family: str, dtype: str = "float32") -> Any:
    """A family of the matrix with new weights."""
    return new_model({**FAMILIES[family], "max_position_embeddings": 512}, dtype=dtype)


def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Float32 logits [len(tokens), V] of the model's own forward pass, before each token."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def logprobs_of(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def spread(parts: list[torch.Tensor]) -> dict[str, float]:
    """Median, 99th percentile and largest of absolute differences."""
    whole = torch.cat(parts).abs()
    return dict(zip(SPREAD, map(float, (whole.median(), whole.quantile(0.99), whole.max())), strict=True))


def measured(family: str, dtype: str) -> dict[str, Any]:
    model = family_model(family, dtype)
    prompts = random_prompts(LENGTHS, model.config.get_text_config().vocab_size)
    answers = Generator(model, max_tokens=TOKENS, logprobs=True)(prompts)
    passes = {"forward": model}
    if dtype != "float32":
        passes["forward_in_float32"] = copy.deepcopy(model).float()
    result: dict[str, Any] = {"largest_logit": 0.0}
    for name, reference in passes.items():
        differences = []
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = logits_of(reference, prompt, answer.tokens)
            if reference is model:
                result["largest_logit"] = max(result["largest_logit"], float(logits.abs().max()))
            differences.append(torch.tensor(answer.logprobs) - logprobs_of(logits, answer.tokens))
        result[name] = spread(differences)
    return result


def page(result: Mapping[str, Any]) -> Iterator[str]:
    def row(family: str, single: Mapping[str, Any], half: Mapping[str, Any]) -> tuple[str, ...]:
        largest = single["forward"]["largest"]
        share = largest / max(single["largest_logit"], 1.0)
        spreads = (half[which] for which in ("forward", "forward_in_float32"))
        cells = (", ".join(f"{one[name]:.2g}" for name in SPREAD) for one in spreads)
        return family, f"{largest:.1e}", f"{share:.1e}", *cells

    yield from table(
        "Family | float32: largest | of the largest logit | bfloat16: median, 99%, largest | against float32: "
        "median, 99%, largest",
        (row(family, of["float32"], of["bfloat16"]) for family, of in result["families"].items()),
    )


BENCHMARK = Benchmark("generate_logprobs", {"inference.md": page})


def main() -> bool:
    """Measure; whether a family is farther than 5e-5 in float32, of logits above 1 as a share of the largest."""
    quiet(threads=1)
    rows: dict[str, Any] = {}
    for family in sorted(set(FAMILIES) - set(WITH_IMAGES)):
        rows[family] = {dtype: measured(family, dtype) for dtype in ("float32", "bfloat16")}
        print(family, rows[family], flush=True)
    BENCHMARK.keep({"answers": len(LENGTHS), "tokens": TOKENS, "families": rows})
    single = [row["float32"] for row in rows.values()]
    return any(one["forward"]["largest"] > 5e-5 * max(one["largest_logit"], 1.0) for one in single)


if __name__ == "__main__":
    run(main)
