"""Every causal language model of the installed Transformers, generated with: identical tokens or refused.

    python benchmarks/attack_generate.py [--families a b]

A family is the default config of its class with sizes cut (`harness.small_models`), in float32. Greedy tokens
of several prompts in one batch are compared with those of Transformers' `generate`, one prompt at a time; and with
those of the same prompts alone. Two logits within 1e-4 are a tie, which rounding decides. Writes
``benchmarks/results/attack_generate.json`` and the list in ``docs/inference.md``. Exits with 1 when tokens are wrong or
depend on the batch, or a model crashes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from attack_models import causal_families
from campaigns import limited, one_line
from commandline import run
from generation import equal_tokens
from measure import quiet
from pages import Benchmark, table
from shapes import random_prompts

LENGTHS, TOKENS, PAGE = (1, 5, 16, 21), 16, 16
TIE = 1e-4
LIMIT_S = 120


def attacked(family: str) -> dict[str, str]:
    """What a family comes to: `outcome` and `detail`."""
    import torch
    import transformers

    from harness.small_models import shrunken
    from hyper_parallel.errors import UnsupportedModelError
    from hyper_parallel.inference import Generator

    try:
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[family](**shrunken(transformers.CONFIG_MAPPING[family]()))
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        prompts = random_prompts(LENGTHS, 120, first=4)
        expected = [_reference(model, prompt) for prompt in prompts]
    except Exception as error:
        return {"outcome": "no reference", "detail": one_line(error)}
    try:
        generator = Generator(model, page=PAGE, max_tokens=TOKENS)
        together = [answer.tokens for answer in generator(prompts)]
        alone = [generator([prompt])[0].tokens for prompt in prompts]
    except UnsupportedModelError as error:
        return {"outcome": "refused", "detail": one_line(error)}
    except Exception as error:
        return {"outcome": "crash", "detail": f"{type(error).__name__}: {one_line(error)}"}
    if together != alone:
        return {"outcome": "WRONG", "detail": "tokens depend on the batch"}
    ties = 0
    for prompt, found, (tokens, logits) in zip(prompts, together, expected, strict=True):
        if (place := equal_tokens(found, tokens)) < TOKENS:
            gap = float(logits[place].max() - logits[place][found[place]])
            if gap > TIE:
                where = f"prompt of {len(prompt)} tokens, token {place}"
                return {"outcome": "WRONG", "detail": f"{where}: {gap:.2g} below the top logit"}
            ties += 1
    return {"outcome": "identical", "detail": f"{ties} ties" if ties else ""}


def _reference(model: Any, prompt: list[int]) -> tuple[list[int], list[Any]]:
    import torch

    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = found.sequences[0, len(prompt) :].tolist()
    if len(tokens) != TOKENS:
        raise ValueError(f"generate gives {len(tokens)} tokens, where {TOKENS} are asked for")
    return tokens, [one[0] for one in found.logits]


def page(result: Mapping[str, Any]) -> Iterator[str]:
    by = defaultdict(list)
    for family, of in sorted(result["families"].items()):
        by[of["outcome"]].append((family, of["detail"]))
    judged = len(result["families"]) - len(by["no reference"])
    yield (
        f"{judged} families of Transformers {result['transformers']}: {len(by['identical'])} have identical tokens, "
        f"{len(by['refused'])} are refused, {len(by['WRONG'])} wrong, {len(by['crash'])} crash. "
        f"{len(by['no reference'])} more do not generate with Transformers here."
    )
    yield from ("", f"Identical: {', '.join(family for family, _ in by['identical'])}.", "")
    yield from table("Refused | why", by["refused"])


BENCHMARK = Benchmark("attack_generate", {"inference.md": page}, key="families")


def main(families: Annotated[tuple[str, ...], "only these; nothing is written"] = ()) -> bool:
    """Run the families; whether one is wrong or crashes."""
    import transformers

    quiet(threads=1)
    found = {}
    for family in families or causal_families():
        try:
            with limited(LIMIT_S):
                found[family] = attacked(family)
        except TimeoutError as error:
            found[family] = {"outcome": "crash", "detail": one_line(error)}
        print(f"{family}: {found[family]['outcome']} {found[family]['detail']}", flush=True)
    if not families:
        BENCHMARK.keep({"transformers": transformers.__version__, "families": found})
    return any(of["outcome"] in ("WRONG", "crash") for of in found.values())


if __name__ == "__main__":
    run(main)
