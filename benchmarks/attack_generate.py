"""Every causal language model of the installed Transformers, generated with: identical tokens or refused.

    python benchmarks/attack_generate.py [--families a,b]

A family is the default config of its class with sizes cut (`hyper_parallel.verify.shrink`), in float32. Greedy tokens
of several prompts in one batch are compared with those of Transformers' `generate`, one prompt at a time; and with
those of the same prompts alone. Two logits within 1e-4 are a tie, which rounding decides. Writes
``benchmarks/results/attack_generate.json`` and the list in ``docs/inference.md``. Exits with 1 when tokens are wrong or
depend on the batch, or a model crashes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from attack_models import families
from measure import write
from pages import DOCS, put

LENGTHS, TOKENS, PAGE = (1, 5, 16, 21), 16, 16
TIE = 1e-4
LIMIT_S = 120


def run(family: str) -> dict[str, str]:
    """What a family comes to: `outcome` and `detail`."""
    import torch
    import transformers

    from hyper_parallel.errors import UnsupportedModelError
    from hyper_parallel.inference import Generator
    from hyper_parallel.verify.shrink import shrunken

    try:
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[family](**shrunken(transformers.CONFIG_MAPPING[family]()))
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        draws = torch.Generator().manual_seed(1)
        prompts = [torch.randint(4, 120, (length,), generator=draws).tolist() for length in LENGTHS]
        expected = [_reference(model, prompt) for prompt in prompts]
    except Exception as error:
        return {"outcome": "no reference", "detail": _line(error)}
    try:
        generator = Generator(model, page=PAGE, max_tokens=TOKENS)
        together = [answer.tokens for answer in generator(prompts)]
        alone = [generator([prompt])[0].tokens for prompt in prompts]
    except UnsupportedModelError as error:
        return {"outcome": "refused", "detail": _line(error)}
    except Exception as error:
        return {"outcome": "crash", "detail": f"{type(error).__name__}: {_line(error)}"}
    if together != alone:
        return {"outcome": "WRONG", "detail": "tokens depend on the batch"}
    ties = 0
    for prompt, found, (tokens, logits) in zip(prompts, together, expected, strict=True):
        for place, (token, other) in enumerate(zip(found, tokens, strict=True)):
            if token != other:
                gap = float(logits[place].max() - logits[place][token])
                if gap > TIE:
                    return {
                        "outcome": "WRONG",
                        "detail": f"prompt of {len(prompt)} tokens, token {place}: {gap:.2g} below the top logit",
                    }
                ties += 1
                break
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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:250]


def _hung(*_: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/inference.md."""
    by = collections.defaultdict(list)
    for family, of in sorted(result["families"].items()):
        by[of["outcome"]].append((family, of["detail"]))
    judged = len(result["families"]) - len(by["no reference"])
    yield (
        f"{judged} families of Transformers {result['transformers']}: {len(by['identical'])} have identical tokens, "
        f"{len(by['refused'])} are refused, {len(by['WRONG'])} wrong, {len(by['crash'])} crash. "
        f"{len(by['no reference'])} more do not generate with Transformers here."
    )
    yield ""
    yield "Identical: " + ", ".join(family for family, _ in by["identical"]) + "."
    yield ""
    yield "| Refused | why |"
    yield "|---|---|"
    for family, why in by["refused"]:
        yield f"| {family} | {why} |"


def main() -> int:
    """Run the families; 0 when none is wrong and none crashes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", help="only these, separated by commas; nothing is written")
    given = parser.parse_args()
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _hung)
    found = {}
    for family in given.families.split(",") if given.families else families():
        signal.alarm(LIMIT_S)
        with contextlib.suppress(KeyboardInterrupt):
            found[family] = run(family)
        signal.alarm(0)
        print(f"{family}: {found[family]['outcome']} {found[family]['detail']}", flush=True)
    if not given.families:
        result = {"transformers": transformers.__version__, "families": found}
        write("attack_generate", result)
        put(DOCS / "inference.md", "attack_generate.py", page(result))
    return int(any(of["outcome"] in ("WRONG", "crash") for of in found.values()))


if __name__ == "__main__":
    sys.exit(main())
